"""Where NIXL puts blocks before they are verified: buffers of our own, given out and taken back. Pure.

NIXL may write into a target after its transfer was cancelled and the other agent removed (seen with UCX over TCP:
every byte of a 32 MiB read arrived after both). So a transfer never targets a slot: it targets a buffer here, which
stays taken until NIXL itself reports the end, however long the caller has gone.
"""

from bisect import bisect_left, insort
from typing import Final

from kvstrata_api.units import KIB, MIB

LANDING_BYTES: Final = 128 * MIB
"""Bytes on their way from all peers at once: four batches of eight pieces, 40 ms of a 25 Gbit/s link."""

_ALIGN_BYTES: Final = 4 * KIB


def padded_bytes(size_bytes: int) -> int:
    """Room that so many bytes take: buffers and the blocks in them begin at multiples of `_ALIGN_BYTES`."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Landing:
    """First-fit allocator of one region."""

    def __init__(self, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size_bytes)]
        """(offset, bytes), by offset, never adjacent."""
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """Bytes given out, rounding included."""
        return sum(self._taken.values())

    def take(self, size_bytes: int) -> int | None:
        """Offset of a buffer; None when there is no room for it now."""
        need = padded_bytes(size_bytes)
        for i, (offset, room) in enumerate(self._free):
            if room >= need:
                self._free[i : i + 1] = [(offset + need, room - need)] if room > need else []
                self._taken[offset] = need
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Make a buffer free again. It must have been taken."""
        size = self._taken.pop(offset)
        insort(self._free, (offset, size))
        at = bisect_left(self._free, (offset, size))
        for i in (at, at - 1):
            if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]
