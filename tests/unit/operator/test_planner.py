"""Laws of the planner over a simulated cluster: it comes to rest at what was declared, whatever came before."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata_api import names
from kvstrata_operator.decide.plan.actions import Create, Delete, Merge, SetFinalizers
from kvstrata_operator.decide.pools.reconcile import RELEASE_S
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import SETTING, Fleet, condition, merge_patch, pool_node, pool_spec, tier

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.unit


def running(nodes: int = 2, spec: Any = None) -> Fleet:
    """A pool `p` whose agents are all ready."""
    fleet = Fleet()
    fleet.pool(spec=spec)
    for i in range(nodes):
        fleet.node(f"n{i}")
    fleet.settle()
    for key in fleet.of(kinds.POOL_NODE):
        fleet.report(key)
    fleet.settle()
    return fleet


def test_a_pool_gets_its_finalizer_before_anything_is_made_for_it() -> None:
    fleet = Fleet()
    fleet.pool()
    fleet.node("n0")

    (first,) = fleet.orders()
    assert isinstance(first, SetFinalizers)
    assert first.finalizers == (names.FINALIZER,)


def test_every_matching_node_gets_its_resolved_tiers() -> None:
    spec = pool_spec([tier(size="2Gi"), tier("cold", "Object", "3Gi")])
    fleet = running(3, spec)

    made = fleet.of(kinds.POOL_NODE)
    assert made.keys() == {"p.n0", "p.n1", "p.n2"}
    told = made["p.n0"]["spec"]
    assert [t["capacityBytes"] for t in told["tiers"]] == [2 << 30, 1 << 30]
    assert (told["poolRef"], told["nodeName"]) == ("p", "n0")
    assert made["p.n0"]["metadata"]["labels"][names.LABEL_POOL] == "p"
    assert made["p.n0"]["metadata"]["ownerReferences"][0]["uid"] == fleet.of(kinds.POOL)["p"]["metadata"]["uid"]


def test_a_pool_is_ready_when_all_its_agents_are() -> None:
    fleet = running()
    pool = fleet.of(kinds.POOL)["p"]

    assert condition(pool, "Ready") == ("True", "AllNodesReady")
    assert condition(pool, "Progressing") == ("False", "Complete")
    assert pool["status"]["nodes"] == {"matched": 2, "ready": 2, "updated": 2, "draining": 0, "degraded": 0}
    assert pool["status"]["currentRevision"] == pool["status"]["updateRevision"] != ""


def test_engine_pods_are_told_how_to_attach() -> None:
    fleet = running()
    told = fleet.of(kinds.CONFIG_MAP)["p-connection"]["data"]

    assert (told["socket"], told["audience"]) == ("/run/kvstrata/p/agent.sock", names.AUDIENCE)
    ref = fleet.of(kinds.POOL)["p"]["status"]["connection"]["configMapRef"]
    assert ref == {"namespace": SETTING.namespace, "name": "p-connection"}


def test_a_node_that_leaves_drains_first_and_goes_when_it_says_so() -> None:
    fleet = running()
    fleet.node("n1", other="label")

    (drain,) = fleet.orders()
    assert isinstance(drain, Merge)
    fleet.settle()
    assert fleet.of(kinds.POOL_NODE)["p.n1"]["spec"]["drain"]["requested"] is True
    fleet.drained("p.n1")
    fleet.settle()
    assert fleet.of(kinds.POOL_NODE).keys() == {"p.n0"}


def test_a_node_that_comes_back_while_it_drains_stays() -> None:
    fleet = running()
    fleet.node("n1", other="label")
    fleet.settle()
    fleet.node("n1")
    fleet.settle()

    assert fleet.of(kinds.POOL_NODE)["p.n1"]["spec"]["drain"]["requested"] is False


def test_an_agent_is_drained_though_no_lease_was_looked_at_yet() -> None:
    """As after a start of the operator."""
    fleet = running()
    fleet.alive.clear()
    fleet.node("n1", other="label")

    assert not any(isinstance(action, Delete) for action in fleet.orders())
    fleet.settle()
    assert fleet.of(kinds.POOL_NODE)["p.n1"]["spec"]["drain"]["requested"] is True


@pytest.mark.parametrize("why", ["silent", "never connected", "node gone", "no time for it"])
def test_nobody_waits_for_an_agent_that_cannot_drain(why: str) -> None:
    spec = pool_spec(updateStrategy={"drain": {"timeoutSeconds": 0 if why == "no time for it" else 300}})
    fleet = running(spec=spec)
    if why == "silent":
        fleet.fall_silent("p.n1")
    if why == "never connected":
        fleet.alive.clear()
        del fleet.objects[pool_node("p", "n1")]["status"]
    if why == "node gone":
        fleet.delete(Ref(kinds.NODE, "n1"))
    else:
        fleet.node("n1", other="label")

    assert any(isinstance(action, Delete) and action.ref == pool_node("p", "n1") for action in fleet.orders())


def test_a_changed_spec_reaches_every_node_and_shows_as_a_rollout() -> None:
    fleet = running()
    before = fleet.of(kinds.POOL)["p"]["status"]["currentRevision"]
    fleet.pool(spec=pool_spec([tier(size="2Gi")]))
    fleet.settle()
    pool = fleet.of(kinds.POOL)["p"]

    assert {n["spec"]["tiers"][0]["capacityBytes"] for n in fleet.of(kinds.POOL_NODE).values()} == {2 << 30}
    assert condition(pool, "Ready") == ("False", "NodesNotUpdated")
    assert condition(pool, "Progressing") == ("True", "RollingOut")
    assert pool["status"]["currentRevision"] == before != pool["status"]["updateRevision"]


def test_a_paused_pool_is_left_alone_but_watched() -> None:
    fleet = running()
    fleet.pool(spec=pool_spec([tier(size="2Gi")], paused=True))
    fleet.node("n2")

    assert fleet.orders() == ()
    fleet.settle()
    assert condition(fleet.of(kinds.POOL)["p"], "Progressing") == ("False", "Paused")


def test_a_pool_that_cannot_be_read_says_why_and_its_nodes_stay() -> None:
    fleet = running()
    fleet.pool(spec={"tiers": [{"name": "x"}]})
    fleet.settle()
    pool = fleet.of(kinds.POOL)["p"]

    assert condition(pool, "Accepted") == ("False", "Invalid")
    assert len(fleet.of(kinds.POOL_NODE)) == 2


def test_an_agent_that_falls_silent_costs_the_pool_its_readiness_and_is_told_once() -> None:
    fleet = running()
    fleet.fall_silent("p.n0")
    fleet.settle()
    node, pool = fleet.of(kinds.POOL_NODE)["p.n0"], fleet.of(kinds.POOL)["p"]

    assert condition(node, "AgentConnected") == condition(node, "Ready") == ("False", "LeaseExpired")
    assert condition(pool, "Degraded") == ("True", "LeaseExpired")
    assert pool["status"]["nodesReady"] == "1/2"


@pytest.mark.parametrize(
    "by_hand",
    [
        {"metadata": {"labels": {names.LABEL_POOL: "other"}}},
        {"metadata": {"ownerReferences": []}},
        {"spec": {"tiers": []}},
        {"spec": {"revision": "mine"}},
        {"spec": {"drain": {"requested": True, "deadline": "2199-01-01T00:00:00Z"}}},
    ],
)
def test_a_pool_node_that_was_edited_by_hand_is_put_right(by_hand: dict[str, Any]) -> None:
    fleet = running()
    before = deepcopy(fleet.of(kinds.POOL_NODE)["p.n0"])
    merge_patch(fleet.objects[pool_node("p", "n0")], by_hand)
    fleet.settle()

    after = fleet.of(kinds.POOL_NODE)["p.n0"]
    assert after["spec"] == before["spec"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert after["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]


@pytest.mark.parametrize("edit", [{"deadline": "2199-01-01T00:00:00Z"}, {"mode": "Drop"}])
def test_a_drain_ends_in_time_whatever_is_done_to_it_by_hand(edit: dict[str, str]) -> None:
    fleet = running(spec=pool_spec(updateStrategy={"drain": {"timeoutSeconds": 100}}))
    fleet.node("n0", other="label")
    fleet.settle()
    fleet.pass_time(50)
    merge_patch(fleet.objects[pool_node("p", "n0")], {"spec": {"drain": edit}})
    fleet.settle()
    assert fleet.of(kinds.POOL_NODE)["p.n0"]["spec"]["drain"]["mode"] == "Demote"

    fleet.pass_time(100)
    fleet.settle()
    assert "p.n0" not in fleet.of(kinds.POOL_NODE)


@pytest.mark.parametrize("policy", ["Retain", "Destroy"])
def test_a_deleted_pool_drains_then_deletes_then_goes(policy: str) -> None:
    fleet = running(spec=pool_spec(deletionPolicy=policy, destroyConfirmation=names.DESTROY_CONFIRMATION))
    fleet.delete(Ref(kinds.POOL, "p"))
    fleet.settle()

    orders = {n["spec"]["drain"]["mode"] for n in fleet.of(kinds.POOL_NODE).values()}
    assert orders == {"Drop" if policy == "Destroy" else "Demote"}
    said = "Destroyed" if policy == "Destroy" else "Released"
    fleet.drained("p.n0", said)
    fleet.settle()
    assert len(fleet.of(kinds.POOL_NODE)) == 2, "one agent is still at it"
    for less in ["Drained", "Released"] if policy == "Destroy" else ["Drained"]:
        fleet.drained("p.n1", less)
        fleet.settle()
        assert len(fleet.of(kinds.POOL_NODE)) == 2, f"{less} is not {said}"
    fleet.drained("p.n1", said)
    fleet.settle()
    assert not fleet.of(kinds.POOL)
    assert not fleet.of(kinds.POOL_NODE)
    assert not fleet.of(kinds.CONFIG_MAP)


@settings(max_examples=40)
@given(st.integers(0, 600), st.floats(0, 1000))
def test_a_deletion_never_waits_longer_than_its_bound(timeout_s: int, passed_s: float) -> None:
    fleet = running(1, pool_spec(updateStrategy={"drain": {"timeoutSeconds": timeout_s}}))
    fleet.delete(Ref(kinds.POOL, "p"))
    fleet.settle()
    fleet.pass_time(passed_s)
    fleet.settle()

    assert ("p" in fleet.of(kinds.POOL)) == (passed_s < timeout_s + RELEASE_S)


def test_a_pool_is_let_go_although_its_nodes_cannot_be_deleted() -> None:
    fleet = running(1)
    fleet.objects[pool_node("p", "n0")]["metadata"]["finalizers"] = ["someone/else"]
    fleet.delete(Ref(kinds.POOL, "p"))
    fleet.pass_time(300)
    fleet.settle()
    assert "p" in fleet.of(kinds.POOL)

    fleet.pass_time(60)
    fleet.settle()
    assert "p" not in fleet.of(kinds.POOL)


@pytest.mark.parametrize(
    "ref", [pool_node("p", "n1"), Ref(kinds.CONFIG_MAP, "p-connection", SETTING.namespace)], ids=str
)
def test_what_lost_its_label_gets_it_back(ref: Ref) -> None:
    fleet = running()
    labels = fleet.objects[ref]["metadata"].pop("labels")
    fleet.settle()

    assert fleet.objects[ref]["metadata"]["labels"] == labels


def test_what_somebody_added_to_a_connection_is_taken_out_once() -> None:
    fleet = running()
    told = fleet.of(kinds.CONFIG_MAP)["p-connection"]["data"]
    before = dict(told)
    told["stray"] = "x"
    fleet.settle()

    assert fleet.of(kinds.CONFIG_MAP)["p-connection"]["data"] == before
    assert fleet.orders() == ()


def test_a_paused_pool_can_be_deleted() -> None:
    fleet = running()
    fleet.pool(spec=pool_spec(paused=True))
    for key in fleet.of(kinds.POOL_NODE):
        fleet.fall_silent(key)
    fleet.delete(Ref(kinds.POOL, "p"))
    fleet.settle()

    assert not fleet.of(kinds.POOL)
    assert not fleet.of(kinds.POOL_NODE)


def test_two_plans_of_one_view_are_equal() -> None:
    fleet = Fleet()
    fleet.pool()
    fleet.settle()
    for i in range(20):
        fleet.node(f"n{i}")

    first = fleet.orders()
    assert first == fleet.orders()
    assert all(isinstance(action, Create) for action in first)


def test_people_are_told_once_for_each_plan_and_not_for_each_node() -> None:
    fleet = running()
    for i in range(2, 9):
        fleet.node(f"n{i}")
    fleet.node("n1", other="label")
    told = [(note.reason, note.message) for action in fleet.orders() for note in action.notes]

    assert told == [
        ("WithdrawingNodes", "KVPoolNodes: 1 to drain"),
        ("CreatingNodes", "KVPoolNodes: 7 to create"),
    ]


def test_a_node_whose_agent_is_gone_with_its_memory_is_named_and_one_that_never_had_an_agent_is_not() -> None:
    fleet = running()
    fleet.node("n2")
    fleet.settle()
    fleet.fall_silent("p.n0")
    fleet.drained("p.n1", "Released")
    fleet.delete(Ref(kinds.POOL, "p"))
    told = {note.reason: note.message for action in fleet.orders() for note in action.notes}

    assert told["NotReleased"] == "1 of 3 nodes have not confirmed that memory is back: n0"


POOLS = ("a", "b")
NODES = tuple(f"n{i}" for i in range(4))


class Life(RuleBasedStateMachine):
    """Administrators, nodes and agents do what they like; after every step the operator may or may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()

    @rule(name=st.sampled_from(POOLS), size=st.sampled_from(["1Gi", "2Gi"]), paused=st.booleans(), nvme=st.booleans())
    def declare(self, name: str, size: str, *, paused: bool, nvme: bool) -> None:
        pool = self.fleet.of(kinds.POOL).get(name, {"metadata": {}})
        if "deletionTimestamp" not in pool["metadata"]:
            tiers = [tier(size=size), *([tier("nvme", "NVMe")] if nvme else [])]
            self.fleet.pool(name, pool_spec(tiers, {name: "yes"}, paused=paused))

    @rule(name=st.sampled_from(POOLS))
    def delete(self, name: str) -> None:
        self.fleet.delete(Ref(kinds.POOL, name))

    @rule(node=st.sampled_from(NODES), labels=st.sets(st.sampled_from(POOLS)))
    def label(self, node: str, labels: set[str]) -> None:
        self.fleet.node(node, **dict.fromkeys(labels, "yes"), any="way")

    @rule(node=st.sampled_from(NODES))
    def lose(self, node: str) -> None:
        self.fleet.delete(Ref(kinds.NODE, node))

    @rule(pool=st.sampled_from(POOLS), node=st.sampled_from(NODES), what=st.sampled_from(["up", "drained", "silent"]))
    def agent(self, pool: str, node: str, what: str) -> None:
        key = names.pool_node_name(pool, node)
        if key in self.fleet.of(kinds.POOL_NODE):
            says: dict[str, Callable[[str], None]] = {
                "up": self.fleet.report,
                "drained": self.fleet.drained,
                "silent": self.fleet.fall_silent,
            }
            says[what](key)

    @rule(seconds=st.sampled_from([1, 299, 400]))
    def wait(self, seconds: int) -> None:
        self.fleet.pass_time(seconds)

    @rule()
    def operate(self) -> None:
        self.fleet.step()

    @precondition(lambda self: self.fleet.objects)
    @rule()
    def rest(self) -> None:
        """At rest, after every drain has run out, the cluster is exactly what was declared."""
        self.fleet.settle()
        self.fleet.pass_time(301)
        self.fleet.settle()
        self.fleet.pass_time(301)
        self.fleet.settle()
        for name, pool in self.fleet.of(kinds.POOL).items():
            if not pool["spec"].get("paused"):
                self._is_as_declared(name, pool)

    def _is_as_declared(self, name: str, pool: Any) -> None:
        labelled = {n for n, body in self.fleet.of(kinds.NODE).items() if body["metadata"]["labels"].get(name)}
        made = {key.split(".")[1] for key in self.fleet.of(kinds.POOL_NODE) if key.startswith(f"{name}.")}
        assert made <= labelled
        if condition(pool, "Provisioned")[1] != "PathConflict":
            assert made == labelled
        sizes = {n["spec"]["tiers"][0]["capacityBytes"] for n in self.fleet.of(kinds.POOL_NODE).values()}
        assert sizes <= {1 << 30, 2 << 30}
        assert pool["status"]["nodes"]["matched"] == len(labelled)

    @invariant()
    def no_pool_node_outlives_its_pool(self) -> None:
        pools = self.fleet.of(kinds.POOL).keys()
        assert all(n["spec"]["poolRef"] in pools for n in self.fleet.of(kinds.POOL_NODE).values())


TestLife = pytest.mark.slow(Life.TestCase)
TestLife.settings = settings(max_examples=40, stateful_step_count=30)
