"""The operator as a process, under its own identity, against a real API server."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from controlplane import ControlPlane
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_operator.decide.pools.reconcile import RELEASE_S
from support.operator.agents import GIB, FakeAgents
from support.operator.fleet import tier
from support.operator.process import CONVERGED_S, KVSTRATA, NEXT_CHANGE_S, RESIZE, SYSTEM, Cluster, Replica, running

pytestmark = pytest.mark.system

TAKEOVER_LEASE_S = 6
"""Longer than that of other tests: a busy machine may not take a living leader's from it."""

QUIET_S = 5.0
"""Several looks at Leases and heartbeats: who writes at every one of them never keeps still for so long."""


@pytest.fixture(scope="module")
def kubeconfigs(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The identities of operator and agents, with the chart's rights and no more."""
    folder = tmp_path_factory.mktemp("identities")
    accounts = (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)
    return {name: plane.service_account_kubeconfig(SYSTEM, name, folder / name) for name in accounts}


@pytest.fixture(scope="module")
def agents(kubeconfigs: dict[str, Path]) -> Iterator[FakeAgents]:
    with FakeAgents(kubeconfigs[names.FIELD_MANAGER_AGENT], SYSTEM) as agents:
        yield agents


@pytest.fixture(scope="class")
def replica(
    kubeconfigs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, agents: FakeAgents
) -> Iterator[Replica]:
    """One operator for all tests of a class; whatever one test breaks, the next one would see."""
    with running(kubeconfigs, tmp_path_factory.mktemp("replica")) as replica:
        yield replica
        assert replica.process.poll() is None, replica.log.read_text()


@pytest.fixture
def cluster(plane: ControlPlane, agents: FakeAgents) -> Iterator[Cluster]:
    cluster = Cluster(plane)
    yield cluster
    agents.manners = type(agents.manners)()
    cluster.remove_all()


@pytest.mark.usefixtures("replica")
class TestOneReplica:
    def test_a_pool_becomes_ready_follows_its_nodes_and_goes_with_everything(
        self, replica: Replica, cluster: Cluster
    ) -> None:
        first, second = cluster.node("a"), cluster.node("b")
        pool = cluster.pool()
        cluster.plane.kubectl("wait", "--for=jsonpath={.status.nodesReady}=2/2", f"kvpool/{pool}", "--timeout=90s")
        cluster.plane.kubectl("wait", "--for=condition=Ready", f"kvpool/{pool}", "--timeout=90s")

        assert cluster.pool_nodes(pool).keys() == {first, second}
        shown = cluster.kv("kvpools", pool)
        assert names.FINALIZER in shown["metadata"]["finalizers"]
        connection = shown["status"]["connection"]["configMapRef"]["name"]
        assert cluster.get(f"/api/v1/namespaces/{SYSTEM}/configmaps/{connection}")["data"]["pool"] == pool

        third = cluster.node("c")
        cluster.sees(lambda: cluster.kv("kvpools", pool)["status"]["nodesReady"] == "3/3")
        cluster.plane.kubectl("label", "node", second, "test-")
        cluster.sees(lambda: cluster.pool_nodes(pool).keys() == {first, third})
        cluster.plane.kubectl("delete", "node", third)
        cluster.sees(lambda: cluster.pool_nodes(pool).keys() == {first})

        cluster.plane.kubectl("delete", "kvpool", pool, "--timeout=90s")
        assert cluster.pool_nodes(pool) == {}
        cluster.sees(lambda: cluster.get(f"/api/v1/namespaces/{SYSTEM}/configmaps/{connection}") is None)
        # An Event is posted after the deed that it tells of.
        cluster.sees(lambda: {"AllNodesReady", "DeletingNodes", "Released"} <= cluster.events(pool))
        assert replica.metric("kvstrata_operator_convergence_seconds_count") >= 1

    def test_a_change_of_the_spec_rolls_to_every_node(self, cluster: Cluster) -> None:
        cluster.node("a")
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Ready", "True")
        before = cluster.kv("kvpools", pool)["status"]["currentRevision"]
        cluster.plane.kubectl("patch", "kvpool", pool, "--type=json", "-p", json.dumps(RESIZE))

        cluster.sees(lambda: cluster.kv("kvpools", pool)["status"]["currentRevision"] not in ("", before))
        cluster.says("kvpools", pool, "Ready", "True")
        sizes = {n["spec"]["tiers"][0]["capacityBytes"] for n in cluster.pool_nodes(pool).values()}
        assert sizes == {2 * GIB}

    def test_what_a_node_has_not_got_is_told_with_numbers(self, cluster: Cluster, agents: FakeAgents) -> None:
        agents.manners.memory_bytes = 32 * GIB
        node = cluster.node("a")
        pool = cluster.pool(tiers=[tier(size="64Gi")])

        cluster.says("kvpools", pool, "CapacitySatisfied", "False", "InsufficientMemory")
        told = {c["type"]: c["message"] for c in cluster.kv("kvpools", pool)["status"]["conditions"]}
        assert told["CapacitySatisfied"] == f"1 of 1 nodes; {node}: memory tiers want 64Gi; the node has 32Gi"
        cluster.says("kvpools", pool, "Ready", "False", "CapacityNotSatisfied")

    def test_two_pools_never_share_a_directory(self, cluster: Cluster) -> None:
        cluster.node("a")
        tiers = [tier(), tier("nvme", "NVMe", nvme={"path": f"/var/lib/kvstrata/{cluster.mark}"})]
        older = cluster.pool(tiers=tiers)
        cluster.says("kvpools", older, "Ready", "True")
        time.sleep(1.0)  # Creation times have whole seconds.
        younger = cluster.pool(f"{cluster.mark}-younger", tiers=tiers)

        cluster.says("kvpools", younger, "Provisioned", "False", "PathConflict")
        assert cluster.pool_nodes(younger) == {}
        cluster.plane.kubectl("delete", "kvpool", older, "--timeout=90s")
        cluster.says("kvpools", younger, "Ready", "True")

    def test_an_agent_that_dies_is_called_silent_and_one_that_returns_is_ready(
        self, cluster: Cluster, agents: FakeAgents
    ) -> None:
        node = cluster.node("a")
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Ready", "True")
        agents.manners.absent.add(node)

        cluster.says("kvpoolnodes", names.pool_node_name(pool, node), "AgentConnected", "False", "LeaseExpired")
        cluster.says("kvpools", pool, "Degraded", "True", "LeaseExpired")
        cluster.says("kvpools", pool, "Ready", "False")
        agents.manners.absent.clear()
        cluster.says("kvpools", pool, "Ready", "True")
        cluster.says("kvpools", pool, "Degraded", "False")

    def test_a_deletion_waits_for_drains_and_no_longer_than_it_may(self, cluster: Cluster, agents: FakeAgents) -> None:
        agents.manners.drains, agents.manners.lease_s = False, 60
        node = cluster.node("a")
        pool = cluster.pool(updateStrategy={"drain": {"timeoutSeconds": 3}})
        cluster.says("kvpools", pool, "Ready", "True")
        began_s = time.monotonic()
        cluster.plane.kubectl("delete", "kvpool", pool, "--wait=false")

        cluster.sees(lambda: cluster.pool_nodes(pool)[node]["spec"]["drain"]["requested"])
        cluster.sees(lambda: cluster.kv("kvpools", pool) is None)
        assert time.monotonic() - began_s > 1.0 + RELEASE_S  # deletionTimestamp has whole seconds.

    def test_scopes_get_keys_and_lose_them_with_their_owner(self, cluster: Cluster) -> None:
        domain = f"{cluster.mark}-d"
        alone = cluster.tenant("alone", trustDomain=domain)
        joined = cluster.tenant("joined", trustDomain=domain)
        cluster.make("kvtrustdomains", "KVTrustDomain", domain, {"tenants": [joined], "sharing": "All"})

        cluster.says("kvtenants", joined, "Ready", "True")
        cluster.says("kvtenants", alone, "Ready", "False", "NotAdmitted")
        cluster.says("kvtrustdomains", domain, "Ready", "True")
        assert cluster.kv("kvtenants", joined)["status"]["effectiveDomain"] == domain
        assert cluster.kv("kvtrustdomains", domain)["status"]["members"] == [joined]

        first = cluster.secret("domain", domain)["data"]
        assert first.keys() - {"v1.data"} == {"v1"}
        cluster.plane.kubectl("patch", "kvtrustdomain", domain, "--type=merge", "-p", '{"spec": {"keyVersion": 2}}')
        cluster.sees(lambda: cluster.kv("kvtrustdomains", domain)["status"]["keyVersion"] == 2)
        cluster.sees(lambda: cluster.secret("domain", domain)["data"].keys() == {"v2", "v2.data"})
        assert first["v1"] != cluster.secret("domain", domain)["data"]["v2"]

        key = cluster.secret("tenant", alone)["data"]["v1"]
        cluster.plane.kubectl("delete", "kvtenant", alone)
        cluster.tenant("alone")
        cluster.says("kvtenants", alone, "Ready", "True")
        cluster.sees(lambda: (cluster.secret("tenant", alone) or {"data": {"v1": key}})["data"]["v1"] != key)

    def test_contested_identities_and_dangling_quotas_are_told(self, cluster: Cluster) -> None:
        account = [{"namespace": cluster.mark, "name": "same"}]
        one = cluster.tenant("one", serviceAccounts=account)
        two = cluster.tenant("two", serviceAccounts=account)
        quota = [{"poolRef": "nowhere", "tier": "dram", "hard": "1Gi"}]
        three = cluster.tenant("three", quotas=quota)

        cluster.says("kvtenants", one, "Accepted", "False", "IdentityConflict")
        cluster.says("kvtenants", two, "Accepted", "False", "IdentityConflict")
        cluster.says("kvtenants", three, "Accepted", "False", "UnknownPool")
        cluster.plane.kubectl("delete", "kvtenant", two)
        cluster.says("kvtenants", one, "Accepted", "True")

    def test_a_fleet_at_rest_causes_no_writes(self, replica: Replica, cluster: Cluster, agents: FakeAgents) -> None:
        agents.manners.lease_s = 60
        cluster.node("a")
        cluster.tenant("one")
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Ready", "True")
        last, since_s = (0.0, ""), time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since_s
            version = cluster.kv("kvpools", pool)["metadata"]["resourceVersion"]
            now = replica.metric("kvstrata_operator_actions_total"), version
            if now != last:
                last, since_s = now, time.monotonic()
            return time.monotonic() - since_s > QUIET_S

        cluster.sees(is_quiet)

    def test_a_server_that_hangs_is_waited_for_and_the_next_change_counts(
        self, replica: Replica, cluster: Cluster
    ) -> None:
        """Connections stay open and unanswered: only deadlines notice."""
        cluster.node("a")
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Ready", "True")
        cluster.plane.pause_apiserver(60.0)
        time.sleep(20.0)
        assert replica.page("healthz") == "ok\n"
        assert replica.metric("kvstrata_operator_leader") == 0.0, "nobody leads who cannot renew"
        cluster.plane.resume_apiserver()
        cluster.plane.wait_ready()

        cluster.node("b")
        cluster.sees(lambda: cluster.kv("kvpools", pool)["status"]["nodesReady"] == "2/2")

    @staticmethod
    def _has_label(cluster: Cluster, node: str, label: str) -> bool:
        return cluster.labels(node).get(label) == "v1"

    def test_weights_are_ordered_counted_and_stated_by_labels_until_their_cache_goes(self, cluster: Cluster) -> None:
        first, second = cluster.node("a"), cluster.node("b")
        disk = tier("nvme", "NVMe", "10Gi", nvme={"path": f"/var/lib/kvstrata/{cluster.mark}"})
        pool = cluster.pool(tiers=[tier(), disk])
        cluster.says("kvpools", pool, "Ready", "True")
        spec = {"poolRef": pool, "source": {"url": "s3://models/m"}, "revision": "v1"}
        cache = cluster.make("kvmodelcaches", "KVModelCache", f"{cluster.mark}-m", spec)
        cluster.says("kvmodelcaches", cache, "Staged", "False", "Staging")
        cluster.sees(lambda: all(n["spec"].get("models") for n in cluster.pool_nodes(pool).values()))

        label, digest = f"{names.LABEL_MODEL_PREFIX}{cache}", "sha256:" + "ab" * 32
        for node in (first, second):
            found = cluster.kv("kvpoolnodes", names.pool_node_name(pool, node))
            (order,) = found["spec"]["models"]
            report = {key: order[key] for key in ("name", "uid", "generation", "revision")} | {"digest": digest}
            report |= {"state": "Staged", "sizeBytes": 7, "stagedBytes": 7, "inUse": node == first}
            path = f"{KVSTRATA}/kvpoolnodes/{found['metadata']['name']}/status"
            cluster.plane.api.patch(path, {"status": {"models": [report]}})
            cluster.sees(partial(self._has_label, cluster, node, label))
        cluster.plane.kubectl("wait", "--for=condition=Staged", f"kvmc/{cache}", "--timeout=90s")
        stated = cluster.kv("kvmodelcaches", cache)["status"]
        assert (stated["summary"], stated["digest"], stated["nodesInUse"]) == ("2/2 nodes", digest, 1)
        cluster.sees(lambda: all(n["spec"]["models"][0].get("digest") for n in cluster.pool_nodes(pool).values()))
        assert cluster.labels(first)["test"], "no other label is touched"

        cluster.plane.kubectl("delete", "kvmodelcache", cache, "--timeout=90s")
        cluster.sees(lambda: not any(label in cluster.labels(node) for node in (first, second)))
        cluster.sees(lambda: not any(n["spec"]["models"] for n in cluster.pool_nodes(pool).values()))

    @pytest.mark.parametrize(("away_s", "times"), [(3.0, 4), (60.0, 1)])
    def test_the_next_change_counts_after_the_api_server_was_away(
        self, replica: Replica, cluster: Cluster, away_s: float, times: int
    ) -> None:
        """Several times, because a starting API server answers 403 for a moment and what that hits is chance."""
        cluster.node("a")
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Ready", "True")
        for round_ in range(times):
            cluster.plane.stop_component("kube-apiserver")
            time.sleep(away_s)
            assert replica.page("healthz") == "ok\n"
            cluster.plane.restart("kube-apiserver")
            cluster.plane.wait_ready()

            began_s = time.monotonic()
            other = cluster.pool(f"{cluster.mark}-after-{round_}")
            cluster.says("kvpools", other, "Accepted", "True")
            took_s = time.monotonic() - began_s
            sys.stdout.write(f"next change after {took_s:.1f} s\n")
            assert took_s < NEXT_CHANGE_S
        cluster.node("b")
        cluster.sees(lambda: cluster.kv("kvpools", pool)["status"]["nodesReady"] == "2/2")


def test_an_operator_that_was_killed_takes_up_where_it_was(
    kubeconfigs: dict[str, Path], cluster: Cluster, tmp_path: Path
) -> None:
    cluster.node("a")
    with running(kubeconfigs, tmp_path) as first:
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Accepted", "True")
        first.end(signal.SIGKILL)
    cluster.node("b")
    cluster.plane.kubectl("patch", "kvpool", pool, "--type=json", "-p", json.dumps(RESIZE))

    with running(kubeconfigs, tmp_path):
        cluster.sees(lambda: cluster.kv("kvpools", pool)["status"].get("nodesReady") == "2/2")
        cluster.says("kvpools", pool, "Ready", "True")
        assert {n["spec"]["tiers"][0]["capacityBytes"] for n in cluster.pool_nodes(pool).values()} == {2 * GIB}


def test_one_of_two_leads_and_the_other_takes_over(
    kubeconfigs: dict[str, Path], cluster: Cluster, tmp_path: Path
) -> None:
    lease = ("--lease-duration-s", str(TAKEOVER_LEASE_S))
    with running(kubeconfigs, tmp_path, *lease) as one, running(kubeconfigs, tmp_path, *lease) as two:
        leads = "kvstrata_operator_leader"
        cluster.sees(lambda: {one.metric(leads), two.metric(leads)} == {0.0, 1.0})
        leader, other = (one, two) if one.metric(leads) else (two, one)
        cluster.node("a")
        pool = cluster.pool()
        cluster.says("kvpools", pool, "Ready", "True")
        assert other.metric("kvstrata_operator_actions_total") == 0

        leader.end(signal.SIGKILL)
        began_s = time.monotonic()
        cluster.sees(lambda: other.metric(leads) == 1.0)
        took_s = time.monotonic() - began_s
        sys.stdout.write(f"took over after {took_s:.1f} s of a {TAKEOVER_LEASE_S} s Lease\n")
        cluster.node("b")
        cluster.sees(lambda: cluster.kv("kvpools", pool)["status"]["nodesReady"] == "2/2")


@pytest.mark.parametrize("by_kopf", [False, True])
def test_a_leader_that_stops_hands_over_at_once(
    kubeconfigs: dict[str, Path], cluster: Cluster, tmp_path: Path, plane: ControlPlane, *, by_kopf: bool
) -> None:
    """Also under `kopf run -m kvstrata_operator`."""
    with running(kubeconfigs, tmp_path, by_kopf=by_kopf) as replica:
        cluster.says("kvpools", cluster.pool(), "Accepted", "True")
        assert wait_until(lambda: replica.metric("kvstrata_operator_leader") == 1.0, CONVERGED_S)
        assert replica.end(signal.SIGTERM) == 0
        assert not replica._ready_file.exists()

    lease = plane.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{names.FIELD_MANAGER_OPERATOR}")
    assert not lease["spec"].get("holderIdentity")
