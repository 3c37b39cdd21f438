"""Blocks in device memory, on devices that are late, small or broken: what was not waited for has not happened."""

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

import torch
from msgspec.structs import replace

from kvstrata_agent.backends.base import ExpectedChecksum, Reading, Record, SlotRef, Writing
from kvstrata_agent.backends.device.hbm import PIECES, HbmTier, HostQueue, Wait, open_queues
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import (
    BackendFailedError,
    BlockCorruptError,
    InvalidInputError,
    TierFullError,
    UnsupportedError,
)
from kvstrata_api.units import MIB
from kvstrata_native.devices import block_sum, open_host, packed
from support.backends import contract as backend_contract
from support.backends.contract import ANNA, BLOCK_BYTES, content, record
from support.backends.late_device import LateQueue

pytestmark = pytest.mark.unit

MANY = 3 * PIECES + 1
OTHER_USE = (99, 5)


def slots_of(tier: HbmTier, count: int = MANY) -> list[SlotRef]:
    return [tier.reserve(ANNA, BLOCK_BYTES) for _ in range(count)]


def writings_of(slots: Sequence[SlotRef]) -> list[Writing]:
    return [Writing(slot, content(n), record(n, content(n), slot)) for n, slot in enumerate(slots)]


def on_the_device(tier: HbmTier, slot: SlotRef) -> bytes:
    return bytes(tier.memory.tensors[slot.extent][slot.offset : slot.offset + BLOCK_BYTES].numpy())


async def read_all(tier: HbmTier, writings: Sequence[Writing]) -> tuple[list[object], list[memoryview]]:
    rooms = [memoryview(bytearray(BLOCK_BYTES)) for _ in writings]
    ends = await tier.read_group([Reading(w.slot, w.record, room) for w, room in zip(writings, rooms, strict=True)])
    return list(ends), rooms


async def test_a_group_is_on_the_device_when_its_write_returns_and_comes_back_whole() -> None:
    tier = HbmTier([LateQueue()], 4 * MIB, threads=1)
    writings = writings_of(slots_of(tier))

    ends = await tier.write_group(writings)

    assert ends == [w.record for w in writings]
    assert [on_the_device(tier, w.slot) for w in writings] == [bytes(w.stored) for w in writings]
    found, rooms = await read_all(tier, writings)
    assert found == [w.record.checksum for w in writings]
    assert rooms == [content(n) for n in range(MANY)]
    await tier.close()


async def test_several_copies_are_under_way_at_a_time_and_host_memory_is_bounded() -> None:
    queue = LateQueue()
    tier = HbmTier([queue], 4 * MIB, threads=1)
    slots = slots_of(tier)
    queue.start(lambda: None)()

    queue.most_under_way = 0
    await tier.write_group(writings_of(slots))
    assert queue.most_under_way == PIECES
    queue.most_under_way = 0
    await read_all(tier, writings_of(slots))
    assert queue.most_under_way == PIECES

    assert queue.stagings == [BLOCK_BYTES] * PIECES
    await tier.close()


async def test_what_differs_from_its_checksum_reaches_nobody_and_its_neighbours_do() -> None:
    tier = HbmTier([LateQueue()], 4 * MIB, threads=1)
    writings = writings_of(slots_of(tier))
    await tier.write_group(writings)
    bad = writings[PIECES].slot
    tier.memory.tensors[bad.extent][bad.offset + 7] ^= 1

    ends, rooms = await read_all(tier, writings)

    assert isinstance(ends.pop(PIECES), BlockCorruptError)
    assert rooms.pop(PIECES) == bytes(BLOCK_BYTES)
    assert ends == [w.record.checksum for n, w in enumerate(writings) if n != PIECES]
    assert rooms == [w.stored for n, w in enumerate(writings) if n != PIECES]
    await tier.close()


async def test_bytes_that_somebody_else_may_write_are_proven_in_the_copy() -> None:
    tier = HbmTier([LateQueue()], 4 * MIB, threads=1)
    slots = slots_of(tier)
    known = [ExpectedChecksum(checksum(content(n), record(n, content(n), s).key.digest, *OTHER_USE), OTHER_USE)
             for n, s in enumerate(slots)]  # fmt: skip
    writings = [
        Writing(s, content(n + 1 if n in {0, 6} else n), replace(record(n, content(n), s), checksum=b""), known[n])
        for n, s in enumerate(slots)
    ]

    ends = await tier.write_group(writings)

    for n, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        if n in {0, 6}:
            assert isinstance(end, BlockCorruptError)
        else:
            assert end == record(n, content(n), slot)
            assert on_the_device(tier, slot) == content(n)
    await tier.close()


async def test_a_reader_gets_a_checksum_for_its_own_use_of_the_bytes() -> None:
    tier = HbmTier([HostQueue()], 4 * MIB, threads=1)
    (writing,) = writings_of(slots_of(tier, 1))
    await tier.write_group([writing])
    room = memoryview(bytearray(BLOCK_BYTES))

    (end,) = await tier.read_group([Reading(writing.slot, writing.record, room, OTHER_USE)])

    assert end == checksum(content(0), writing.record.key.digest, *OTHER_USE)
    await tier.close()


async def test_a_copy_that_the_device_fails_at_costs_its_block_alone() -> None:
    queue = LateQueue()
    tier = HbmTier([queue], 4 * MIB, threads=1)
    slots = slots_of(tier)
    writings = writings_of(slots)
    queue.fails_at = frozenset({queue.started + 2, queue.started + MANY + 5})

    ends = await tier.write_group(writings)
    assert [n for n, end in enumerate(ends) if not isinstance(end, Record)] == [2]
    assert isinstance(ends[2], BackendFailedError)
    assert "illegal memory access" in tier.last_error

    found, rooms = await read_all(tier, writings)
    assert isinstance(found[2], BlockCorruptError)
    assert isinstance(found[5], BackendFailedError)
    assert rooms[5] == bytes(BLOCK_BYTES)
    assert [n for n, end in enumerate(found) if end == writings[n].record.checksum] == [
        n for n in range(MANY) if n not in {2, 5}
    ]
    await tier.close()


async def test_a_block_larger_than_its_slot_is_refused_and_leaves_its_neighbour_alone() -> None:
    tier = HbmTier([LateQueue()], 4 * MIB, threads=1)
    first, second = slots_of(tier, 2)
    (_, kept) = writings_of([first, second])
    await tier.write_group([kept])
    long = content(1, 2 * BLOCK_BYTES)

    with pytest.raises(InvalidInputError, match=f"{len(long)} B in an HBM slot of {first.size_bytes} B"):
        await tier.write(first, record(1, long, first), long)

    assert on_the_device(tier, second) == kept.stored
    await tier.close()


async def test_extents_lie_on_all_devices_and_on_the_other_when_one_is_full() -> None:
    small, large = LateQueue("late:0", 300_000), LateQueue("late:1", 8 * MIB)
    tier = HbmTier([small, large], 2 * MIB, threads=1)

    slots = backend_contract.fill(tier, ANNA)

    homes = [tier.memory.part(slot, 1)[0] for slot in slots]
    assert {home.name for home in homes} == {"late:0", "late:1"}
    assert len(slots) * BLOCK_BYTES > MIB
    await tier.close()


async def test_no_memory_left_says_how_much_was_asked_of_which_devices() -> None:
    queues = [LateQueue("late:0", MIB), LateQueue("late:1", MIB)]
    for queue in queues:
        queue.allocate(MIB)  # Engines took it meanwhile.
    tier = HbmTier(queues, MIB)

    with pytest.raises(TierFullError, match=r"\d+ B of HBM: late:0: out of memory.*; late:1: out of memory"):
        tier.reserve(ANNA, BLOCK_BYTES)

    assert "late:1: out of memory" in tier.last_error
    await tier.close()


async def test_of_an_extent_that_could_not_be_cleared_nothing_is_kept() -> None:
    class Broken(LateQueue):
        def start(self, work: Callable[[], object]) -> Wait:
            raise RuntimeError(f"CUDA error: unknown error at {work}")

    tier = HbmTier([Broken()], MIB, threads=1, lends=True)

    with pytest.raises(TierFullError, match="late:0: CUDA error"):
        tier.reserve(ANNA, BLOCK_BYTES)

    assert tier.memory.shared == {}
    await tier.close()


def test_more_than_the_devices_have_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidInputError, match="3145728 B asked for; late:0 has 1048576 B, late:1 has 1048576 B"):
        HbmTier([LateQueue("late:0", MIB), LateQueue("late:1", MIB)], 3 * MIB, threads=1)


def test_other_devices_than_those_of_cuda_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'meta'"):
        open_queues("meta")


def test_a_torch_without_its_runtime_is_refused_by_the_runtimes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "9.9")
    with pytest.raises(UnsupportedError, match=r"libcudart\.so\.9"):
        open_queues("cuda")


async def test_memory_is_cleared_before_anybody_else_may_have_it() -> None:
    queue = LateQueue()
    tier = HbmTier([queue], MIB, threads=1)
    writings = writings_of(slots_of(tier, 2))
    await tier.write_group(writings)
    tensors = list(tier.memory.tensors.values())

    for writing in writings:
        tier.drop(writing.slot)
    await tier.resize(0)
    await tier.close()

    assert tier.memory.tensors == {}
    assert queue.trims == len(tensors)
    assert not any(bool(torch.any(t)) for t in tensors)


async def test_a_device_that_fails_at_clearing_says_so_and_the_tier_still_ends() -> None:
    queue = LateQueue()
    tier = HbmTier([queue], MIB, threads=1)
    slots_of(tier, 2)
    queue.fails_at = frozenset(range(1_000))

    await tier.close()

    assert tier.memory.tensors == {}
    assert queue.trims == 0


async def test_a_lent_block_has_a_sum_of_what_the_device_was_given_until_its_slot_is_dropped() -> None:
    tier = HbmTier([LateQueue()], 4 * MIB, threads=1, lends=True)
    writings = writings_of(slots_of(tier))
    await tier.write_group(writings)

    for writing in writings:
        wanted = packed(block_sum(torch.frombuffer(bytearray(writing.stored), dtype=torch.uint8)))
        assert tier.sum_of(writing.slot) == wanted
        assert tier.is_intact(writing.slot)
    first = writings[0].slot
    tier.memory.tensors[first.extent][first.offset] ^= 1
    assert not tier.is_intact(first)
    tier.drop(first)
    assert tier.sum_of(first) == b""
    (again,) = [s for s in slots_of(tier, 1) if (s.extent, s.offset) == (first.extent, first.offset)]
    assert tier.sum_of(again) == b""
    await tier.close()


async def test_a_tier_that_does_not_lend_makes_no_sums_and_has_nothing_to_lend() -> None:
    tier = HbmTier([LateQueue()], 4 * MIB, threads=1)
    writings = writings_of(slots_of(tier, 1))
    await tier.write_group(writings)

    assert tier.lending is None
    assert tier.sum_of(writings[0].slot) == b""
    await tier.close()


async def test_lent_memory_is_cleared_at_its_release_and_kept_for_the_last_borrower() -> None:
    tier = HbmTier([HostQueue()], MIB, threads=1, lends=True)
    (writing,) = writings_of(slots_of(tier, 1))
    await tier.write_group([writing])
    extent = writing.slot.extent
    fd = tier.lend(extent, 1)
    tier.lend(extent, 2)
    opened = open_host(fd, tier.extent_bytes(extent))
    assert bytes(opened.memory[:BLOCK_BYTES].numpy()) == content(0)

    tier.drop(writing.slot)
    await tier.resize(0)
    tier.give_back(1, [extent])
    await tier.write_group([])  # Behind all that the thread of the tier had to do.

    assert not opened.memory.any()
    assert set(tier.memory._lent) == {extent}
    tier.give_back(2)
    await tier.write_group([])
    assert tier.memory._lent == {}
    await tier.close()
