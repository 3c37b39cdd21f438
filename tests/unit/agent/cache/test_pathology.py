"""Workloads for which a cache is of no use, each found by its name, and alike ones that are left alone."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import pytest

from kvstrata_agent.blocks.signs import HALF_S
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, Fate
from kvstrata_agent.kube.report import _effective
from kvstrata_agent.policy import pathology
from kvstrata_agent.policy.pathology import EARLY_S, RULES, Pathology, Sign, findings
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
    before = signs._now[Sign.READ_UP]

    sources = set()
    for number in roots(2, BLOCKS):
        acquired = await engine.acquire(number, deadline_s=5.0)
        sources |= {block.source for block in acquired.blocks}
        await engine.release(acquired)

    assert sources == {"dram", "cxl"}
    assert signs._now[Sign.READ_UP] == before, "nothing came up"
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
        if is_read:
            engine.clock.now_s += 3.0
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
        await engine.core.cache.evictor.evict(tier, EvictionRequest(1 << 40, "room", fate=Fate.DROP))
    assert Pathology.POLLUTED in found(engine)
    assert 0 < await written(60_002) <= 4, "one in 16 is tried"
    assert "written no further than memory" in _effective(engine.core.node.signs.found).message

    engine.clock.now_s += 3 * HALF_S
    found(engine)
    assert await written(70_002) == 32
    await close(engine)


def test_who_has_little_part_in_it_is_no_polluter() -> None:
    polluted = findings({Sign.GONE: 100_000, Sign.UNREAD: 95_000})
    gone, unread = {"a": 94_000, "b": 5000, "c": 1000}, {"a": 93_000, "b": 1000, "c": 1000}

    assert pathology.polluters(polluted, gone, unread) == {"a"}
    assert pathology.polluters((), gone, unread) == frozenset()


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
async def test_what_is_read_just_after_it_left_memory_lies_one_tier_too_low(engine: Engine, step_s: float) -> None:
    await store(engine, roots(2, BLOCKS))
    for _ in range(ROUNDS):
        await read(engine, roots(2, BLOCKS), step_s)
        engine.core.node.signs._since_s = engine.clock.now_s  # However long it takes.

    assert (Pathology.TOO_LOW in found(engine)) == (step_s * BLOCKS < EARLY_S)


def test_a_rule_holds_from_its_share_on_and_not_by_few_blocks() -> None:
    for rule in pathology.RULES:
        cases = round(rule.share_min * rule.blocks_min + 0.5)
        assert rule in [f.rule for f in findings({rule.of: rule.blocks_min, rule.cases: cases})]
        assert findings({rule.of: rule.blocks_min - 1, rule.cases: rule.blocks_min - 1}) == ()
        less = int(rule.share_min * rule.blocks_min * 0.9)
        assert rule not in [f.rule for f in findings({rule.of: rule.blocks_min, rule.cases: less})]


def test_what_is_said_does_not_change_with_every_block() -> None:
    (one,) = findings({Sign.GONE: 10_000, Sign.UNREAD: 9_100})
    (other,) = findings({Sign.GONE: 10_000, Sign.UNREAD: 9_900})

    assert one.said == other.said
    assert one.said.startswith("90 % of the blocks that made room were never read (meanwhile ")
