"""Laws of statuses: capacity with numbers, coarse writes, Events on flips only."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_operator.app.controller import USAGE_EVERY_S, WRITE_EVERY_S, Pacing
from kvstrata_operator.app.gauges import Convergence
from kvstrata_operator.decide.plan.actions import Merge, Severity, StatusWrite
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import GIB, SETTING, Fleet, condition, pool_node, pool_spec, tier

pytestmark = pytest.mark.unit

STATES = st.sampled_from(["absent", "made", "starting", "ready", "silent", "failed tier", "old revision"])


def fleet_in(states: list[str]) -> Fleet:
    """Give a pool `p` with one node in each state."""
    fleet = Fleet()
    fleet.pool()
    for i, _ in enumerate(states):
        fleet.node(f"n{i}")
    fleet.settle()
    for i, state in enumerate(states):
        _bring(fleet, f"p.n{i}", state)
    return fleet


def _bring(fleet: Fleet, key: str, state: str) -> None:
    ref = Ref(kinds.POOL_NODE, key)
    if state == "absent":
        fleet.delete(ref)
    elif state != "made":
        fleet.report(key, ready=state != "starting")
    if state == "silent":
        fleet.fall_silent(key)
    if state == "failed tier":
        fleet.objects[ref]["status"]["tiers"][0] |= {"phase": "Failed", "lastError": "EIO"}
    if state == "old revision":
        fleet.objects[ref]["status"]["observedRevision"] = "before"


def statuses(fleet: Fleet) -> dict[str, Any]:
    """Statuses that would be written, by object name."""
    return {w.action.ref.name: w for w in plan_statuses(*fleet.seen(), SETTING, fleet.now)}


def notes(fleet: Fleet, name: str) -> list[tuple[str, Severity]]:
    """Events that would be told about one object."""
    found = statuses(fleet).get(name)
    return [(note.reason, note.severity) for note in found.action.notes] if found else []


@settings(max_examples=40)
@given(st.lists(STATES, max_size=6))
def test_counts_add_up_and_ready_means_all(states: list[str]) -> None:
    fleet = fleet_in(states)
    fleet.settle()
    pool = fleet.of(kinds.POOL)["p"]
    counts = pool["status"]["nodes"]

    assert counts["matched"] == len(states)
    assert counts["ready"] == sum(s in ("ready", "failed tier", "old revision") for s in states)
    assert counts["updated"] == sum(s not in ("absent", "made", "old revision") for s in states)
    assert counts["degraded"] == sum(s in ("silent", "failed tier") for s in states)
    all_ready = bool(states) and set(states) <= {"ready", "failed tier"}
    assert condition(pool, "Ready")[0] == str(all_ready)


@settings(max_examples=40)
@given(st.lists(STATES, max_size=4), st.integers(0, 500))
def test_a_steady_fleet_is_not_written(states: list[str], passed_s: int) -> None:
    fleet = fleet_in(states)
    fleet.settle()
    fleet.pass_time(passed_s)

    assert statuses(fleet) == {}


def test_memory_that_a_node_has_not_got_is_told_with_numbers() -> None:
    fleet = Fleet()
    fleet.pool(spec=pool_spec([tier(size="64Gi")]))
    fleet.node("n0")
    fleet.settle()
    fleet.report("p.n0", memory_bytes=32 * GIB)
    fleet.settle()
    pool = fleet.of(kinds.POOL)["p"]

    assert condition(pool, "CapacitySatisfied") == ("False", "InsufficientMemory")
    assert condition(pool, "Ready") == ("False", "CapacityNotSatisfied")
    message = next(c["message"] for c in pool["status"]["conditions"] if c["type"] == "CapacitySatisfied")
    assert message == "1 of 1 nodes; n0: memory tiers want 64Gi; the node has 32Gi"


@pytest.mark.parametrize(
    ("size", "nodes", "told"), [("1Ei", 5, "4Ei"), ("999999999999999Ki", 2, "1818Pi"), ("4Ei", 1, "4Ei")]
)
def test_a_capacity_of_all_nodes_is_one_that_can_be_stored(size: str, nodes: int, told: str) -> None:
    fleet = Fleet()
    fleet.pool(spec=pool_spec([tier(size="1Gi"), tier("nvme", "NVMe", size)]))
    for i in range(nodes):
        fleet.node(f"n{i}")
    fleet.settle()

    assert fleet.of(kinds.POOL)["p"]["status"]["tiers"][1]["capacity"] == told


def test_a_size_above_what_can_be_counted_counts_as_that() -> None:
    fleet = Fleet()
    fleet.pool("big", pool_spec([tier("bucket", "Object", size="7Ei")]))
    fleet.node("n0")
    fleet.settle()
    pool = fleet.of(kinds.POOL)["big"]

    assert condition(pool, "Accepted")[0] == "True"
    assert pool["status"]["tiers"][0]["capacity"] == "4Ei"


def test_the_younger_of_two_pools_is_the_one_too_many() -> None:
    fleet = Fleet()
    fleet.node("n0")
    for name in ("old", "young"):
        fleet.pool(name, pool_spec([tier(size="40Gi")]))
        fleet.pass_time(1)
    fleet.settle()
    for name in ("old", "young"):
        fleet.report(f"{name}.n0")
    fleet.settle()
    pools = fleet.of(kinds.POOL)

    assert condition(pools["old"], "CapacitySatisfied")[0] == "True"
    assert condition(pools["young"], "CapacitySatisfied") == ("False", "InsufficientMemory")
    assert "older pools 40Gi" in str(pools["young"]["status"]["conditions"])


def test_nothing_is_claimed_about_nodes_that_have_not_reported() -> None:
    fleet = Fleet()
    fleet.pool()
    fleet.node("n0")
    fleet.settle()
    pool = fleet.of(kinds.POOL)["p"]

    assert condition(pool, "CapacitySatisfied") == ("Unknown", "NoReport")
    assert condition(pool, "MetadataAvailable") == ("Unknown", "NoReport")
    assert condition(pool, "Degraded")[0] == "False"


def test_an_agents_own_complaints_reach_the_pool() -> None:
    fleet = fleet_in(["ready", "ready"])
    fleet.report("p.n1", MetadataAvailable=("False", "RedisAway"), CapacitySatisfied=("False", "DiskTooSmall"))
    fleet.settle()
    pool = fleet.of(kinds.POOL)["p"]

    assert condition(pool, "MetadataAvailable") == ("False", "RedisAway")
    assert condition(pool, "Degraded") == ("True", "RedisAway")
    assert condition(pool, "CapacitySatisfied") == ("False", "DiskTooSmall")


def test_a_refused_write_shows_and_goes_away() -> None:
    fleet = fleet_in(["ready"])
    fleet.failures["p"] = "POST /apis: 403 no"
    fleet.settle()
    assert condition(fleet.of(kinds.POOL)["p"], "Provisioned") == ("False", "ApplyFailed")

    fleet.failures.clear()
    fleet.settle()
    assert condition(fleet.of(kinds.POOL)["p"], "Provisioned")[0] == "True"


def test_a_pool_that_is_ready_before_its_first_status_tells_so_all_the_same() -> None:
    fleet = Fleet()
    fleet.pool()
    fleet.node("n0")
    for _ in range(2):
        for action in fleet.orders():
            fleet.apply(action)
    fleet.report("p.n0")

    assert not fleet.of(kinds.POOL)["p"].get("status"), "no status was written yet"
    assert notes(fleet, "p") == [("AllNodesReady", Severity.NORMAL)]


def test_a_flip_is_told_once_and_other_first_good_states_not_at_all() -> None:
    fleet = fleet_in(["ready"])
    assert ("AllNodesReady", Severity.NORMAL) in notes(fleet, "p")
    fleet.settle()
    fleet.fall_silent("p.n0")
    fleet.apply(fleet.orders()[0])

    assert ("LeaseExpired", Severity.WARNING) in notes(fleet, "p")
    fleet.settle()
    assert notes(fleet, "p") == []


def test_a_silent_agent_is_not_counted_even_before_its_own_status_says_so() -> None:
    fleet = fleet_in(["ready", "ready"])
    fleet.settle()
    fleet.fall_silent("p.n0")
    told = statuses(fleet)["p"].action.body["status"]

    assert condition(fleet.of(kinds.POOL_NODE)["p.n0"], "Ready")[0] == "True", "nothing was marked yet"
    assert told["nodesReady"] == "1/2"
    assert condition({"status": told}, "Ready")[0] == "False"


def test_a_write_that_flips_nothing_tells_nothing() -> None:
    fleet = fleet_in(["ready"])
    fleet.settle()
    fleet.objects[pool_node("p", "n0")]["status"]["tiers"][0]["usedBytes"] = 512 << 20

    assert "p" in statuses(fleet)
    assert notes(fleet, "p") == []


def test_a_condition_keeps_its_time_while_its_status_stays() -> None:
    fleet = fleet_in(["ready", "starting"])
    fleet.settle()
    before = {c["type"]: c["lastTransitionTime"] for c in fleet.of(kinds.POOL)["p"]["status"]["conditions"]}
    fleet.pass_time(60)
    fleet.node("n2")
    fleet.settle()
    after = fleet.of(kinds.POOL)["p"]["status"]["conditions"]

    assert all(c["lastTransitionTime"] == before[c["type"]] for c in after if c["type"] in ("Ready", "Accepted"))


def test_only_figures_that_move_with_the_load_count_as_usage() -> None:
    fleet = fleet_in(["ready"])
    fleet.settle()
    status = fleet.objects[pool_node("p", "n0")]["status"]
    status["tiers"][0]["usedBytes"] = 512 << 20
    status["lookups"] = {"queried": 100, "hit": 42}
    status["evictedPerMinute"], status["directoryBacklog"] = 90, 35
    write = statuses(fleet)["p"]

    assert write.is_usage_only
    assert write.action.body["status"]["usedOfCapacity"] == "512Mi/1Gi"
    assert write.action.body["status"]["hitPercent"] == 42
    assert write.action.body["status"]["evictionsPerSecond"] == "1.5"
    assert write.action.body["status"]["gcBacklog"] == 32
    fleet.fall_silent("p.n0")
    assert not statuses(fleet)["p"].is_usage_only


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("ab"), st.booleans()), max_size=40))
def test_no_object_is_written_too_often_and_nothing_is_lost(events: list[tuple[int, str, bool]]) -> None:
    pacing, now_s = Pacing(), 0.0
    written: dict[str, float] = {}
    for quarters, name, usage in events:
        now_s += quarters / 4  # Exact in binary.
        write = StatusWrite(Merge(Ref(kinds.POOL, name), body={}), is_usage_only=usage)
        due, held_s = pacing.sort([write], now_s)
        assert bool(due) != (held_s is not None)
        every_s = USAGE_EVERY_S if usage else WRITE_EVERY_S
        if due:
            assert now_s - written.get(name, -every_s) >= every_s
            written[name] = now_s
        else:
            assert held_s == pytest.approx(written[name] + every_s)


def test_convergence_counts_from_the_change_to_ready_at_that_generation() -> None:
    fleet = fleet_in(["ready"])
    watch = Convergence()

    assert watch.observe(fleet.view().pools.declared, 10.0) == []
    fleet.settle()
    assert watch.observe(fleet.view().pools.declared, 12.5) == [2.5]
    assert watch.observe(fleet.view().pools.declared, 13.0) == []
    fleet.pool(spec=pool_spec([tier(size="2Gi")]))
    assert watch.observe(fleet.view().pools.declared, 20.0) == []
    fleet.settle()
    fleet.report("p.n0")
    fleet.settle()
    assert watch.observe(fleet.view().pools.declared, 24.0) == [4.0]
    assert Convergence().observe(fleet.view().pools.declared, 0.0) == [], (
        "Ready at first sight: nobody knows since when."
    )
