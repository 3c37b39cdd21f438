"""One segment file of a record store: creation, who uses it, what its slots hold, deletion.

What is noted of each slot until the index is written takes two thirds of its entry there (`SlotNotes`), and a set of
slots a byte for each, where a set of Python takes a hundred (`OffsetSet`).
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstrata_agent.backends.base import IDENTITIES, IDENTITY, IDENTITY_NAMES, identity_of
from kvstrata_agent.backends.file.index_format import FIELDS, Kinds, SegmentName
from kvstrata_agent.backends.recovered import alike
from kvstrata_agent.backends.slot_table import FREE, Extent
from kvstrata_api.blocks import LayoutId

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstrata_agent.backends.base import Columns, Record, SlotRef
    from kvstrata_agent.backends.file.volume import Volume, VolumeFile
    from kvstrata_api.blocks import ScopeId

_STORED_BYTES_MAX: Final = 2**32 - 1
TRAITS_MAX: Final = 1 << 16


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


_TRAITS: Final = struct.Struct("<I")
"""Number of what the record has in common with others, before the identity; 0: nothing to list. The slot's table knows
the stamp."""
_IDENTITY_AT: Final = _TRAITS.size
NOTE_BYTES: Final = _IDENTITY_AT + IDENTITY.size
_NOTE_FIELDS: Final = np.dtype([("traits", "<u4"), *IDENTITIES.descr])

_NOTHING: Final = bytes(NOTE_BYTES)

_Key = tuple[LayoutId, str, int, int, int]


class Traits:
    """What many records have in common, by number from 1. Numbers are kept: a store has few."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._numbers: dict[_Key, int] = {}
        self._table = np.zeros(16, FIELDS)

    def number(self, record: Record) -> int | None:
        """Return the number of a record's traits, new ones included; None when the index or a note has none left."""
        key = (record.layout_id, record.codec, record.epoch, record.raw_bytes, len(record.parent))
        found = self._numbers.get(key)
        return self._add(key) if found is None else found

    def _add(self, key: _Key) -> int | None:
        layout_id, codec, epoch, raw_bytes, parent_length = key
        kind, number = self.kinds.number(layout_id, codec), len(self._numbers) + 1
        if kind is None or number > TRAITS_MAX:
            return None
        if number == len(self._table):
            self._table = np.concatenate([self._table, np.zeros(number, FIELDS)])
        row = self._table[number : number + 1]
        row["kind"], row["epoch"], row["raw_bytes"], row["parent_length"] = kind, epoch, raw_bytes, parent_length
        self._numbers[key] = number
        return number

    def entries(self, numbers: NDArray[np.uint32]) -> NDArray[np.void]:
        """Entries of the index with what the numbers stand for and nothing else; all zeros for 0."""
        entries: NDArray[np.void] = self._table.take(numbers)
        return entries


class SlotNotes:
    """Notes of the slots of one segment: records that are durable and not dropped (`Notes`)."""

    def __init__(self, slots: int) -> None:
        self.buffer = bytearray(slots * NOTE_BYTES)

    def position(self, index: int) -> int:
        """Where the identity of what lies in a slot begins."""
        return index * NOTE_BYTES + _IDENTITY_AT

    def holds(self, index: int, identity: bytes) -> bool:
        """True where it is noted that this lies in a slot."""
        at = index * NOTE_BYTES
        is_noted = at < len(self.buffer) and _TRAITS.unpack_from(self.buffer, at)[0] != 0
        return is_noted and self.buffer.startswith(identity, at + _IDENTITY_AT)

    def holds_all(self, indices: NDArray[np.intp], identities: NDArray[np.void]) -> bool:
        """The same of identities in as many slots."""
        notes = np.frombuffer(self.buffer, _NOTE_FIELDS)
        if indices.max() >= len(notes) or not notes["traits"][indices].all():
            return False
        return self.identities(indices).tobytes() == identities.tobytes()

    def identities(self, indices: NDArray[np.intp]) -> NDArray[np.void]:
        """Identities of slots; a copy."""
        notes = np.frombuffer(self.buffer, np.uint8).reshape(-1, NOTE_BYTES)
        found: NDArray[np.void] = notes[indices, _IDENTITY_AT:].view(IDENTITIES)[:, 0]
        return found

    def set(self, index: int, record: Record, traits: Traits) -> bool:
        """Note a record; False when there are no words for it, and nothing was noted."""
        number = traits.number(record)
        if number is None or record.stored_bytes > _STORED_BYTES_MAX:
            return False
        self.buffer[index * NOTE_BYTES : (index + 1) * NOTE_BYTES] = _TRAITS.pack(number) + identity_of(record)
        return True

    def set_all(self, found: Columns, traits: Traits) -> bool:
        """Note what an earlier run has left; False when there are no words for some of it, and nothing was noted."""
        firsts, of = alike(found.records)
        numbers = [traits.number(found.record(first)) for first in firsts]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers) or found.records["stored_bytes"].max() > _STORED_BYTES_MAX:
            return False
        notes = np.zeros(len(found), _NOTE_FIELDS)
        notes["traits"] = np.array(known, np.uint32)[of]
        for name in IDENTITY_NAMES:
            notes[name] = found.records[name]
        np.frombuffer(self.buffer, _NOTE_FIELDS)[found.indices] = notes
        return True

    def clear(self, index: int) -> None:
        """Note that a slot holds nothing any more."""
        self.buffer[index * NOTE_BYTES : (index + 1) * NOTE_BYTES] = _NOTHING

    def entries(self, stamps: Sequence[int], traits: Traits) -> memoryview:
        """What the index lists of each slot, whose present use has this stamp: one `ENTRY_BYTES` after the other."""
        notes = np.frombuffer(self.buffer, _NOTE_FIELDS)
        entries = traits.entries(notes["traits"])
        entries["stamp"] = np.where(notes["traits"] != 0, np.asarray(stamps, np.uint64), 0)
        for name in IDENTITY_NAMES:
            entries[name] = notes[name]
        return memoryview(entries.view(np.uint8).data)


assert _NOTE_FIELDS.itemsize == NOTE_BYTES, "both describe the same note"


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
    pending_discards: dict[int, float] = field(default_factory=dict)
    """Offsets of dropped records that are still there, and when they were dropped."""
    discarding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while holes are punched: a late one must not hit the next record."""
    users: int = 0
    writers: int = 0
    """Users that change the file."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nobody uses the file."""
    busy: dict[int, int] = field(default_factory=dict)
    """Transfers under way at each offset; such a slot is not used again before they end, even when it is dropped."""
    deferred_drops: dict[int, SlotRef] = field(default_factory=dict)
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
        """What the index would list of the slots now."""
        return self.notes.entries(self.stamps, traits)

    @property
    def is_settled(self) -> bool:
        """True when the medium holds what the entries state, and nothing else that a start could find."""
        return not self.writers and not self.pending_discards

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
