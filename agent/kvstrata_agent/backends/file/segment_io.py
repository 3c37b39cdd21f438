"""The segment files of one store, slot by slot: whole runs of records written and read, dropped ones discarded.

A slot that is written again needs no hole, and a slot that stays allocated is written over at the disk's full speed: on
ext4 a write into new or punched blocks costs a third more (docs/decisions/072). A tier that is full drops what it
replaces, so nearly all of its slots are used again within seconds: what was dropped waits for that (`plan_discards`).
What belongs to a scope that has nothing left in the tier goes at once: it was erased, or nobody uses it.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import MemoryAwayError, Record
from kvstrata_agent.backends.threads import Apart, Later, together
from kvstrata_api.errors import BackendFailedError, KvStrataError
from kvstrata_api.units import KIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from kvstrata_agent.backends.base import SlotRef, Writing
    from kvstrata_agent.backends.file.index_file import IndexFile
    from kvstrata_agent.backends.file.segment import Segment, Traits
    from kvstrata_agent.backends.file.volume import Volume, VolumeFile
    from kvstrata_agent.backends.slot_table import Extent, SlotTable

HOLD_S: Final = 20.0
"""How long the bytes of a dropped block stay on the medium at most, beyond the batch that erases them."""

FULL_PAUSE_S: Final = 5.0
"""After the disk was full, no new segment is tried for this long."""

_DISCARD_DELAY_S: Final = 0.5
"""Dropped records become holes in batches, this long after the first drop of a batch."""

_INDEX_DELAY_S: Final = 60.0
"""From the first change after an index to the next index: a start after a crash reads the headers of the segments
that were touched in between, and a million records cost 96 MB of writes each time."""

_GRACE_S: Final = 1.0
"""A cancelled call waits so long for the medium; then the slot and the store's own buffer wait on without it."""

_GAP_BYTES_MAX: Final = 128 * KIB
"""Unused ends of slots up to this are written over with zeros: a write of its own costs more. A slot of 2 MiB leaves
60 KiB; the ends of larger ones break a run."""

_ZEROS: Final = memoryview(mmap.mmap(-1, _GAP_BYTES_MAX)).toreadonly()


@dataclass(slots=True, eq=False)
class LaidOutRecord:
    """A record as it goes to its slot."""

    writing: Writing
    parts: tuple[memoryview, ...]
    """What lies in the slot from its start: multiples of the alignment, at the alignment."""
    lay_out: Callable[[Record], None]
    """What fills the first part."""
    end: Record | KvStrataError
    """The record that is written, or why there is none; what is durable is not known here."""

    @property
    def slot(self) -> SlotRef:
        """Where it goes."""
        return self.writing.slot

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(p) for p in self.parts)


def coalesced(records: Iterable[LaidOutRecord]) -> list[list[LaidOutRecord]]:
    """Records of neighbouring slots together, in the order of their offsets."""
    runs: list[list[LaidOutRecord]] = []
    for one in sorted(records, key=lambda r: (r.slot.extent, r.slot.offset)):
        if runs and _is_next(runs[-1][-1], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _is_next(before: LaidOutRecord, one: LaidOutRecord) -> bool:
    slot = before.slot
    has_place = (slot.extent, slot.offset + slot.size_bytes) == (one.slot.extent, one.slot.offset)
    return has_place and slot.size_bytes - before.size_bytes <= _GAP_BYTES_MAX


def lay_out_run(
    run: Sequence[LaidOutRecord], with_checksums: Callable[[Sequence[Writing]], Sequence[Record | KvStrataError]]
) -> list[memoryview]:
    """Lay the records of a run out; return what one write of it consists of, nothing when no record is left in it.

    `with_checksums` returns records with the checksums of their bytes. One that is not to be written leaves a page of
    zeros where its header would be, so that a run stays one write.
    """
    for one, record in zip(run, with_checksums([one.writing for one in run]), strict=True):
        if isinstance(record, KvStrataError):
            one.parts[0][:] = bytes(len(one.parts[0]))  # The buffer's last user may have been another scope.
        else:
            one.lay_out(record)
        one.end = record
    return parts_of(run) if any(isinstance(one.end, Record) for one in run) else []


def parts_of(run: Sequence[LaidOutRecord]) -> list[memoryview]:
    """Memory that one write of a run consists of."""
    parts: list[memoryview] = []
    for one in run:
        parts += one.parts
        gap_bytes = one.slot.size_bytes - one.size_bytes
        if gap_bytes and one is not run[-1]:
            parts.append(_ZEROS[:gap_bytes])
    return parts


@dataclass(frozen=True, slots=True)
class Discards:
    """What is to be erased."""

    extents: tuple[int, ...]
    """Empty ones, which go as a whole."""
    offsets: Mapping[int, frozenset[int]]
    """Of dropped records, by extent."""


def plan_discards(extents: Iterable[Extent], pending: Mapping[int, Mapping[int, float]], before_s: float) -> Discards:
    """What was dropped at `before_s` or earlier, and everything of scopes that have no block left. Pure.

    `pending` maps extents to the offsets of their dropped records and when they were dropped.
    """
    known = tuple(extents)
    alive = {extent.scope for extent in known if extent.live}
    whole: list[int] = []
    parts: dict[int, frozenset[int]] = {}
    for extent in known:
        dropped = pending.get(extent.id, {})
        is_scope_gone = extent.scope not in alive
        old = frozenset(offset for offset, at_s in dropped.items() if is_scope_gone or at_s <= before_s)
        if extent.live == 0 and len(old) == len(dropped):
            whole.append(extent.id)
        elif old:
            parts[extent.id] = old
    return Discards(tuple(whole), parts)


@dataclass(frozen=True, slots=True)
class StoreState:
    """The tables of one store: its slots, the files they lie in, and what the index will list of them."""

    table: SlotTable
    segments: dict[int, Segment]
    """By extent. Every extent of `table` has one."""
    traits: Traits
    index: IndexFile


class SegmentIo:
    """Every access to the segment files of one store after their recovery; failures of the medium end here."""

    def __init__(self, state: StoreState, volume: Volume, clock: Callable[[], float]) -> None:
        """Share `state` with the store."""
        self.state = state
        self.volume = volume
        self.apart = Apart(_GRACE_S)
        """Transfers that outlive a caller who was cancelled."""
        self.stuck_bytes = 0
        """Bytes of segments that could not be deleted; they may be there until the next start."""
        self.full_until_s = float("-inf")
        self.last_error = ""
        self._clock = clock
        self._deletions: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._discarding = Later(_DISCARD_DELAY_S, self._discard_due)
        self._indexing = Later(_INDEX_DELAY_S, self.write_index)

    async def write(self, run: Sequence[LaidOutRecord], parts: Callable[[], Sequence[memoryview]]) -> None:
        """Write records of neighbouring slots as `parts` returns them, durable on return.

        Raises `BackendFailedError`; none of them counts then.
        """
        slots = [one.slot for one in run]
        offsets = [slot.offset for slot in slots]
        async with self._using(slots, is_writing=True) as (segment, file):
            for offset in offsets:
                segment.pending_discards.pop(offset, None)
            await self.state.index.touch(slots[0].extent)
            self._indexing.ask()
            if segment.discarding.locked():
                async with segment.discarding:
                    pass
            if not segment.holes.isdisjoint(offsets):
                await self.apart.outlive(asyncio.ensure_future(self._fill_holes(slots, segment, file)))
            segment.written.update(offsets)
            await file.write(offsets[0], parts)
            for one in run:
                if isinstance(one.end, Record):
                    segment.enter(one.slot, one.end, self.state.traits)

    async def _fill_holes(self, slots: Sequence[SlotRef], segment: Segment, file: VolumeFile) -> None:
        """Give neighbouring slots their blocks back; those that have theirs lose nothing."""
        offsets = [slot.offset for slot in slots]
        with segment.using(is_writing=True), segment.moving(offsets):
            await file.allocate(offsets[0], sum(slot.size_bytes for slot in slots))
            segment.holes.difference_update(offsets)
        self._drop_deferred(segment)

    async def read(self, ranges: Sequence[tuple[SlotRef, int, memoryview]], then: Callable[[], None]) -> None:
        """Fill memory from so many bytes behind the start of slots of one segment, and go on with `then`.

        Raises `BackendFailedError`.
        """
        async with self._using([slot for slot, _, _ in ranges], is_writing=False) as (_, file):
            await file.read([(slot.offset + skip_bytes, into) for slot, skip_bytes, into in ranges], then)

    def is_live(self, slot: SlotRef) -> bool:
        """True while the slot is in use and was not dropped, not even with a transfer under way."""
        segment = self.state.segments.get(slot.extent)
        return (
            segment is not None and self.state.table.is_live(slot) and segment.deferred_drops.get(slot.offset) != slot
        )

    @asynccontextmanager
    async def _using(self, slots: Sequence[SlotRef], *, is_writing: bool) -> AsyncIterator[tuple[Segment, VolumeFile]]:
        """Use the file of slots; an I/O error of the medium closes the segment for new blocks.

        Raises `BackendFailedError`.
        """
        segment = self.state.segments.get(slots[0].extent)
        gone = next((s for s in slots if segment is None or segment.deferred_drops.get(s.offset) == s), None)
        if segment is None or gone is not None:
            raise BackendFailedError(f"segment {slots[0].extent} is gone: slot at {slots[0].offset} was dropped")
        try:
            with segment.using(is_writing=is_writing), segment.moving([slot.offset for slot in slots]):
                if not segment.is_made and self._deletions:
                    await asyncio.wait(self._deletions)  # Their bytes are given back before new ones are taken.
                yield segment, await segment.opened()
        except OSError as e:
            if e.errno == errno.EFAULT:
                raise MemoryAwayError(f"{self._where(segment)}: memory was taken away under a transfer") from e
            raise await self._failed(segment, e) from e
        finally:
            self._drop_deferred(segment)

    async def _failed(self, segment: Segment, error: OSError) -> BackendFailedError:
        """Retire the segment; nothing on it is tried again except reads of what was written before."""
        segment.is_listable = False
        self.last_error = f"{self._where(segment)}: {error.strerror or error}"
        if not segment.is_made:
            self.full_until_s = self._clock() + FULL_PAUSE_S
            with suppress(OSError):
                free_bytes = await self.volume.free_bytes()
                self.last_error += f"; {segment.name.size_bytes} B wanted, {free_bytes} B free"
        empty = self.state.table.close_extent(segment.name.id)
        if empty is not None:
            self.delete(empty)
        return BackendFailedError(self.last_error)

    def _where(self, segment: Segment) -> str:
        return f"{self.volume.where}/{segment.name}"

    def fail(self, error: OSError) -> BackendFailedError:
        """Error for a failure of the volume, which is its last one now."""
        self.last_error = f"{self.volume.where}: {error.strerror or error}"
        return BackendFailedError(self.last_error)

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back; unless it is used again it becomes a hole, so that it stays dropped after a crash.

        That happens within a second when the scope has no block left, else after `HOLD_S`. A slot with a transfer
        under way is given back when that ends.
        """
        table = self.state.table
        if not table.is_live(slot):
            return
        segment = self.state.segments[slot.extent]
        if slot.offset in segment.busy:
            segment.deferred_drops[slot.offset] = slot
            return
        segment.leave(slot.offset)
        extent = table.drop(slot)
        if extent is not None:
            self.delete(extent)
        elif slot.offset in segment.written:
            segment.pending_discards[slot.offset] = self._clock()
            self._discarding.ask()
        elif table.is_empty(slot.extent):
            self._discarding.ask()

    def _drop_deferred(self, segment: Segment) -> None:
        """Drop the slots whose last transfer has ended."""
        for slot in [s for offset, s in segment.deferred_drops.items() if offset not in segment.busy]:
            del segment.deferred_drops[slot.offset]
            self.drop(slot)

    async def _discard_due(self) -> None:
        await self.discard(HOLD_S)
        if any(s.pending_discards for s in self.state.segments.values()):
            self._discarding.ask()

    async def discard(self, hold_s: float = 0.0) -> None:
        """Erase what was dropped at least `hold_s` ago, and what no scope's block needs any more."""
        state = self.state
        pending = {i: s.pending_discards for i, s in state.segments.items() if s.pending_discards}
        planned = plan_discards(state.table.extents.values(), pending, self._clock() - hold_s)
        for extent in planned.extents:
            self.delete(state.table.forget(extent))  # The payloads go too.
        for extent, offsets in planned.offsets.items():
            if extent in state.segments:
                await self._discard_in(state.segments[extent], offsets)

    async def _discard_in(self, segment: Segment, offsets: frozenset[int]) -> None:
        try:
            with segment.using(is_writing=True):
                file = await segment.opened()
                await self.state.index.touch(segment.name.id)
                self._indexing.ask()
                async with segment.discarding:
                    due = {o for o in offsets if segment.pending_discards.pop(o, None) is not None}
                    await segment.punch(file, due)
        except OSError as e:
            await self._failed(segment, e)

    def delete(self, extent: Extent) -> None:
        """Remove the file of an extent that the table has forgotten; it goes on in a task of its own."""
        segment = self.state.segments.pop(extent.id)
        task = asyncio.ensure_future(self._remove(segment))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _remove(self, segment: Segment) -> None:
        try:
            await segment.delete()
        except OSError as e:
            self.stuck_bytes += segment.name.size_bytes
            self.last_error = f"{self._where(segment)}: {e.strerror or e}"

    async def settle_deletions(self) -> None:
        """Wait for the files that are being removed."""
        await asyncio.gather(*self._deletions)

    def index_soon(self) -> None:
        """Have the index written in time: it does not list what there is."""
        self._indexing.ask()

    async def write_index(self) -> None:
        """Write the index now; a failure leaves the start after this run more headers to read."""
        try:
            await self.state.index.replace(
                self.state.segments.values(), self.state.traits, self.state.table.next_extent
            )
        except OSError as e:
            self.last_error = f"{self.volume.where}: index: {e.strerror or e}"

    async def close(self) -> None:
        """Make drops durable and write the index, once; close all files, whatever becomes of that."""
        self._discarding.stop()
        self._indexing.stop()
        try:
            if not self._is_stopped:
                self._is_stopped = True
                await self._settle()
        finally:
            await together([self.state.index.close(), *(s.close() for s in self.state.segments.values())])

    async def _settle(self) -> None:
        await self.apart.settle()
        await self.discard()
        await self.settle_deletions()
        if self.state.segments:
            await self.write_index()
