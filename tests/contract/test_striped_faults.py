"""A tier over several devices: one that fails, is lost or comes late costs its own blocks and nothing else."""

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import Reading, Record, SlotRef, Writing, identity_of
from kvstrata_agent.backends.file.devices import PAUSE_S
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.file.posix import PosixFile, PosixVolume
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.striped import DEVICE_BITS, StripedStore, open_striped
from kvstrata_agent.backends.file.volume import nothing
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, TierFullError
from kvstrata_api.models.pool import NvmeTier
from support.backends.contract import ANNA, BLOCK_BYTES, content, fill, get, put, record

pytestmark = pytest.mark.contract

CAPACITY_BYTES = 6 << 20
NAMES = ("a", "b", "c")


class Disk(PosixVolume):
    """A volume that fails or takes its time."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, os.open(directory, os.O_RDONLY | os.O_DIRECTORY), is_direct=False)
        self.write_errno = 0
        self.read_errno = 0
        self.delay_s = 0.0
        self.turns = asyncio.Lock()
        self.bytes_written = 0
        self.reads = 0

    def _file(self, fd: int) -> PosixFile:
        return DiskFile(fd, self)


class DiskFile(PosixFile):
    """A file of it. With a delay the disk serves one transfer at a time, as a device at its limit does."""

    def __init__(self, fd: int, disk: Disk) -> None:
        super().__init__(fd, disk._movers, disk._namers)
        self._disk = disk

    async def _turn(self, number: int) -> None:
        if self._disk.delay_s:
            async with self._disk.turns:
                await asyncio.sleep(self._disk.delay_s)
        if number:
            raise OSError(number, os.strerror(number))

    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        await self._turn(self._disk.write_errno)
        parts = made()
        self._disk.bytes_written += sum(map(len, parts))
        await super().write(offset, lambda: parts)

    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        self._disk.reads += 1
        await self._turn(self._disk.read_errno)
        await super().read(ranges, then)


@dataclass
class Rack:
    """Three disks, and the tier over them."""

    root: Path
    disks: dict[str, Disk] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)

    async def _open(self, name: str, part_bytes: int) -> RecordStore:
        if name in self.away:
            raise InvalidInputError(f"{self.root / name}: Input/output error")
        disk = self.disks[name] = Disk(self.root / name)
        return await open_store(disk, part_bytes)

    async def tier(self, names: tuple[str, ...] = NAMES) -> StripedStore:
        return await open_striped({str(self.root / n): partial(self._open, n) for n in names}, CAPACITY_BYTES)

    def of(self, slot: SlotRef, names: tuple[str, ...] = NAMES) -> str:
        return names[slot.extent & (1 << DEVICE_BITS) - 1]

    def heal(self) -> None:
        for disk in self.disks.values():
            disk.write_errno = disk.read_errno = 0


@pytest.fixture
def rack(tmp_path: Path) -> Rack:
    return Rack(tmp_path)


@pytest.fixture
async def tier(rack: Rack) -> AsyncIterator[StripedStore]:
    tier = await rack.tier()
    yield tier
    rack.heal()
    await tier.close()


async def fail_once(tier: StripedStore) -> None:
    """Store blocks on all devices, until the one that fails is found out."""
    with pytest.raises(BackendFailedError):
        await asyncio.gather(*(put(tier, n) for n in range(len(NAMES))))


async def found_in(tier: StripedStore) -> dict[int, tuple[SlotRef, Record]]:
    return {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in tier.recover()}


async def test_bytes_are_spread_evenly(rack: Rack, tier: StripedStore) -> None:
    await asyncio.gather(*(put(tier, n) for n in range(60)))

    written = [disk.bytes_written for disk in rack.disks.values()]
    assert max(written) - min(written) <= BLOCK_BYTES + 4096
    assert max(d.used_bytes for d in tier.devices) == min(d.used_bytes for d in tier.devices)


async def test_each_device_notes_what_lies_in_its_slots(tier: StripedStore) -> None:
    for slot, made in [await put(tier, n) for n in range(9)]:
        notes, index = tier.notes(slot.extent), slot.offset // slot.size_bytes
        assert notes is not None
        assert notes.holds(index, identity_of(made))


async def test_a_group_goes_to_all_devices_and_one_that_fails_costs_its_own(rack: Rack, tier: StripedStore) -> None:
    slots = [tier.reserve(ANNA, BLOCK_BYTES) for _ in range(9)]
    rack.disks[NAMES[0]].write_errno = errno.EIO
    writings = [Writing(slot, content(n), record(n, content(n), slot)) for n, slot in enumerate(slots)]

    ends = await tier.write_group(writings)

    on_first = [rack.of(slot) == NAMES[0] for slot in slots]
    assert [isinstance(end, BackendFailedError) for end in ends] == on_first
    assert sum(on_first) == 3
    written = [(w, end) for w, end in zip(writings, ends, strict=True) if isinstance(end, Record)]
    targets = [memoryview(bytearray(BLOCK_BYTES)) for _ in written]
    readings = [Reading(w.slot, end, into) for (w, end), into in zip(written, targets, strict=True)]
    assert await tier.read_group(readings) == [end.checksum for _, end in written]
    assert all(into == w.stored for (w, _), into in zip(written, targets, strict=True))
    assert [bool(d.error) for d in tier.devices] == [True, False, False]


async def test_a_device_that_fails_writes_gets_no_blocks_and_the_tier_goes_on(rack: Rack, tier: StripedStore) -> None:
    before = [await put(tier, n) for n in range(9)]
    rack.disks["b"].write_errno = errno.EIO
    failed, after = 0, []
    for n in range(100, 130):
        slot = tier.reserve(ANNA, BLOCK_BYTES)
        try:
            await tier.write(slot, record(n, content(n), slot), content(n))
            after.append((n, slot))
        except BackendFailedError:
            failed += 1
            tier.drop(slot)

    assert failed == 1
    assert {rack.of(slot) for _, slot in after} == {"a", "c"}
    assert [d.error != "" for d in tier.devices] == [False, True, False]
    assert str(rack.root / "b") in tier.last_error
    assert os.strerror(errno.EIO) in tier.last_error
    for n, (slot, made) in enumerate(before):
        assert await get(tier, slot, made) == content(n)


async def test_the_room_of_a_failed_device_is_not_offered(rack: Rack, tier: StripedStore) -> None:
    rack.disks["b"].write_errno = errno.EIO
    whole = tier.capacity_bytes
    await fail_once(tier)

    assert tier.capacity_bytes <= whole * 0.7
    assert {rack.of(slot) for slot in fill(tier, ANNA)} == {"a", "c"}


async def test_a_device_that_works_again_is_used_again(
    rack: Rack, tier: StripedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr("kvstrata_agent.backends.file.striped._now_s", lambda: now_s)
    rack.disks["b"].write_errno = errno.EIO
    await fail_once(tier)
    rack.heal()
    now_s += PAUSE_S

    slots = [(await put(tier, n))[0] for n in range(10, 20)]

    assert "b" in {rack.of(slot) for slot in slots}
    assert not any(d.error for d in tier.devices)


async def test_reads_of_a_dead_device_are_misses_and_all_others_come_back(rack: Rack, tier: StripedStore) -> None:
    stored = [await put(tier, n) for n in range(12)]
    rack.disks["c"].read_errno = errno.EIO

    for n, (slot, made) in enumerate(stored):
        if rack.of(slot) == "c":
            with pytest.raises(BackendFailedError):
                await get(tier, slot, made)
        else:
            assert await get(tier, slot, made) == content(n)
    assert [bool(d.error) for d in tier.devices] == [False, False, True]


async def test_a_slow_device_gets_fewer_blocks(rack: Rack, tier: StripedStore) -> None:
    for name, disk in rack.disks.items():
        disk.delay_s = 0.1 if name == "a" else 0.001
    todo = iter(range(90))

    async def writer() -> None:
        for n in todo:
            await put(tier, n)

    await asyncio.gather(*(writer() for _ in range(6)))

    written = {name: disk.bytes_written for name, disk in rack.disks.items()}
    assert written["a"] < 0.5 * min(written["b"], written["c"])


async def test_devices_work_in_parallel(rack: Rack, tmp_path: Path) -> None:
    """Each of three devices serves one transfer at a time; together they take about a third of the time of one."""

    async def timed(names: tuple[str, ...]) -> float:
        alone = Rack(tmp_path / "-".join(names))
        tier = await alone.tier(names)
        for disk in alone.disks.values():
            disk.delay_s = 0.04  # Far above what a busy machine adds to a transfer.
        started_s = time.perf_counter()
        stored = await asyncio.gather(*(put(tier, n) for n in range(30)))
        await asyncio.gather(*(get(tier, *one) for one in stored))
        took_s = time.perf_counter() - started_s
        await tier.close()
        return took_s

    one_s, three_s = await timed(("a",)), await timed(NAMES)

    assert three_s < 0.6 * one_s


async def test_a_lost_device_costs_its_own_blocks_and_gives_them_back_when_it_returns(rack: Rack) -> None:
    tier = await rack.tier()
    stored = {n: await put(tier, n) for n in range(12)}
    await tier.close()
    rack.away = {"b"}
    tier = await rack.tier()

    found = await found_in(tier)

    assert set(found) == {n for n, (slot, _) in stored.items() if rack.of(slot) != "b"}
    assert [bool(d.error) for d in tier.devices] == [False, True, False]
    for n, (slot, made) in found.items():
        assert await get(tier, slot, made) == content(n)
    assert [r async for r in tier.recover_late()] == []
    rack.away = set()
    late = {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in tier.recover_late()}
    assert set(late) == set(stored) - set(found)
    for n, (slot, made) in late.items():
        assert await get(tier, slot, made) == content(n)
    assert not any(d.error for d in tier.devices)
    await tier.close()


async def test_devices_can_be_added_and_taken_out(rack: Rack) -> None:
    tier = await rack.tier(("a", "b"))
    stored = {n: await put(tier, n) for n in range(8)}
    await tier.close()

    tier = await rack.tier(("c", "b", "a"))
    found = await found_in(tier)
    assert {n: made for n, (_, made) in found.items()} == {n: made for n, (_, made) in stored.items()}
    slots = [(await put(tier, n))[0] for n in range(20, 32)]
    assert {rack.of(slot) for slot in slots} == {"a", "b", "c"}
    assert min(s.stamp for s in slots) > max(s.stamp for s, _ in found.values())
    await tier.close()

    tier = await rack.tier(("b",))
    left = await found_in(tier)
    assert left
    for n, (slot, made) in left.items():
        assert await get(tier, slot, made) == content(n)
    await tier.close()


async def test_a_slot_of_one_device_does_not_pass_for_one_of_another(tier: StripedStore) -> None:
    (one, made), (other, _) = await put(tier, 1), await put(tier, 2)
    swapped = SlotRef(one.extent ^ (one.extent ^ other.extent), one.offset, one.size_bytes, one.stamp)

    with pytest.raises((BlockCorruptError, BackendFailedError)):
        await get(tier, swapped, made)


async def test_without_any_device_the_first_cause_is_told(rack: Rack) -> None:
    rack.away = set(NAMES)

    with pytest.raises(InvalidInputError, match=str(rack.root / "a")):
        await rack.tier()


async def test_directories_of_one_file_system_are_told_apart_from_devices(tmp_path: Path) -> None:
    tier = NvmeTier(paths=(f"{tmp_path}/a", f"{tmp_path}/b"), io="Posix")
    backend = await open_nvme(tier, "pool-a", "node-a", CAPACITY_BYTES)

    assert f"{tmp_path}/b is on the file system of {tmp_path}/a" in backend.capabilities.fallback
    await backend.close()


async def test_a_directory_of_another_pool_is_left_out_and_named(tmp_path: Path) -> None:
    other = await open_nvme(NvmeTier(path=f"{tmp_path}/b", io="Posix"), "pool-b", "node-a", CAPACITY_BYTES)
    await other.close()
    tier = NvmeTier(paths=(f"{tmp_path}/a", f"{tmp_path}/b"), io="Posix")

    backend = await open_nvme(tier, "pool-a", "node-a", CAPACITY_BYTES)

    assert "belongs to pool 'pool-b'" in backend.last_error
    await put(backend, 1)
    await backend.close()


async def test_a_full_tier_over_devices_is_full_on_all_of_them(rack: Rack, tier: StripedStore) -> None:
    slots = fill(tier, ANNA)

    assert {rack.of(slot) for slot in slots} == set(NAMES)
    with pytest.raises(TierFullError):
        tier.reserve(ANNA, BLOCK_BYTES)
