"""Laws of erasing dropped records: what waits and for how long; nothing does once its scope has no block left."""

import asyncio
import errno
from array import array
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.volume import MemoryVolume

from kvstrata_agent.backends.base import SlotRef
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.segment_io import FULL_PAUSE_S, HOLD_S, plan_discards
from kvstrata_agent.backends.slot_table import Extent
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import BackendFailedError, TierFullError
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, content, fill, put, record
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

STRIDE_BYTES = 8192
SLOTS = 4

holdings = st.lists(
    st.tuples(
        st.sampled_from([ANNA, BOB]),
        st.integers(0, SLOTS),
        st.dictionaries(st.integers(0, SLOTS - 1), st.floats(0, 100)),
    ),
    max_size=6,
)


def extent(number: int, scope: ScopeId, live: int) -> Extent:
    stamps = array("Q", [1] * live + [0] * (SLOTS - live))
    return Extent(number, scope, "", STRIDE_BYTES, SLOTS * STRIDE_BYTES, stamps, live=live)


@given(holdings, st.floats(0, 100))
def test_what_is_due_is_old_or_of_a_scope_without_blocks(
    held: list[tuple[ScopeId, int, Mapping[int, float]]], before_s: float
) -> None:
    extents = [extent(i, scope, live) for i, (scope, live, _) in enumerate(held)]
    pending = {i: dropped for i, (_, _, dropped) in enumerate(held)}
    alive = {scope for scope, live, _ in held if live}

    planned = plan_discards(extents, pending, before_s)

    for i, (scope, live, dropped) in enumerate(held):
        may = {o for o, at_s in dropped.items() if at_s <= before_s or scope not in alive}
        if i in planned.extents:
            assert live == 0
            assert may == set(dropped)
        else:
            assert planned.offsets.get(i, frozenset()) == may
            assert live or may != set(dropped), "an empty extent with nothing to wait for goes"


def test_a_slot_that_is_used_again_soon_never_becomes_a_hole() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        kept, (old, _) = await put(store, 0), await put(store, 1)
        store.drop(old)
        await asyncio.sleep(HOLD_S - 1)
        assert volume.peek(*_header_of(store, old)) != bytes(16)
        new, _ = await put(store, 2)
        assert (new.extent, new.offset) == (old.extent, old.offset)
        await asyncio.sleep(2 * HOLD_S)
        assert volume.peek(*_header_of(store, new)) != bytes(16)
        assert volume.peek(*_header_of(store, kept[0])) != bytes(16)
        await store.close()

    run_virtually(scenario())


def test_a_dropped_record_is_a_hole_when_its_time_is_up() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        await put(store, 0)
        old, _ = await put(store, 1)
        store.drop(old)
        await asyncio.sleep(HOLD_S + 1.5)
        assert volume.peek(*_header_of(store, old)) == bytes(16)
        await store.close()

    run_virtually(scenario())


def test_the_last_block_of_a_scope_takes_all_of_its_bytes_along_at_once() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        await put(store, 0, BOB)
        slots = [(await put(store, n))[0] for n in range(1, 4)]
        segments = {str(store._state.segments[slot.extent].name) for slot in slots}
        for slot in slots:
            store.drop(slot)
        await asyncio.sleep(1.5)
        assert not segments & set(await volume.names())
        await store.close()

    run_virtually(scenario())


def test_a_full_tier_that_turns_over_makes_and_removes_no_files() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        slots = fill(store, ANNA)
        for number, slot in enumerate(slots):
            await store.write(slot, record(number, content(number), slot), content(number))
        before = {name for name in await volume.names() if name.startswith("seg-")}
        for turn in range(3):
            for slot in slots[: len(slots) // 2]:
                store.drop(slot)
            await asyncio.sleep(1)
            fresh = [store.reserve(ANNA, BLOCK_BYTES) for _ in range(len(slots) // 2)]
            for number, slot in enumerate(fresh):
                await store.write(slot, record(number, content(turn), slot), content(turn))
            slots = slots[len(slots) // 2 :] + fresh
        assert {name for name in await volume.names() if name.startswith("seg-")} == before
        await store.close()

    run_virtually(scenario())


def test_what_a_scope_left_goes_with_a_slot_that_finds_no_room_on_a_disk_that_was_full_once() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        bob, _ = await put(store, 1, BOB)
        volume.fail("create", errno.ENOSPC)
        with pytest.raises(BackendFailedError):
            await put(store, 2, ANNA)
        await asyncio.sleep(FULL_PAUSE_S)
        fill(store, ANNA)
        left = f"seg-{bob.extent:08x}-"
        store.drop(bob)

        with pytest.raises(TierFullError):
            store.reserve(ANNA, CAPACITY_BYTES // 4)
        await asyncio.sleep(1)

        assert not any(name.startswith(left) for name in await volume.names())
        assert store.notes(bob.extent) is None

    run_virtually(scenario())


def _header_of(store: RecordStore, slot: SlotRef) -> tuple[str, int, int]:
    return str(store._state.segments[slot.extent].name), slot.offset, 16
