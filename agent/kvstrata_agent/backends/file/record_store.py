"""Record store on a volume: segments of equal slots, each record with its own header page, and an index of them all.

Slots are filled in log order and a freed slot is used again in place (threaded logging), so nothing is copied
to make room. The bytes of all files never exceed the capacity. docs/format.md: the format, and what a crash leaves.

Which dropped records are erased now, and which wait because their slots are likely to be written again soon. Pure.

A slot that is written again needs no hole, and a slot that stays allocated is written over at the disk's full speed: on
ext4 a write into new or punched blocks costs a third more (docs/decisions.md). A tier that is full drops what it
replaces, so nearly all of its slots are used again within seconds. What belongs to a scope that has nothing left in the
tier goes at once: it was erased, or nobody uses it.

How a record store's capacity is shared out between segments, markers and the index. Pure.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.backends.base import (
    Capabilities,
    ColumnarBackend,
    Columns,
    GroupBackend,
    MemoryAwayError,
    OptionalCapabilities,
    Reading,
    Record,
    SealingBackend,
    SlotRef,
    Writing,
)
from kvstrata_agent.backends.file.claim import Claim, start_run
from kvstrata_agent.backends.file.index_file import IndexFile
from kvstrata_agent.backends.file.index_format import BODY_OFFSET, Kinds, body_bytes_max, entry_sealing
from kvstrata_agent.backends.file.recovery import Recovery
from kvstrata_agent.backends.file.segment import Segment, Traits
from kvstrata_agent.backends.file.transfers import Laid, Transfers
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, Volume, VolumeFile
from kvstrata_agent.backends.record.encryption import DataKeys
from kvstrata_agent.backends.record.layout import HEADER_BYTES, form_of
from kvstrata_agent.backends.recovered import each
from kvstrata_agent.backends.slot_table import Extent, SlotTable, target_extent_bytes
from kvstrata_agent.backends.threads import Later
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import BackendFailedError, InvalidInputError, KvStrataError, TierFullError
from kvstrata_api.units import MIB

HOLD_S: Final = 20.0
"""How long the bytes of a dropped block stay on the medium at most, beyond the batch that erases them."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be erased."""

    extents: tuple[int, ...]
    """Empty ones, which go as a whole."""
    graves: Mapping[int, frozenset[int]]
    """Offsets of dropped records, by extent."""


def due(extents: Iterable[Extent], graves: Mapping[int, Mapping[int, float]], before_s: float) -> Due:
    """What was dropped at `before_s` or earlier, and everything of scopes that have no block left.

    `graves` maps extents to the offsets of their dropped records and when they were dropped.
    """
    known = tuple(extents)
    alive = {extent.scope for extent in known if extent.live}
    whole: list[int] = []
    parts: dict[int, frozenset[int]] = {}
    for extent in known:
        dropped = graves.get(extent.id, {})
        is_scope_gone = extent.scope not in alive
        old = frozenset(offset for offset, at_s in dropped.items() if is_scope_gone or at_s <= before_s)
        if extent.live == 0 and len(old) == len(dropped):
            whole.append(extent.id)
        elif old:
            parts[extent.id] = old
    return Due(tuple(whole), parts)


_SEGMENT_PARTS: Final = 32
_SEGMENT_BYTES_MAX: Final = 64 * MIB
_SEGMENTS_MAX: Final = 8192
"""One descriptor each."""

_MARKERS_BYTES: Final = 2 * DIRECT_BYTES
"""The store's marker, and the one that takes its place."""


def segments_bytes_max(capacity_bytes: int, segments: int, slots: int) -> int:
    """Bytes that all segments may take when there are so many of them, with so many slots.

    The rest is for the markers and for two indexes: the old one and the one that takes its place.
    """
    return capacity_bytes - _MARKERS_BYTES - 2 * (BODY_OFFSET + body_bytes_max(segments, slots))


def target_bytes(capacity_bytes: int) -> int:
    """Size that segments have where it holds one slot at least."""
    return target_extent_bytes(
        capacity_bytes, parts=_SEGMENT_PARTS, most_bytes=_SEGMENT_BYTES_MAX, count_max=_SEGMENTS_MAX
    )


_CLASS_BITS: Final = 6
"""Strides at most 1/32 longer than needed; codecs that differ by a few per cent share two or three strides."""

_FULL_PAUSE_S: Final = 5.0
"""After the disk was full, no new segment is tried for this long."""

_BURY_DELAY_S: Final = 0.5
"""Dropped records become holes in batches, this long after the first drop of a batch."""

_INDEX_DELAY_S: Final = 60.0
"""From the first change after an index to the next index: a start after a crash reads the headers of the segments
that were touched in between, and a million records cost 96 MB of writes each time."""


class RecordStore(OptionalCapabilities):
    """A tier of records in segment files (`TierBackend`)."""

    def __init__(
        self,
        claim: Claim,
        volume: Volume,
        capacity_bytes: int,
        *,
        medium: str = "",
        clock: Callable[[], float] | None = None,
        keys: DataKeys | None = None,
    ) -> None:
        """Use `open_store`. `close` releases `volume`; `medium` replaces its name; no `clock` means the loop's."""
        self._claim = claim
        self._form = form_of(claim.secret, keys)
        self._volume = volume
        self._medium = medium or volume.medium
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._capacity_bytes = capacity_bytes
        self._table = SlotTable(
            capacity_bytes=capacity_bytes,
            target_bytes=target_bytes(capacity_bytes),
            page_bytes=DIRECT_BYTES,
            alignment_bytes=DIRECT_BYTES,
            class_bits=_CLASS_BITS,
            first_stamp=claim.first_stamp,
        )
        self._table.keeps_empty = True
        self.skip_stamps = self._table.skip_stamps  # For several stores that are one tier.
        self._segments: dict[int, Segment] = {}
        self._traits = Traits(Kinds())
        self._index = IndexFile(volume, claim.secret, claim.run, entry_sealing(self._form))
        places = (self._table, self._segments, self._traits, self._index)
        self._indexing = Later(_INDEX_DELAY_S, self.write_index)
        self._recovery = Recovery(volume, self._form, *places, self._fit, self._indexing.ask, self._fail)
        self._transfers = Transfers(self._form, self)
        self._deletions: set[asyncio.Task[None]] = set()
        self._burial = Later(_BURY_DELAY_S, self._bury_due)
        self._stuck_bytes = 0
        """Bytes of segments that could not be deleted; they may be there until the next start."""
        self._full_until_s = float("-inf")
        self._last_error = ""
        self._is_closed = False
        self._fit(0, 0)
        if self._table.capacity_bytes < HEADER_BYTES + DIRECT_BYTES:
            raise InvalidInputError(f"{volume.where}: capacity of {capacity_bytes} B holds no record")

    @property
    def group(self) -> GroupBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def columnar(self) -> ColumnarBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def sealing(self) -> SealingBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """State what the medium can do."""
        return Capabilities(
            medium=self._medium,
            is_memory=False,
            survives_restart=True,
            is_emulated=False,
            alignment_bytes=DIRECT_BYTES,
            fallback=self._volume.fallback,
            is_encrypted=self._form.is_sealed,
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the files may take in all."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now, headers and rounding included."""
        return self._table.used_bytes

    @property
    def last_error(self) -> str:
        """The last failure of the medium; empty when there was none."""
        return self._last_error

    def _fit(self, new_segments: int, new_slots: int) -> None:
        """Set what the segments may take with so many new ones."""
        slots = new_slots + sum(s.name.slots for s in self._segments.values())
        room_bytes = self._capacity_bytes - self._stuck_bytes - self._recovery.waiting_bytes
        self._table.capacity_bytes = segments_bytes_max(room_bytes, new_segments + len(self._segments), slots)

    def _fit_one_more(self, need_bytes: int) -> None:
        self._fit(1, max(1, self._table.target_bytes // self._table.stride(need_bytes)))

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take a slot for a record of `size_bytes`. See `TierBackend`."""
        need_bytes = HEADER_BYTES + size_bytes
        slot = self._table.take(scope, need_bytes)
        if slot is None:
            self._open(scope, need_bytes)
            slot = self._table.take(scope, need_bytes)
        assert slot is not None, "a new segment has room"
        return slot

    def _open(self, scope: ScopeId, need_bytes: int) -> None:
        if self._clock() < self._full_until_s:
            raise TierFullError(self._last_error, delay_s=_FULL_PAUSE_S)
        # A disk that was full once gets back what is empty before it is asked for more.
        empty = self._table.forget_empty() if self._full_until_s > float("-inf") else ()
        self._fit_one_more(need_bytes)
        opening = self._table.open(scope, need_bytes)
        for extent in (*empty, *opening.retired):
            self._delete(extent)
        self._segments[opening.extent.id] = Segment.of(opening.extent, self._volume)

    def _delete(self, extent: Extent) -> None:
        segment = self._segments.pop(extent.id)
        task = asyncio.ensure_future(self._remove(segment))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _remove(self, segment: Segment) -> None:
        try:
            await segment.delete()
        except OSError as e:
            self._stuck_bytes += segment.name.size_bytes
            self._last_error = f"{self._where(segment)}: {e.strerror or e}"

    def _where(self, segment: Segment) -> str:
        return f"{self._volume.where}/{segment.name}"

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Write header and payload in one transfer, durable on return. See `TierBackend`."""
        (end,) = await self._transfers.write_group([Writing(slot, stored[: record.stored_bytes], record)])
        if isinstance(end, KvStrataError):
            raise end

    async def write_group(self, writings: Sequence[Writing]) -> Sequence[Record | KvStrataError]:
        """Write records of neighbouring slots in one transfer. See `GroupBackend`."""
        return await self._transfers.write_group(writings)

    async def store(self, run: Sequence[Laid], parts: Callable[[], Sequence[memoryview]]) -> None:
        """Write neighbouring records. See `Places`."""
        slots = [one.slot for one in run]
        offsets = [slot.offset for slot in slots]
        async with self._using(slots, is_writing=True) as (segment, file):
            for offset in offsets:
                segment.graves.pop(offset, None)
            await self._index.touch(slots[0].extent)
            self._indexing.ask()
            if segment.burying.locked():
                async with segment.burying:
                    pass
            if not segment.holes.isdisjoint(offsets):
                await self._transfers.apart.outlive(asyncio.ensure_future(self._fill_holes(slots, segment, file)))
            segment.written.update(offsets)
            await file.write(offsets[0], parts)
            for one in run:
                if isinstance(one.end, Record):
                    segment.enter(one.slot, one.end, self._traits)

    async def _fill_holes(self, slots: Sequence[SlotRef], segment: Segment, file: VolumeFile) -> None:
        """Give neighbouring slots their blocks back; those that have theirs lose nothing."""
        offsets = [slot.offset for slot in slots]
        with segment.using(is_writing=True), segment.moving(offsets):
            await file.allocate(offsets[0], sum(slot.size_bytes for slot in slots))
            segment.holes.difference_update(offsets)
        self._bury_doomed(segment)

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Read the payload and verify it. See `TierBackend`."""
        (end,) = await self._transfers.read_group([Reading(slot, record, into)])
        if isinstance(end, KvStrataError):
            raise end

    async def read_group(self, readings: Sequence[Reading]) -> Sequence[bytes | KvStrataError]:
        """Read records and verify them. See `GroupBackend`."""
        return await self._transfers.read_group(readings)

    async def load(self, ranges: Sequence[tuple[SlotRef, int, memoryview]], then: Callable[[], None]) -> None:
        """Read payloads. See `Places`."""
        async with self._using([slot for slot, _, _ in ranges], is_writing=False) as (_, file):
            await file.read([(slot.offset + skip_bytes, into) for slot, skip_bytes, into in ranges], then)

    def is_live(self, slot: SlotRef) -> bool:
        """See `Places`."""
        segment = self._segments.get(slot.extent)
        return segment is not None and self._table.is_live(slot) and segment.doomed.get(slot.offset) != slot

    @asynccontextmanager
    async def _using(self, slots: Sequence[SlotRef], *, is_writing: bool) -> AsyncIterator[tuple[Segment, VolumeFile]]:
        """Use the file of slots; an I/O error of the medium closes the segment for new blocks.

        Raises `BackendFailedError`.
        """
        segment = self._segments.get(slots[0].extent)
        gone = next((s for s in slots if segment is None or segment.doomed.get(s.offset) == s), None)
        if segment is None or gone is not None:
            raise BackendFailedError(f"segment {slots[0].extent} is gone: slot at {slots[0].offset} was dropped")
        if not segment.is_made and self._deletions:
            await asyncio.wait(self._deletions)  # Their bytes are given back before new ones are taken.
        try:
            with segment.using(is_writing=is_writing), segment.moving([slot.offset for slot in slots]):
                yield segment, await segment.opened()
        except OSError as e:
            if e.errno == errno.EFAULT:
                raise MemoryAwayError(f"{self._where(segment)}: memory was taken away under a transfer") from e
            raise await self._failed(segment, e) from e
        finally:
            self._bury_doomed(segment)

    async def _failed(self, segment: Segment, error: OSError) -> BackendFailedError:
        """Retire the segment; nothing on it is tried again except reads of what was written before."""
        segment.is_listable = False
        self._last_error = f"{self._where(segment)}: {error.strerror or error}"
        if not segment.is_made:
            self._full_until_s = self._clock() + _FULL_PAUSE_S
            with suppress(OSError):
                free_bytes = await self._volume.free_bytes()
                self._last_error += f"; {segment.name.size_bytes} B wanted, {free_bytes} B free"
        empty = self._table.close_extent(segment.name.id)
        if empty is not None:
            self._delete(empty)
        return BackendFailedError(self._last_error)

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back; unless it is used again it becomes a hole, so that it stays dropped after a crash.

        That happens within a second when the scope has no block left, else after `HOLD_S`. A slot with a transfer
        under way is given back when that ends.
        """
        if not self._table.is_live(slot):
            return
        segment = self._segments[slot.extent]
        if slot.offset in segment.busy:
            segment.doomed[slot.offset] = slot
            return
        segment.leave(slot.offset)
        extent = self._table.drop(slot)
        if extent is not None:
            self._delete(extent)
        elif slot.offset in segment.written:
            segment.graves[slot.offset] = self._clock()
            self._burial.ask()
        elif self._table.is_empty(slot.extent):
            self._burial.ask()

    def _bury_doomed(self, segment: Segment) -> None:
        for slot in [s for offset, s in segment.doomed.items() if offset not in segment.busy]:
            del segment.doomed[slot.offset]
            self.drop(slot)

    async def _bury_due(self) -> None:
        await self._bury(HOLD_S)
        if any(s.graves for s in self._segments.values()):
            self._burial.ask()

    async def _bury(self, hold_s: float = 0.0) -> None:
        """Erase what was dropped at least `hold_s` ago, and what no scope's block needs any more."""
        graves = {i: s.graves for i, s in self._segments.items() if s.graves}
        now = due(self._table.extents.values(), graves, self._clock() - hold_s)
        for extent in now.extents:
            self._delete(self._table.forget(extent))  # The payloads go too.
        for extent, offsets in now.graves.items():
            if extent in self._segments:
                await self._bury_in(self._segments[extent], offsets)

    async def _bury_in(self, segment: Segment, offsets: frozenset[int]) -> None:
        try:
            with segment.using(is_writing=True):
                file = await segment.opened()
                await self._index.touch(segment.name.id)
                self._indexing.ask()
                async with segment.burying:
                    due_now = {o for o in offsets if segment.graves.pop(o, None) is not None}
                    await segment.punch(file, due_now)
        except OSError as e:
            await self._failed(segment, e)

    async def write_index(self) -> None:
        """Write the index now; a failure leaves the start after this run more headers to read."""
        try:
            await self._index.replace(self._segments.values(), self._traits, self._table.next_extent)
        except OSError as e:
            self._last_error = f"{self._volume.where}: index: {e.strerror or e}"

    def _fail(self, error: OSError) -> BackendFailedError:
        self._last_error = f"{self._volume.where}: {error.strerror or error}"
        return BackendFailedError(self._last_error)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity; returns the segments that close. See `TierBackend`."""
        self._capacity_bytes = capacity_bytes
        self._table.target_bytes = target_bytes(capacity_bytes)
        self._fit(0, 0)
        closing, released = self._table.resize(self._table.capacity_bytes)
        for extent in released:
            self._delete(extent)
        return closing

    def relief(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        """Segments whose emptying makes room for such a slot. See `TierBackend`."""
        need_bytes = HEADER_BYTES + size_bytes
        self._fit_one_more(need_bytes)
        return frozenset() if self._table.has_room(scope, need_bytes) else self._table.relief(need_bytes)

    def compact(self) -> frozenset[int]:
        """Close sparse extents. See `TierBackend`."""
        return self._table.compact()

    def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks of earlier runs; raises `BackendFailedError` when the volume cannot be listed or cleaned."""
        return each(self._recovery.run())

    def recover_columns(self) -> AsyncIterator[Columns]:
        """The same, a segment at a time. See `ColumnarBackend`."""
        return self._recovery.run()

    @property
    def waiting(self) -> frozenset[bytes]:
        """Tags of scopes whose key is missing. See `SealingBackend`."""
        return self._recovery.waiting

    def recover_waiting(self, tag: bytes) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks that waited for a key. See `SealingBackend`."""
        return each(self._recovery.resume(tag))

    async def forget_waiting(self, tag: bytes) -> None:
        """Remove what waits for a key. See `SealingBackend`."""
        await self._recovery.forget(tag)

    async def close(self) -> None:
        """Make drops durable, write the index, close all files and let go of the volume. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._burial.stop()
        self._indexing.stop()
        await self._transfers.apart.settle()
        await self._bury()
        await asyncio.gather(*self._deletions)
        if self._segments:
            await self.write_index()
        await asyncio.gather(self._index.close(), *(s.close() for s in self._segments.values()))
        await self._volume.close()


async def open_store(
    volume: Volume,
    capacity_bytes: int,
    *,
    medium: str = "",
    clock: Callable[[], float] | None = None,
    keys: DataKeys | None = None,
) -> RecordStore:
    """Begin a run of the store in `volume`, which stays the caller's on `InvalidInputError` and `OSError`.

    With `keys` every record is sealed under the data key of its scope.
    """
    claim = await start_run(volume, is_sealed=keys is not None)
    return RecordStore(claim, volume, capacity_bytes, medium=medium, clock=clock, keys=keys)
