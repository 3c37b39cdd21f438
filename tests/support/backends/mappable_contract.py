"""The laws of memory that engines map, on top of those of every backend."""

import asyncio
import mmap
import os
from contextlib import suppress
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import MappableBackend
from support.backends import contract as sizes
from support.backends.contract import ANNA, BOB, BackendContract, content, fill, get, record


class MappableContract(BackendContract):
    """For memory that engines map."""

    async def test_what_a_client_writes_through_its_mapping_is_in_the_slot(self, backend: MappableBackend) -> None:
        slot = backend.reserve(ANNA, sizes.BLOCK_BYTES)
        size = backend.extent_bytes(slot.extent)
        with mmap.mmap(backend.extent_fd(slot.extent, is_writable=True), size) as mapped:
            mapped[slot.offset : slot.offset + sizes.BLOCK_BYTES] = content(8)

        assert backend.view(slot)[: sizes.BLOCK_BYTES] == content(8)
        assert backend.extent_view(slot.extent)[slot.offset : slot.offset + sizes.BLOCK_BYTES] == content(8)
        assert await get(backend, slot, record(8, content(8), slot)) == content(8)

    async def test_a_read_only_descriptor_refuses_a_writable_mapping(self, backend: MappableBackend) -> None:
        slot = backend.reserve(ANNA, sizes.BLOCK_BYTES)
        fd = backend.extent_fd(slot.extent, is_writable=False)

        with pytest.raises(PermissionError):
            mmap.mmap(fd, backend.extent_bytes(slot.extent))

    @pytest.mark.skipif(os.getuid() != 0, reason="a client of another uid can be made by root only")
    async def test_a_client_of_another_uid_cannot_reopen_a_read_only_descriptor_writable(
        self, backend: MappableBackend
    ) -> None:
        slot = backend.reserve(ANNA, sizes.BLOCK_BYTES)
        fd = backend.extent_fd(slot.extent, is_writable=False)

        assert _reopen_as_nobody(fd) == "refused"
        assert _reopen_as_nobody(backend.extent_fd(slot.extent, is_writable=True), os.O_RDONLY) == "refused"

    async def test_memory_that_changes_scope_is_zero_and_out_of_reach_of_the_old_mapping(
        self, backend: MappableBackend
    ) -> None:
        slots = fill(backend, ANNA)
        fd, size = backend.extent_fd(slots[0].extent, is_writable=True), backend.extent_bytes(slots[0].extent)
        with mmap.mmap(fd, size) as kept:
            for slot in slots:
                backend.view(slot)[:] = b"\xaa" * slot.size_bytes
                backend.drop(slot)
            after = fill(backend, BOB)
            assert all(not any(bytes(backend.view(s))) for s in after)

            for slot in after:
                backend.view(slot)[:] = b"\xbb" * slot.size_bytes
            assert b"\xbb" not in kept[:]
            assert slots[0].extent in {s.extent for s in after} or b"\xaa" not in kept[:]

    async def test_an_extent_that_stays_empty_is_given_back(
        self, backend: MappableBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstrata_agent.backends.memory.arena._IDLE_S", 0.01)
        gone: list[int] = []
        backend.on_release(gone.append)
        slot, kept = backend.reserve(ANNA, sizes.BLOCK_BYTES), backend.reserve(BOB, sizes.BLOCK_BYTES)
        with mmap.mmap(backend.extent_fd(slot.extent, is_writable=True), backend.extent_bytes(slot.extent)) as mapped:
            backend.view(slot)[:] = b"\xcc" * slot.size_bytes
            backend.drop(slot)
            for _ in range(200):
                await asyncio.sleep(0.01)
                if not any(mapped[: slot.size_bytes]):
                    break

            assert not any(mapped[: slot.size_bytes])
        assert gone == [slot.extent]
        assert not any(bytes(backend.view(kept)))

    async def test_a_tier_that_ends_holds_no_memory_that_clients_still_have(self, backend: MappableBackend) -> None:
        slot = backend.reserve(ANNA, sizes.BLOCK_BYTES)
        fd = backend.extent_fd(slot.extent, is_writable=True)
        memory = os.fstat(fd)
        with mmap.mmap(fd, backend.extent_bytes(slot.extent)) as mapped:
            await backend.close()
            mapped[:1] = b"x"

            assert _descriptors_of(memory) == 1, "that of the mapping"
        assert _descriptors_of(memory) == 0

    async def test_those_who_asked_hear_of_an_extent_before_it_goes(self, backend: MappableBackend) -> None:
        gone: list[int] = []
        backend.on_release(gone.append)
        slots = fill(backend, ANNA)
        for slot in slots:
            backend.drop(slot)
        kept = {s.extent for s in fill(backend, BOB)}

        assert set(gone) == {s.extent for s in slots}
        assert kept.isdisjoint(gone)


def _descriptors_of(memory: os.stat_result) -> int:
    """How many of this process lead to a file."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += os.path.samestat(path.stat(), memory)
    return count


def _reopen_as_nobody(fd: int, flags: int = os.O_RDWR) -> str:
    """What a process of another uid gets that inherited the descriptor."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.open(f"/proc/self/fd/{fd}", flags)
            os.write(write_end, b"opened")
        except PermissionError:
            os.write(write_end, b"refused")
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as answer:
        return answer.read().decode()
