"""A path that is congested is told of, with an estimate; every other reason for less is a plain miss."""

from collections.abc import AsyncIterator

import pytest

from kvstrata_agent.cache import store as writer
from kvstrata_agent.movement.path import PathLimiter, Priority, QueuedMove
from kvstrata_api import wire
from kvstrata_api.models.poolnode import TierProbe
from support.agent.doubles import BLOCK_BYTES, SCOPE, digest
from support.agent.engine import SLOTS, Engine, close, steps_until

pytestmark = pytest.mark.unit

RATE = 1 << 30
FLOOD = QueuedMove(Priority.ARCHIVE, "z", 100, 8 * RATE)
"""Eight seconds of the path."""


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """Blocks 1 to 3 lie below memory; computing all of them takes 48 ms, and bringing them up some microseconds."""
    made = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 1000}).attach()
    await made.store(1, 2, 3)
    await made.push_down()
    made.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=RATE, read_latency_microseconds=1)
    yield made
    await close(made)


def path(engine: Engine, source: str, target: str) -> PathLimiter:
    gate = engine.core.cache.mover.scheduler.paths.between(source, target).limiter
    gate._width = 1
    return gate


def told(engine: Engine, verb: str) -> float:
    labels = {"pool": "pool", "node": "node", "verb": verb}
    count: float = engine.core.node.counters._instruments.counter("kvstrata_busy_answers_total", **labels)._value.get()
    return count


async def test_blocks_behind_a_congested_path_are_missing_with_an_estimate_and_there_when_it_is_free(
    engine: Engine,
) -> None:
    async with path(engine, "nvme", "dram").enter(FLOOD):
        answer = await engine.acquire(1, 2, 3)
    assert (answer.blocks, answer.busy_s) == ((), 8.0)
    assert told(engine, "acquire") == 1

    answer = await engine.acquire(1, 2, 3)
    assert (len(answer.blocks), answer.busy_s) == (3, 0.0)
    assert told(engine, "acquire") == 1


async def test_a_prefix_that_ends_before_the_congested_path_says_so_too(engine: Engine) -> None:
    await engine.release(await engine.acquire(1))
    async with path(engine, "nvme", "dram").enter(FLOOD):
        answer = await engine.acquire(1, 2, 3, part_bytes=BLOCK_BYTES)
    assert (len(answer.blocks), answer.busy_s) == (1, 8.0)


async def test_a_full_queue_is_told_of_whatever_the_policy(engine: Engine) -> None:
    gate = path(engine, "nvme", "dram")
    gate._waiting_max = 0
    engine.core.node.tiers[1].probe = None
    async with gate.enter(FLOOD):
        answer = await engine.acquire(1, 2, 3)
    assert (answer.blocks, answer.busy_s) == ((), 1.0)


async def test_an_absent_block_is_no_business_of_a_congested_path(engine: Engine) -> None:
    async with path(engine, "nvme", "dram").enter(FLOOD):
        assert (await engine.acquire(7)).busy_s == 0.0


async def test_what_costs_more_than_computing_even_alone_is_a_plain_miss(engine: Engine) -> None:
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=1000, read_latency_microseconds=50_000)
    async with path(engine, "nvme", "dram").enter(FLOOD):
        answer = await engine.acquire(1, 2, 3)
    assert (answer.blocks, answer.busy_s) == ((), 0.0)


async def test_a_writer_hears_that_blocks_wait_to_leave_and_nothing_when_they_are_held(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RESERVE_WAIT_S", 0.5)
    await engine.store(*range(10, 10 + SLOTS))
    gate = path(engine, "dram", "nvme")
    async with gate.enter(FLOOD):
        answer = await engine.ask(wire.Reserve(2, SCOPE, b"", digest(100)))
        assert gate.waiting > 0
        assert (answer.slots, answer.busy_s) == ((), 1.0)
    assert told(engine, "reserve") == 1

    await steps_until(lambda: gate.waiting == 0)
    held = await engine.ask(wire.Reserve(2, SCOPE, b"", b"".join(digest(n) for n in range(100, 140))))
    assert 0 < len(held.slots) < 40
    assert held.busy_s == 0.0
