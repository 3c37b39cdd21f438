"""Memory of this process that blocks pass through, in huge pages where the kernel has some to give. No I/O.

Page-aligned scratch memory for moves, made once and used again. No I/O.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.slot_table import round_up
from kvstrata_api.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


HUGE_BYTES: Final = 2 * MIB
"""Huge page of x86-64, and of aarch64 with pages of 4 KiB. Where it is another size this only rounds up addresses."""

_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


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


KEPT_PER_SIZE: Final = 32
"""Buffers of one size kept for the next move; the gate lets no more moves run at a time."""
SIZES_MAX: Final = 8
"""Sizes kept; a pool has one block size for each layout, and layouts are few."""
PAGE_BYTES: Final = 4096


class Buffers:
    """Lends scratch buffers. Contents are whatever was there before."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[memoryview]:
        """A buffer of `size_bytes`, page-aligned so that O_DIRECT takes it; back in the pool at the end."""
        rounded = -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        kept = self._free.setdefault(rounded, [])
        buffer = kept.pop() if kept else scratch(rounded)
        try:
            with memoryview(buffer) as whole, whole[:size_bytes] as view:
                yield view
        finally:
            if len(kept) < KEPT_PER_SIZE:
                kept.append(buffer)
            if len(self._free) > SIZES_MAX:
                del self._free[next(iter(self._free))]
