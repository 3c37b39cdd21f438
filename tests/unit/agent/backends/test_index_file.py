"""Laws of the index: what is believed, what is not, and what a start finds with and without it."""

import asyncio
import errno
import itertools
import os
import random
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.volume import MemoryFile, MemoryVolume

from kvstrata_agent.backends.base import IDENTITY, Record, SlotRef, identity_of
from kvstrata_agent.backends.file.index_file import INDEX_FILE, IndexFile
from kvstrata_agent.backends.file.index_format import (
    KINDS_MAX,
    Body,
    Kinds,
    Listed,
    SegmentName,
    body_bytes_max,
    body_head,
    pack_map,
    seal,
    sealed_bytes,
    unpack_body,
    unpack_entries,
    unpack_map,
)
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.segment import SlotNotes, Traits
from kvstrata_api.blocks import BlockKey, LayoutId
from kvstrata_api.errors import TierFullError
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, content, get, put
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

SECRET = bytes(range(32))
ONE = Record(BlockKey(ANNA, b"k" * 20), b"p" * 20, LayoutId(b"l" * 16), "raw", 4096, 4000, b"c" * 16, 9)
u64 = st.integers(0, (1 << 64) - 1)
in_one_scope = st.builds(
    Record,
    key=st.binary(min_size=20, max_size=20).map(lambda digest: BlockKey(ANNA, digest)),
    parent=st.one_of(st.just(b""), st.binary(min_size=20, max_size=20)),
    layout_id=st.binary(min_size=16, max_size=16).map(LayoutId),
    codec=st.sampled_from(["raw", "lossless", "c" * 32]),
    raw_bytes=u64,
    stored_bytes=st.integers(0, (1 << 32) - 1),
    checksum=st.binary(min_size=16, max_size=16),
    epoch=u64,
)


def packed(body: Body) -> memoryview:
    head = body_head(body)
    whole = memoryview(bytearray(head + b"".join(s.entries for s in body.listed) + bytes(16)))
    assert len(whole) == sealed_bytes(head)
    seal(whole, SECRET)
    return whole


def body_of(found: list[Record | None]) -> Body:
    """Index of one segment with a slot for each record."""
    kinds, notes = Kinds(), SlotNotes(len(found))
    traits = Traits(kinds)
    for at, record in enumerate(found):
        assert record is None or notes.set(at, record, traits)
    entries = notes.entries(range(1, len(found) + 1), traits)
    return Body(3, 6, tuple(kinds.known), (Listed(SegmentName(5, 8192, len(found)), ANNA, entries),))


@given(st.lists(st.none() | in_one_scope, max_size=6))
def test_what_was_listed_is_found(found: list[Record | None]) -> None:
    whole = packed(body_of(found))
    body = unpack_body(whole, SECRET)

    assert body is not None
    assert (body.generation, body.next_segment) == (3, 6)
    seen = list(unpack_entries(body.listed[0], body.kinds).pairs())
    assert seen == [(SlotRef(5, n * 8192, 8192, n + 1), r) for n, r in enumerate(found) if r is not None]
    assert len(whole) <= body_bytes_max(1, len(found))


def test_every_flipped_bit_of_an_index_is_noticed() -> None:
    whole = packed(body_of([ONE, None, ONE]))
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        assert unpack_body(whole, SECRET) is None, bit
        whole[bit // 8] ^= 1 << bit % 8
    assert unpack_body(whole, SECRET) is not None
    assert unpack_body(whole, bytes(32)) is None


def test_every_flipped_bit_of_a_map_is_noticed_and_copies_are_not_interchangeable() -> None:
    page = bytearray(pack_map(3, 9, b"\x05", 0, SECRET))
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        assert unpack_map(memoryview(page), 3, 0, SECRET) is None, bit
        page[bit // 8] ^= 1 << bit % 8
    assert unpack_map(memoryview(page), 3, 0, SECRET) is not None
    assert unpack_map(memoryview(page), 3, 1, SECRET) is None
    assert unpack_map(memoryview(page), 4, 0, SECRET) is None


def test_a_slot_of_a_kind_that_is_not_listed_has_no_record() -> None:
    other = msgspec.structs.replace(ONE, codec="lossless")
    body = body_of([ONE, other, None])

    assert [r for _, r in unpack_entries(body.listed[0], body.kinds).pairs()] == [ONE, other]
    assert [r for _, r in unpack_entries(body.listed[0], body.kinds[:1]).pairs()] == [ONE]


def test_an_index_with_a_codec_of_a_name_that_is_too_long_is_none() -> None:
    for codec, is_read in (("c" * 32, True), ("c" * 33, False)):
        whole = packed(Body(3, 6, ((LayoutId(b"l" * 16), codec),), ()))
        assert (unpack_body(whole, SECRET) is not None) == is_read


def test_kinds_that_the_index_has_no_number_for_are_told() -> None:
    kinds = Kinds()
    numbers = [kinds.number(LayoutId(n.to_bytes(16, "big")), "raw") for n in range(KINDS_MAX + 1)]

    assert numbers == [*range(KINDS_MAX), None]


async def _filled(volume: MemoryVolume, count: int) -> RecordStore:
    store = await open_store(volume, CAPACITY_BYTES)
    for n in range(count):
        await put(store, n, BOB if n % 2 else ANNA)
    return store


async def _found(volume: MemoryVolume) -> tuple[RecordStore, set[int]]:
    store = await open_store(volume, CAPACITY_BYTES)
    return store, {int.from_bytes(r.key.digest, "big") async for _, r in store.recover()}


def test_a_start_after_a_close_reads_no_header_and_after_a_crash_only_those_of_touched_segments() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        await (await _filled(volume, 40)).close()
        volume = volume.kill()
        store, found = await _found(volume)
        assert found == set(range(40))
        assert volume.calls["read_pages"] == 0

        await put(store, 40, ANNA)
        volume = volume.crash()
        store, found = await _found(volume)
        assert found == set(range(41))
        assert volume.calls["read_pages"] == 1

    run_virtually(scenario())


@pytest.mark.parametrize("is_read", [False, True])
def test_the_file_of_an_index_that_is_not_believed_is_closed(*, is_read: bool) -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        await (await _filled(volume, 4)).close()
        volume = volume.kill()
        if not is_read:
            volume.fail("read", errno.EIO, name=INDEX_FILE)

        assert await IndexFile(volume, bytes(32), 2).load() is None  # Not the secret that it was sealed with.
        assert INDEX_FILE not in volume.image.names
        assert volume.calls["open"] == volume.calls["close"] == 1

    run_virtually(scenario())


def test_a_store_that_is_closed_unread_keeps_its_index() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        await (await _filled(volume, 20)).close()
        volume = volume.kill()
        await (await open_store(volume, CAPACITY_BYTES)).close()
        _, found = await _found(volume := volume.kill())
        assert found == set(range(20))
        assert volume.calls["read_pages"] == 0

    run_virtually(scenario())


def test_a_scope_whose_key_goes_while_the_index_is_written_is_left_to_its_headers_and_the_store_closes() -> None:
    async def scenario() -> None:
        volume, keys = MemoryVolume(), KeyRing(ANNA, BOB)
        store = await open_store(volume, CAPACITY_BYTES, keys=keys)
        for n in range(40):
            await put(store, n, BOB if n == 39 else ANNA)
        closing = asyncio.create_task(store.close())
        while not store._state.index._taken:  # noqa: ASYNC110  Nothing tells when the list is taken.
            await asyncio.sleep(0)
        kept = keys.shred(BOB)
        await closing
        assert volume.is_closed

        keys.known[BOB] = kept
        volume = volume.kill()
        store = await open_store(volume, CAPACITY_BYTES, keys=keys)
        assert {int.from_bytes(r.key.digest, "big") async for _, r in store.recover()} == set(range(40))
        assert volume.calls["read_pages"] == 1, "all others are listed"

    run_virtually(scenario())


def test_an_old_index_that_cannot_be_closed_takes_no_mark_away_from_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(_: MemoryFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        volume = MemoryVolume()
        store = await _filled(volume, 20)
        await store.write_index()
        with monkeypatch.context() as patched:
            patched.setattr(MemoryFile, "close", fail)
            await store.write_index()
        assert store.last_error == ""
        for n in range(20, 30):
            await put(store, n, ANNA)

        _, found = await _found(volume.crash())
        assert found == set(range(30))

    run_virtually(scenario())


def test_a_close_that_does_not_end_well_closes_the_files_and_the_volume() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await _filled(volume, 20)
        hung = volume.hold("create")
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(1)
        closing.cancel()
        hung.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

        assert volume.is_closed
        assert all(segment.file is None for segment in store._state.segments.values())
        volume.is_closed = False
        await store.close()
        assert volume.is_closed

    run_virtually(scenario())


@pytest.mark.parametrize("damage", ["missing", "torn", "rotten", "empty", "foreign", "map"])
def test_an_index_that_does_not_hold_costs_time_and_nothing_else(damage: str) -> None:
    async def scenario() -> None:
        volume = MemoryVolume(rng=random.Random(3))
        await (await _filled(volume, 20)).close()
        volume = volume.kill()
        size_bytes = (await volume.names())[INDEX_FILE]
        match damage:
            case "missing":
                await volume.unlink(INDEX_FILE)
            case "torn":
                volume.poke(INDEX_FILE, size_bytes - 4096, bytes(4096))
            case "rotten":
                volume.flip(INDEX_FILE, 8192 + 300, 4)
            case "empty":
                volume.poke(INDEX_FILE, 0, bytes(size_bytes))
            case "foreign":
                volume.poke(INDEX_FILE, 0, random.Random(1).randbytes(size_bytes))
            case "map":
                volume.poke(INDEX_FILE, 0, bytes(8192))
        store, found = await _found(volume)
        assert found == set(range(20))
        assert volume.calls["read_pages"] > 0
        await store.close()
        assert INDEX_FILE in volume.image.names

    run_virtually(scenario())


@pytest.mark.parametrize("copy", [0, 1])
def test_one_rotten_copy_of_the_map_loses_no_mark(copy: int) -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        await (await _filled(volume, 20)).close()
        store, _ = await _found(volume := volume.kill())
        await put(store, 99, ANNA)
        volume = volume.crash()
        volume.flip(INDEX_FILE, copy * 4096 + 30, 1)
        _, found = await _found(volume)
        assert found == {*range(20), 99}

    run_virtually(scenario())


def test_an_old_index_that_comes_back_gives_misses_or_right_blocks() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await _filled(volume, 20)
        await store.write_index()
        old = volume.image.copy()
        for slot, _ in [await put(store, n, ANNA) for n in range(20, 60)][::2]:
            store.drop(slot)
        await store.close()
        volume = volume.kill()
        number = old.names[INDEX_FILE]
        volume.image.files[number] = volume.disk.files[number] = old.files[number]
        volume.image.names[INDEX_FILE] = volume.disk.names[INDEX_FILE] = number
        again = await open_store(volume, CAPACITY_BYTES)
        async for slot, made in again.recover():
            assert await get(again, slot, made) == content(int.from_bytes(made.key.digest, "big"), BLOCK_BYTES)

    run_virtually(scenario())


def test_a_slot_is_noted_from_the_end_of_its_write_to_the_drop() -> None:
    async def scenario() -> None:
        store = await open_store(MemoryVolume(), CAPACITY_BYTES)
        slot, made = await put(store, 1, ANNA)
        other, beside = await put(store, 2, ANNA)
        taken = store.reserve(ANNA, BLOCK_BYTES)
        notes = store.notes(slot.extent)
        assert notes is not None
        index, at = slot.offset // slot.size_bytes, other.offset // other.size_bytes
        assert notes.holds(index, identity_of(made))
        assert notes.buffer.startswith(identity_of(made), notes.position(index))
        assert notes.identities(np.array([at, index])).tobytes() == identity_of(beside) + identity_of(made)
        assert not notes.holds(index, identity_of(beside))
        assert not notes.holds(taken.offset // taken.size_bytes, bytes(IDENTITY.size))
        assert not notes.holds(1 << 40, identity_of(made))

        store.drop(slot)

        assert not notes.holds(index, identity_of(made))
        assert notes.holds(at, identity_of(beside))
        assert store.notes(1 << 20) is None
        await store.close()

    run_virtually(scenario())


@pytest.mark.parametrize("size_bytes", [1, BLOCK_BYTES, 200_000])
def test_a_full_store_with_two_indexes_is_within_its_capacity(size_bytes: int) -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        with suppress(TierFullError):
            for n in itertools.count():
                await put(store, n, BOB if n % 2 else ANNA, size_bytes)
        await store.write_index()
        await store.close()
        assert CAPACITY_BYTES * 0.8 < volume.peak_bytes <= CAPACITY_BYTES

    run_virtually(scenario())


@pytest.mark.parametrize(("at", "value"), [(32, 9), (36, 9), (72, 0xFF00), (76, 0xFFFFFFFF)])
def test_an_index_that_does_not_add_up_is_none_whoever_has_signed_it(at: int, value: int) -> None:
    whole = packed(body_of([ONE, None]))
    assert unpack_body(whole, SECRET) is not None
    whole[at : at + 4] = value.to_bytes(4, "little")
    seal(whole, SECRET)

    assert unpack_body(whole, SECRET) is None
