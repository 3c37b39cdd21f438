"""The operator runs agents as pods: a real API server, DaemonSet, disruption and garbage controllers, nodes by kwok.

Agents are played (`operator_agents`), pods are ready as soon as they are bound. Identities, rights, policies and the
template are the chart's.
"""

import json
from collections.abc import Iterator
from pathlib import Path
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
NODES = ("w0", "w1", "w2")
ROOM = {"cpu": "8", "memory": "64Gi", "pods": "50", "hugepages-2Mi": "8Gi"}
STARTED_OTHERWISE = ("Deployment", "StatefulSet", "Secret", "Service")
STRATEGY = {"maxUnavailable": 1, "drain": {"timeoutSeconds": 10}}
PODS = f"/api/v1/namespaces/{SYSTEM}/pods"


def template(digit: str) -> list[Any]:
    """The chart as of one image of agents, but what these tests start themselves."""
    digest = "sha256:" + digit * 64
    rendered = rights.render(**{"processes.enabled": "true", "agent.image.digest": digest})
    return [o for o in yaml.safe_load_all(rendered) if o and o["kind"] not in STARTED_OTHERWISE]


def upgrade(plane: ControlPlane, digit: str) -> None:
    """Upgrade the chart's template of agents."""
    found = [o for o in template(digit) if o["metadata"]["name"] == names.AGENT_TEMPLATE]
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(found))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(tmp_path_factory.mktemp("workers")) as plane:
        rights.prepare(plane, yaml.safe_dump_all(template("1")))
        plane.add_fake_nodes(NODES, {"test": "workers"}, ROOM)
        yield plane


@pytest.fixture(scope="module")
def cluster(workers: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("operator")
    accounts = (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)
    kubeconfigs = {n: workers.service_account_kubeconfig(SYSTEM, n, folder / n) for n in accounts}
    more = ("--agent-template", names.AGENT_TEMPLATE)
    with FakeAgents(kubeconfigs[names.FIELD_MANAGER_AGENT], SYSTEM), running(kubeconfigs, folder, *more) as replica:
        yield Cluster(workers)
        assert replica.process.poll() is None, replica.log.read_text()


def declare(cluster: Cluster, name: str, **spec: Any) -> str:
    strategy = spec.pop("updateStrategy", STRATEGY)
    body = {"nodeSelector": {"test": "workers"}, "updateStrategy": strategy, **spec}
    return cluster.pool(name, **body)


def pods(cluster: Cluster, pool: str) -> list[Any]:
    return list(cluster.get(f"{PODS}?labelSelector=kvstrata.io/pool%3D{pool}")["items"])


def is_ready(pod: Any) -> bool:
    return condition(pod, "Ready")[0] == "True" and "deletionTimestamp" not in pod["metadata"]


def digests(cluster: Cluster, pool: str) -> set[str]:
    return {p["spec"]["containers"][0]["image"][-1] for p in pods(cluster, pool)}


def ready(cluster: Cluster, pool: str) -> bool:
    shown = cluster.kv("kvpools", pool)
    is_told = shown.get("status", {}).get("observedGeneration") == shown["metadata"]["generation"]
    return is_told and condition(shown, "Ready")[0] == "True" and shown["status"]["nodes"]["updated"] == len(NODES)


def allowed(cluster: Cluster, budget: str) -> Any:
    return cluster.get(budget).get("status", {}).get("disruptionsAllowed")


def conditions(cluster: Cluster, pool: str) -> list[Any]:
    return list(cluster.kv("kvpools", pool).get("status", {}).get("conditions", ()))


def status_of(cluster: Cluster, pool: str) -> str:
    return json.dumps(cluster.kv("kvpools", pool).get("status"), indent=1)


def may(plane: ControlPlane, *what: str) -> bool:
    """Whether the API server allows it; of a new binding it hears by a watch of its own."""
    try:
        return plane.kubectl("auth", "can-i", *what).strip() == "yes"
    except KubectlError:
        return False


def test_a_pool_alone_gets_agents_and_an_upgrade_rolls_over_them(cluster: Cluster) -> None:
    upgrade(cluster.plane, "1")
    pool = declare(cluster, "rolled")
    assert wait_until(lambda: ready(cluster, pool), WAIT_S), status_of(cluster, pool)

    assert {p["spec"]["nodeName"] for p in pods(cluster, pool)} == set(NODES)
    (agent,) = pods(cluster, pool)[0]["spec"]["containers"]
    assert agent["resources"]["limits"]["hugepages-2Mi"] == "1Gi"
    budget = f"/apis/policy/v1/namespaces/{SYSTEM}/poddisruptionbudgets/kvstrata-agent-{pool}"
    assert wait_until(lambda: allowed(cluster, budget) == 1, WAIT_S), cluster.get(budget)

    before = cluster.kv("kvpools", pool)["status"]["currentRevision"]
    upgrade(cluster.plane, "2")
    fewest: list[int] = []

    def is_done() -> bool:
        fewest.append(sum(map(is_ready, pods(cluster, pool))))
        return digests(cluster, pool) == {"2"} and ready(cluster, pool)

    assert wait_until(is_done, 2 * WAIT_S), status_of(cluster, pool)
    assert min(fewest) >= len(NODES) - 1
    shown = cluster.kv("kvpools", pool)["status"]
    assert before != shown["currentRevision"] == shown["updateRevision"]
    cluster.sees(lambda: not any(n["spec"]["drain"]["requested"] for n in cluster.pool_nodes(pool).values()))
    cluster.sees(lambda: "ReplacingAgent" in cluster.events(pool))

    cluster.plane.kubectl("delete", "kvpool", pool, "--timeout=90s")
    gone = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/kvstrata-agent-{pool}"
    assert wait_until(lambda: cluster.get(gone) is None and not pods(cluster, pool), WAIT_S)
    cluster.sees(lambda: cluster.get(budget) is None)


def told_of(cluster: Cluster, pool: str, type_: str) -> tuple[str, str]:
    """Reason and message of a condition of a pool; empty before there is one."""
    found = [c for c in conditions(cluster, pool) if c["type"] == type_]
    return (found[0]["reason"], found[0]["message"]) if found else ("", "")


def test_pages_that_no_node_has_are_memory_instead_and_are_told(cluster: Cluster) -> None:
    pool = declare(cluster, "greedy", tiers=[tier(size="32Gi", hostDRAM={"pageSize": "2Mi"})])
    assert wait_until(lambda: ready(cluster, pool), WAIT_S), status_of(cluster, pool)

    reason, message = told_of(cluster, pool, "Provisioned")
    assert reason == "Provisioned"
    assert f"{len(NODES)} of {len(NODES)} nodes have pages of 4Ki" in message
    assert "its kubelet offers 8Gi of hugepages-2Mi, 32Gi wanted" in message
    for found in pods(cluster, pool):
        assert "hugepages-2Mi" not in found["spec"]["containers"][0]["resources"]["limits"]
    cluster.plane.kubectl("delete", "kvpool", pool, "--timeout=90s")
    gone = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/{names.small_agents_name(pool)}"
    assert wait_until(lambda: cluster.get(gone) is None and not pods(cluster, pool), WAIT_S)


def test_memory_that_no_node_has_is_told_in_the_scheduler_s_words(cluster: Cluster) -> None:
    pool = declare(cluster, "greedier", tiers=[tier(size="128Gi", hostDRAM={"pageSize": "4Ki"})])

    def is_told() -> bool:
        reason, message = told_of(cluster, pool, "Provisioned")
        return reason == "AgentsNotRunning" and "Insufficient memory" in message

    assert wait_until(is_told, WAIT_S), status_of(cluster, pool)
    cluster.plane.kubectl("delete", "kvpool", pool, "--timeout=90s")


def test_an_image_that_policies_refuse_is_told_and_a_good_one_mends_it(cluster: Cluster, tmp_path: Path) -> None:
    found = [o for o in template("3") if o["metadata"]["name"] == names.AGENT_TEMPLATE]
    found[0]["data"][names.AGENT_TEMPLATE_ENTRY] = found[0]["data"][names.AGENT_TEMPLATE_ENTRY].replace("@sha256:", ":")
    path = tmp_path / "template.yaml"
    path.write_text(yaml.safe_dump_all(found))
    cluster.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    pool = declare(cluster, "refused")

    cluster.says("kvpools", pool, "Provisioned", "False", "ApplyFailed")
    told = {c["type"]: c["message"] for c in conditions(cluster, pool)}
    assert "named by its digest" in told["Provisioned"]
    upgrade(cluster.plane, "4")
    assert wait_until(lambda: ready(cluster, pool), 2 * WAIT_S), status_of(cluster, pool)
    cluster.plane.kubectl("delete", "kvpool", pool, "--timeout=90s")


def test_nobody_else_writes_what_the_operator_makes(cluster: Cluster) -> None:
    upgrade(cluster.plane, "5")
    pool = declare(cluster, "guarded")
    assert wait_until(lambda: ready(cluster, pool), WAIT_S), status_of(cluster, pool)

    change = ["patch", "daemonset", f"kvstrata-agent-{pool}", "-n", SYSTEM, "-p", '{"spec": {"minReadySeconds": 1}}']
    as_root = ["--as", "root-of-the-cluster"]
    cluster.plane.kubectl("create", "clusterrolebinding", "r", "--clusterrole=cluster-admin", "--user", as_root[1])
    assert wait_until(lambda: may(cluster.plane, "patch", "daemonsets", "-n", SYSTEM, *as_root), WAIT_S)
    with pytest.raises(KubectlError, match="made by the operator from KVPools"):
        cluster.plane.kubectl(*change, *as_root)
    cluster.plane.kubectl("delete", "kvpool", pool, "--timeout=90s")
