"""Blocks that a reader wants are brought up in groups that share a move; none is left with a move that never ends."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.move import Move
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    dict_tier,
    digest,
    dram_tier,
    make_core,
    secret,
    store_chain,
)

pytestmark = pytest.mark.unit

PLACE = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES)
COUNT = 32


async def core_with_blocks_below(slots: int = 2 * COUNT) -> tuple[AgentParts, list[Entry]]:
    core = make_core([dram_tier(slots * BLOCK_BYTES), dict_tier("nvme", 2 * COUNT * BLOCK_BYTES, 1, 2)])
    for first in range(0, COUNT, 8):
        assert await store_chain(core, PLACE, range(first, first + 8), first - 1 if first else None) == 8
    while await core.cache.evictor.drain(core.node.tiers[0]):
        pass
    found = [core.node.index.find(SCOPE, digest(n)) for n in range(COUNT)]
    return core, [e for e in found if e is not None]


async def test_what_a_reader_wants_rises_in_groups_that_share_a_move() -> None:
    core, entries = await core_with_blocks_below()
    promoter = core.cache.promoter

    promoter.start_promotions([*entries, entries[0]])
    moves = {entry.move for entry in entries}
    assert None not in moves
    assert len(moves) == COUNT // 2
    promoter.start_promotions(entries)
    assert {entry.move for entry in entries} == moves, "what is on its way is left alone"
    await promoter.wait_together(entries, "a")

    assert all(promoter.promoted(entry) and entry.move is None for entry in entries)
    await core.close()


async def test_of_a_promoted_chain_the_end_may_leave_and_nothing_before_it() -> None:
    core, entries = await core_with_blocks_below()
    core.cache.promoter.start_promotions(entries)
    await core.cache.promoter.wait_together(entries, "a")
    dram, nvme = (core.node.contents(tier) for tier in core.node.tiers)

    assert [dram.is_queued(entry) for entry in entries] == [False] * (COUNT - 1) + [True]
    assert all(nvme.is_queued(entry) for entry in entries), "memory has them too"
    await core.close()


async def test_blocks_whose_rise_has_not_begun_are_let_go_at_the_end() -> None:
    core, entries = await core_with_blocks_below()

    core.cache.promoter.start_promotions(entries)
    moves = {entry.move for entry in entries}
    await core.cache.promoter.close()

    assert all(move is not None and move.done() and not move.result() for move in moves)
    assert {entry.move for entry in entries} == {None}
    await core.close()


async def test_blocks_behind_one_that_waits_for_room_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    core, entries = await core_with_blocks_below()
    place = core.cache.promoter._take_slots

    async def place_one(entries: Sequence[Entry], tier: Tier, moves: list[Move], is_wanted: Callable[[], bool]) -> int:
        return await place(entries[:1], tier, moves, is_wanted)

    monkeypatch.setattr(core.cache.promoter, "_take_slots", place_one)
    async with asyncio.timeout(10.0):
        acquired = await core.cache.reader.acquire(AcquireCall(PLACE, [digest(n) for n in range(COUNT)], 30.0, 5.0))

    assert len(acquired.reads) == COUNT
    assert {entry.move for entry in entries} == {None}
    await core.close()


async def test_blocks_whose_reader_has_left_take_no_room_from_others() -> None:
    core, entries = await core_with_blocks_below(slots=8)
    acquired = await core.cache.reader.acquire(AcquireCall(PLACE, [digest(n) for n in range(8)], 30.0, 5.0))
    core.cache.release(PLACE.owner, [read.lease.id for read in acquired.reads])

    core.cache.promoter.start_promotions(entries[8:])
    await asyncio.wait([entry.move for entry in entries[8:] if entry.move is not None])

    assert [entry for entry in entries if core.cache.promoter.promoted(entry)] == entries[:8]
    assert {entry.move for entry in entries} == {None}
    await core.close()
