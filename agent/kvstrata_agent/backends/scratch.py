"""Page-aligned memory of this process that blocks pass through, made once and used again. No I/O.

`ScratchPool` lends without waiting, for moves that are bounded elsewhere. `BoundedBuffers` is the bound of its user,
and a buffer of it may be in use by a thread or a device after its borrower has left.
"""

from __future__ import annotations

import asyncio
import mmap
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstrata_agent.backends.base import MediumIntactError
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_api.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_PAGE_BYTES: Final = 4096
"""Sizes are multiples of it: O_DIRECT takes the memory as it lies."""
HUGE_BYTES: Final = 2 * MIB
"""Huge page of x86-64, and of aarch64 with pages of 4 KiB. Where it is another size this only rounds up addresses."""

_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

KEPT_PER_SIZE: Final = 32
"""Buffers of one size kept for the next move; a path lets no more moves run at a time."""
SIZES_MAX: Final = 8
"""Sizes kept; a pool has one block size for each layout, and layouts are few."""
_BUFFERS_MAX: Final = 16
"""Twice the depth at which the measured disks saturate (8 transfers of 2 MiB)."""


def scratch(size_bytes: int) -> mmap.mmap:
    """Anonymous memory, page-aligned, of `size_bytes` at least. A child that is forked does not have it.

    A transfer pins its pages one by one, and a hash stops at the end of each: reading, verifying and copying 2 MiB took
    from 4 KiB pages 0.45 ms of processor time, from a huge one 0.31. Only whole huge pages are asked for, so nothing
    more is taken than was wanted.
    """
    memory = mmap.mmap(-1, round_up(size_bytes, HUGE_BYTES if size_bytes >= HUGE_BYTES else mmap.PAGESIZE), _FLAGS)
    memory.madvise(mmap.MADV_DONTFORK)  # Else a fork leaves the device with pages that one of both has copied.
    whole_bytes = size_bytes // HUGE_BYTES * HUGE_BYTES
    if whole_bytes:
        with suppress(OSError):  # A kernel without them.
            memory.madvise(mmap.MADV_HUGEPAGE, 0, whole_bytes)
    return memory


def _buffer(size_bytes: int) -> mmap.mmap:
    """The same. Raises `MediumIntactError` when there is no memory for it."""
    try:
        return scratch(size_bytes)
    except OSError as e:
        raise MediumIntactError(f"no memory for a buffer of {size_bytes} B: {e.strerror or e}") from e


class ScratchPool:
    """Lends buffers without waiting, and keeps a few of each size. Contents are whatever was there before."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """A buffer of `size_bytes`, page-aligned so that O_DIRECT takes it; back in the pool at the end.

        Raises `MediumIntactError` when there is no memory for it.
        """
        rounded = round_up(max(size_bytes, 1), _PAGE_BYTES)
        kept = self._free.setdefault(rounded, [])
        buffer = kept.pop() if kept else _buffer(rounded)
        try:
            with memoryview(buffer) as whole, whole[:size_bytes] as view:
                yield view
        finally:
            if len(kept) < KEPT_PER_SIZE:
                kept.append(buffer)
            if len(self._free) > SIZES_MAX:
                del self._free[next(iter(self._free))]


def address_of(view: memoryview) -> int:
    """Address of the first byte, of read-only views too; the view must stay alive while the address is used."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


@dataclass(slots=True)
class Loan:
    """A buffer that somebody uses."""

    view: memoryview
    user: asyncio.Future[Any] | None = None
    """What uses the buffer even after the borrower has left; the buffer is not lent again before it is done."""


class BoundedBuffers:
    """Lends at most so many buffers at a time, for payloads that do not lie where O_DIRECT wants them."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._permits = asyncio.Semaphore(_BUFFERS_MAX)

    @asynccontextmanager
    async def lend(self, size_bytes: int) -> AsyncIterator[Loan]:
        """Borrow a buffer of `size_bytes`, rounded up to the alignment; waits while all are in use.

        Raises `MediumIntactError` when there is no memory for it.
        """
        size = round_up(size_bytes, _PAGE_BYTES)
        await self._permits.acquire()
        try:
            buffer = self._take(size)
        except MediumIntactError:
            self._permits.release()
            raise
        loan = Loan(memoryview(buffer)[:size])
        try:
            yield loan
        finally:
            if loan.user is None or loan.user.done():
                self._give_back(buffer)
            else:
                loan.user.add_done_callback(lambda _: self._give_back(buffer))

    def _take(self, size_bytes: int) -> mmap.mmap:
        kept = self._free.pop() if self._free else None
        return kept if kept is not None and len(kept) >= size_bytes else _buffer(size_bytes)

    def _give_back(self, buffer: mmap.mmap) -> None:
        self._free.append(buffer)
        self._permits.release()
