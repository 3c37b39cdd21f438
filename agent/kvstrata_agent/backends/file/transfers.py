"""Records between memory and segments, several at a time: one turn of a thread lays out and writes, or reads and opens.

Records of neighbouring slots go to the medium as one write. What O_DIRECT can use goes down from the caller's memory as
it lies, everything else through buffers of the store. What comes up is verified in such a buffer first: engines map the
slots that it is copied to, and never see anything else.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Final, TypeVar

from msgspec.structs import replace as struct_replace

from kvstrata_agent.backends.base import ExpectedChecksum, Reading, Record, SlotRef, Writing, matches
from kvstrata_agent.backends.file.segment_io import LaidOutRecord, SegmentIo, coalesced, lay_out_run
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.record.layout import HEADER_BYTES, Form
from kvstrata_agent.backends.scratch import BoundedBuffers, Loan, address_of
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_agent.backends.threads import together
from kvstrata_api.checksum import Use, copied, rebound
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, KvStrataError
from kvstrata_native import copy

T = TypeVar("T")

_ANSWER_S: Final = 30.0
"""A read without an answer for so long has failed: Linux itself gives up on a local NVMe command then (io_timeout)."""


@dataclass(slots=True)
class _Callers:
    """Memory of a caller who may leave while a thread is on its way to it."""

    _lock: Lock = field(default_factory=Lock)
    _has_left: bool = False

    def use(self, work: Callable[[], T], otherwise: T) -> T:
        """Do what goes over the caller's memory, or nothing once it has left."""
        with self._lock:
            return otherwise if self._has_left else work()

    def leave(self) -> None:
        """Return once nobody is at the memory, and nobody will be: a thread is through with it in a millisecond."""
        with self._lock:
            self._has_left = True


@dataclass(slots=True, eq=False)
class _Arrival:
    """One record that is read."""

    reading: Reading
    whole: memoryview
    """Of the store's buffer: what is read."""
    open: Callable[[memoryview, memoryview], memoryview | None]
    bound: bytes = b""
    """The checksum for the reader; empty while it is not known to be this very record."""


class Transfers:
    """Writes and reads of one store."""

    def __init__(self, form: Form, io: SegmentIo) -> None:
        """Own buffers."""
        self._form = form
        self._io = io
        self._outgoing, self._incoming = BoundedBuffers(), BoundedBuffers()  # A reader waits behind no writes.

    async def write_group(self, writings: Sequence[Writing]) -> list[Record | KvStrataError]:
        """See `GroupBackend`."""
        is_straight = not self._form.is_sealed and all(is_direct(w.stored) for w in writings)
        rooms = [HEADER_BYTES if is_straight else _room_bytes(HEADER_BYTES, w.record) for w in writings]
        async with self._outgoing.lend(sum(rooms)) as loan:
            parts = zip(writings, _cut(loan.view, rooms), strict=True)
            laid = [self._laid_out(w, room, is_straight=is_straight) for w, room in parts]
            runs = coalesced(one for one in laid if isinstance(one, LaidOutRecord))
            if is_straight:
                await together([self._store(run, partial(lay_out_run, run, with_checksums)) for run in runs])
            else:
                await self._store_apart(runs, loan)
        return [one.end if isinstance(one, LaidOutRecord) else one for one in laid]

    def _laid_out(self, writing: Writing, room: memoryview, *, is_straight: bool) -> LaidOutRecord | KvStrataError:
        slot, record, stored = writing.slot, writing.record, writing.stored
        try:
            _check_fits(record, slot)
            if is_straight:
                return LaidOutRecord(
                    writing, (room, stored), self._form.lay_out(room, record, slot, stored[:0]), record
                )
            return LaidOutRecord(writing, (room,), self._form.lay_out(room, record, slot, stored), record)
        except KvStrataError as e:
            return e

    async def _store_apart(self, runs: Sequence[Sequence[LaidOutRecord]], loan: Loan) -> None:
        """Write from the store's own buffer; the caller's memory is left alone once the caller has gone."""
        callers = _Callers()
        unmade: list[memoryview] = []
        stores = [
            self._store(run, partial(callers.use, partial(lay_out_run, run, with_checksums), unmade)) for run in runs
        ]
        loan.user = asyncio.ensure_future(together(stores))
        try:
            await self._io.apart.outlive(loan.user)
        finally:
            callers.leave()

    async def _store(self, run: Sequence[LaidOutRecord], parts: Callable[[], list[memoryview]]) -> None:
        try:
            await self._io.write(run, parts)
        except BackendFailedError as e:
            for one in run:
                one.end = e

    async def read_group(self, readings: Sequence[Reading]) -> list[bytes | KvStrataError]:
        """See `GroupBackend`."""
        ordered = sorted(readings, key=lambda r: (r.slot.extent, r.slot.offset))
        read = await together([self._read(list(part)) for _, part in groupby(ordered, lambda r: r.slot.extent)])
        ends = {slot: end for part in read for slot, end in part.items()}
        return [ends[r.slot] for r in readings]

    async def _read(self, readings: Sequence[Reading]) -> dict[SlotRef, bytes | KvStrataError]:
        """Read records of one segment."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._read_together(readings)
        except TimeoutError:
            hung = BackendFailedError(
                f"segment {readings[0].slot.extent}: no answer to a read within {_ANSWER_S:.0f} s"
            )
            return {r.slot: hung for r in readings}
        except BackendFailedError as e:
            if len(readings) == 1:
                return {readings[0].slot: e}
        alone = await together([self._read([r]) for r in readings])  # One bad sector costs one block.
        return {slot: end for part in alone for slot, end in part.items()}

    async def _read_together(self, readings: Sequence[Reading]) -> dict[SlotRef, bytes | KvStrataError]:
        head_bytes = self._form.head_bytes
        rooms = [_room_bytes(head_bytes, r.record) for r in readings]
        callers = _Callers()
        async with self._incoming.lend(sum(rooms)) as loan:
            arrivals = [
                _Arrival(r, room, self._form.opener(r.record, r.slot))
                for r, room in zip(readings, _cut(loan.view, rooms), strict=True)
            ]
            ranges = [(a.reading.slot, HEADER_BYTES - head_bytes, a.whole) for a in arrivals]
            loan.user = asyncio.ensure_future(self._io.read(ranges, partial(self._arrive, arrivals, callers)))
            try:
                await self._io.apart.outlive(loan.user)
            finally:
                callers.leave()
        return {a.reading.slot: self._end(a) for a in arrivals}

    def _arrive(self, arrivals: Sequence[_Arrival], callers: _Callers) -> None:
        """Open what was read, and hand over what is sound."""
        opened = [(a, a.open(a.whole, self._payload(a))) for a in arrivals]
        sound = [(a, payload) for a, payload in opened if payload is not None]
        over = partial(handed_over, [(a.reading, payload) for a, payload in sound], is_sealed=self._form.is_sealed)
        for (arrival, _), digest in zip(sound, callers.use(over, [b""] * len(sound)), strict=True):
            arrival.bound = digest

    def _payload(self, arrival: _Arrival) -> memoryview:
        """Where a payload lies, which is also where it is opened to."""
        head_bytes = self._form.head_bytes
        return arrival.whole[head_bytes : head_bytes + arrival.reading.record.stored_bytes]

    def _end(self, arrival: _Arrival) -> bytes | KvStrataError:
        slot, record = arrival.reading.slot, arrival.reading.record
        if arrival.bound and self._io.is_live(slot):
            return arrival.bound
        try:
            self._form.opener(record, slot)
        except BackendFailedError as e:
            return e  # Its key went while it was read: nothing is known of the record.
        return BlockCorruptError(f"block {record.key} in segment {slot.extent} at {slot.offset}: checksum differs")


def is_direct(view: memoryview) -> bool:
    """True when O_DIRECT can use the memory as it lies."""
    return len(view) % DIRECT_BYTES == 0 and address_of(view) % DIRECT_BYTES == 0


def _check_fits(record: Record, slot: SlotRef) -> None:
    room_bytes = slot.size_bytes - HEADER_BYTES
    if record.stored_bytes > room_bytes:
        raise InvalidInputError(f"block {record.key}: {record.stored_bytes} B into a slot of {room_bytes} B")


def _room_bytes(head_bytes: int, record: Record) -> int:
    return round_up(head_bytes + record.stored_bytes, DIRECT_BYTES)


def _cut(view: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    at = 0
    for size_bytes in sizes:
        yield view[at : at + size_bytes]
        at += size_bytes


def with_checksums(writings: Sequence[Writing]) -> list[Record | KvStrataError]:
    """Records with the checksums of their bytes, in this thread; an error for bytes that are not sound."""
    unsure = [(w, w.expected) for w in writings if w.expected is not None]
    pairs = rebound([
        (w.stored, w.record.key.digest, (w.record.epoch, w.slot.stamp), sound.use) for w, sound in unsure
    ])  # fmt: skip
    made = {w.slot: proven(w, sound, *pair) for (w, sound), pair in zip(unsure, pairs, strict=True)}
    return [made.get(w.slot, w.record) for w in writings]


def proven(writing: Writing, expected: ExpectedChecksum, ours: bytes, theirs: bytes) -> Record | KvStrataError:
    """Record with our checksum of bytes whose other checksum is the one that they are known by; else an error."""
    if theirs != expected.checksum:
        return BlockCorruptError(f"block {writing.record.key} in memory: checksum differs")
    return struct_replace(writing.record, checksum=ours)


def handed_over(opened: Sequence[tuple[Reading, memoryview]], *, is_sealed: bool) -> list[bytes]:
    """Verify payloads, in this thread, and copy them to the callers' memory.

    Returns checksums for the readers, empty where the bytes are not the record's: nothing was copied there.
    """
    again = [(r, payload, r.rebind) for r, payload in opened if r.rebind is not None]
    ends = iter(copied([_rebinding(*one) for one in again]))
    return [next(ends) if r.rebind is not None else _seen(r, payload, is_sealed=is_sealed) for r, payload in opened]


def _rebinding(
    reading: Reading, payload: memoryview, ours: Use
) -> tuple[memoryview, memoryview, bytes, bytes, Use, Use]:
    record = reading.record
    theirs = (record.epoch, reading.slot.stamp)
    return _target(reading), payload, record.key.digest, record.checksum, theirs, ours


def _seen(reading: Reading, payload: memoryview, *, is_sealed: bool) -> bytes:
    if not is_sealed and not matches(payload, reading.record, reading.slot.stamp):
        return b""
    copy(_target(reading), payload)
    return reading.record.checksum


def _target(reading: Reading) -> memoryview:
    return reading.into[: reading.record.stored_bytes]
