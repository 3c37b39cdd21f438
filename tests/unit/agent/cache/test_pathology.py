"""Workloads for which a cache is of no use, each found by its name, and alike ones that are left alone."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from math import inf

import pytest

from kvstrata_agent.blocks import signs
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, Fate
from kvstrata_agent.kube.report import _effective
from kvstrata_agent.policy import pathology
from kvstrata_agent.policy.pathology import EARLY_S, HALF_S, RULES, TRIED_EVERY, Pathology, Recent, Sign, findings
from kvstrata_api import wire
from kvstrata_api.models.poolnode import TierProbe
from support.agent.doubles import SCOPE, digest
from support.agent.engine import SLOTS, Engine, close, steps_until

pytestmark = pytest.mark.unit

BLOCKS = 2 * SLOTS
ROUNDS = 2
PART = 16
"""Rules are tried with so many times fewer blocks, because a bare few already show what they count."""
FULL = {"type": "LeafLRU", "highWatermarkPercent": 100, "lowWatermarkPercent": 99}
FETCH = {"type": "AlwaysFetch"}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathology, "RULES", tuple(replace(r, blocks_min=r.blocks_min // PART) for r in RULES))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = await Engine(eviction=FULL, recompute=FETCH).attach()
    yield made
    await close(made)


def roots(first: int, count: int) -> range:
    """Numbers of blocks none of which continues another."""
    return range(first, first + 2 * count, 2)


async def store(engine: Engine, numbers: Iterable[int]) -> None:
    for number in numbers:
        await engine.store(number)


async def read(engine: Engine, numbers: Iterable[int], step_s: float) -> None:
    for number in numbers:
        engine.clock.now_s += step_s
        acquired = await engine.acquire(number, lease_s=1.0, deadline_s=5.0)
        await engine.release(acquired)


async def settle(engine: Engine) -> None:
    """Let copies start, and end."""
    for _ in range(4):
        await asyncio.sleep(0)
    await steps_until(lambda: not engine.core.cache.mover.under_way)


def found(engine: Engine) -> set[Pathology]:
    return {finding.rule.pathology for finding in engine.core.node.signs.judge()}


async def test_reads_that_push_each_other_out_are_thrashing(engine: Engine) -> None:
    await store(engine, roots(2, BLOCKS))
    for _ in range(ROUNDS):
        await read(engine, roots(2, BLOCKS), 0.3)

    assert Pathology.THRASHING in found(engine)
    condition = _effective(engine.core.node.signs.found)
    assert (condition.status, condition.reason) == ("False", "Thrashing")
    assert "left memory before another use" in condition.message


async def test_reads_of_what_memory_holds_are_not(engine: Engine) -> None:
    await store(engine, roots(2, BLOCKS))
    for _ in range(20):
        await read(engine, roots(2, SLOTS // 2), 0.3)

    assert found(engine) == set()
    assert _effective(engine.core.node.signs.found).status == "True"


async def test_while_memory_thrashes_what_engines_map_is_read_where_it_lies() -> None:
    engine = await Engine(cxl_slots=2 * BLOCKS, eviction=FULL, recompute=FETCH).attach()
    await store(engine, roots(2, BLOCKS))
    for _ in range(ROUNDS):
        await read(engine, roots(2, BLOCKS), 0.3)
    assert Pathology.THRASHING in found(engine)
    signs, dram = engine.core.node.signs, engine.core.node.tiers[0]
    before = signs._recent.counts[Sign.READ_UP]

    sources = set()
    for number in roots(2, BLOCKS):
        acquired = await engine.acquire(number, deadline_s=5.0)
        sources |= {block.source for block in acquired.blocks}
        await engine.release(acquired)

    assert sources == {"dram", "cxl"}
    assert signs._recent.counts[Sign.READ_UP] == before, "nothing came up"
    assert engine.core.node.contents(dram).blocks <= SLOTS
    engine.clock.now_s += 3 * HALF_S
    assert found(engine) == set(), "it is tried again"
    await close(engine)


async def test_prefetches_that_nobody_reads_end_and_are_tried_again(engine: Engine) -> None:
    await store(engine, roots(2, BLOCKS))

    async def prefetch(number: int) -> int:
        engine.clock.now_s += 0.1
        count: int = (await engine.ask(wire.Prefetch(4, SCOPE, digest(number)))).count
        await settle(engine)
        return count

    for _ in range(ROUNDS):
        for number in roots(2, BLOCKS):
            await prefetch(number)
    assert Pathology.THRASHING in found(engine)
    assert [await prefetch(number) for number in roots(2, BLOCKS)] == [0] * BLOCKS

    engine.clock.now_s += 3 * HALF_S
    found(engine)
    assert sum([await prefetch(number) for number in roots(2, BLOCKS)]) > 0


@pytest.mark.parametrize(("is_read", "expected"), [(False, {Pathology.POLLUTED}), (True, set())])
async def test_what_nobody_ever_reads_is_pollution(engine: Engine, *, is_read: bool, expected: set[Pathology]) -> None:
    tier = engine.core.node.tiers[0]
    for first in range(2, 10 * SLOTS, 2 * SLOTS):
        await store(engine, roots(first, SLOTS))
        engine.clock.now_s += 3.0
        if is_read:
            await read(engine, roots(first, SLOTS), 0.1)
        await engine.core.cache.evictor.evict(tier, EvictionRequest(1 << 40, "room", fate=Fate.DROP))
    assert found(engine) & {Pathology.POLLUTED} == expected


async def test_who_pollutes_writes_little_below_memory_until_that_ends() -> None:
    engine = await Engine(eviction=FULL, recompute=FETCH, admission={"type": "Auto"}).attach()
    tier = engine.core.node.tiers[0]

    async def written(first: int) -> int:
        """Of 32 new blocks that make room in memory, how many lie in flash afterwards."""
        await store(engine, roots(first, 32))
        await engine.core.cache.evictor.evict(tier, EvictionRequest(1 << 40, "room"))
        found = [engine.core.node.index.find(*engine.key(n)) for n in roots(first, 32)]
        return sum(1 for e in found if e is not None and e.residences)

    assert await written(50_002) == 32
    for first in range(2, 10 * SLOTS, 2 * SLOTS):
        await store(engine, roots(first, SLOTS))
        engine.clock.now_s += 3.0
        await engine.core.cache.evictor.evict(tier, EvictionRequest(1 << 40, "room", fate=Fate.DROP))
    assert Pathology.POLLUTED in found(engine)
    assert 0 < await written(60_002) <= 4, "one in 16 is tried"
    assert "written no further than memory" in _effective(engine.core.node.signs.found).message

    engine.clock.now_s += 3 * HALF_S
    found(engine)
    assert await written(70_002) == 32
    await close(engine)


async def test_reads_count_when_they_happen_and_not_when_their_block_leaves(engine: Engine) -> None:
    """The first to leave a tier are those that nobody reads; a third of all blocks are read here."""
    tier = engine.core.node.tiers[0]
    for first in range(2, 40 * SLOTS, 2 * SLOTS):
        await store(engine, roots(first, SLOTS))
        engine.clock.now_s += 3.0
        kept = roots(first, SLOTS // 3)
        await read(engine, kept, 0.0)
        await read(engine, kept, 0.0)
        for number in roots(first, SLOTS):
            entry = engine.core.node.index.find(*engine.key(number))
            assert entry is not None
            if number not in kept:
                request = EvictionRequest(
                    1, "room", fate=Fate.DROP, extents=frozenset({entry.residences[0].slot.extent})
                )
                await engine.core.cache.evictor.evict(tier, request)
        await engine.push_down()
    counts = engine.core.node.signs._recent.counts
    assert counts[Sign.UNREAD] > 0
    assert counts[Sign.SETTLED] - counts[Sign.UNREAD] == 20 * (SLOTS // 3), "a second read counts no more"
    assert found(engine) & {Pathology.POLLUTED} == set()


@pytest.mark.parametrize(("stays_s", "is_declined"), [(1.0, False), (3.0, True)])
async def test_what_had_no_chance_to_be_read_is_no_pollution(stays_s: float, *, is_declined: bool) -> None:
    """Neither what has left before a read would count as one, nor what was not let into the tier it would lie in."""
    engine = await Engine(eviction=FULL, recompute=FETCH, admission={"type": "Auto"}).attach()
    node = engine.core.node
    node.signs.polluters = frozenset({"a"} if is_declined else ())
    fate = Fate.DEMOTE_OR_DROP if is_declined else Fate.DROP
    for first in range(2, 10 * SLOTS, 2 * SLOTS):
        await store(engine, roots(first, SLOTS))
        engine.clock.now_s += stays_s
        await engine.core.cache.evictor.evict(node.tiers[0], EvictionRequest(1 << 40, "room", fate=fate))
    assert node.index.in_use <= SLOTS
    assert found(engine) == set()
    assert node.signs._recent.counts[Sign.SETTLED] == 0
    await close(engine)


@pytest.mark.parametrize(("tried", "written"), [((), 0), ((1,), 1), ((9,), 9), ((12,), 12)])
async def test_what_is_written_of_a_polluter_is_written_with_all_that_comes_before_it(
    tried: tuple[int, ...], written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan settles it: what stayed behind as a parent of what was written would be looked at by every later one."""
    engine = await Engine(eviction=FULL, recompute=FETCH, admission={"type": "Auto"}).attach()
    node = engine.core.node
    await engine.store(*range(1, 13))
    monkeypatch.setattr(node.signs, "polluters", frozenset({"a"}))
    chosen = {digest(number) for number in tried}
    monkeypatch.setattr("kvstrata_agent.blocks.returns.is_tried", lambda entry: entry.digest in chosen)

    await engine.core.cache.evictor.evict(node.tiers[0], EvictionRequest(1 << 40, "room"))
    await settle(engine)

    assert node.contents(node.tiers[0]).blocks == 0
    here = [node.index.find(*engine.key(number)) is not None for number in range(1, 13)]
    assert here == [number <= written for number in range(1, 13)]
    await close(engine)


async def test_one_publication_in_so_many_is_tried_as_a_whole() -> None:
    engine = await Engine(eviction=FULL, recompute=FETCH).attach()
    tried = list[bool]()
    for first in range(2, 3 * 400, 3):
        await engine.store(first, first + 1)
        both = [engine.core.node.index.find(*engine.key(n)) for n in (first, first + 1)]
        alike = {signs.is_tried(e) for e in both if e is not None}
        assert len(alike) == 1
        tried += alike
    assert len(tried) / TRIED_EVERY / 2 < sum(tried) < len(tried) / TRIED_EVERY * 2
    await close(engine)


def test_counts_go_after_one_to_two_halves() -> None:
    recent: Recent[str] = Recent(0.0)
    recent.counts["a"] += 1
    assert recent.judged(HALF_S) == {"a": 1}
    recent.counts["a"] += 2
    assert recent.judged(2 * HALF_S - 1.0) == {"a": 3}
    assert recent.judged(2 * HALF_S) == {"a": 2}
    assert recent.judged(3 * HALF_S) == {}
    recent.counts["a"] += 1
    assert recent.judged(6 * HALF_S) == {}, "long ago"


def test_who_has_little_part_in_it_is_no_polluter() -> None:
    polluted = findings({Sign.SETTLED: 100_000, Sign.UNREAD: 95_000})
    settled, unread = {"a": 94_000, "b": 5000, "c": 1000}, {"a": 93_000, "b": 1000, "c": 1000}

    assert pathology.polluters(polluted, settled, unread) == {"a"}
    assert pathology.polluters((), settled, unread) == frozenset()


@pytest.mark.parametrize("policy", ["CostModel", "AlwaysFetch"])
async def test_blocks_that_are_here_and_computed_all_the_same_are_said(policy: str) -> None:
    recompute = {"type": policy, "prefillTokensPerSecond": 100_000_000}
    engine = await Engine(eviction=FULL, recompute=recompute).attach()
    await store(engine, roots(2, BLOCKS))
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=1000, read_latency_microseconds=50_000)
    for _ in range(ROUNDS):
        await read(engine, roots(2, BLOCKS), 0.1)

    assert (Pathology.RECOMPUTING in found(engine)) == (policy == "CostModel")
    await close(engine)


@pytest.mark.parametrize("step_s", [0.3, 2.0 * EARLY_S / SLOTS])
async def test_what_is_read_just_after_it_left_memory_lies_one_tier_too_low(
    engine: Engine, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathology, "HALF_S", inf)  # However long it takes.
    await store(engine, roots(2, BLOCKS))
    for _ in range(ROUNDS):
        await read(engine, roots(2, BLOCKS), step_s)

    assert (Pathology.TOO_LOW in found(engine)) == (step_s * BLOCKS < EARLY_S)


def test_a_rule_holds_from_its_share_on_and_not_by_few_blocks() -> None:
    for rule in pathology.RULES:
        cases = round(rule.share_min * rule.blocks_min + 0.5)
        assert rule in [f.rule for f in findings({rule.of: rule.blocks_min, rule.cases: cases})]
        assert findings({rule.of: rule.blocks_min - 1, rule.cases: rule.blocks_min - 1}) == ()
        less = int(rule.share_min * rule.blocks_min * 0.9)
        assert rule not in [f.rule for f in findings({rule.of: rule.blocks_min, rule.cases: less})]


def test_what_is_said_does_not_change_with_every_block() -> None:
    (one,) = findings({Sign.SETTLED: 10_000, Sign.UNREAD: 9_100})
    (other,) = findings({Sign.SETTLED: 10_000, Sign.UNREAD: 9_900})

    assert one.said == other.said
    assert one.said.startswith("90 % of the new blocks left before anybody read them (meanwhile ")
