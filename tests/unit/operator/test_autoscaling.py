"""Laws of tiers that scale: within bounds, a step at a time, at rest while reuse stays as it is, and told."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_api.models.pool import TierAutoscale
from kvstrata_api.tiers import step_down, step_up
from kvstrata_api.units import GIB, MIB
from kvstrata_operator.decide.pools.autoscaling import Signal, decide
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds
from support.operator.fleet import SETTING, Fleet, pool_node, pool_spec, tier

pytestmark = pytest.mark.unit

GRAIN = 2 * MIB
COOLDOWN_S = 60

Curve = dict[int, int]
"""Permille of hits that the part between two sizes adds, by its upper end in MiB."""

sizes = st.integers(64, 1 << 20).map(lambda mib: mib // 2 * GRAIN)
curves = st.dictionaries(st.integers(64, 1 << 20), st.integers(0, 60), max_size=12)
policies = st.builds(
    lambda low, high, gain: TierAutoscale(
        min_per_node=min(low, high), max_per_node=max(low, high), min_gain_permille=gain, cooldown_seconds=COOLDOWN_S
    ),
    sizes,
    sizes,
    st.integers(1, 100),
)


def hits(curve: Curve, size_bytes: int) -> int:
    return sum(gain for at, gain in curve.items() if at * MIB <= size_bytes)


def signal(curve: Curve, now_bytes: int, held_bytes: int = 0) -> Signal:
    """What agents would measure; of a workload that stays as it is, on nodes that are full."""
    here = hits(curve, now_bytes)
    gain, loss = hits(curve, step_up(now_bytes, GRAIN)) - here, here - hits(curve, step_down(now_bytes, GRAIN))
    return Signal(gain, loss, held_bytes, is_full=True, is_short=False)


signals = st.builds(
    Signal,
    gain_permille=st.integers(0, 1000),
    loss_permille=st.integers(0, 1000),
    held_bytes=sizes,
    is_full=st.booleans(),
    is_short=st.booleans(),
)


@given(policies, st.data(), signals)
def test_a_step_is_a_quarter_at_most_and_stays_within_bounds_and_above_what_is_held(
    policy: TierAutoscale, data: st.DataObject, told: Signal
) -> None:
    now_bytes = data.draw(st.integers(policy.min_per_node // GRAIN, policy.max_per_node // GRAIN)) * GRAIN
    step = decide(policy, now_bytes, told, GRAIN)
    if step is None:
        return
    assert policy.min_per_node <= step.capacity_bytes <= policy.max_per_node
    if step.capacity_bytes > now_bytes:
        assert step.capacity_bytes <= now_bytes * 5 // 4
        assert told.is_full
        assert not told.is_short
        assert told.gain_permille >= policy.min_gain_permille
    else:
        assert step.capacity_bytes >= max(now_bytes * 4 // 5, told.held_bytes)
        assert 2 * told.loss_permille <= policy.min_gain_permille


@settings(max_examples=200)
@given(policies, curves, st.data())
def test_while_reuse_stays_as_it_is_a_size_comes_to_rest_and_never_goes_back_and_forth(
    policy: TierAutoscale, curve: Curve, data: st.DataObject
) -> None:
    now_bytes = data.draw(st.integers(policy.min_per_node // GRAIN, policy.max_per_node // GRAIN)) * GRAIN
    ways: list[bool] = []
    for _ in range(80):  # From 64 MiB to 1 TiB are 44 quarters.
        step = decide(policy, now_bytes, signal(curve, now_bytes), GRAIN)
        if step is None:
            break
        ways.append(step.capacity_bytes > now_bytes)
        now_bytes = step.capacity_bytes
    else:
        raise AssertionError(f"not at rest: {ways[-8:]}")
    assert len(set(ways)) <= 1, ways


def scaling(**more: Any) -> Fleet:
    """A pool of two nodes whose 64 GiB of DRAM may be 16 GiB to 100 GiB."""
    policy = {"minPerNode": "16Gi", "maxPerNode": "100Gi", "cooldownSeconds": COOLDOWN_S}
    fleet = Fleet()
    fleet.pool(spec=pool_spec([tier(size="64Gi", autoscale={**policy, **more})]))
    for name in ("n0", "n1"):
        fleet.node(name)
    fleet.settle()
    return fleet


def report(fleet: Fleet, gain: int, loss: int, *, held_bytes: int = 0, fill: float = 0.9, **said: Any) -> None:
    """Let all agents set up what they are told, and say what reuse says."""
    for name in ("n0", "n1"):
        ref = pool_node("p", name)
        fleet.report(ref.name, memory_bytes=1024 * GIB, **said)
        (told,) = fleet.objects[ref]["status"]["tiers"]
        told["usedBytes"] = int(fill * told["capacityBytes"])
        told["demand"] = {"gainPermille": gain, "lossPermille": loss, "heldBytes": held_bytes}
    fleet.settle()


def asked_gib(fleet: Fleet) -> set[float]:
    return {n["spec"]["tiers"][0]["capacityBytes"] / GIB for n in fleet.of(kinds.POOL_NODE).values()}


def test_a_tier_grows_by_a_quarter_after_each_cooldown_up_to_its_bound_and_every_step_is_an_event() -> None:
    fleet = scaling()
    for wanted in (80.0, 100.0, 100.0):
        report(fleet, 23, 4)
        told = [w.action for w in plan_statuses(*fleet.seen(), SETTING, fleet.now)]
        assert not told, "a step is made once"
        assert asked_gib(fleet) == {wanted}
        report(fleet, 23, 4)
        assert asked_gib(fleet) == {wanted}, "and the next one after the cooldown"
        fleet.pass_time(COOLDOWN_S)
    (scale,) = fleet.of(kinds.POOL)["p"]["status"]["autoscaling"]
    assert scale["message"] == (
        "grown from 80Gi to 100Gi on each node: a step up finds 23 more of 1000 blocks asked for; minGainPermille 10"
    )
    assert fleet.of(kinds.POOL)["p"]["status"]["usedOfCapacity"] == "180Gi/200Gi"


@pytest.mark.parametrize(("ahead_s", "wanted"), [(COOLDOWN_S - 1, 80.0), (COOLDOWN_S, 100.0), (10**9, 100.0)])
def test_a_clock_that_was_ahead_at_a_step_holds_the_next_one_no_longer_than_the_cooldown(
    ahead_s: int, wanted: float
) -> None:
    fleet = scaling()
    fleet.now += timedelta(seconds=ahead_s)
    report(fleet, 23, 4)
    fleet.now -= timedelta(seconds=ahead_s)
    report(fleet, 23, 4)
    assert asked_gib(fleet) == {wanted}


def test_the_event_of_a_step_has_its_figures() -> None:
    fleet = scaling()
    for key in fleet.of(kinds.POOL_NODE):
        fleet.report(key)
    fleet.settle()
    for key in fleet.of(kinds.POOL_NODE):
        (told,) = fleet.objects[pool_node("p", key.split(".")[1])]["status"]["tiers"]
        told |= {"usedBytes": 60 * GIB, "demand": {"gainPermille": 50, "lossPermille": 50}}
    (write,) = plan_statuses(*fleet.seen(), SETTING, fleet.now)

    (note,) = [n for n in write.action.notes if n.reason == "TierScaled"]
    assert note.message.startswith("tier dram: grown from 64Gi to 80Gi on each node: a step up finds 50 more")


def test_a_tier_shrinks_while_that_costs_little_and_never_below_what_is_held() -> None:
    fleet = scaling()
    for _ in range(12):
        report(fleet, 0, 5, held_bytes=30 * GIB)
        fleet.pass_time(COOLDOWN_S)
    (gib,) = asked_gib(fleet)
    assert 30 <= gib < 31
    for _ in range(12):
        report(fleet, 0, 5)
        fleet.pass_time(COOLDOWN_S)
    assert asked_gib(fleet) == {16.0}


@pytest.mark.parametrize(
    "why",
    [
        {"fill": 0.5},
        {"CapacitySatisfied": ("False", "InsufficientCapacity")},
        {"TiersSettled": ("False", "ShrinkingTier")},
    ],
)
def test_a_tier_does_not_grow_while_it_has_room_or_nodes_have_not_or_still_change(why: dict[str, Any]) -> None:
    fleet = scaling()
    report(fleet, 100, 100, **why)
    assert asked_gib(fleet) == {64.0}


def test_a_pool_that_is_paused_or_says_nothing_keeps_its_size_and_new_bounds_count_at_once() -> None:
    fleet = scaling()
    report(fleet, 100, 100)
    assert asked_gib(fleet) == {80.0}
    fleet.pass_time(COOLDOWN_S)
    spec = fleet.of(kinds.POOL)["p"]["spec"]
    fleet.pool(spec=spec | {"paused": True})
    report(fleet, 100, 100)
    assert asked_gib(fleet) == {80.0}

    spec["tiers"][0]["autoscale"]["maxPerNode"] = "70Gi"
    fleet.pool(spec=spec | {"paused": False})
    fleet.settle()
    assert asked_gib(fleet) == {70.0}
    del spec["tiers"][0]["autoscale"]
    fleet.pool(spec=spec)
    fleet.settle()
    assert asked_gib(fleet) == {64.0}
    assert fleet.of(kinds.POOL)["p"]["status"]["autoscaling"] == []
