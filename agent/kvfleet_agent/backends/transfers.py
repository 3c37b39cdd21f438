"""Records between memory and segments, several at a time: sealed, laid out and verified in threads.

What lies where O_DIRECT wants it goes from and to the caller's memory; everything else through buffers of the store.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeVar

from msgspec.structs import replace as struct_replace

from kvfleet_agent.backends.base import Reading, Record, SlotRef, Sound, Writing, matches
from kvfleet_agent.backends.buffers import Buffers, is_direct
from kvfleet_agent.backends.header import HEADER_BYTES, pack_header
from kvfleet_agent.backends.record_bytes import Form
from kvfleet_agent.backends.runs import Laid, runs_of
from kvfleet_agent.backends.slots import round_up
from kvfleet_agent.backends.volume import DIRECT_BYTES
from kvfleet_agent.backends.waiting import Apart, here_or_in_thread, in_thread
from kvfleet_api.checksum import rebound
from kvfleet_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, KvFleetError
from kvfleet_native import copy

T = TypeVar("T")

_CHECKERS: Final = 2
"""Threads that hash, seal and copy."""

_GRACE_S: Final = 1.0
"""A cancelled call waits so long for the medium; then the slot and the store's own buffer wait on without it."""


class Places(Protocol):
    """The slots of a store."""

    async def store(self, run: Sequence[Laid]) -> None:
        """Write neighbouring records, durable on return. Raises `BackendFailedError`; none of them counts then."""

    async def load(self, ranges: Sequence[tuple[SlotRef, int, memoryview]]) -> None:
        """Fill memory from so many bytes behind the start of each slot. Raises `BackendFailedError`."""

    def is_live(self, slot: SlotRef) -> bool:
        """True while the slot is in use and was not dropped, not even with a transfer under way."""


class Transfers:
    """Writes and reads of one store."""

    def __init__(self, form: Form, secret: bytes, places: Places, *, is_sealed: bool) -> None:
        """Own buffers and threads."""
        self._form = form
        self._secret = secret
        self._places = places
        self._is_sealed = is_sealed
        self._buffers = Buffers()
        self._copies = Buffers()
        """For what is laid out into one of `_buffers`: whoever holds one of these waits for one of those, never the
        other way round."""
        self._checkers = ThreadPoolExecutor(_CHECKERS, "kvfleet-record")
        self.apart = Apart(_GRACE_S)

    async def close(self) -> None:
        """Stop the threads; `apart` has settled before."""
        await in_thread(None, self._checkers.shutdown)

    async def write_group(self, writings: Sequence[Writing]) -> list[Record | KvFleetError]:
        """See `GroupBackend`."""
        goes_straight = [not self._is_sealed and is_direct(w.stored) for w in writings]
        straight = [w for w, is_straight in zip(writings, goes_straight, strict=True) if is_straight]
        apart = [w for w, is_straight in zip(writings, goes_straight, strict=True) if not is_straight]
        written = await _all([self._write_straight(straight)] if straight else [])
        copied = await _all([self._write_apart(w) for w in apart])
        ends = {slot: end for part in written for slot, end in part.items()}
        ends |= {w.slot: end for w, end in zip(apart, copied, strict=True)}
        return [ends[w.slot] for w in writings]

    async def _write_straight(self, writings: Sequence[Writing]) -> dict[SlotRef, Record | KvFleetError]:
        size_bytes = sum(len(w.stored) for w in writings if w.sound)
        async with self._buffers.lend(HEADER_BYTES * len(writings)) as loan:
            made = await here_or_in_thread(self._checkers, size_bytes, partial(self._laid, writings, loan.view))
            runs = runs_of(one for one in made if isinstance(one, Laid))
            failures = await _all([self._store(run) for run in runs])
        ends: dict[SlotRef, Record | KvFleetError] = {
            w.slot: one for w, one in zip(writings, made, strict=True) if isinstance(one, KvFleetError)
        }
        for run, failure in zip(runs, failures, strict=True):
            ends.update((one.slot, failure or one.record) for one in run)
        return ends

    def _laid(self, writings: Sequence[Writing], headers: memoryview) -> list[Laid | KvFleetError]:
        """Put headers before payloads; one that is not sound is left out."""
        made: list[Laid | KvFleetError] = []
        pages = (headers[at : at + HEADER_BYTES] for at in range(0, len(headers), HEADER_BYTES))
        for writing, record, page in zip(writings, sealed(writings), pages, strict=True):
            if isinstance(record, KvFleetError):
                made.append(record)
                continue
            try:
                page[:] = pack_header(record, writing.slot, self._secret)
                made.append(Laid(writing.slot, record, (page, writing.stored)))
            except InvalidInputError as e:
                made.append(e)
        return made

    async def _store(self, run: Sequence[Laid]) -> KvFleetError | None:
        try:
            await self._places.store(run)
        except BackendFailedError as e:
            return e
        return None

    async def _write_apart(self, writing: Writing) -> Record | KvFleetError:
        """Lay the record out in a buffer, of bytes that nobody else can reach."""
        stored = writing.stored
        try:
            if writing.sound is None:
                return await self._write_laid_out(writing.slot, writing.record, stored)
            async with self._copies.lend(len(stored)) as loan:
                own = loan.view[: len(stored)]
                (record,) = await here_or_in_thread(self._checkers, len(own), partial(_copied, own, writing))
                if isinstance(record, KvFleetError):
                    return record
                return await self._write_laid_out(writing.slot, record, own)
        except KvFleetError as e:
            return e

    async def _write_laid_out(self, slot: SlotRef, record: Record, stored: memoryview) -> Record:
        async with self._buffers.lend(HEADER_BYTES + round_up(len(stored), DIRECT_BYTES)) as loan:
            laid_out = self._form.lay_out(loan.view, record, slot, stored)
            await here_or_in_thread(self._checkers, len(stored), laid_out)
            loan.user = asyncio.ensure_future(self._places.store([Laid(slot, record, (loan.view,))]))
            await self.apart.outlive(loan.user)
        return record

    async def read_group(self, readings: Sequence[Reading]) -> list[bytes | KvFleetError]:
        """See `GroupBackend`."""
        goes_straight = [not self._is_sealed and is_direct(_target(r)) for r in readings]
        straight = [r for r, is_straight in zip(readings, goes_straight, strict=True) if is_straight]
        apart = [r for r, is_straight in zip(readings, goes_straight, strict=True) if not is_straight]
        loaded = await _all([self._read_straight(straight)] if straight else [])
        copied = await _all([self._read_apart(r) for r in apart])
        ends = {slot: end for part in loaded for slot, end in part.items()}
        ends |= {r.slot: end for r, end in zip(apart, copied, strict=True)}
        return [ends[r.slot] for r in readings]

    async def _read_straight(self, readings: Sequence[Reading]) -> dict[SlotRef, bytes | KvFleetError]:
        try:
            await self._places.load([(r.slot, HEADER_BYTES, _target(r)) for r in readings])
        except BackendFailedError as e:
            if len(readings) == 1:
                return {readings[0].slot: e}
            alone = await _all([self._read_straight([r]) for r in readings])  # One bad sector costs one block.
            return {slot: end for part in alone for slot, end in part.items()}
        size_bytes = sum(len(_target(r)) for r in readings)
        found = await here_or_in_thread(self._checkers, size_bytes, partial(verified, readings))
        return {r.slot: self._end(r, bound) for r, bound in zip(readings, found, strict=True)}

    async def _read_apart(self, reading: Reading) -> bytes | KvFleetError:
        slot, record, target, head_bytes = reading.slot, reading.record, _target(reading), self._form.head_bytes
        try:
            async with self._buffers.lend(head_bytes + record.stored_bytes) as loan:
                ranges = [(slot, HEADER_BYTES - head_bytes, loan.view)]
                loan.user = asyncio.ensure_future(self._places.load(ranges))
                await self.apart.outlive(loan.user)
                opened = self._form.open_record(target, loan.view, record, slot)
                work = partial(_opened, opened, reading)
                return self._end(reading, await here_or_in_thread(self._checkers, len(target), work))
        except BackendFailedError as e:
            return e

    def _end(self, reading: Reading, bound: bytes) -> bytes | KvFleetError:
        if bound and self._places.is_live(reading.slot):
            return bound
        slot = reading.slot
        where = f"segment {slot.extent} at {slot.offset}"
        return BlockCorruptError(f"block {reading.record.key} in {where}: checksum differs")


def _target(reading: Reading) -> memoryview:
    return reading.into[: reading.record.stored_bytes]


def _copied(own: memoryview, writing: Writing) -> list[Record | KvFleetError]:
    copy(own, writing.stored)
    return sealed([replace(writing, stored=own)])


def _opened(opened: Callable[[], bool], reading: Reading) -> bytes:
    """Open a record that was read; the checksum for its reader, empty when it is not this very one."""
    if not opened():
        return b""
    return reading.record.checksum if reading.rebind is None else verified([reading])[0]


def sealed(writings: Sequence[Writing]) -> list[Record | KvFleetError]:
    """Records with the checksums of their bytes, in this thread; an error for bytes that are not sound."""
    unsure = [(w, w.sound) for w in writings if w.sound is not None]
    pairs = rebound([
        (w.stored, w.record.key.digest, (w.record.epoch, w.slot.stamp), sound.use) for w, sound in unsure
    ])  # fmt: skip
    made = {w.slot: _sealed(w, sound, *pair) for (w, sound), pair in zip(unsure, pairs, strict=True)}
    return [made.get(w.slot, w.record) for w in writings]


def _sealed(writing: Writing, sound: Sound, ours: bytes, theirs: bytes) -> Record | KvFleetError:
    if theirs != sound.checksum:
        return BlockCorruptError(f"block {writing.record.key} in memory: checksum differs")
    return struct_replace(writing.record, checksum=ours)


def verified(readings: Sequence[Reading]) -> list[bytes]:
    """Checksums for the readers, in this thread; empty where the bytes are not the record's."""
    bound = [(r, r.rebind) for r in readings if r.rebind is not None]
    pairs = rebound([
        (_target(r), r.record.key.digest, use, (r.record.epoch, r.slot.stamp)) for r, use in bound
    ])  # fmt: skip
    made = {
        r.slot: ours if theirs == r.record.checksum else b""
        for (r, _), (ours, theirs) in zip(bound, pairs, strict=True)
    }
    return [made[r.slot] if r.rebind is not None else _seen(r) for r in readings]


def _seen(reading: Reading) -> bytes:
    is_same = matches(_target(reading), reading.record, reading.slot.stamp)
    return reading.record.checksum if is_same else b""


async def _all(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Do all at once; a task for each only where there are several."""
    return [await work[0]] if len(work) == 1 else list(await asyncio.gather(*work))
