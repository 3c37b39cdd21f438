"""The operator runs Redis: a real API server, StatefulSet, scheduling and garbage controllers, nodes by kwok.

Pods are ready as soon as they are bound: what a Redis does is seen elsewhere. Identities, rights, policies and the
template are the chart's.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from checks import rights
from controlplane import ControlPlane, KubectlError, start
from controlplane.waiting import wait_until
from kvstrata_api import names
from support.operator.agents import FakeAgents
from support.operator.fleet import condition, tier
from support.operator.process import SYSTEM, Cluster, running

pytestmark = pytest.mark.system

WAIT_S = 90.0
NODES = ("w0", "w1")
ROOM = {"cpu": "8", "memory": "64Gi", "pods": "50"}
REDIS = f"/apis/apps/v1/namespaces/{SYSTEM}/statefulsets/{names.REDIS}"
POD = f"/api/v1/namespaces/{SYSTEM}/pods/{names.REDIS}-0"
MIB = 1 << 20


def chart(digit: str, **settings: str) -> list[Any]:
    """The chart as of one image of Redis, but what these tests start themselves."""
    digest = "sha256:" + digit * 64
    rendered = rights.render(**{"processes.enabled": "true", "redis.image.digest": digest, **settings})
    return [o for o in yaml.safe_load_all(rendered) if o and o["kind"] not in ("Deployment", "Secret")]


def upgrade(plane: ControlPlane, digit: str, **settings: str) -> None:
    """Upgrade the chart's template of Redis."""
    found = [o for o in chart(digit, **settings) if o["metadata"]["name"] == names.REDIS_TEMPLATE]
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(found))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(tmp_path_factory.mktemp("workers")) as plane:
        rights.prepare(plane, yaml.safe_dump_all(chart("1")))
        plane.add_fake_nodes(NODES, {"test": "workers"}, ROOM)
        yield plane


@pytest.fixture(scope="module")
def cluster(workers: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("operator")
    accounts = (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)
    kubeconfigs = {n: workers.service_account_kubeconfig(SYSTEM, n, folder / n) for n in accounts}
    more = ("--redis-template", names.REDIS_TEMPLATE, "--redis-mode", "Embedded")
    with FakeAgents(kubeconfigs[names.FIELD_MANAGER_AGENT], SYSTEM), running(kubeconfigs, folder, *more) as replica:
        yield Cluster(workers, replica.log)
        assert replica.process.poll() is None, replica.log.read_text()


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[str]:
    """A pool whose agents say that they reach the directory."""
    name = cluster.pool("p", nodeSelector={"test": "workers"}, tiers=[nvme("1Gi")])
    says(cluster, name, "True", "Available")
    yield name
    cluster.plane.kubectl("delete", "kvpool", name, "--timeout=60s")


def nvme(size: str, folder: str = "p") -> Any:
    return tier("nvme", "NVMe", size, nvme={"path": f"/var/lib/kvstrata/{folder}"})


def says(cluster: Cluster, pool: str, status: str, reason: str) -> None:
    """Wait for MetadataAvailable; a pod of Redis that is ready is part of it."""

    def holds() -> bool:
        return condition(cluster.kv("kvpools", pool), "MetadataAvailable") == (status, reason)

    if not wait_until(holds, WAIT_S):
        conditions = cluster.kv("kvpools", pool).get("status", {}).get("conditions")
        pytest.fail(f"{conditions}\n{cluster.get(REDIS)}\n{cluster.get(POD)}\n{events(cluster)}\n{cluster.told()}")


def redis(cluster: Cluster, kind: str = POD) -> Any:
    """Container of the pod that runs, or of the template; empty while there is none."""
    found = cluster.get(kind)
    if found is None or "deletionTimestamp" in found["metadata"]:
        return {}
    spec = found["spec"]["template"]["spec"] if kind == REDIS else found["spec"]
    return spec["containers"][0]


def memory_mib(cluster: Cluster, kind: str = POD) -> int:
    given = {v["name"]: v["value"] for v in redis(cluster, kind).get("env", ())}
    return int(given.get(names.REDIS_MEMORY_VARIABLE, "0")) // MIB


def runs(cluster: Cluster, digit: str, mib: int) -> bool:
    pod = cluster.get(POD)
    is_ready = pod is not None and condition(pod, "Ready")[0] == "True"
    return is_ready and redis(cluster).get("image", "").endswith(digit) and memory_mib(cluster) == mib


def events(cluster: Cluster) -> list[str]:
    found = cluster.get(f"/api/v1/namespaces/{SYSTEM}/events")["items"]
    return [e["reason"] for e in found if e["source"].get("component") == names.FIELD_MANAGER_OPERATOR]


def test_redis_is_there_without_a_pool_and_nothing_is_written_twice(cluster: Cluster) -> None:
    assert wait_until(lambda: runs(cluster, "1", 256), WAIT_S), (cluster.get(REDIS), cluster.get(POD))
    made = cluster.get(REDIS)

    assert redis(cluster)["resources"]["limits"]["memory"] == "384Mi"
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("ConfigMap", names.REDIS_TEMPLATE)
    managers = {m["manager"] for m in made["metadata"]["managedFields"] if m.get("subresource") != "status"}
    assert managers == {names.FIELD_MANAGER_OPERATOR}
    before = events(cluster)
    assert before.count("CreatingRedis") == 1
    tenant = cluster.tenant("quiet")  # A plan goes by after this.
    assert wait_until(lambda: cluster.secret("tenant", tenant) is not None, WAIT_S)
    assert cluster.get(REDIS)["metadata"]["generation"] == made["metadata"]["generation"]
    assert events(cluster) == before, "what the API server fills in was taken for somebody's change"
    cluster.remove_all()


def test_what_somebody_changes_or_deletes_comes_back(cluster: Cluster, pool: str) -> None:
    change = ["patch", "statefulset", names.REDIS, "-n", SYSTEM, "--type=merge", "-p"]
    cluster.plane.kubectl(*change, '{"spec": {"replicas": 0}}')
    assert wait_until(lambda: cluster.get(REDIS)["spec"]["replicas"] == 1, WAIT_S)
    assert wait_until(lambda: "RestoringRedis" in events(cluster), WAIT_S)

    before = cluster.get(REDIS)["metadata"]["uid"]
    cluster.plane.kubectl("delete", "statefulset", names.REDIS, "-n", SYSTEM, "--wait=false")
    assert wait_until(
        lambda: (cluster.get(REDIS) or {"metadata": {"uid": before}})["metadata"]["uid"] != before, WAIT_S
    )
    assert wait_until(lambda: runs(cluster, "1", 256), WAIT_S), cluster.get(POD)
    says(cluster, pool, "True", "Available")


def test_memory_grows_with_the_pools_and_an_upgrade_lowers_it(cluster: Cluster, pool: str) -> None:
    larger = cluster.pool("larger", nodeSelector={"test": "workers"}, tiers=[nvme("2Ti", "larger")])
    assert wait_until(lambda: runs(cluster, "1", 512), WAIT_S), (cluster.get(REDIS), cluster.get(POD))
    assert wait_until(lambda: "ResizingRedis" in events(cluster), WAIT_S)
    says(cluster, pool, "True", "Available")

    cluster.plane.kubectl("delete", "kvpool", larger, "--timeout=60s")
    upgrade(cluster.plane, "2")
    assert wait_until(lambda: runs(cluster, "2", 256), WAIT_S), (cluster.get(REDIS), cluster.get(POD))
    assert wait_until(lambda: "UpgradingRedis" in events(cluster), WAIT_S)
    says(cluster, pool, "True", "Available")


def test_a_redis_that_cannot_run_is_told_and_a_better_one_takes_its_place(cluster: Cluster, pool: str) -> None:
    upgrade(cluster.plane, "3", **{"redis.nodeSelector.nowhere": "yes"})
    says(cluster, pool, "False", "RedisNotRunning")
    told = {c["type"]: c["message"] for c in cluster.kv("kvpools", pool)["status"]["conditions"]}
    assert "Unschedulable" in told["MetadataAvailable"]

    upgrade(cluster.plane, "4")
    assert wait_until(lambda: runs(cluster, "4", 256), WAIT_S), (cluster.get(REDIS), cluster.get(POD))
    says(cluster, pool, "True", "Available")


def test_what_the_api_server_changes_never_is_made_anew(cluster: Cluster, pool: str) -> None:
    before = cluster.get(REDIS)["metadata"]["uid"]
    upgrade(cluster.plane, "4", **{"redis.persistence.enabled": "true"})

    def is_anew() -> bool:
        found = cluster.get(REDIS)
        return bool(found and found["metadata"]["uid"] != before and found["spec"].get("volumeClaimTemplates"))

    assert wait_until(is_anew, WAIT_S), cluster.get(REDIS)
    says(cluster, pool, "False", "RedisNotRunning")  # Nobody makes volumes here.
    upgrade(cluster.plane, "4")
    assert wait_until(lambda: runs(cluster, "4", 256), WAIT_S), (cluster.get(REDIS), cluster.get(POD))


def test_nobody_else_writes_it_and_the_operator_writes_no_other(cluster: Cluster) -> None:
    as_root = ["--as", "root-of-the-cluster"]
    cluster.plane.kubectl("create", "clusterrolebinding", "r", "--clusterrole=cluster-admin", "--user", as_root[1])
    change = ["patch", "statefulset", names.REDIS, "-n", SYSTEM, "-p", '{"spec": {"minReadySeconds": 1}}']
    with pytest.raises(KubectlError, match="the StatefulSet of Redis is made by it"):
        cluster.plane.kubectl(*change, *as_root)

    operator = f"system:serviceaccount:{SYSTEM}:{names.FIELD_MANAGER_OPERATOR}"
    other = json.loads(json.dumps(cluster.get(REDIS)))
    other["metadata"] = {"name": "other", "namespace": SYSTEM, "labels": other["metadata"]["labels"]}
    apply = ["apply", "--server-side", "--field-manager=test", "-f", "-", "--as", operator]
    with pytest.raises(KubectlError, match="cannot patch resource"):
        cluster.plane.kubectl(*apply, stdin=json.dumps({k: v for k, v in other.items() if k != "status"}))


def test_nothing_is_left_of_it_when_the_release_goes(cluster: Cluster) -> None:
    assert wait_until(lambda: cluster.get(POD) is not None, WAIT_S)
    cluster.plane.kubectl("delete", "configmap", names.REDIS_TEMPLATE, "-n", SYSTEM)

    assert wait_until(lambda: cluster.get(REDIS) is None and cluster.get(POD) is None, WAIT_S), cluster.get(REDIS)
