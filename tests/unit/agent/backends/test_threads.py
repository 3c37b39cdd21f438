"""Laws of waiting for threads, of group sync and of what slow deletions hold up."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from kvstrata_agent.backends.file.posix import PosixVolume
from kvstrata_agent.backends.file.transfers import is_direct
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.memory.mapping import make_memfd
from kvstrata_agent.backends.scratch import BoundedBuffers
from kvstrata_agent.backends.threads import in_thread
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, content, fill, put, record
from support.backends.record_stores import buffered_store

pytestmark = pytest.mark.unit


async def test_a_cancelled_caller_leaves_only_when_the_thread_is_done() -> None:
    go, done = threading.Event(), []

    def work() -> None:
        go.wait(5)
        done.append(True)

    waiting = asyncio.create_task(in_thread(None, work))
    await asyncio.sleep(0)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    go.set()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done


async def test_a_failure_in_the_thread_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(None, partial(divmod, 1, 0))


def _files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_room_on_disk_is_given_back_before_more_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = PosixVolume.unlink

    async def unlink_slowly(self: PosixVolume, name: str) -> None:
        await asyncio.sleep(0.05)
        await unlink(self, name)

    monkeypatch.setattr(PosixVolume, "unlink", unlink_slowly)
    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    slots = fill(store, ANNA)
    for slot in slots:
        await store.write(slot, record(1, content(1), slot), content(1))
    for slot in slots:
        store.drop(slot)

    await put(store, 2, BOB, CAPACITY_BYTES // 2)

    assert sum(p.stat().st_size for p in _files(tmp_path)) <= CAPACITY_BYTES
    await store.close()


async def test_no_byte_of_an_earlier_block_is_left_in_a_shorter_ones_padding(tmp_path: Path) -> None:
    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    secret = memoryview(b"canary--" * (BLOCK_BYTES // 8))
    slot = store.reserve(ANNA, BLOCK_BYTES)
    await store.write(slot, record(1, secret, slot), secret)
    other, _ = await put(store, 2, BOB, BLOCK_BYTES - 100)

    assert other.extent != slot.extent
    path = next(p for p in _files(tmp_path) if p.name.startswith(f"seg-{other.extent:08x}-"))
    assert b"canary" not in path.read_bytes()
    await store.close()


async def test_buffers_are_aligned_bounded_and_used_again() -> None:
    buffers = BoundedBuffers()
    inside = most = 0

    async def borrow(size_bytes: int) -> None:
        nonlocal inside, most
        async with buffers.lend(size_bytes) as loan:
            inside += 1
            most = max(most, inside)
            assert is_direct(loan.view)
            assert size_bytes <= len(loan.view) < size_bytes + DIRECT_BYTES
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(borrow(1 + 977 * n) for n in range(100)))

    assert most == 16


def test_memory_knows_where_direct_io_can_go() -> None:
    extent = make_memfd(4 * DIRECT_BYTES, 4096)

    assert is_direct(extent.view)
    assert not is_direct(extent.view[1:])
    assert not is_direct(extent.view[:100])
    assert not is_direct(memoryview(bytes(DIRECT_BYTES + 1))[1:])
    extent.release()
