"""Some of a segment's slots, by their offsets: a byte for each slot, where a set takes a hundred. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class OffsetSet:
    """A set of multiples of `stride_bytes`, as many of them as there are flags. Methods do what those of a set do."""

    __slots__ = ("_flags", "_stride_bytes")

    def __init__(self, stride_bytes: int, flags: bytearray) -> None:
        """Take over `flags`: 1 for each slot that is in the set, else 0."""
        self._stride_bytes = stride_bytes
        self._flags = flags

    def __contains__(self, offset: int) -> bool:
        return bool(self._flags[offset // self._stride_bytes])

    def isdisjoint(self, offsets: Iterable[int]) -> bool:
        """True when none of the offsets is in the set."""
        return not any(offset in self for offset in offsets)

    def add(self, offset: int) -> None:
        """Put an offset into the set."""
        self._flags[offset // self._stride_bytes] = 1

    def discard(self, offset: int) -> None:
        """Take an offset out of the set, if it is there."""
        self._flags[offset // self._stride_bytes] = 0

    def update(self, offsets: Iterable[int]) -> None:
        """Put offsets into the set."""
        for offset in offsets:
            self.add(offset)

    def difference_update(self, offsets: Iterable[int]) -> None:
        """Take offsets out of the set."""
        for offset in offsets:
            self.discard(offset)
