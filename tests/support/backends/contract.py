"""The laws that every tier backend keeps. A new backend adds one fixture and inherits them.

The two sizes are read when a test runs: a class whose medium has a coarser grain sets others.
"""

import asyncio
import mmap

import pytest
from msgspec.structs import replace

from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.provision.probe import probe
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError, TierFullError

BLOCK_BYTES = 12 << 10
CAPACITY_BYTES = 2 << 20
EPOCH = 7
ANNA = ScopeId("tenant/anna/6f3a/v1")
BOB = ScopeId("tenant/bob/11c9/v1")


def content(number: int, size_bytes: int = 0) -> memoryview:
    """Bytes that differ for every number; a block's size when none is given."""
    size_bytes = size_bytes or BLOCK_BYTES
    return memoryview((number.to_bytes(4, "big") * (size_bytes // 4 + 1))[:size_bytes])


def record(number: int, stored: memoryview, slot: SlotRef, scope: ScopeId = ANNA, epoch: int = EPOCH) -> Record:
    """Record of block `number` with the checksum bound to its slot."""
    key = BlockKey(scope, number.to_bytes(20, "big"))
    bound = checksum(stored, key.digest, epoch, slot.stamp)
    parent = (number - 1).to_bytes(20, "big") if number else b""
    return Record(key, parent, LayoutId(b"layout-16-bytes!"), "raw", len(stored), len(stored), bound, epoch)


async def put(backend: TierBackend, number: int, scope: ScopeId = ANNA, size_bytes: int = 0) -> tuple[SlotRef, Record]:
    """Store block `number`."""
    stored = content(number, size_bytes)
    slot = backend.reserve(scope, len(stored))
    made = record(number, stored, slot, scope)
    await backend.write(slot, made, stored)
    return slot, made


async def get(backend: TierBackend, slot: SlotRef, made: Record) -> memoryview:
    """Read a block into fresh memory."""
    into = memoryview(bytearray(made.stored_bytes))
    await backend.read(slot, made, into)
    return into


def fill(backend: TierBackend, scope: ScopeId) -> list[SlotRef]:
    """Reserve until the tier is full."""
    slots = []
    for _ in range(10_000):
        try:
            slots.append(backend.reserve(scope, BLOCK_BYTES))
        except TierFullError:
            return slots
    raise AssertionError("the tier never filled")


async def put_until_refused(backend: TierBackend) -> tuple[list[tuple[SlotRef, Record]], KvStrataError]:
    """Store blocks until one is refused."""
    stored: list[tuple[SlotRef, Record]] = []
    try:
        while True:
            stored.append(await put(backend, len(stored)))
    except (BackendFailedError, TierFullError) as e:
        return stored, e


class BackendContract:
    """Subclass with a `backend` fixture of `CAPACITY_BYTES`."""

    async def test_a_block_comes_back_as_it_was_written(self, backend: TierBackend) -> None:
        slot, made = await put(backend, 1)

        assert await get(backend, slot, made) == content(1)

    @pytest.mark.parametrize("size_bytes", [1, 511, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 300_001])
    async def test_blocks_of_any_size_come_back(self, backend: TierBackend, size_bytes: int) -> None:
        slot, made = await put(backend, 5, size_bytes=size_bytes)

        assert await get(backend, slot, made) == content(5, size_bytes)

    @pytest.mark.parametrize("size_bytes", [1, 4096, 4097, BLOCK_BYTES, 300_001])
    async def test_what_a_slot_takes_is_known_before(self, backend: TierBackend, size_bytes: int) -> None:
        before_bytes = backend.used_bytes
        slot = backend.reserve(ANNA, size_bytes)

        assert backend.slot_bytes(size_bytes) == slot.size_bytes == backend.used_bytes - before_bytes

    async def test_page_aligned_memory_needs_no_copy_and_gives_the_same_bytes(self, backend: TierBackend) -> None:
        source, target = mmap.mmap(-1, BLOCK_BYTES), mmap.mmap(-1, BLOCK_BYTES)
        source[:] = content(9)
        slot = backend.reserve(ANNA, BLOCK_BYTES)
        made = record(9, memoryview(source), slot)

        await backend.write(slot, made, memoryview(source))
        await backend.read(slot, made, memoryview(target))

        assert target[:] == content(9)

    async def test_read_touches_nothing_behind_the_stored_bytes(self, backend: TierBackend) -> None:
        slot, made = await put(backend, 2, size_bytes=5000)
        into = memoryview(bytearray(b"\xee" * 12_288))

        await backend.read(slot, made, into)

        assert into[:5000] == content(2, 5000)
        assert into[5000:] == b"\xee" * (12_288 - 5000)

    async def test_many_blocks_at_once_do_not_mix(self, backend: TierBackend) -> None:
        stored = await asyncio.gather(*(put(backend, n, BOB if n % 2 else ANNA) for n in range(30)))
        found = await asyncio.gather(*(get(backend, *s) for s in stored))

        assert found == [content(n) for n in range(30)]

    async def test_a_record_of_another_use_is_refused(self, backend: TierBackend) -> None:
        slot, made = await put(backend, 3)
        other_key = BlockKey(ANNA, b"x" * 20)

        for wrong in (replace(made, epoch=EPOCH + 1), replace(made, key=other_key), replace(made, checksum=bytes(16))):
            with pytest.raises(BlockCorruptError):
                await get(backend, slot, wrong)

    async def test_slots_of_different_scopes_lie_in_different_extents(self, backend: TierBackend) -> None:
        owners: dict[int, ScopeId] = {}
        for n in range(24):
            scope = BOB if n % 3 else ANNA
            slot = backend.reserve(scope, BLOCK_BYTES)
            assert owners.setdefault(slot.extent, scope) == scope

    async def test_slots_in_use_never_overlap_and_stamps_only_grow(self, backend: TierBackend) -> None:
        taken: set[tuple[int, int]] = set()
        last_stamp = 0
        for slot in fill(backend, ANNA):
            assert (slot.extent, slot.offset) not in taken
            assert slot.size_bytes >= BLOCK_BYTES
            assert slot.stamp > last_stamp
            taken.add((slot.extent, slot.offset))
            last_stamp = slot.stamp

    async def test_a_full_tier_refuses_with_numbers_and_changes_nothing(self, backend: TierBackend) -> None:
        slots = fill(backend, ANNA)
        used = backend.used_bytes
        assert len(slots) * BLOCK_BYTES >= CAPACITY_BYTES * 0.6

        with pytest.raises(TierFullError, match=r"\d+ B"):
            backend.reserve(ANNA, BLOCK_BYTES)

        assert backend.used_bytes == used == sum(s.size_bytes for s in slots)
        assert used <= backend.capacity_bytes <= CAPACITY_BYTES

    async def test_dropped_room_is_there_again_at_once(self, backend: TierBackend) -> None:
        slots = fill(backend, ANNA)
        backend.drop(slots[3])

        assert backend.reserve(ANNA, BLOCK_BYTES).stamp > slots[-1].stamp

    async def test_everything_dropped_leaves_room_for_another_scope(self, backend: TierBackend) -> None:
        slots = fill(backend, ANNA)
        for slot in slots:
            backend.drop(slot)

        assert backend.used_bytes == 0
        assert len(fill(backend, BOB)) == len(slots)

    async def test_dropping_twice_is_harmless(self, backend: TierBackend) -> None:
        slot, _ = await put(backend, 1)
        backend.drop(slot)
        after, made = await put(backend, 2)
        used = backend.used_bytes

        backend.drop(slot)

        assert backend.used_bytes == used
        assert await get(backend, after, made) == content(2)

    async def test_a_dropped_block_is_never_read_again(self, backend: TierBackend) -> None:
        slot, made = await put(backend, 1)
        backend.drop(slot)
        with pytest.raises((BlockCorruptError, BackendFailedError)):
            await get(backend, slot, made)

        await put(backend, 2)

        with pytest.raises((BlockCorruptError, BackendFailedError)):
            await get(backend, slot, made)

    async def test_a_cancelled_write_leaves_nothing_readable_once_dropped(self, backend: TierBackend) -> None:
        stored = content(4, 1 << 20)
        slot = backend.reserve(ANNA, 1 << 20)
        made = record(4, stored, slot)
        writing = asyncio.create_task(backend.write(slot, made, stored))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        backend.drop(slot)

        with pytest.raises((BlockCorruptError, BackendFailedError)):
            await get(backend, slot, made)
        after, other = await put(backend, 5, size_bytes=1 << 20)
        assert await get(backend, after, other) == content(5, 1 << 20)

    async def test_a_cancelled_read_no_longer_writes_to_its_buffer(self, backend: TierBackend) -> None:
        slot, made = await put(backend, 6, size_bytes=1 << 20)
        into = mmap.mmap(-1, 1 << 20)
        reading = asyncio.create_task(backend.read(slot, made, memoryview(into)))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])

        into[:] = bytes(1 << 20)
        await put(backend, 7)

        assert into[:] == bytes(1 << 20)

    async def test_growing_makes_room_at_once(self, backend: TierBackend) -> None:
        before = len(fill(backend, ANNA))

        assert await backend.resize(2 * CAPACITY_BYTES) == frozenset()

        assert len(fill(backend, ANNA)) >= before * 0.9
        assert backend.capacity_bytes <= 2 * CAPACITY_BYTES

    async def test_after_a_shrink_and_the_moves_it_asks_for_the_tier_is_within_its_capacity(
        self, backend: TierBackend
    ) -> None:
        stored = [await put(backend, n) for n in range(40)]
        closing = await backend.resize(CAPACITY_BYTES // 4)

        for slot, _ in stored:
            if slot.extent in closing or backend.used_bytes > backend.capacity_bytes:
                backend.drop(slot)
        with pytest.raises(TierFullError):
            backend.reserve(ANNA, CAPACITY_BYTES // 4)

        assert backend.used_bytes <= backend.capacity_bytes <= CAPACITY_BYTES // 4
        assert all(s.extent not in closing for s in fill(backend, ANNA))

    async def test_blocks_stay_readable_while_their_extent_closes(self, backend: TierBackend) -> None:
        stored = [await put(backend, n) for n in range(20)]
        await backend.resize(CAPACITY_BYTES // 4)

        assert [await get(backend, *s) for s in stored] == [content(n) for n in range(20)]

    async def test_emptying_what_relief_names_makes_room(self, backend: TierBackend) -> None:
        assert backend.extents_to_free(BOB, BLOCK_BYTES) == frozenset()
        slots = fill(backend, ANNA)

        named = backend.extents_to_free(BOB, BLOCK_BYTES)
        for slot in slots:
            if slot.extent in named:
                backend.drop(slot)

        assert 0 < len(named) < len({s.extent for s in slots})
        backend.reserve(BOB, BLOCK_BYTES)

    async def test_the_probe_measures_and_leaves_nothing(self, backend: TierBackend) -> None:
        measured = await probe(backend, BLOCK_BYTES)

        assert measured.block_bytes == BLOCK_BYTES
        assert min(measured.read_bytes_per_second, measured.write_bytes_per_second) > 0
        assert backend.used_bytes == 0

    async def test_capabilities_are_stated(self, backend: TierBackend) -> None:
        stated = backend.capabilities

        assert stated.medium
        assert stated.is_memory == (stated.is_memory or backend.mappable is not None)
        for name in ("mappable", "persistent", "group", "columnar", "striped", "paced", "shared", "sealing"):
            assert getattr(backend, name) in (None, backend), name
        assert backend.last_error == ""
        assert stated == backend.capabilities

    async def test_closing_twice_is_harmless(self, backend: TierBackend) -> None:
        await put(backend, 1)
        await backend.close()
        await backend.close()


class PersistentContract(BackendContract):
    """For media that survive a restart: subclass with an async `reopen` method on the same medium."""

    async def reopen(self, where: object) -> TierBackend:
        raise NotImplementedError

    async def recovered(self, where: object) -> tuple[TierBackend, dict[int, tuple[SlotRef, Record]]]:
        backend = await self.reopen(where)
        found = {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in backend.recover()}
        return backend, found

    async def test_blocks_survive_a_restart_with_all_that_is_known_of_them(
        self, backend: TierBackend, where: object
    ) -> None:
        stored = {n: await put(backend, n, BOB if n % 2 else ANNA) for n in range(12)}
        used = backend.used_bytes
        await backend.close()

        again, found = await self.recovered(where)

        assert {n: r for n, (_, r) in found.items()} == {n: r for n, (_, r) in stored.items()}
        assert again.used_bytes == used
        for n, (slot, made) in found.items():
            assert slot.stamp == stored[n][0].stamp
            assert await get(again, slot, made) == content(n)
        await again.close()

    async def test_stamps_go_on_growing_after_a_restart(self, backend: TierBackend, where: object) -> None:
        for n in range(5):
            slot, _ = await put(backend, n)
            backend.drop(slot)
        await backend.close()

        again = await self.reopen(where)
        assert again.reserve(ANNA, BLOCK_BYTES).stamp > slot.stamp
        await again.close()

    async def test_a_drop_survives_a_restart(self, backend: TierBackend, where: object) -> None:
        stored = [await put(backend, n) for n in range(6)]
        for slot, _ in stored[:3]:
            backend.drop(slot)
        await backend.close()

        again, found = await self.recovered(where)
        assert sorted(found) == [3, 4, 5]
        await again.close()

    async def test_recovered_room_can_be_used_up_to_the_capacity(self, backend: TierBackend, where: object) -> None:
        for n in range(10):
            await put(backend, n)
        await backend.close()

        again, found = await self.recovered(where)
        slots = fill(again, ANNA)
        assert {(s.extent, s.offset) for s in slots}.isdisjoint((s.extent, s.offset) for s, _ in found.values())
        assert again.used_bytes <= again.capacity_bytes
        await again.close()
