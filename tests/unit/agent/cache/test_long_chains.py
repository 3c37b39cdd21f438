"""A chain that is longer than the entry tier comes up piece by piece, in whatever order its blocks arrive."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import settings

from support.agent.engine import SLOTS, Engine, close

pytestmark = pytest.mark.unit

BLOCKS = 3 * SLOTS - 4
QUICK = (0, 0, 1, 5, 30)
SLOW = (*QUICK, 300, 3_000)
"""Steps of the loop that a read takes."""


async def stored_below(rng: random.Random, steps: tuple[int, ...] = QUICK) -> Engine:
    """A chain in the lower tier, whose reads take a random while."""
    engine = await Engine().attach()
    for first in range(1, BLOCKS + 1, 4):
        await engine.store(*range(first, first + 4), session="s")
    await engine.push_down()
    read = engine.low.read

    async def slowly(*arguments: Any) -> None:
        for _ in range(rng.choice(steps)):
            await asyncio.sleep(0)
        await read(*arguments)

    engine.low.read = slowly  # type: ignore[assignment,method-assign]
    return engine


@pytest.mark.parametrize("seed", range(settings().max_examples // 6))
async def test_every_batch_of_a_long_chain_brings_at_least_a_block(seed: int) -> None:
    """Blocks behind the first one may take all room before it; then they must not keep it out."""
    engine = await stored_below(random.Random(seed))
    done = 0
    while done < BLOCKS:
        acquired = await engine.acquire(*range(done + 1, BLOCKS + 1), session="s")
        assert acquired.blocks, f"nothing came after {done} of {BLOCKS} blocks"
        await engine.release(acquired)
        done += len(acquired.blocks)
    await close(engine)


@pytest.mark.parametrize("seed", range(settings().max_examples // 4))
async def test_a_block_waits_for_those_on_their_way_that_hold_the_room_before_them(seed: int) -> None:
    """Somebody wanted the end of the chain and left; nothing before it can leave, and it not before it is there."""
    engine = await stored_below(random.Random(seed), SLOW)
    end = await engine.acquire(*range(SLOTS // 2 + 1, BLOCKS + 1), session="s", deadline_s=0.0)
    await engine.release(end)

    acquired = await engine.acquire(*range(1, SLOTS // 2 + 1), session="s")

    assert acquired.blocks
    await close(engine)
