"""A store right after a load that filled memory: whatever holds the slots then, the new blocks find room.

The only session of the node loads a prompt of at least as many blocks as memory has slots, and stores what continues it
while the last of its leases, moves and guards are still there. The tier below has room for everything.
"""

import asyncio
import errno
import mmap
import os
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from kvstrata_agent.cache.store import RESERVE_WAIT_S
from kvstrata_api import wire
from support.agent.doubles import BLOCK_BYTES
from support.agent.engine import SLOTS, Engine, close
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

NEW = 6
"""Blocks that a turn adds."""
BATCH = 4
HELD_S = RESERVE_WAIT_S / 2
"""Nothing holds a slot for longer after the load: a store waits twice as long."""


class Pressed:
    """The session, with every duration drawn."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._engine = Engine(cxl_slots=self._rng.choice([0, 0, 2, 4]))
        self._blocks = SLOTS + self._rng.choice([0, 0, 1, SLOTS // 2, 2 * SLOTS])
        self._ends: list[asyncio.Task[None]] = []

    async def play(self) -> None:
        try:
            await self._play(await self._engine.attach())
        finally:
            for end in self._ends:
                end.cancel()
            await asyncio.gather(*self._ends, return_exceptions=True)
            await close(self._engine)

    async def _play(self, engine: Engine) -> None:
        engine.core.node.clock = asyncio.get_running_loop().time
        await engine.ask(wire.OpenSession(6, "s", "", ""))
        for first in range(1, self._blocks + 1, BATCH):
            await engine.store(*range(first, min(first + BATCH, self._blocks + 1)), session="s")
        await engine.push_down()
        self._slow_down()

        await self._load()
        stored = await self._store()

        assert stored == NEW, f"{NEW - stored} of {NEW} blocks were refused"
        kept = [engine.core.node.index.find(*engine.key(n)) for n in range(1, self._blocks + NEW + 1)]
        assert all(kept), f"block {kept.index(None) + 1} was lost for them"

    def _slow_down(self) -> None:
        read, write = self._engine.low.read, self._engine.low.write
        read_s, write_s = self._rng.choice([0.0, 0.001, 0.02]), self._rng.choice([0.0, 0.001, 0.02])

        async def slow_read(*arguments: Any) -> None:
            await asyncio.sleep(self._rng.random() * read_s)
            await read(*arguments)

        async def slow_write(*arguments: Any) -> None:
            await asyncio.sleep(self._rng.random() * write_s)
            await write(*arguments)

        self._engine.low.read, self._engine.low.write = slow_read, slow_write  # type: ignore[assignment,method-assign]

    async def _load(self) -> None:
        """Batch by batch, like the client; perhaps a batch is asked for ahead that nobody waits for in the end."""
        rng, engine, done = self._rng, self._engine, 0
        while done < self._blocks:
            ahead = range(done + BATCH + 1, min(done + 3 * BATCH, self._blocks) + 1)
            if ahead and rng.random() < 0.3:
                left = await engine.acquire(*ahead, session="s", deadline_s=0.0)
                await engine.release(left)
            acquired = await engine.acquire(
                *range(done + 1, min(done + BATCH, self._blocks) + 1), session="s", deadline_s=5.0
            )
            done += len(acquired.blocks)
            is_last = done == self._blocks or (self._blocks == SLOTS and rng.random() < 0.5)
            self._later(partial(engine.release, acquired), rng.random() * HELD_S if is_last else 0.0)
            await asyncio.sleep(0.0 if is_last else 0.001)
        await engine.ask(wire.TouchSession(7, "s", "decoding", 100))
        self._later(partial(engine.ask, wire.TouchSession(8, "s", "idle")), rng.choice([0.0, rng.random() * HELD_S]))
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.1]))

    def _later(self, work: Callable[[], Coroutine[Any, Any, Any]], after_s: float) -> None:
        async def run() -> None:
            await asyncio.sleep(after_s)
            await work()

        self._ends.append(asyncio.create_task(run()))

    async def _store(self) -> int:
        """Blocks that were stored until the agent had no slot for one."""
        stored = 0
        while stored < NEW:
            first = self._blocks + stored + 1
            numbers = range(first, min(first + BATCH, self._blocks + NEW + 1))
            results = await self._engine.store(*numbers, session="s")
            if 1 not in results:
                break
            stored += results.count(1)
        return stored


# Ten times as many as a law of this level has examples, 1,000, in `make test`, and 20 in `make check`.
@pytest.mark.parametrize("seed", range(settings().max_examples))
def test_drawn_timings_find_room_for_what_continues_the_prompt(seed: int) -> None:
    for drawn in range(10 * seed, 10 * seed + (10 if settings().max_examples >= 100 else 2)):
        try:
            run_virtually(Pressed(drawn).play(), 60.0)
        except (AssertionError, TimeoutError) as e:
            pytest.fail(f"timing {drawn}: {e}")


async def test_blocks_below_the_one_that_is_read_go_down_without_it() -> None:
    engine = await Engine().attach()
    for first in range(1, SLOTS + 1, BATCH):
        await engine.store(*range(first, first + BATCH), session="s")
    last = await engine.acquire(SLOTS)

    reserved = await engine.ask_to_store(1000)

    assert len(reserved.slots) == 1, reserved.refusal
    assert all(engine.core.node.index.find(*engine.key(n)) for n in range(1, SLOTS + 1))
    await engine.release(last)
    await close(engine)


async def test_a_writer_that_is_cancelled_in_any_step_leaves_no_slot_behind() -> None:
    for steps in range(60):
        engine = await Engine().attach()
        for first in range(1, SLOTS + 1, BATCH):
            await engine.store(*range(first, first + BATCH), session="s")
        writing = asyncio.create_task(engine.store(SLOTS + 1, session="s"))
        for _ in range(steps):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        engine.core.node.end_owner(1)
        room = engine.core.cache.evictor
        while room._tasks:  # noqa: ASYNC110  Nothing rings when they have ended.
            await asyncio.sleep(0)
        await asyncio.sleep(0)

        for tier in engine.core.node.tiers:
            assert tier.backend.used_bytes == engine.core.node.contents(tier).blocks * BLOCK_BYTES, (
                f"cancelled after {steps} steps"
            )
        await close(engine)


async def test_a_store_goes_on_where_there_is_no_memory_for_the_way_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    engine = await Engine().attach()
    monkeypatch.setattr("kvstrata_agent.backends.scratch.scratch", refuse)
    for number in range(1, 2 * SLOTS):
        await engine.store(number)

    assert not engine.core.cache.mover.under_way
    await close(engine)
