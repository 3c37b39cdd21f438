"""Laws of the incremental node facts: refreshed node by node, they are those of a look at everything."""

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata_api import names
from kvstrata_operator.decide.incremental import FleetFacts, FleetSums, Members
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.pools import pool_facts
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.parse import parse_pool_node
from support.operator.fleet import SETTING, Fleet, facts_of, pool_node, pool_spec, tier
from support.operator.kept import KeptFleet

pytestmark = pytest.mark.unit

POOLS = ("a", "b", "c")
NODES = tuple(f"n{i}" for i in range(7))


def test_nothing_is_kept_of_tenants_and_shares_that_no_node_tells_of_any_more() -> None:
    body = {
        "metadata": {"name": "a.n1", "uid": "u", "resourceVersion": "1"},
        "spec": {"poolRef": "a", "nodeName": "n1"},
        "status": {
            "tenants": [{"tenant": "t", "tier": "dram", "usedBytes": 5, "overHard": True}],
            "shares": [{"uid": "s", "hits": 3}],
        },
    }
    seen, sums = parse_pool_node(json.dumps(body).encode()), FleetSums()

    sums.add(seen, 1)
    assert (sums.held["t"].used_bytes["a", "dram"], sums.share_hits["s"]) == (5, 3)
    sums.add(seen, -1)
    assert sums == FleetSums()


class Keeping(RuleBasedStateMachine):
    """Administrators, nodes, agents and the operator do what they like, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = KeptFleet()

    @initialize(nodes=st.sampled_from([2, 5]), size=st.sampled_from(["1Gi", "40Gi"]))
    def begin(self, nodes: int, size: str) -> None:
        """Two pools on the same nodes, with agents, so that there is something to lose."""
        for name in POOLS[:2]:
            self.fleet.pool(name, pool_spec([tier(size=size), tier("cold", "Object", "100Gi")], {"any": "yes"}))
        for node in NODES[:nodes]:
            self.fleet.node(node, any="yes")
        self.fleet.settle()
        for pool in POOLS[:2]:
            for node in NODES[:nodes]:
                self.agent(pool, node, 1 << 30, "up")

    @rule(
        name=st.sampled_from(POOLS),
        size=st.sampled_from(["1Gi", "40Gi"]),
        kinds_=st.sets(st.sampled_from(["NVMe", "Object"])),
        label=st.sampled_from(["a", "b", "any"]),
        paused=st.booleans(),
    )
    def declare(self, name: str, size: str, kinds_: set[str], label: str, *, paused: bool) -> None:
        """Shared tiers change with the number of nodes, directories are contested."""
        pool = self.fleet.of(kinds.POOL).get(name, {"metadata": {}})
        if "deletionTimestamp" not in pool["metadata"]:
            tiers = [tier(size=size), *(tier(kind.lower(), kind, "100Gi") for kind in sorted(kinds_))]
            self.fleet.pool(name, pool_spec(tiers, {label: "yes"}, paused=paused))

    @rule(name=st.sampled_from(POOLS))
    def spoil(self, name: str) -> None:
        """A pool that today's rules refuse."""
        self.fleet.pool(name, pool_spec([tier(), tier()]))

    @rule(name=st.sampled_from(POOLS))
    def delete(self, name: str) -> None:
        self.fleet.delete(Ref(kinds.POOL, name))

    @rule(nodes=st.sets(st.sampled_from(NODES)), labels=st.sets(st.sampled_from(POOLS)))
    def label(self, nodes: set[str], labels: set[str]) -> None:
        for node in nodes:
            self.fleet.node(node, **dict.fromkeys(labels, "yes"), any="yes")

    @rule(node=st.sampled_from(NODES))
    def lose(self, node: str) -> None:
        self.fleet.delete(Ref(kinds.NODE, node))

    @rule(guaranteed=st.sampled_from(["1Gi", "30Gi", None]), pool=st.sampled_from(POOLS))
    def guarantee(self, guaranteed: str | None, pool: str) -> None:
        quota = {"poolRef": pool, "tier": "dram", "hard": "40Gi"} | ({"guaranteed": guaranteed} if guaranteed else {})
        self.fleet.tenant("t", quotas=[quota])

    @rule(
        pool=st.sampled_from(POOLS),
        node=st.sampled_from(NODES),
        used=st.sampled_from([0, 1 << 20, 1 << 30]),
        what=st.sampled_from(["up", "unready", "small", "drained", "silent", "gone", "broken"]),
    )
    def agent(self, pool: str, node: str, used: int, what: str) -> None:
        key = names.pool_node_name(pool, node)
        body = self.fleet.of(kinds.POOL_NODE).get(key)
        if body is None:
            return
        if what == "silent":
            self.fleet.fall_silent(key)
        elif what == "gone":
            self.fleet.delete(pool_node(pool, node))
        else:
            draining = {"Draining": ("False", "Drained")} if what == "drained" else {}
            memory_bytes = (1 if what == "small" else 64) << 30
            self.fleet.report(key, ready=what != "unready", memory_bytes=memory_bytes, **draining)
            self._fill(body["status"], used, is_broken=what == "broken")

    def _fill(self, status: Any, used: int, *, is_broken: bool) -> None:
        """Let an agent report figures; its version has moved on with the report."""
        status["tiers"][0] |= {"usedBytes": used, "phase": "Failed" if is_broken else "Ready"}
        status["lookups"] = {"queried": used, "hit": used // 3}
        status["shares"] = [{"uid": "s", "hits": used}]
        status["tenantLookups"] = [{"tenant": "t", "queried": used, "hit": used // 2, "denied": used // 4}]
        status["evictedPerMinute"], status["directoryBacklog"] = used, used // 8
        status["tenants"] = [{"tenant": "t", "tier": "dram", "usedBytes": used, "overHard": used > 1 << 20}]

    @rule(seconds=st.sampled_from([1, 400]))
    def wait(self, seconds: int) -> None:
        self.fleet.pass_time(seconds)

    @rule()
    def operate(self) -> None:
        self.fleet.step()

    @invariant()
    def what_is_kept_is_what_is_there(self) -> None:
        kept, view = self.fleet.seen(), Fleet.view(self.fleet)
        whole = view, facts_of(view)
        now = self.fleet.now
        assert plan_orders(*kept, SETTING, now) == plan_orders(*whole, SETTING, now)
        assert plan_statuses(*kept, SETTING, now) == plan_statuses(*whole, SETTING, now)
        assert +kept[1].sums.share_hits == +whole[1].sums.share_hits
        assert kept[1].sums.asked == whole[1].sums.asked
        for pool in kept[0].pools.declared:
            assert facts(kept[1], pool) == facts(whole[1], pool)


TestKeeping = pytest.mark.slow(Keeping.TestCase)
TestKeeping.settings = settings(max_examples=30, stateful_step_count=15)


def facts(fleet: FleetFacts, pool: str) -> Any:
    members = fleet.pools.get(pool, Members())
    return (
        (members.tally.facts(members.placement) if members.placement else None),
        members.difference,
        members.placement,
        members.draining,
        members.seen.keys(),
    )


@pytest.mark.parametrize("size", [5, 120])
def test_one_node_costs_the_same_in_a_fleet_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = KeptFleet()
    fleet.pool("a")
    fleet.pool("b", pool_spec(selector={}))
    for i in range(size):
        fleet.node(f"n{i}")
    fleet.settle()
    judged: list[str] = []

    def counted(placement: Any, node: str, *args: Any, **more: Any) -> Any:
        judged.append(f"{placement.pool}.{node}")
        return pool_facts.judge(placement, node, *args, **more)

    monkeypatch.setattr("kvstrata_operator.decide.incremental.judge", counted)
    fleet.node("new")
    fleet.view()
    assert sorted(judged) == ["a.new", "b.new"]
    judged.clear()
    fleet.report("a.n0")
    fleet.view()
    assert sorted(judged) == ["a.n0", "b.n0"]
    judged.clear()
    fleet.fall_silent("a.n0")
    fleet.view()
    assert sorted(judged) == ["a.n0", "b.n0"]
    judged.clear()
    fleet.view()
    assert judged == []


def test_a_status_of_a_pool_has_nobody_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = KeptFleet()
    fleet.pool("a")
    fleet.node("n0")
    fleet.settle()
    fleet.view()
    monkeypatch.setattr("kvstrata_operator.decide.incremental.judge", None)
    body = fleet.objects[Ref(kinds.POOL, "a")]
    body["status"]["nodesReady"] = "0/9"
    body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 1000)

    assert json.dumps(dict(fleet.view().pools.declared["a"].status)).count("0/9") == 1
