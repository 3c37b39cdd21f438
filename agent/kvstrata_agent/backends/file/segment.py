"""One segment file of a record store: creation, who uses it, what its slots hold, deletion.

Some of a segment's slots, by their offsets: a byte for each slot, where a set takes a hundred. Pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstrata_agent.backends.file.segment_name import SegmentName
from kvstrata_agent.backends.file.slot_index import SlotNotes, Traits
from kvstrata_agent.backends.slot_table import FREE, Extent

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Iterable, Iterator

    from kvstrata_agent.backends.base import Record, SlotRef
    from kvstrata_agent.backends.file.volume import Volume, VolumeFile
    from kvstrata_agent.backends.recovered import Columns
    from kvstrata_api.blocks import ScopeId


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


@dataclass(slots=True, eq=False)
class Segment:
    """A file of equal slots of one scope. The file is made by the first write, not by `reserve`."""

    name: SegmentName
    scope: ScopeId
    volume: Volume
    stamps: array[int]
    """Stamp of the present use of each slot: the store's table keeps it."""
    notes: SlotNotes
    written: OffsetSet
    """Where a header may be on the medium."""
    holes: OffsetSet
    """Slots whose blocks may have been given back."""
    file: VolumeFile | None = None
    is_made: bool = False
    """True once the file is on the medium under its name."""
    is_listable: bool = True
    """False when the index has no words for one of its records, or the medium failed here."""
    graves: dict[int, float] = field(default_factory=dict)
    """Offsets of dropped records that are still there, and when they were dropped."""
    burying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while holes are punched: a late one must not hit the next record."""
    users: int = 0
    writers: int = 0
    """Users that change the file."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nobody uses the file."""
    busy: dict[int, int] = field(default_factory=dict)
    """Transfers under way at each offset; such a slot is not used again before they end, even when it is dropped."""
    doomed: dict[int, SlotRef] = field(default_factory=dict)
    """Slots that were dropped while they were busy."""
    _opening: asyncio.Task[VolumeFile] | None = None

    @classmethod
    def of(cls, extent: Extent, volume: Volume, *, is_made: bool = False) -> Segment:
        """Segment for a new extent; `is_made` for one that was found on the medium."""
        name = SegmentName(extent.id, extent.stride_bytes, len(extent.stamps))
        is_used = np.frombuffer(extent.stamps, np.uint64) != FREE
        written, holes = (
            OffsetSet(name.stride_bytes, bytearray((flags & is_made).tobytes())) for flags in (is_used, ~is_used)
        )
        notes = SlotNotes(name.slots)
        segment = cls(name, extent.scope, volume, extent.stamps, notes, written, holes, is_made=is_made)
        segment.idle.set()
        return segment

    def entries(self, traits: Traits) -> memoryview:
        """What the index says of the slots now."""
        return self.notes.entries(self.stamps, traits)

    @property
    def is_settled(self) -> bool:
        """True when the medium holds what the entries say, and nothing else that a start could find."""
        return not self.writers and not self.graves

    def enter(self, slot: SlotRef, record: Record, traits: Traits) -> None:
        """Note a record that is durable."""
        self.is_listable &= self.notes.set(slot.offset // self.name.stride_bytes, record, traits)

    def enter_all(self, found: Columns, traits: Traits) -> None:
        """Note the records that an earlier run has left."""
        self.is_listable &= self.notes.set_all(found, traits)

    def leave(self, offset: int) -> None:
        """Note that a slot holds nothing any more."""
        self.notes.clear(offset // self.name.stride_bytes)

    @contextmanager
    def using(self, *, is_writing: bool) -> Iterator[None]:
        """Keep the file from being closed or deleted."""
        self.users += 1
        self.writers += is_writing
        self.idle.clear()
        try:
            yield
        finally:
            self.users -= 1
            self.writers -= is_writing
            if self.users == 0:
                self.idle.set()

    @contextmanager
    def moving(self, offsets: Collection[int]) -> Iterator[None]:
        """Keep slots from being used again."""
        for offset in offsets:
            self.busy[offset] = self.busy.get(offset, 0) + 1
        try:
            yield
        finally:
            for offset in offsets:
                left = self.busy.pop(offset) - 1
                if left:
                    self.busy[offset] = left

    async def opened(self) -> VolumeFile:
        """Return the file, made when it is missing. Raises `OSError`. Cancelled at once: it is opened for others."""
        if self.file is None:
            if self._opening is None:
                self._opening = asyncio.ensure_future(self._open())
                self._opening.add_done_callback(self._opened)
            return await asyncio.shield(self._opening)
        return self.file

    def _opened(self, task: asyncio.Task[VolumeFile]) -> None:
        self._opening = None
        if not task.cancelled() and task.exception() is None:
            self.file, self.is_made = task.result(), True

    async def _open(self) -> VolumeFile:
        name = str(self.name)
        if self.is_made:
            return await self.volume.open(name)
        file = await self.volume.create(name, self.name.size_bytes)
        try:
            await self.volume.sync()
        except OSError:
            await file.close()
            with suppress(OSError):
                await self.volume.unlink(name)
            raise
        return file

    async def close(self) -> None:
        """Close the file once nobody uses it."""
        await self.idle.wait()
        if self._opening is not None:
            await asyncio.wait([self._opening])
            await asyncio.sleep(0)
        file, self.file = self.file, None
        if file is not None:
            await file.close()

    async def delete(self) -> None:
        """Remove the file, durable on return; its blocks go back to the file system, which trims them."""
        await self.close()
        if self.is_made:
            await self.volume.unlink(str(self.name))
            await self.volume.sync()

    async def punch(self, file: VolumeFile, offsets: Iterable[int]) -> None:
        """Turn slots into holes, durable on return; neighbours are punched as one."""
        ranges: list[tuple[int, int]] = []
        for offset in sorted(offsets):
            if ranges and sum(ranges[-1]) == offset:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + self.name.stride_bytes)
            else:
                ranges.append((offset, self.name.stride_bytes))
            self.holes.add(offset)
            self.written.discard(offset)
        await file.punch(ranges)
