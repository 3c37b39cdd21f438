"""Faults of media: full, failing, rotting, foreign. A miss or a clear error, never wrong bytes, never a crash."""

import asyncio
import errno
import mmap
import os
import random
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvstrata_agent.backends.base import MemoryAwayError, Record, SlotRef, TierBackend
from kvstrata_agent.backends.file.engine import open_volume
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.nixl import NixlVolume
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.file.posix import PosixFile, PosixVolume
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, nothing
from kvstrata_agent.backends.memory.mapping import make_memfd
from kvstrata_api.errors import (
    BackendFailedError,
    BlockCorruptError,
    InvalidInputError,
    TierFullError,
)
from kvstrata_api.models.pool import NvmeTier
from support.agent.engine import steps_until
from support.backends.contract import (
    ANNA,
    BLOCK_BYTES,
    BOB,
    CAPACITY_BYTES,
    content,
    fill,
    get,
    put,
    put_until_refused,
    record,
)
from support.backends.damage import flip

pytestmark = pytest.mark.contract


class FaultyVolume(PosixVolume):
    """A POSIX volume whose next writes or reads fail with an errno."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        super().__init__(directory, os.open(directory, os.O_RDONLY | os.O_DIRECTORY), is_direct=False)
        self.write_errno = 0
        self.read_errno = 0
        self.tears = False
        self.holds_punches: asyncio.Event | None = None
        self.holds_writes: asyncio.Event | None = None
        self.attempts = 0

    def _file(self, fd: int) -> PosixFile:
        return FaultyFile(fd, self)


class FaultyFile(PosixFile):
    """A file of it."""

    def __init__(self, fd: int, volume: FaultyVolume) -> None:
        super().__init__(fd, volume._movers, volume._namers)
        self._volume = volume

    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        self._volume.attempts += 1
        if self._volume.holds_writes is not None:
            await self._volume.holds_writes.wait()
        if self._volume.write_errno:
            if self._volume.tears:
                await super().write(offset, lambda: [made()[0][:DIRECT_BYTES]])
            raise OSError(self._volume.write_errno, os.strerror(self._volume.write_errno))
        await super().write(offset, made)

    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        if self._volume.read_errno:
            raise OSError(self._volume.read_errno, os.strerror(self._volume.read_errno))
        await super().read(ranges, then)

    async def punch(self, ranges: Sequence[tuple[int, int]]) -> None:
        if self._volume.holds_punches is not None:
            await self._volume.holds_punches.wait()
        await super().punch(ranges)


class Clock:
    """A clock that only tests move."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def io(tmp_path: Path) -> FaultyVolume:
    return FaultyVolume(tmp_path / "store" / "node-a")


@pytest.fixture
async def store(tmp_path: Path, io: FaultyVolume) -> AsyncIterator[RecordStore]:
    (tmp_path / "store" / "kvstrata-pool.json").write_text('{"format": 1, "pool": "pool-a"}')
    store = await open_store(io, CAPACITY_BYTES)
    yield store
    io.write_errno = io.read_errno = 0
    await store.close()


async def reopen(path: Path) -> tuple[TierBackend, dict[int, tuple[SlotRef, Record]]]:
    backend = await open_nvme(NvmeTier(path=str(path), io="Posix"), "pool-a", "node-a", CAPACITY_BYTES)
    return backend, {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in backend.recover()}


async def test_memory_that_a_client_cuts_short_under_a_write_is_no_failure_of_the_medium(store: RecordStore) -> None:
    fd = os.memfd_create("engine")
    os.ftruncate(fd, BLOCK_BYTES)
    stored = memoryview(mmap.mmap(fd, BLOCK_BYTES))  # Not closed: what is raised refers to it until it is collected.
    slot = store.reserve(ANNA, BLOCK_BYTES)
    made = record(9, content(9), slot)
    os.ftruncate(fd, 0)
    os.close(fd)
    with pytest.raises(MemoryAwayError):
        await store.write(slot, made, stored)
    store.drop(slot)

    after = await put(store, 2)
    assert after[0].extent == slot.extent, "its segment goes on"
    assert await get(store, *after) == content(2)
    assert store.last_error == ""


async def test_a_reader_waits_behind_no_write_that_the_disk_is_slow_with(store: RecordStore, io: FaultyVolume) -> None:
    there = await put(store, 1)
    io.holds_writes = asyncio.Event()
    writing = [asyncio.create_task(put(store, 2 + i)) for i in range(40)]
    before = io.attempts
    await steps_until(lambda: io.attempts >= before + 16)  # As many as may be under way at a time.
    try:
        assert await asyncio.wait_for(get(store, *there), 10.0) == content(1)
    finally:
        io.holds_writes.set()
        await asyncio.gather(*writing)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENODEV])
@pytest.mark.parametrize("tears", [False, True])
async def test_a_failed_write_is_a_clear_error_and_retires_its_segment(
    store: RecordStore, io: FaultyVolume, number: int, *, tears: bool
) -> None:
    before = [await put(store, n) for n in range(3)]
    io.write_errno, io.tears, io.attempts = number, tears, 0
    slot = store.reserve(ANNA, BLOCK_BYTES)
    made = record(9, content(9), slot)

    with pytest.raises(BackendFailedError, match=os.strerror(number)):
        await store.write(slot, made, content(9))

    assert io.attempts == 1, "a failed write is never tried again"
    assert os.strerror(number) in store.last_error
    store.drop(slot)
    io.write_errno = 0
    with pytest.raises((BackendFailedError, BlockCorruptError)):
        await get(store, slot, made)
    after = await put(store, 10)
    assert after[0].extent != slot.extent
    for n, (old, old_record) in enumerate(before):
        assert await get(store, old, old_record) == content(n)


async def test_a_late_hole_never_hits_the_next_record_of_its_slot(
    tmp_path: Path, store: RecordStore, io: FaultyVolume
) -> None:
    slot, _ = await put(store, 1)
    await put(store, 3)
    store.drop(slot)
    io.holds_punches = asyncio.Event()
    burying = asyncio.create_task(store._io.discard())
    await asyncio.sleep(0.01)
    next_slot = store.reserve(ANNA, BLOCK_BYTES)
    made = record(2, content(2), next_slot)
    writing = asyncio.create_task(store.write(next_slot, made, content(2)))
    await asyncio.sleep(0.01)
    io.holds_punches.set()
    await asyncio.gather(burying, writing)
    await store.close()

    assert (next_slot.extent, next_slot.offset) == (slot.extent, slot.offset)
    again, found = await reopen(tmp_path / "store")
    assert sorted(found) == [2, 3]
    await again.close()


async def test_a_failed_read_is_a_miss_and_its_segment_takes_no_more(store: RecordStore, io: FaultyVolume) -> None:
    slot, made = await put(store, 1)
    io.read_errno = errno.EIO

    with pytest.raises(BackendFailedError, match="Input/output error"):
        await get(store, slot, made)

    io.read_errno = 0
    assert await get(store, slot, made) == content(1)
    assert (await put(store, 2))[0].extent != slot.extent


async def test_when_every_segment_has_failed_the_tier_is_full_and_alive(store: RecordStore, io: FaultyVolume) -> None:
    slots = fill(store, ANNA)
    io.write_errno = errno.EIO
    for n, slot in enumerate(slots):
        with pytest.raises(BackendFailedError):
            await store.write(slot, record(n, content(n), slot), content(n))
    with pytest.raises(TierFullError):
        store.reserve(ANNA, BLOCK_BYTES)

    for slot in slots:
        store.drop(slot)
    io.write_errno = 0

    assert store.used_bytes == 0
    assert await get(store, *await put(store, 7)) == content(7)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB; not below pytest's own directory, which other runs tidy up."""
    if os.getuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = Path(tempfile.mkdtemp(prefix="kvstrata-small-disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kvstrata-test", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        mount.rmdir()


async def test_a_full_disk_is_a_full_tier_with_numbers_and_comes_back(small_disk: Path) -> None:
    clock = Clock()
    store = await open_store(await open_volume(small_disk / "node-a", "Uring"), 4 * CAPACITY_BYTES, clock=clock)
    stored, error = await put_until_refused(store)
    assert isinstance(error, BackendFailedError)
    assert re.search(r"No space left on device; \d+ B wanted, \d+ B free", str(error))

    assert len(stored) * BLOCK_BYTES > 400_000
    with pytest.raises(TierFullError, match="No space left"):
        fill_one_more_segment(store)
    for n, (slot, made) in enumerate(stored):
        assert await get(store, slot, made) == content(n)
        store.drop(slot)
    await asyncio.sleep(0)
    clock.now_s += 10
    assert await get(store, *await put(store, 300, BOB)) == content(300)
    await store.close()


def fill_one_more_segment(store: RecordStore) -> None:
    """Reserve until a new segment is needed."""
    for _ in range(100):
        store.reserve(BOB, BLOCK_BYTES)


@pytest.mark.parametrize("path", ["/proc/kvstrata", "/sys/kvstrata/blocks"])
async def test_an_unwritable_path_is_refused_by_name(path: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"{path.split('/blocks', maxsplit=1)[0]}.*must be able to write"):
        await open_nvme(NvmeTier(path=path), "pool-a", "node-a", CAPACITY_BYTES)


async def test_a_capacity_of_no_record_is_refused_with_the_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="capacity of 4096 B holds no record"):
        await open_nvme(NvmeTier(path=str(tmp_path)), "pool-a", "node-a", 4096)
    backend, _ = await reopen(tmp_path)
    await backend.close()


def segments(path: Path) -> list[Path]:
    return sorted(path.rglob("seg-*"))


async def test_a_flipped_bit_of_a_payload_is_never_served(tmp_path: Path, store: RecordStore) -> None:
    slot, made = await put(store, 1)
    file = segments(tmp_path)[0]
    for bit in random.Random(1).sample(range(8 * BLOCK_BYTES), 200):
        flip(file, slot.offset + DIRECT_BYTES + bit // 8, 1 << bit % 8)
        with pytest.raises(BlockCorruptError):
            await get(store, slot, made)
        flip(file, slot.offset + DIRECT_BYTES + bit // 8, 1 << bit % 8)
    assert await get(store, slot, made) == content(1)


@pytest.mark.parametrize("is_indexed", [False, True])
async def test_records_that_lie_where_another_belongs_are_not_found(
    tmp_path: Path, store: RecordStore, *, is_indexed: bool
) -> None:
    (first, _), (second, _) = await put(store, 1), await put(store, 2)
    await store.close()
    file = segments(tmp_path)[0]
    blob = bytearray(file.read_bytes())
    a, b = (slice(s.offset, s.offset + s.size_bytes) for s in (first, second))
    blob[a], blob[b] = blob[b], blob[a]
    file.write_bytes(blob)
    if not is_indexed:
        os.unlink(file.parent / INDEX_FILE)  # noqa: PTH108

    again, found = await reopen(tmp_path / "store")
    assert sorted(found) == ([1, 2] if is_indexed else [])
    for slot, made in found.values():
        with pytest.raises(BlockCorruptError):
            await get(again, slot, made)
    await again.close()


async def test_a_payload_that_lies_where_another_belongs_is_not_served(tmp_path: Path, store: RecordStore) -> None:
    (first, made), (second, _) = await put(store, 1), await put(store, 2)
    file = segments(tmp_path)[0]
    blob = file.read_bytes()
    with file.open("r+b") as f:
        f.seek(first.offset + DIRECT_BYTES)
        f.write(blob[second.offset + DIRECT_BYTES : second.offset + second.size_bytes])

    with pytest.raises(BlockCorruptError):
        await get(store, first, made)


async def test_block_bytes_that_look_like_a_header_never_become_a_record(tmp_path: Path, store: RecordStore) -> None:
    """A tenant stores a page that is a valid header of its own store but for the secret."""
    slot, made = await put(store, 1)
    header = segments(tmp_path)[0].read_bytes()[slot.offset : slot.offset + DIRECT_BYTES]
    forged = memoryview(header * (BLOCK_BYTES // DIRECT_BYTES))
    hostile = store.reserve(ANNA, BLOCK_BYTES)
    forged_record = replace(record(2, forged, hostile), key=replace(made.key, digest=b"\x02" * 20))
    await store.write(hostile, forged_record, forged)
    await store.close()

    again, _ = await reopen(tmp_path / "store")
    assert again.used_bytes == slot.size_bytes + hostile.size_bytes
    await again.close()


async def test_whatever_happens_to_the_files_only_right_bytes_or_errors_come_back(
    tmp_path: Path, store: RecordStore
) -> None:
    for n in range(30):
        await put(store, n, BOB if n % 2 else ANNA)
    await store.close()
    originals = {p: p.read_bytes() for p in segments(tmp_path)}
    for seed in range(25):
        rng = random.Random(seed)
        for path, blob in originals.items():
            path.write_bytes(_damaged(blob, rng))

        again, found = await reopen(tmp_path / "store")
        for n, (slot, made) in found.items():
            try:
                assert await get(again, slot, made) == content(n)
            except (BlockCorruptError, BackendFailedError):
                again.drop(slot)
        assert await get(again, *await put(again, 99)) == content(99)
        await again.close()


def _damaged(blob: bytes, rng: random.Random) -> bytes:
    """Truncated, with zeroed, repeated or scrambled pages."""
    damaged = bytearray(blob)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(damaged) // DIRECT_BYTES) * DIRECT_BYTES
        other = rng.randrange(len(damaged) // DIRECT_BYTES) * DIRECT_BYTES
        choices = (bytes(DIRECT_BYTES), bytes(damaged[other : other + DIRECT_BYTES]), rng.randbytes(DIRECT_BYTES))
        damaged[at : at + DIRECT_BYTES] = rng.choice(choices)
    if rng.random() < 0.3:
        del damaged[rng.randrange(len(damaged)) :]
    return bytes(damaged)


async def test_nixl_that_fails_is_helped_out_by_posix_or_tells_the_errno(tmp_path: Path) -> None:
    volume = await open_volume(tmp_path, "Uring")
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * DIRECT_BYTES))
    assert isinstance(volume, NixlVolume)
    readonly = volume._file(os.open(path, os.O_RDONLY | os.O_DIRECT))
    page = memoryview(make_memfd(DIRECT_BYTES, DIRECT_BYTES).view)
    with pytest.raises(OSError, match="Bad file descriptor"):
        await readonly.write(0, lambda: [page])
    with pytest.raises(OSError, match="end of file"):
        await readonly.read([(64 * DIRECT_BYTES, page)])

    await readonly.read([(0, page)])
    await readonly.close()
    await volume.close()


async def test_a_stopped_nixl_thread_leaves_the_store_working(tmp_path: Path) -> None:
    volume = await open_volume(tmp_path, "Uring")
    assert isinstance(volume, NixlVolume)
    volume._mover._queue.put(None)
    volume._mover._thread.join()
    store = await open_store(volume, CAPACITY_BYTES)

    assert await get(store, *await put(store, 1)) == content(1)
    await store.close()
