"""Prefetch at pause: who is brought up first and when, what it was good for, and how near it comes to an oracle."""

import asyncio
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.prefetch import AGAIN_S, CARE, HORIZON_S, LEAD_S, FairSessions, Wanted, coming_up_s, doubt_s
from kvstrata_agent.policy.priority import PriorityClass
from kvstrata_api import wire
from kvstrata_api.models.poolnode import TierProbe
from support.agent.doubles import BLOCK_BYTES, SCOPE, digest
from support.agent.engine import SLOTS, Engine, close, steps_until

pytestmark = pytest.mark.unit

BLOCKS = 4
"""Of each session."""


def counted(engine: Engine) -> Counter[str]:
    name = "kvstrata_prefetched_blocks_total"
    children = engine.core.node.counters._children.items()
    return Counter({labels[0]: int(c._value.get()) for (found, *labels), c in children if found == name})


def in_memory(engine: Engine, number: int) -> bool:
    entry = engine.core.node.index.find(*engine.key(number))
    return entry is not None and entry.residence(engine.core.node.tiers[0]) is not None


async def settled(engine: Engine) -> None:
    await steps_until(lambda: not engine.core.cache.mover.under_way)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.sampled_from(PriorityClass)), max_size=40),
    st.integers(1, 5),
)
def test_tenants_take_turns_by_weight_and_within_one_the_most_urgent_goes_first(
    asked: list[tuple[str, int, PriorityClass]], weight: int
) -> None:
    weights = {"a": 1, "b": weight, "c": 1}
    wanted = [Wanted(i, tenant, urgency, named, 0.0, str(i)) for i, (tenant, urgency, named) in enumerate(asked)]
    fair: FairSessions[int] = FairSessions()
    order: list[Wanted[int]] = []
    for one in fair.order(wanted):
        order.append(one)
        fair.served(one.tenant, 100, weights[one.tenant])
    assert sorted(w.session for w in order) == list(range(len(asked)))
    for tenant in "abc":
        own = [(-w.urgency, w.priority) for w in order if w.tenant == tenant]
        assert own == sorted(own)
    left, at = Counter(w.tenant for w in order), dict.fromkeys("abc", 0.0)
    for one in order:
        waiting = [t for t in "abc" if left[t]]
        assert at[one.tenant] <= min(at[t] for t in waiting) + 100
        at[one.tenant] += 100 / weights[one.tenant]
        left[one.tenant] -= 1


def test_a_tenant_that_had_its_turn_waits_for_the_other_in_the_next_round_too() -> None:
    fair: FairSessions[str] = FairSessions()
    both = [Wanted(t, t, 0, PriorityClass.STANDARD, 0.0, t) for t in "ab"]
    assert next(fair.order(both)).tenant == "a"
    fair.served("a", 100, 1)  # And the pool's bound is reached.
    assert next(fair.order(both)).tenant == "b"


@given(st.floats(0, 1e4), st.floats(0, 10), st.integers(0, 1 << 40), st.floats(0, 1e10))
def test_what_takes_longer_begins_earlier_within_bounds(
    wait_s: float, latency_s: float, size_bytes: int, speed: float
) -> None:
    for found in (doubt_s(wait_s), coming_up_s(latency_s, size_bytes, speed)):
        assert LEAD_S <= found <= HORIZON_S
    assert coming_up_s(latency_s, 2 * size_bytes, speed) >= coming_up_s(latency_s, size_bytes, speed)


async def test_a_session_comes_up_sooner_where_its_tier_is_slow() -> None:
    engine = await Engine().attach()
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(*range(1, 1 + BLOCKS), session="s")
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(
        read_bytes_per_second=BLOCKS * BLOCK_BYTES // 10, read_latency_microseconds=0
    )
    await engine.ask(wire.TouchSession(1, "s", "tool", 0, 50.0))
    life = engine.core.cache.life
    life.bring_up(engine.clock.now_s)
    (plan,) = life._expected.values()
    assert plan.lead_s == pytest.approx(LEAD_S + CARE * 5.0, rel=0.01), "their form below is half as long"
    engine.clock.now_s += 50.0 - plan.lead_s - 1.0
    life.bring_up(engine.clock.now_s)
    assert not engine.core.cache.mover.under_way
    engine.clock.now_s += 1.5
    life.bring_up(engine.clock.now_s)
    await steps_until(lambda: all(in_memory(engine, n) for n in range(1, 1 + BLOCKS)))
    await close(engine)


async def test_an_urgent_session_comes_up_at_once_and_again_before_it_is_back() -> None:
    engine = await Engine().attach()
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(*range(1, 1 + BLOCKS), session="s")
    await engine.push_down()
    await engine.ask(wire.TouchSession(1, "s", "tool", 90, 300.0))
    life = engine.core.cache.life
    for at_s in (0.0, 295.0):
        engine.clock.now_s += at_s
        life.bring_up(engine.clock.now_s)
        await steps_until(lambda: in_memory(engine, BLOCKS))
        await settled(engine)
        await engine.push_down()
    engine.clock.now_s += AGAIN_S
    life.bring_up(engine.clock.now_s)
    await steps_until(lambda: in_memory(engine, BLOCKS))
    await settled(engine)
    engine.clock.now_s += 60.0
    life.bring_up(engine.clock.now_s)
    assert not life._expected, "it did not come back"
    assert counted(engine) == {"wasted": 2 * BLOCKS}
    await close(engine)


async def test_prefetched_blocks_are_useful_late_or_wasted() -> None:
    engine = await Engine().attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    await engine.ask(wire.Prefetch(1, SCOPE, digest(1) + digest(2)))
    await steps_until(lambda: in_memory(engine, 2))
    await settled(engine)
    assert counted(engine) == {}
    await engine.release(await engine.acquire(1))
    await engine.release(await engine.acquire(1))
    assert counted(engine) == {"useful": 1}
    await engine.ask(wire.Prefetch(1, SCOPE, digest(1) + digest(2) + digest(3)))
    reading = asyncio.create_task(engine.acquire(1, 2, 3))
    await engine.release(await reading)
    assert counted(engine) == {"useful": 2, "late": 1}
    await engine.push_down()
    await engine.ask(wire.Prefetch(1, SCOPE, digest(1)))
    await steps_until(lambda: in_memory(engine, 1))
    await settled(engine)
    await engine.push_down()
    assert counted(engine) == {"useful": 2, "late": 1, "wasted": 1}
    assert len(engine.core.node.prefetches) == 0
    await close(engine)


async def played(prefetch: str, seed: int) -> tuple[int, int]:
    """Blocks that were in memory when their session came back from a tool, of so many."""
    policy = {"type": "LeafLRU", "highWatermarkPercent": 100, "lowWatermarkPercent": 99}
    engine = await Engine(prefetch={"type": prefetch}, eviction=policy).attach()
    dice, life, now_s = Random(seed), engine.core.cache.life, 0.0
    sessions = {f"s{i}": range(1000 * (i + 1), 1000 * (i + 1) + BLOCKS) for i in range(8)}
    back_s: dict[str, float] = {}
    found, asked, hinted = 0, 0, set[str]()
    for name, chain in sessions.items():
        await engine.ask(wire.OpenSession(1, name))
        await engine.store(*chain, session=name)
        back_s[name] = dice.uniform(0.0, 40.0)
    for second in range(400):
        now_s += 1.0
        await engine.store(100_000 + 10 * second)  # Others' blocks, which take the memory over every 16 s.
        life.bring_up(engine.clock.now_s)
        await settled(engine)
        engine.clock.now_s += 0.99
        if second % 50 == 0:
            await engine.attach()
        for name, chain in sessions.items():
            if now_s < back_s[name]:
                continue
            if name in hinted:
                found += sum(in_memory(engine, n) for n in chain)
                asked += BLOCKS
            hinted.add(name)
            await engine.release(await engine.acquire(*chain, session=name))
            wait_s = dice.lognormvariate(math.log(40.0), 0.7)
            back_s[name] = now_s + wait_s * dice.uniform(0.92, 1.08)  # What the engine says is not exact.
            await engine.ask(wire.TouchSession(1, name, "tool", 0, wait_s))
        life.bring_up(engine.clock.now_s)
        await settled(engine)
    await close(engine)
    assert len(sessions) * BLOCKS > SLOTS
    return found, asked


@pytest.mark.slow
async def test_prefetch_at_pause_has_nearly_all_that_an_oracle_would_gain() -> None:
    """An oracle has every session's blocks in memory when it is back."""
    found = without = asked = 0
    for seed in (1, 2, 3):
        more, count = await played("Urgency", seed)
        fewer, same = await played("None", seed)
        assert count == same
        found, without, asked = found + more, without + fewer, asked + count
    share = (found - without) / (asked - without)
    assert without < 0.6 * asked
    assert share >= 0.95, f"{found} of {asked} blocks, {without} without"
