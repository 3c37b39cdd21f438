"""Record store on a volume: segments of equal slots, each record with its own header page, and an index of them all.

Slots are filled in log order and a freed slot is used again in place (threaded logging), so nothing is copied
to make room. The bytes of all files never exceed the capacity, which segments, markers and two indexes share.
docs/format.md: the format, and what a crash leaves.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from kvstrata_agent.backends.base import (
    Capabilities,
    ColumnarBackend,
    Columns,
    GroupBackend,
    Notes,
    NotingBackend,
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
from kvstrata_agent.backends.file.segment_io import FULL_PAUSE_S, SegmentIo, StoreState
from kvstrata_agent.backends.file.transfers import Transfers
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, Volume
from kvstrata_agent.backends.record.encryption import DataKeys
from kvstrata_agent.backends.record.layout import HEADER_BYTES, form_of
from kvstrata_agent.backends.recovered import each
from kvstrata_agent.backends.slot_table import SlotTable, stride_of, target_extent_bytes
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import InvalidInputError, KvStrataError, TierFullError
from kvstrata_api.units import MIB

_SEGMENT_PARTS: Final = 32
_SEGMENT_BYTES_MAX: Final = 64 * MIB
_SEGMENTS_MAX: Final = 8192
"""One descriptor each."""

_MARKERS_BYTES: Final = 2 * DIRECT_BYTES
"""The store's marker, and the one that takes its place."""

_CLASS_BITS: Final = 6
"""Strides at most 1/32 longer than needed; codecs that differ by a few per cent share two or three strides."""


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


def slot_bytes(size_bytes: int) -> int:
    """Bytes of the slot that a record of `size_bytes` takes in any store."""
    return stride_of(HEADER_BYTES + size_bytes, DIRECT_BYTES, _CLASS_BITS)


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
        self._form = form_of(claim.secret, keys)
        self._volume = volume
        self._medium = medium or volume.medium
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._capacity_bytes = capacity_bytes
        table = SlotTable(
            capacity_bytes=capacity_bytes,
            target_bytes=target_bytes(capacity_bytes),
            page_bytes=DIRECT_BYTES,
            alignment_bytes=DIRECT_BYTES,
            class_bits=_CLASS_BITS,
            first_stamp=claim.first_stamp,
        )
        table.keeps_empty = True
        self.skip_stamps = table.skip_stamps  # For several stores that are one tier.
        index = IndexFile(volume, claim.secret, claim.run, entry_sealing(self._form))
        self._state = StoreState(table, {}, Traits(Kinds()), index)
        self._io = SegmentIo(self._state, volume, self._clock)
        self._recovery = Recovery(self._form, self._io, self._fit)
        self._transfers = Transfers(self._form, self._io)
        self._closing = asyncio.Lock()
        self._fit(0, 0)
        if table.capacity_bytes < HEADER_BYTES + DIRECT_BYTES:
            raise InvalidInputError(f"{volume.where}: capacity of {capacity_bytes} B holds no record")

    @property
    def group(self) -> GroupBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def noting(self) -> NotingBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    def notes(self, extent: int) -> Notes | None:
        """What its index will list of a segment. See `NotingBackend`."""
        segment = self._state.segments.get(extent)
        return None if segment is None else segment.notes

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
        return self._state.table.used_bytes

    @property
    def last_error(self) -> str:
        """The last failure of the medium; empty when there was none."""
        return self._io.last_error

    def _fit(self, new_segments: int, new_slots: int) -> None:
        """Set what the segments may take with so many new ones."""
        segments = self._state.segments
        slots = new_slots + sum(s.name.slots for s in segments.values())
        room_bytes = self._capacity_bytes - self._io.stuck_bytes - self._recovery.waiting_bytes
        self._state.table.capacity_bytes = segments_bytes_max(room_bytes, new_segments + len(segments), slots)

    def _fit_one_more(self, need_bytes: int) -> None:
        self._fit(1, max(1, self._state.table.target_bytes // self._state.table.stride(need_bytes)))

    def slot_bytes(self, size_bytes: int) -> int:
        """Bytes of such a record's slot. See `TierBackend`."""
        return slot_bytes(size_bytes)

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take a slot for a record of `size_bytes`. See `TierBackend`."""
        need_bytes = HEADER_BYTES + size_bytes
        slot = self._state.table.take(scope, need_bytes)
        if slot is None:
            self._open(scope, need_bytes)
            slot = self._state.table.take(scope, need_bytes)
        assert slot is not None, "a new segment has room"
        return slot

    def _open(self, scope: ScopeId, need_bytes: int) -> None:
        io, table = self._io, self._state.table
        if self._clock() < io.full_until_s:
            raise TierFullError(io.last_error, delay_s=FULL_PAUSE_S)
        if io.full_until_s > float("-inf"):
            # A disk that was full once gets back what is empty before it is asked for more.
            for extent in table.forget_empty():
                io.delete(extent)
        self._fit_one_more(need_bytes)
        opening = table.open(scope, need_bytes)
        for extent in opening.retired:
            io.delete(extent)
        self._state.segments[opening.extent.id] = Segment.of(opening.extent, self._volume)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Write header and payload in one transfer, durable on return. See `TierBackend`."""
        (end,) = await self._transfers.write_group([Writing(slot, stored[: record.stored_bytes], record)])
        if isinstance(end, KvStrataError):
            raise end

    async def write_group(self, writings: Sequence[Writing]) -> Sequence[Record | KvStrataError]:
        """Write records of neighbouring slots in one transfer. See `GroupBackend`."""
        return await self._transfers.write_group(writings)

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Read the payload and verify it. See `TierBackend`."""
        (end,) = await self._transfers.read_group([Reading(slot, record, into)])
        if isinstance(end, KvStrataError):
            raise end

    async def read_group(self, readings: Sequence[Reading]) -> Sequence[bytes | KvStrataError]:
        """Read records and verify them. See `GroupBackend`."""
        return await self._transfers.read_group(readings)

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back, at the end of a transfer that is under way there. See `SegmentIo.drop`."""
        self._io.drop(slot)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity; returns the segments that close. See `TierBackend`."""
        self._capacity_bytes = capacity_bytes
        self._state.table.target_bytes = target_bytes(capacity_bytes)
        self._fit(0, 0)
        closing, released = self._state.table.resize(self._state.table.capacity_bytes)
        for extent in released:
            self._io.delete(extent)
        return closing

    def extents_to_free(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        """Segments whose emptying makes room for such a slot. See `TierBackend`."""
        need_bytes = HEADER_BYTES + size_bytes
        self._fit_one_more(need_bytes)
        return (
            frozenset()
            if self._state.table.has_room(scope, need_bytes)
            else self._state.table.extents_to_free(need_bytes)
        )

    def compact(self) -> frozenset[int]:
        """Close sparse extents. See `TierBackend`."""
        return self._state.table.compact()

    def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks of earlier runs; raises `BackendFailedError` when the volume cannot be listed or cleaned."""
        return each(self._recovery.run())

    def recover_columns(self) -> AsyncIterator[Columns]:
        """The same, a segment at a time. See `ColumnarBackend`."""
        return self._recovery.run()

    async def write_index(self) -> None:
        """Write the index now; a failure leaves the start after this run more headers to read."""
        await self._io.write_index()

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
        """Make drops durable, write the index, close all files and let go of the volume. Idempotent.

        The files and the volume go also when the rest fails.
        """
        async with self._closing:
            try:
                await self._io.close()
            finally:
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
