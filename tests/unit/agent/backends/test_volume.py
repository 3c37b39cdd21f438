"""Laws of the volumes: what is durable when a call returns, and what a hung medium holds up."""

import asyncio
import errno
import fcntl
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path

import pytest
from sim.volume import MemoryVolume

from kvstrata_agent.backends.file.claim import replace
from kvstrata_agent.backends.file.engine import open_volume
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.nixl import NixlFile
from kvstrata_agent.backends.file.posix import PosixFile, PosixVolume
from kvstrata_agent.backends.file.record_store import open_store
from kvstrata_agent.backends.file.transfers import is_direct
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, content, fill, get, put, record
from support.backends.record_stores import buffered_store
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """System calls that change files, in the order in which they ended."""
    said: list[str] = []
    pwritev = os.pwritev

    def write(fd: int, parts: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        done = pwritev(fd, parts, offset, flags)
        said.append("durable write" if flags & os.RWF_DSYNC else "write")
        return done

    monkeypatch.setattr(os, "pwritev", write)
    for name in ("fsync", "fdatasync", "replace"):
        monkeypatch.setattr(os, name, partial(_tell, said, name, getattr(os, name)))
    return said


def _tell(said: list[str], name: str, call: Callable[..., None], *given: object) -> None:
    call(*given)
    said.append(name)


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, DIRECT_BYTES))


async def test_a_directory_that_is_made_is_durable_before_anything_lies_in_it(tmp_path: Path, told: list[str]) -> None:
    volume = await open_volume(tmp_path / "pool" / "node", "Buffered")

    assert told == ["fsync", "fsync"]
    await volume.close()


async def test_a_write_is_durable_when_it_returns(tmp_path: Path, told: list[str]) -> None:
    volume = await open_volume(tmp_path, "Posix")
    file = await volume.create("file", 4 * DIRECT_BYTES)
    told.clear()
    await file.write(0, lambda: [page(), page()])

    assert told == ["durable write"]
    await file.close()
    await volume.close()


async def test_a_write_through_nixl_is_durable_when_it_returns(tmp_path: Path) -> None:
    volume = await open_volume(tmp_path, "Uring")
    assert volume.medium == "file-uring", volume.fallback
    made = await volume.create("file", 4 * DIRECT_BYTES)
    opened = await volume.open("file")

    for file in (made, opened):  # NIXL writes without flags and does not sync: the descriptor has to say it.
        assert isinstance(file, NixlFile)
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        assert flags & os.O_DSYNC
        assert flags & os.O_DIRECT
        await file.close()
    await volume.close()


async def test_many_transfers_at_once_all_arrive(tmp_path: Path) -> None:
    volume = await open_volume(tmp_path, "Uring")
    file = await volume.create("file", 64 * DIRECT_BYTES)
    pages = [page() for _ in range(64)]
    for number, view in enumerate(pages):
        view[:] = bytes([number]) * DIRECT_BYTES
    await asyncio.gather(*(file.write(i * DIRECT_BYTES, partial(list, [view])) for i, view in enumerate(pages)))
    targets = [page() for _ in pages]
    late = page()
    await asyncio.gather(
        *(file.read([(i * DIRECT_BYTES, view)]) for i, view in enumerate(targets)),
        file.write(0, lambda: [pages[9]]),
        file.read([(9 * DIRECT_BYTES, late)]),
    )

    assert [bytes(v) for v in targets[1:]] == [bytes(v) for v in pages[1:]]
    assert bytes(late) == bytes(pages[9])
    assert (tmp_path / "file").read_bytes()[:DIRECT_BYTES] == bytes(pages[9])
    await file.close()
    await volume.close()


async def test_one_bad_transfer_of_a_batch_fails_alone(tmp_path: Path) -> None:
    volume = await open_volume(tmp_path, "Uring")
    file = await volume.create("file", 4 * DIRECT_BYTES)
    inside, outside = page(), page()
    reads = file.read([(0, inside)]), file.read([(64 * DIRECT_BYTES, outside)])
    answers = await asyncio.gather(*reads, return_exceptions=True)

    assert answers[0] is None
    assert isinstance(answers[1], OSError)
    await file.close()
    await volume.close()


async def test_a_hole_is_durable_when_it_is_told(tmp_path: Path, told: list[str]) -> None:
    volume = await open_volume(tmp_path, "Buffered")
    file = await volume.create("file", 4 * DIRECT_BYTES)
    full = page()
    full[:] = b"x" * DIRECT_BYTES
    await file.write(DIRECT_BYTES, lambda: [full])
    told.clear()
    await file.punch([(DIRECT_BYTES, DIRECT_BYTES)])

    assert told == ["fdatasync"]
    into = page()
    await file.read([(DIRECT_BYTES, into)])
    assert not any(into)
    assert (tmp_path / "file").stat().st_blocks * 512 == 3 * DIRECT_BYTES
    await file.close()
    await volume.close()


async def test_a_small_file_is_replaced_in_an_order_that_no_crash_can_break(tmp_path: Path, told: list[str]) -> None:
    volume = await open_volume(tmp_path, "Posix")
    told.clear()
    await replace(volume, "marker.json", {"a": 1})

    assert told == ["durable write", "replace", "fsync"]
    await volume.close()


async def test_a_volume_lists_what_is_there_and_makes_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    volume = await open_volume(tmp_path, "Buffered")
    await (await volume.create("a", 8192)).close()

    assert dict(await volume.names()) == {"directory": -1, "a": 8192}
    with pytest.raises(FileExistsError):
        await volume.create("a", 4096)
    with pytest.raises(OSError, match=r"No space|too large"):
        await volume.create("b", 1 << 60)
    assert sorted(await volume.names()) == ["a", "directory"]
    await volume.close()
    assert isinstance(volume, PosixVolume)


def open_below(directory: Path) -> set[Path]:
    """Files below a directory that this process has open."""
    opened = {link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return {file for file in opened if file.is_relative_to(directory)}


@pytest.mark.parametrize("site", ["open", "read_pages"])
async def test_a_recovery_that_fails_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    for n in range(100):
        await put(store, n)
    await store.close()
    (tmp_path / INDEX_FILE).unlink()
    calls = 0

    async def fail(call: Callable[..., Awaitable[object]], *given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return await call(*given)

    of = PosixVolume if site == "open" else PosixFile
    monkeypatch.setattr(of, site, partialmethod(partial(fail, getattr(of, site))))
    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    with pytest.raises(BackendFailedError):
        [found async for found in store.recover()]
    await store.close()

    assert calls > 8, "in the second batch"
    assert not open_below(tmp_path)


def _aligned(number: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    view[:] = content(number, BLOCK_BYTES)
    return view


def _loose(size_bytes: int) -> memoryview:
    """Memory that the device cannot use as it lies."""
    view = memoryview(bytearray(size_bytes + 1))
    return view[1:] if is_direct(view[:size_bytes]) else view[:size_bytes]


def test_a_hung_write_holds_up_no_cancelled_caller_and_keeps_its_slot_and_buffer() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        await put(store, 1)
        hung = volume.hold("write")
        slot = store.reserve(ANNA, BLOCK_BYTES)
        stored = _loose(BLOCK_BYTES)
        stored[:] = content(2)
        made = record(2, stored, slot)
        writing = asyncio.create_task(store.write(slot, made, stored))
        await asyncio.sleep(1)
        writing.cancel()
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait([writing])
        assert asyncio.get_running_loop().time() - began_s <= 1.0
        assert writing.cancelled()

        store.drop(slot)
        with pytest.raises(BackendFailedError):
            await get(store, slot, made)
        assert (slot.extent, slot.offset) not in {(o.extent, o.offset) for o in fill(store, ANNA)}
        used_bytes = store.used_bytes
        hung.set()
        await asyncio.sleep(0.1)
        assert store.used_bytes == used_bytes - slot.size_bytes
        after = store.reserve(ANNA, BLOCK_BYTES)
        assert (after.extent, after.offset) == (slot.extent, slot.offset)

    run_virtually(scenario())


def test_a_cancelled_write_that_waits_for_deletions_keeps_its_slot_and_leaves_no_file() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        bob, _ = await put(store, 1, BOB)
        hung = volume.hold("unlink")
        store.drop(bob)
        await asyncio.sleep(1)
        slot = store.reserve(ANNA, BLOCK_BYTES)
        stored = _loose(BLOCK_BYTES)
        writing = asyncio.create_task(store.write(slot, record(2, stored, slot), stored))
        await asyncio.sleep(1)
        writing.cancel()
        await asyncio.wait([writing])
        store.drop(slot)
        await asyncio.sleep(1)

        other = store.reserve(ANNA, BLOCK_BYTES)
        assert (other.extent, other.offset) != (slot.extent, slot.offset)
        store.drop(other)
        hung.set()
        await asyncio.sleep(2)
        assert not any(name.startswith("seg-") for name in await volume.names())

    run_virtually(scenario())


@pytest.mark.parametrize("site", ["create", "sync"])
def test_a_caller_whose_memory_is_not_in_use_yet_leaves_a_hung_medium_at_once(site: str) -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        hung = volume.hold(site)
        slot = store.reserve(ANNA, BLOCK_BYTES)
        view = _aligned(2)
        writing = asyncio.create_task(store.write(slot, record(2, view, slot), view))
        await asyncio.sleep(1)
        writing.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert writing.cancelled()
        hung.set()
        store.drop(slot)
        assert await get(store, *await put(store, 3)) == content(3)

    run_virtually(scenario())


def test_a_block_that_is_dropped_while_it_is_read_goes_when_the_read_ends() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        held = await put(store, 1)
        hung = volume.hold("read")
        reading = asyncio.create_task(store.read(*held, _loose(BLOCK_BYTES)))
        await asyncio.sleep(1)
        reading.cancel()
        await asyncio.wait([reading])
        store.drop(held[0])
        with pytest.raises((BackendFailedError, BlockCorruptError)):
            await store.read(*held, _loose(BLOCK_BYTES))
        hung.set()
        await asyncio.sleep(0.1)
        assert store.used_bytes == 0

    run_virtually(scenario())


def test_a_caller_whose_memory_the_device_uses_waits_until_it_is_done() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        hung = volume.hold("write")
        slot = store.reserve(ANNA, BLOCK_BYTES)
        hung.set()
        await put(store, 1)
        hung.clear()
        view = _aligned(2)
        writing = asyncio.create_task(store.write(slot, record(2, view, slot), view))
        await asyncio.sleep(1)
        writing.cancel()
        await asyncio.sleep(10)
        assert not writing.done()
        hung.set()
        await asyncio.wait([writing])
        assert writing.cancelled()

    run_virtually(scenario())
