"""Page-aligned scratch memory for moves, made once and used again. No I/O."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.scratch import scratch

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

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
