"""The life of a pool with everything real: API server, operator, agents with tiers, an engine that reads every byte."""

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from controlplane import ApiError, ControlPlane
from kvstrata_agent.backends.file.claim import POOL_FILE
from kvstrata_agent.policy.reuse_curve import SAME_USE_S
from kvstrata_api import names
from support.kube.agent import MIB, Agent, got, keys_of, put, until
from support.operator.fleet import condition
from support.operator.process import SYSTEM, Cluster, Replica, running
from support.runner import leftovers

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

COMPATIBILITY = {"model": "m", "revision": "r", "dtype": "bf16", "blockTokens": 16}
DRAIN_S = 20
EVERYTHING = {"deletionPolicy": "Destroy", "destroyConfirmation": names.DESTROY_CONFIRMATION}


@pytest.fixture(scope="module")
def kubeconfigs(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("identities")
    account = names.FIELD_MANAGER_OPERATOR
    return {account: plane.service_account_kubeconfig(SYSTEM, account, folder / account)}


@pytest.fixture(scope="class")
def replica(kubeconfigs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with running(kubeconfigs, tmp_path_factory.mktemp("replica")) as replica:
        yield replica
        assert replica.process.poll() is None, replica.log.read_text()


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    cluster = Cluster(plane)
    yield cluster
    cluster.remove_all()


def dram(capacity: str = "16Mi") -> dict[str, Any]:
    settings = {"pageSize": "4Ki", "persistence": "None"}
    return {"name": "dram", "type": "HostDRAM", "capacityPerNode": capacity, "hostDRAM": settings}


def lasting(capacity: str = "16Mi") -> dict[str, Any]:
    settings = {"pageSize": "4Ki", "persistence": "AgentRestart"}
    return {"name": "dram", "type": "HostDRAM", "capacityPerNode": capacity, "hostDRAM": settings}


def disk(path: Path, name: str = "nvme", capacity: str = "64Mi") -> dict[str, Any]:
    return {"name": name, "type": "NVMe", "capacityPerNode": capacity, "nvme": {"path": str(path)}}


class Life:
    """One pool on real agents, one for each node, and what its administrator does to it."""

    def __init__(self, cluster: Cluster, kubeconfig: Path, home: Path, stack: ExitStack) -> None:
        self.cluster, self.plane, self.pool = cluster, cluster.plane, cluster.mark
        self._kubeconfig, self._home, self._stack = kubeconfig, home, stack
        self._agents: list[Agent] = []
        self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": self.pool}})
        self.plane.api.post(f"/api/v1/namespaces/{self.pool}/serviceaccounts", {"metadata": {"name": "engine"}})
        account = {"namespace": self.pool, "name": "engine"}
        cluster.make("kvtenants", "KVTenant", self.pool, {"serviceAccounts": [account]})

    def declare(self, *tiers: dict[str, Any], **spec: Any) -> None:
        quick: dict[str, Any] = {
            "updateStrategy": {"drain": {"timeoutSeconds": DRAIN_S}},
            "policy": {"recompute": {"type": "AlwaysFetch"}},
        }
        self.cluster.pool(tiers=list(tiers), compatibility=COMPATIBILITY, **quick | spec)

    def agent(self, node: str = "a", memory_dir: Path | None = None) -> Agent:
        """Make a node and start its agent."""
        made = self.cluster.node(node)
        home = self._home / made
        home.mkdir()
        agent = Agent(self.plane, self._kubeconfig, home, pool=self.pool, node=made, memory_dir=memory_dir)
        self._stack.enter_context(agent)
        agent.start()
        self._agents.append(agent)
        return agent

    def patch(self, **spec: Any) -> None:
        self.plane.kubectl("patch", "kvpool", self.pool, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self) -> None:
        self.plane.kubectl("delete", "kvpool", self.pool, "--wait=false")

    def condition(self, type_: str) -> tuple[str, str]:
        return condition(self.cluster.kv("kvpools", self.pool), type_)

    def is_ready(self) -> bool:
        """Whether the pool says so of its present generation, and of the agents that run and no others.

        What an agent said before it was killed, and what was said of a node that is gone, does not count.
        """
        agents = {agent.node: agent for agent in self._agents if agent.process is not None}
        if self.cluster.pool_nodes(self.pool).keys() != agents.keys():
            return False
        if not all(agent.has_reported() for agent in agents.values()):
            return False
        shown = self.cluster.kv("kvpools", self.pool)
        ready = condition(shown, "Ready")[0] == "True" and condition(shown, "Progressing")[1] == "Complete"
        return ready and _is_observed(shown)

    def is_observed(self) -> bool:
        """Whether the operator has seen what was last declared, and done what it does about that."""
        return _is_observed(self.cluster.kv("kvpools", self.pool))

    def events(self) -> set[str]:
        return self.cluster.events(self.pool)


def _is_observed(pool: dict[str, Any]) -> bool:
    return bool(pool["status"].get("observedGeneration") == pool["metadata"]["generation"])


@pytest.fixture
def life(cluster: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[Life]:
    with ExitStack() as stack:
        yield Life(cluster, kubeconfig, tmp_path, stack)


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as directory:
        yield Path(directory)


def blocks(agent: Agent, tier: str) -> Callable[[], int]:
    return lambda: int(agent.tier(tier).get("blocks", 0))


def extents(path: Path) -> list[str]:
    return [name for name in files(path) if name.endswith(".data")]


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) if path.exists() else []


@pytest.mark.usefixtures("replica")
class TestTiers:
    def test_a_tier_grows_and_shrinks_under_a_reader_who_loses_nothing(self, life: Life, tmp_path: Path) -> None:
        life.declare(dram("32Mi"), disk(tmp_path / "nvme"))
        agent = life.agent()
        with agent.client(life.pool) as client:
            for seed in range(1, 21):
                assert put(client, seed) == 16
            held = client.acquire(keys_of(client, 1))
            assert len(held) == 16
            before = [bytes(lease.view) for lease in held]
            life.patch(tiers=[dram("8Mi"), disk(tmp_path / "nvme")])

            until(lambda: agent.condition("TiersSettled").get("reason") == "ShrinkingTier")
            until(lambda: life.condition("Progressing")[1] == "ShrinkingTier")
            assert [bytes(lease.view) for lease in held] == before, "memory under a lease stays as it is"
            held.release()
            until(life.is_ready)
            assert agent.tier("dram")["capacityBytes"] == 8 * MIB
            for seed in range(1, 21):
                assert got(client, seed)[0] == 16, f"chain {seed} was demoted, not lost"

            life.patch(tiers=[dram("64Mi"), disk(tmp_path / "nvme")])
            until(lambda: agent.tier("dram")["capacityBytes"] == 64 * MIB)
            until(life.is_ready)

    @pytest.mark.parametrize("policy", ["Retain", "Destroy"])
    def test_a_tier_comes_and_goes_and_its_blocks_move_to_the_others(
        self, life: Life, tmp_path: Path, policy: str
    ) -> None:
        far, near = disk(tmp_path / "far", "far"), disk(tmp_path / "near", "near")
        life.declare(dram("4Mi"), far, **(EVERYTHING if policy == "Destroy" else {}))
        agent = life.agent()
        with agent.client(life.pool) as client:
            life.patch(tiers=[dram("4Mi"), near, far])
            until(life.is_ready)
            for seed in range(1, 9):
                assert put(client, seed) == 16
            until(lambda: blocks(agent, "near")() > 0)

            life.patch(tiers=[dram("4Mi"), far])
            until(lambda: [t["name"] for t in agent.status()["tiers"]] == ["dram", "far"])
            until(life.is_ready)
            assert {1, 2, 3, 4} <= {seed for seed in range(1, 9) if got(client, seed)[0] == 16}
            if policy == "Destroy":
                until(lambda: not files(tmp_path / "near"))
            else:
                assert files(tmp_path / "near")
            assert files(tmp_path / "far")


@pytest.mark.usefixtures("replica")
class TestNodes:
    def test_a_cordoned_node_keeps_its_blocks_and_serves(self, life: Life, tmp_path: Path) -> None:
        life.declare(dram(), disk(tmp_path / "nvme"))
        agent = life.agent()
        with agent.client(life.pool) as client:
            assert put(client, 1) == 16
            life.plane.kubectl("cordon", agent.node)
            until(life.is_ready)
            assert got(client, 1)[0] == 16
            assert put(client, 2) == 16

    def test_a_label_put_back_during_a_drain_ends_it(self, life: Life) -> None:
        """Nothing of a memory pool survives anywhere else, so such a drain is done at once: the last label wins."""
        life.declare(dram())
        agent = life.agent()
        until(life.is_ready)
        for _ in range(3):
            life.plane.kubectl("label", "node", agent.node, "test-")
            life.plane.kubectl("label", "node", agent.node, f"test={life.cluster.mark}")
        until(life.is_ready)
        with agent.client(life.pool) as client:
            until(lambda: put(client, 3) == 16)

    def test_a_node_of_the_same_name_is_another_node_and_the_pool_comes_back_on_it(self, life: Life) -> None:
        life.declare(dram())
        agent = life.agent()
        until(life.is_ready)
        first = agent.status()["epoch"]
        agent.stop(signal.SIGKILL)
        life.plane.kubectl("delete", "node", agent.node)
        life.plane.api.post("/api/v1/nodes", {"metadata": {"name": agent.node, "labels": {"test": life.cluster.mark}}})
        agent.start()
        until(life.is_ready)
        assert agent.status()["epoch"] > first

    def test_a_renamed_node_leaves_nothing_of_the_old_one(self, life: Life) -> None:
        life.declare(dram())
        old = life.agent("old")
        until(life.is_ready)
        life.plane.kubectl("delete", "node", old.node)
        old.stop(signal.SIGKILL)
        new = life.agent("new")
        until(life.is_ready)
        assert new.tier("dram")["phase"] == "Ready"
        lease = names.agent_lease_name(life.pool, old.node)
        path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{lease}"
        until(lambda: life.cluster.get(path) is None)

    def test_what_is_done_to_a_pool_node_by_hand_is_healed_or_refused(self, life: Life) -> None:
        life.declare(dram())
        agent = life.agent()
        until(life.is_ready)
        uid = life.cluster.pool_nodes(life.pool)[agent.node]["metadata"]["uid"]
        path = f"kvpn/{agent.name}"
        by_hand = {"tiers": [], "revision": "mine", "drain": {"requested": True, "deadline": "2199-01-01T00:00:00Z"}}
        meta = {"labels": {names.LABEL_POOL: "other", names.LABEL_NODE: None}, "ownerReferences": None}
        life.plane.kubectl("patch", path, "--type=merge", "-p", json.dumps({"spec": by_hand, "metadata": meta}))

        def healed() -> bool:
            shown = life.cluster.pool_nodes(life.pool).get(agent.node)
            return bool(
                shown
                and shown["spec"]["tiers"]
                and not shown["spec"]["drain"]["requested"]
                and shown["metadata"]["labels"].get(names.LABEL_NODE) == agent.node
                and shown["metadata"].get("ownerReferences")
            )

        until(healed)
        with pytest.raises(Exception, match=r"metadata.name must be"):
            life.plane.kubectl("patch", path, "--type=merge", "-p", '{"spec": {"nodeName": "elsewhere"}}')
        life.plane.kubectl("delete", path)
        until(lambda: life.cluster.pool_nodes(life.pool).get(agent.node, {}).get("metadata", {}).get("uid", uid) != uid)
        until(life.is_ready)


@pytest.mark.usefixtures("replica")
class TestAdministrators:
    def test_of_two_who_change_a_pool_at_once_the_last_word_on_each_field_counts(self, life: Life) -> None:
        life.declare(dram())
        agent = life.agent()
        until(life.is_ready)
        for size in range(5, 25):
            life.plane.kubectl(
                "patch", "kvpool", life.pool, "--type=json", "-p",
                json.dumps([{"op": "replace", "path": "/spec/tiers/0/capacityPerNode", "value": f"{size}Mi"}]),
            )  # fmt: skip
            life.patch(updateStrategy={"drain": {"timeoutSeconds": size}}, paused=size % 2 == 1)
        until(life.is_ready)
        assert agent.tier("dram")["capacityBytes"] == 24 * MIB

        stale = life.cluster.kv("kvpools", life.pool)
        life.patch(paused=True)
        with pytest.raises(ApiError) as refused:
            life.plane.api.request("PUT", f"/apis/{names.API_VERSION}/kvpools/{life.pool}", stale)
        assert refused.value.status == 409

    def test_a_paused_pool_changes_nothing_and_goes_on_where_it_was_left(self, life: Life) -> None:
        life.declare(dram())
        agent = life.agent()
        until(life.is_ready)
        life.patch(paused=True)
        until(lambda: life.condition("Progressing") == ("False", "Paused"))
        placed = life.cluster.pool_nodes(life.pool)[agent.node]["spec"]
        life.patch(tiers=[dram("8Mi")])
        until(life.is_observed)
        assert life.condition("Progressing") == ("False", "Paused")
        assert life.cluster.pool_nodes(life.pool)[agent.node]["spec"] == placed
        assert agent.tier("dram")["capacityBytes"] == 16 * MIB
        life.patch(paused=False)
        until(life.is_ready)
        assert agent.tier("dram")["capacityBytes"] == 8 * MIB


class TestDeletion:
    @pytest.mark.usefixtures("replica")
    def test_what_is_retained_serves_a_pool_of_the_same_name(self, life: Life, tmp_path: Path) -> None:
        life.declare(dram(), disk(tmp_path / "nvme"))
        agent = life.agent()
        with agent.client(life.pool) as client:
            assert put(client, 1) == 16
            life.delete()
            life.cluster.sees(lambda: life.cluster.kv("kvpools", life.pool) is None)
            assert any(name.startswith(agent.node) for name in files(tmp_path / "nvme"))
            assert (tmp_path / "nvme" / POOL_FILE).exists()
            life.declare(dram(), disk(tmp_path / "nvme"))
            until(life.is_ready)
            until(lambda: put(client, 2) == 16)
            assert got(client, 1)[0] == 16

    @pytest.mark.usefixtures("replica")
    def test_what_is_destroyed_is_gone_and_said_to_be_and_a_dead_node_is_named(
        self, life: Life, tmp_path: Path
    ) -> None:
        life.declare(dram(), disk(tmp_path / "nvme"), **EVERYTHING)
        agent, dead = life.agent("a"), life.agent("b")
        until(life.is_ready)
        with agent.client(life.pool) as client:
            assert put(client, 1) == 16
            dead.stop(signal.SIGKILL)
            until(lambda: dead.condition("AgentConnected").get("reason") == "LeaseExpired")
            life.delete()
            life.cluster.sees(lambda: life.cluster.kv("kvpools", life.pool) is None)
        assert not any(name.startswith(agent.node) for name in files(tmp_path / "nvme"))
        life.cluster.sees(lambda: "NotDestroyed" in life.events())


class TestMemory:
    """Memory that outlives an agent, at the end of its pool."""

    @pytest.mark.usefixtures("replica")
    @pytest.mark.parametrize("held", ["blocks", "leased blocks"])
    def test_agents_give_it_back_before_they_are_let_go(
        self, life: Life, tmp_path: Path, memory_dir: Path, held: str
    ) -> None:
        life.declare(lasting(), disk(tmp_path / "nvme"))
        agent = life.agent(memory_dir=memory_dir)
        with agent.client(life.pool) as client:
            assert put(client, 1) == 16
            assert extents(memory_dir)
            leases = client.acquire(keys_of(client, 1)) if held == "leased blocks" else None
            life.delete()
            life.cluster.sees(lambda: life.cluster.pool_nodes(life.pool) == {})
            assert files(memory_dir) == [], "the operator stops agents only when nothing is left"
            life.cluster.sees(lambda: life.cluster.kv("kvpools", life.pool) is None)
            del leases
        assert "NotReleased" not in life.events()
        assert any(name.startswith(agent.node) for name in files(tmp_path / "nvme"))

    def test_an_agent_that_ends_when_its_pool_goes_takes_it_along_and_one_that_is_restarted_does_not(
        self, life: Life, memory_dir: Path, tmp_path: Path, kubeconfigs: dict[str, Path]
    ) -> None:
        with running(kubeconfigs, tmp_path):
            life.declare(lasting())
            agent = life.agent(memory_dir=memory_dir)
            with agent.client(life.pool) as client:
                assert put(client, 1) == 16
                assert agent.stop(signal.SIGTERM) == 0
                assert extents(memory_dir)
                agent.start()
                until(lambda: client.is_attached)
                assert got(client, 1) == (16, {"dram"})
        life.delete()  # And no operator is there that would have it drained.
        assert agent.stop(signal.SIGTERM) == 0
        assert files(memory_dir) == []

    def test_what_a_killed_agent_left_goes_with_the_next_one_that_finds_no_pool(
        self, life: Life, memory_dir: Path, tmp_path: Path, kubeconfigs: dict[str, Path]
    ) -> None:
        with running(kubeconfigs, tmp_path):
            life.declare(lasting())
            agent = life.agent(memory_dir=memory_dir)
            with agent.client(life.pool) as client:
                assert put(client, 1) == 16
            agent.stop(signal.SIGKILL)
            life.delete()
            life.cluster.sees(lambda: life.cluster.kv("kvpools", life.pool) is None)
        assert extents(memory_dir)
        log = agent.home / "agent.log"
        before = log.stat().st_size
        agent.launch()
        until(lambda: b"waiting for the declared state" in log.read_bytes()[before:])
        assert agent.stop(signal.SIGTERM) == 0
        assert files(memory_dir) == []


class TestWithoutOperator:
    """None runs but those that a test starts."""

    def test_agents_destroy_while_the_operator_is_down_and_the_pool_goes_when_it_is_back(
        self, life: Life, tmp_path: Path, kubeconfigs: dict[str, Path]
    ) -> None:
        with running(kubeconfigs, tmp_path):
            life.declare(dram(), disk(tmp_path / "nvme"), **EVERYTHING)
            agent = life.agent()
            until(life.is_ready)
        with agent.client(life.pool) as client:
            assert put(client, 1) == 16
            life.delete()
            until(lambda: agent.condition("Draining").get("reason") == "Destroyed")
            assert files(tmp_path / "nvme") == []
        assert life.cluster.kv("kvpools", life.pool) is not None, "the finalizer waits for the operator"
        with running(kubeconfigs, tmp_path):
            life.cluster.sees(lambda: life.cluster.kv("kvpools", life.pool) is None)

    def test_a_pool_whose_operator_never_comes_back_is_let_go_by_hand(
        self, life: Life, tmp_path: Path, kubeconfigs: dict[str, Path]
    ) -> None:
        with running(kubeconfigs, tmp_path):
            life.declare(dram())
            agent = life.agent()
            until(life.is_ready)
        life.delete()
        remove = '[{"op": "remove", "path": "/metadata/finalizers"}]'
        life.plane.kubectl("patch", "kvpool", life.pool, "--type=json", "-p", remove)
        life.cluster.sees(lambda: life.cluster.kv("kvpools", life.pool) is None)
        life.cluster.sees(lambda: life.cluster.pool_nodes(life.pool) == {})
        assert agent.process is not None
        assert agent.process.poll() is None, "the agent goes on, and takes nothing new"


@pytest.mark.usefixtures("replica")
def test_a_tier_that_scales_grows_to_what_is_asked_for_again_and_says_why(life: Life, tmp_path: Path) -> None:
    """64 chains of 1 MiB go round: 60 MiB always evict what comes next, and a quarter more holds them all."""
    scale = {"minPerNode": "16Mi", "maxPerNode": "96Mi", "cooldownSeconds": 10}
    life.declare(dram("60Mi") | {"autoscale": scale}, disk(tmp_path / "nvme", capacity="256Mi"))
    agent = life.agent()
    with agent.client(life.pool) as client:
        for seed in range(64):
            put(client, seed)
        deadline_s = time.monotonic() + 120.0
        while agent.tier("dram").get("capacityBytes") != 75 * MIB:
            assert time.monotonic() < deadline_s, agent.status()
            again_s = time.monotonic() + SAME_USE_S
            for seed in range(64):
                got(client, seed)
            time.sleep(max(0.0, again_s - time.monotonic()))  # What is asked for again at once is the same use.
    until(lambda: "TierScaled" in life.events())
    (told,) = life.cluster.kv("kvpools", life.pool)["status"]["autoscaling"]
    assert told["message"].startswith("grown from 60Mi to 75Mi on each node: a step up finds ")
