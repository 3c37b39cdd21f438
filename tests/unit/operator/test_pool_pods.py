"""Laws of what is kept of agents' pods: it says what one says that looks at all of them, and costs one node's worth."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata_api import names
from kvstrata_api.models.pool import UpdateStrategy
from kvstrata_operator.decide.agents.agents import PodState, Rollout, RollSpec, roll
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.pools.pool_facts import PoolPods
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.parse import parse_pool_node
from kvstrata_operator.observe.records import AgentPodSeen, PoolNodeSeen, Room
from support.operator.fleet import Fleet, facts_of, pool_spec, tier
from support.operator.kept import KeptFleet
from support.operator.pods import SETTING, Cluster, template

pytestmark = pytest.mark.unit

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODES = ("n0", "n1", "n2")
TIMES = ("2025-12-31T23:00:00Z", "2025-12-31T23:59:50Z")


def pod(key: str, node: str, revision: str, **more: Any) -> AgentPodSeen:
    """Build a pod that is well unless told otherwise."""
    facts: dict[str, Any] = {"created": TIMES[0], "is_deleting": False, "is_ready": True, "ready_since": TIMES[0]}
    facts |= {"trouble": "", **more}
    return AgentPodSeen(key=key, uid=key, version=1, pool="p", node=node, revision=revision, room=Room(), **facts)


pods = st.builds(
    pod,
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(NODES),
    st.sampled_from(["old", "new"]),
    created=st.sampled_from(TIMES),
    ready_since=st.sampled_from(TIMES),
    is_deleting=st.booleans(),
    is_ready=st.booleans(),
    trouble=st.sampled_from(["", "Unschedulable"]),
    unstarted_since=st.sampled_from(["", TIMES[0]]),
)


@given(st.lists(st.tuples(st.booleans(), pods), max_size=12))
def test_what_is_told_of_pods_depends_on_those_that_are_there(changes: list[tuple[bool, AgentPodSeen]]) -> None:
    kept, there = PoolPods(), dict[str, AgentPodSeen]()
    for comes, one in changes:
        if one.key in there:
            kept.remove(there.pop(one.key))
        if comes:
            there[one.key] = one
            kept.put(one)
    whole = PoolPods()
    for one in reversed(there.values()):
        whole.put(one)

    assert kept == whole
    assert kept.by_node.keys() == {one.node for one in there.values()}
    assert kept.not_of("new") == {node for node, one in kept.by_node.items() if one.revision != "new"}
    assert kept.troubled == {node for node, one in kept.by_node.items() if one.trouble}


@given(pods, pods)
def test_of_two_pods_of_a_node_the_one_that_stays_counts_and_of_those_the_newer(
    one: AgentPodSeen, other: AgentPodSeen
) -> None:
    kept = PoolPods()
    newcomer = replace(other, key="newcomer", node=one.node)
    kept.put(one)
    kept.put(newcomer)
    counts = kept.by_node[one.node]
    passed = newcomer if counts is one else one

    assert (not counts.is_deleting, counts.created) >= (not passed.is_deleting, passed.created)


def seen_on(node: str, *, is_ready: bool, is_draining: bool) -> PoolNodeSeen:
    """Build a KVPoolNode whose agent has reported."""
    said = {"AgentConnected": "True", "Ready": "True" if is_ready else "False"}
    body = {
        "metadata": {"name": f"p.{node}", "uid": node, "resourceVersion": "1"},
        "spec": {"poolRef": "p", "nodeName": node, "drain": {"requested": is_draining, "mode": "Demote"}},
        "status": {"conditions": [{"type": t, "status": s} for t, s in said.items()]},
    }
    return parse_pool_node(json.dumps(body).encode())


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, PodState]:
    """Nodes in all states that a roll may meet."""
    found = {}
    for number in range(draw(st.integers(0, 6))):
        node = f"n{number}"
        seen = seen_on(node, is_ready=draw(st.booleans()), is_draining=draw(st.booleans()))
        its = draw(st.one_of(st.none(), pods))
        alive = draw(st.booleans())
        found[node] = PodState(its, draw(st.sampled_from([None, seen])), is_alive=alive, is_silent=not alive)
    return found


@given(fleets(), st.integers(1, 3), st.sampled_from(["RollingUpdate", "OnDelete"]))
def test_nodes_that_serve_from_the_wanted_pod_make_no_difference(
    states: Mapping[str, PodState], most: int, type_: str
) -> None:
    strategy = UpdateStrategy.model_validate({"type": type_, "maxUnavailable": most, "progressDeadlineSeconds": 60})
    wanted = RollSpec("new", Room(), strategy, None)
    doubtful = {node: s for node, s in states.items() if not s.is_serving or s.pod is None or s.pod.revision != "new"}

    assert roll(wanted, states, NOW) == roll(wanted, doubtful, NOW)


def kept_cluster(nodes: int) -> Cluster:
    """Let a pool `p` run, seen through a World."""
    cluster = Cluster(KeptFleet(setting=SETTING))
    cluster.install(template())
    strategy = {"maxUnavailable": 2, "progressDeadlineSeconds": 60, "drain": {"timeoutSeconds": 20}}
    cluster.fleet.pool(spec=pool_spec([tier(size="1Gi", hostDRAM={"pageSize": "2Mi"})], updateStrategy=strategy))
    for i in range(nodes):
        cluster.fleet.node(f"n{i}")
    cluster.turn(4)
    return cluster


class Keeping(RuleBasedStateMachine):
    """Upgrades, broken images, lost nodes and pods in any order."""

    @initialize(nodes=st.integers(1, 4))
    def begin(self, nodes: int) -> None:
        self.cluster, self.version = kept_cluster(nodes), 1

    @rule(is_broken=st.booleans())
    def upgrade(self, *, is_broken: bool) -> None:
        self.version += 1
        self.cluster.install(template(f"v{self.version}"))
        if is_broken:
            self.cluster.fleet.step()
            self.cluster.broken.add(self.cluster.wanted())

    @rule(node=st.sampled_from(NODES))
    def lose(self, node: str) -> None:
        if node in self.cluster.pods():
            self.cluster.go_down(node)

    @rule(node=st.sampled_from(NODES))
    def find(self, node: str) -> None:
        self.cluster.come_back(node)

    @rule(node=st.sampled_from(NODES), belongs=st.booleans())
    def label(self, node: str, *, belongs: bool) -> None:
        self.cluster.fleet.node(node, **({"pool": "yes"} if belongs else {"other": "yes"}))

    @rule(node=st.sampled_from(NODES), pages=st.sampled_from(["0", "2Gi"]))
    def huge_pages_come_and_go(self, node: str, pages: str) -> None:
        self.cluster.fleet.node(node, pages=pages, pool="yes")

    @rule(node=st.sampled_from(NODES))
    def evict(self, node: str) -> None:
        if node in self.cluster.pods():
            self.cluster.fleet.delete(Ref(kinds.POD, self.cluster.pods()[node]["metadata"]["name"], SETTING.namespace))

    @rule()
    def operate(self) -> None:
        self.cluster.fleet.step()

    @rule(seconds=st.sampled_from([1, 90]))
    def others_act(self, seconds: int) -> None:
        self.cluster.fleet.pass_time(seconds)
        self.cluster.act()

    @invariant()
    def what_is_kept_is_what_is_there(self) -> None:
        if not hasattr(self, "cluster"):
            return
        fleet = self.cluster.fleet
        kept, view = fleet.seen(), Fleet.view(fleet)
        whole = view, facts_of(view)
        assert plan_orders(*kept, SETTING, fleet.now) == plan_orders(*whole, SETTING, fleet.now)
        assert plan_statuses(*kept, SETTING, fleet.now) == plan_statuses(*whole, SETTING, fleet.now)


TestKeeping = pytest.mark.slow(Keeping.TestCase)
TestKeeping.settings = settings(max_examples=20, stateful_step_count=12)


@pytest.mark.parametrize("size", [4, 40])
def test_one_pod_costs_the_same_in_a_pool_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = kept_cluster(size)
    looked_at: list[set[str]] = []

    def counted(wanted: RollSpec, states: Mapping[str, PodState], now: datetime) -> Rollout:
        looked_at.append(set(states))
        return roll(wanted, states, now)

    monkeypatch.setattr("kvstrata_operator.decide.agents.agents.roll", counted)

    def nodes_of_a_round() -> set[str]:
        looked_at.clear()
        seen = cluster.fleet.seen()
        plan_orders(*seen, SETTING, cluster.fleet.now)
        plan_statuses(*seen, SETTING, cluster.fleet.now)
        assert len(looked_at) == 2
        return set[str]().union(*looked_at)

    assert nodes_of_a_round() == set()
    cluster.go_down("n1")
    assert nodes_of_a_round() == {"n1"}
    cluster.fleet.fall_silent(names.pool_node_name("p", "n2"))
    assert nodes_of_a_round() == {"n1", "n2"}
