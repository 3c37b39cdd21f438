"""Priority classes: what a session's blocks outlive, for how long, and at whose expense."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.sessions import Session
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_agent.policy.priority import NAMES, SPREAD, PriorityClass, class_of, felt_use_s
from kvstrata_agent.policy.quota import Bound, Rules
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    Clock,
    DeclaredTenants,
    dict_tier,
    digest,
    dram_tier,
    make_core,
    secret,
    store_chain,
)
from support.agent.engine import SLOTS, Engine, close

pytestmark = pytest.mark.unit

GUARANTEED = 6


def played(play: Callable[[Engine], Coroutine[Any, Any, None]], eviction: str) -> None:
    async def run() -> None:
        policy = {"type": eviction, "highWatermarkPercent": 100, "lowWatermarkPercent": 99}
        engine = await Engine(eviction=policy).attach()
        try:
            await play(engine)
        finally:
            await close(engine)

    asyncio.run(run())


async def stored(engine: Engine, first: int, priority: str, blocks: int = 1) -> None:
    """A root of its own and what continues it, by a session of that priority."""
    await engine.ask(wire.OpenSession(6, f"{priority} {first}", "", priority))
    await engine.store(*range(first, first + blocks), session=f"{priority} {first}")


def in_memory(engine: Engine, number: int) -> bool:
    entry = engine.core.node.index.find(*engine.key(number))
    return entry is not None and entry.residence(engine.core.node.tiers[0]) is not None


async def left_of(engine: Engine, earlier: str, later: str) -> list[bool]:
    """Which of two chains, 101 and 201, of these classes is in memory once one had to leave."""
    for first, priority in ((101, earlier), (201, later)):
        await stored(engine, first, priority, 4)
        engine.clock.now_s += 10.0
    for first in (301, 401, 501):
        await stored(engine, first, "", 4)
    return [in_memory(engine, n) for n in (101, 201)]


@given(st.floats(0.001, 1e6), st.floats(0, 1e6), st.sampled_from(PriorityClass), st.sampled_from(PriorityClass))
def test_nothing_dead_outlives_what_was_idle_for_a_spread_less(
    used_s: float, idle_s: float, one: PriorityClass, other: PriorityClass
) -> None:
    now_s = used_s + idle_s
    less_used_s = now_s - 0.99 * idle_s / SPREAD
    assert felt_use_s(used_s, now_s, one) <= felt_use_s(less_used_s, now_s, other)
    assert felt_use_s(0.0, now_s, one) < felt_use_s(used_s, now_s, other) + idle_s * SPREAD


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.sampled_from(["", *NAMES])), min_size=2, max_size=SLOTS))
def test_by_last_use_leaves_go_in_the_order_of_the_idle_time_by_their_factors(steps: list[tuple[float, str]]) -> None:
    async def play(engine: Engine) -> None:
        for i, (gap_s, priority) in enumerate(steps):
            engine.clock.now_s += gap_s
            await stored(engine, 100 * i + 100, priority)
        engine.clock.now_s += 1.0
        node, now_s = engine.core.node, engine.clock.now_s
        candidates, order = TierCandidates(node.index, node.tiers[0], EvictionRequest(1, "room"), now_s), []
        while (entry := candidates.pop()) is not None:
            order.append((now_s - entry.used_at_s, entry.priority))
        assert len(order) == len(steps)
        felt = [idle_s / priority.factor for idle_s, priority in order]
        assert felt == sorted(felt, reverse=True)
        assert all(later <= SPREAD * first + 1e-6 for i, (first, _) in enumerate(order) for later, _ in order[i:])

    played(play, "LeafLRU")


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
def test_a_higher_class_outlives_what_was_used_a_little_later_and_not_for_ever(eviction: str) -> None:
    async def play(engine: Engine) -> None:
        assert await left_of(engine, "urgent", "background") == [True, False]
        for i in range(4 * int(SPREAD)):
            engine.clock.now_s += 320.0
            await engine.attach()
            await stored(engine, 1000 + 10 * i, "background", 4)
        assert not in_memory(engine, 101), "a dead block of the highest class holds its place for ever"

    played(play, eviction)


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
def test_without_classes_the_earlier_one_leaves(eviction: str) -> None:
    async def play(engine: Engine) -> None:
        assert await left_of(engine, "", "") == [False, True]

    played(play, eviction)


def test_a_block_is_of_the_class_of_the_session_that_used_it_last() -> None:
    async def play(engine: Engine) -> None:
        node = engine.core.node
        await stored(engine, 1, "urgent", 2)
        entry = node.index.find(*engine.key(2))
        assert entry is not None
        for priority, expected in (("background", PriorityClass.BACKGROUND), ("no class", PriorityClass.STANDARD)):
            await engine.ask(wire.OpenSession(6, priority, "", priority))
            await engine.release(await engine.acquire(1, 2, session=priority))
            assert entry.priority is expected
        await engine.ask(wire.Touch(9, SCOPE, digest(1) + digest(2), "urgent 1"))
        await engine.release(await engine.acquire(1, 2))
        assert entry.priority is PriorityClass.URGENT, "a use without a session leaves it as it is"
        explained = json.loads((await engine.ask(wire.Explain(9, SCOPE, digest(2)))).json)["expected_reuse"]
        assert (explained["priority_class"], explained["factor"]) == ("urgent", 4.0)
        explained = json.loads((await engine.ask(wire.Explain(9, session="no class"))).json)
        assert (explained["priority"], explained["priority_class"]) == ("no class", "standard")
        node.index._in_use_max = 0
        await engine.store(3)
        assert node.index.pack(engine.clock.now_s + 1.0) > 0
        again = [node.index.find(*engine.key(n)) for n in (1, 2)]
        assert all(e is not None and e.priority is PriorityClass.URGENT for e in again), "a row forgets the class"

    played(play, "ReuseAware")


def test_a_fork_has_its_parents_class_unless_it_names_one() -> None:
    async def play(engine: Engine) -> None:
        await stored(engine, 1, "urgent", 2)
        await engine.ask(wire.OpenSession(6, "fork", "urgent 1"))
        await engine.ask(wire.OpenSession(6, "draft", "urgent 1", "background"))
        find = engine.core.node.sessions.find
        found = [find("a", name) for name in ("fork", "draft")]
        assert [class_of(s.priority) for s in found if s] == [PriorityClass.URGENT, PriorityClass.BACKGROUND]

    played(play, "ReuseAware")


def shared() -> AgentParts:
    return make_core([dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)], Clock())


async def ended(core: AgentParts) -> None:
    await core.close()
    for tier in core.node.tiers:
        await tier.backend.close()


async def shares(steps: list[tuple[str, str]]) -> list[tuple[int, ...]]:
    """Blocks of memory that three tenants hold after each of these writes, by tenant and class."""
    core, found = shared(), []
    bound = Bound(None, GUARANTEED * BLOCK_BYTES)
    core.cache.tenancy.follow(DeclaredTenants(a=Rules(bounds={"dram": bound}), b=Rules(weight=300), c=Rules()))
    try:
        for i, (tenant, priority) in enumerate(steps):
            core.node.clock.now_s += 1.0  # type: ignore[attr-defined]
            scope = ScopeId(f"tenant/{tenant}/uid-{tenant}/v1")
            session = Session(tenant, f"s{i}", priority=priority)
            at = RequestContext(1, tenant, secret(scope), LAYOUT_ID, BLOCK_BYTES, session)
            await store_chain(core, at, [10 * i + 10, 10 * i + 11])
            held = core.node.tiers[0].tenant_bytes
            found.append(tuple(held.get(t, 0) // BLOCK_BYTES for t in "abc"))
    finally:
        await ended(core)
    return found


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(NAMES)), min_size=8, max_size=24))
def test_whatever_classes_tenants_name_each_holds_what_it_would_without(steps: list[tuple[str, str]]) -> None:
    named = asyncio.run(shares(steps))
    assert named == asyncio.run(shares([(tenant, "") for tenant, _ in steps]))
    most = 0
    for a, _, _ in named:
        most = max(most, min(a, GUARANTEED))
        assert a >= most, "a tenant fell below its guarantee"


async def test_a_flood_of_urgent_blocks_leaves_another_tenants_guarantee() -> None:
    steps = [("a", "background")] * 3 + [("b", "urgent")] * 20
    assert [held[0] for held in await shares(steps)][2:] == [GUARANTEED] * 21


def test_an_unknown_priority_is_a_standard_one() -> None:
    assert [class_of(name) for name in ("", "Urgent", "gold")] == [PriorityClass.STANDARD] * 3
    assert [class_of(name) for name in NAMES] == list(PriorityClass)
