"""Memory tiers: slots in extents that engines map. DRAM and CXL differ only in how an extent is made and kept.

An extent is made when a scope needs one, and one more of its size is prepared ahead by a thread, so `reserve`
seldom waits for page faults. An extent that changes hands is released and made again under a new id: whoever kept
the old descriptor sees zeros, never the next scope's bytes (`StillMapped` polls such memory).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

from kvstrata_agent.backends.base import (
    Capabilities,
    ColumnarBackend,
    Columns,
    MappableBackend,
    OptionalCapabilities,
    PersistentBackend,
    Record,
    SlotRef,
    matches,
)
from kvstrata_agent.backends.memory import sigbus
from kvstrata_agent.backends.memory.extent_store import ExtentStore, StillMapped
from kvstrata_agent.backends.memory.mapping import MappedExtent, Remains
from kvstrata_agent.backends.recovered import each
from kvstrata_agent.backends.slot_table import NOBODY, Extent, SlotTable, sole_writer, target_extent_bytes
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, KvStrataError, TierFullError
from kvstrata_api.units import KIB, MIB
from kvstrata_native import copy

ALIGNMENT_BYTES: Final = 4 * KIB
"""A page, so that a slot can be the source and target of O_DIRECT transfers."""

_EXTENT_PARTS: Final = 16
_EXTENT_BYTES_MAX: Final = 64 * MIB
_EXTENTS_MAX: Final = 4096
"""Four descriptors each; a hard limit of 2^20 descriptors leaves room."""

_CHECKED_AT_ONCE: Final = 64
"""Extents whose size one `compact` checks: a microsecond each."""

_IDLE_S: Final = 1.0
"""An extent that stays empty for so long is given back: the last block of an erased scope leaves nothing behind."""

_INLINE_BYTES_MAX: Final = 256 * KIB
"""Copies up to this take less than a thread switch and its wake-up (about 50 us)."""

_LINES_IN_FLIGHT: Final = 32
"""Cache lines that prefetchers keep in flight; divides the modelled latency of a bulk copy. An assumption."""

_log = logging.getLogger(__name__)


class Arena(OptionalCapabilities):
    """A mappable memory tier (`PersistentBackend`; what lasts is up to the store of its extents)."""

    def __init__(
        self,
        capabilities: Capabilities,
        capacity_bytes: int,
        store: ExtentStore,
        *,
        page_bytes: int,
        extra_latency_s: float = 0.0,
    ) -> None:
        """Take over `store`. `extra_latency_s` per cache line is added to `read` and `write`, not to mapped access."""
        if capacity_bytes < page_bytes:
            raise InvalidInputError(f"capacity of {capacity_bytes} B is less than one page of {page_bytes} B")
        self._capabilities = capabilities
        self._store = store
        self._extra_latency_s = extra_latency_s
        self._page_bytes = page_bytes
        self._table = SlotTable(
            capacity_bytes=capacity_bytes // page_bytes * page_bytes,
            target_bytes=self._target_bytes(capacity_bytes),
            page_bytes=page_bytes,
            alignment_bytes=ALIGNMENT_BYTES,
            first_stamp=store.first_stamp,
        )
        self._memory: dict[int, MappedExtent] = {}
        self._spare: tuple[int, Future[MappedExtent]] | None = None
        """Size of the memory that is prepared, and the memory."""
        self._releases: list[Future[Remains | None]] = []
        self._worker = ThreadPoolExecutor(1, "kvstrata-arena")
        self._still_mapped = StillMapped(self._worker)
        self._unchecked: list[int] = []
        """Extents whose size is still to be checked in this round."""
        self._copiers = ThreadPoolExecutor(2, "kvstrata-copy")
        self._idle: asyncio.TimerHandle | None = None
        self._listeners: list[Callable[[int], None]] = []
        self._is_closed = False
        self._last_error = ""

    @staticmethod
    def _target_bytes(capacity_bytes: int) -> int:
        return target_extent_bytes(
            capacity_bytes, parts=_EXTENT_PARTS, most_bytes=_EXTENT_BYTES_MAX, count_max=_EXTENTS_MAX
        )

    @property
    def mappable(self) -> MappableBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def persistent(self) -> PersistentBackend | None:
        """Itself where the store of its extents keeps blocks. See `OptionalCapabilities`."""
        return self if self._capabilities.outlives_agent else None

    @property
    def columnar(self) -> ColumnarBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """State what the medium can do."""
        return self._capabilities

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be reserved in all."""
        return self._table.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now, rounding included."""
        return self._table.used_bytes

    @property
    def last_error(self) -> str:
        """Why the last extent could not be made; empty when none failed."""
        return self._last_error

    def slot_bytes(self, size_bytes: int) -> int:
        """Bytes of such a slot. See `TierBackend`."""
        return self._table.stride(size_bytes)

    def reserve(self, scope: ScopeId, size_bytes: int, writer: str = NOBODY) -> SlotRef:
        """Take a slot; makes an extent when the scope has none with room. See `MappableBackend`."""
        (slot,) = self._take(scope, size_bytes, 1, writer)
        return slot

    def reserve_run(self, scope: ScopeId, size_bytes: int, count: int, writer: str = NOBODY) -> list[SlotRef]:
        """Take up to `count` slots. See `MappableBackend`."""
        slots: list[SlotRef] = []
        with suppress(TierFullError, BackendFailedError):
            while len(slots) < count:
                slots += self._take(scope, size_bytes, count - len(slots), writer)
        return slots

    def _take(self, scope: ScopeId, size_bytes: int, count: int, writer: str) -> list[SlotRef]:
        """Take up to `count` slots of one extent, a new one where no other has room; at least one."""
        writer = sole_writer(scope) or writer
        slots = self._table.take_run(scope, size_bytes, count, writer)
        if not slots:
            self._open(scope, size_bytes, writer)
            slots = self._table.take_run(scope, size_bytes, count, writer)
        assert slots, "a new extent has room"
        for slot in slots:
            self._store.taken(slot)
        return slots

    def _open(self, scope: ScopeId, size_bytes: int, writer: str) -> None:
        opening = self._table.open(scope, size_bytes, writer)
        for extent in opening.retired:
            self._release(extent)
        self._await_releases(len(self._releases))
        self._still_mapped.empty()  # What is given back comes before what is taken, page for page.
        try:
            self._memory[opening.extent.id] = self._made(opening.extent)
        except KvStrataError as e:
            self._table.forget(opening.extent.id)
            self._last_error = str(e)
            raise
        self._prepare_spare(opening.extent.size_bytes)

    def _made(self, extent: Extent) -> MappedExtent:
        """Memory for a new extent: the spare when it fits, whose pages are faulted in already or soon."""
        memory = self._taken_spare(extent.size_bytes) or self._store.make(extent.size_bytes)
        try:
            self._store.opened(extent, memory)
        except KvStrataError:
            memory.release()
            raise
        self._worker.submit(memory.populate)
        return memory

    def _taken_spare(self, size_bytes: int) -> MappedExtent | None:
        """Return the spare when it is of that size; one that is only waiting to be made is not waited for."""
        spare, self._spare = self._spare, None
        if spare is None or spare[1].cancel():
            return None
        with suppress(KvStrataError):  # It could not be made; making one now will raise the cause.
            memory = spare[1].result()
            if spare[0] == size_bytes:
                return memory
            memory.release()
        return None

    def _prepare_spare(self, size_bytes: int) -> None:
        """Only while there is room for it: the spare counts against the capacity like any extent."""
        if self._spare is None and self._table.held_bytes + size_bytes <= self._table.capacity_bytes:
            self._spare = size_bytes, self._worker.submit(self._store.make, size_bytes)
            self._worker.submit(_populate, self._spare[1])

    def _release(self, extent: Extent) -> None:
        """Freeing 64 MiB takes milliseconds: a thread does it."""
        for listener in self._listeners:
            listener(extent.id)
        self._releases.append(self._worker.submit(self._store.released, extent.id, self._memory.pop(extent.id)))

    def _await_releases(self, count: int) -> None:
        """Take over what the oldest releases left behind."""
        done, self._releases = self._releases[:count], self._releases[count:]
        for release in done:
            try:
                self._still_mapped.add(release.result())
            except OSError as e:
                self._last_error = str(e)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Copy into the slot; engines that mapped the extent write there themselves instead."""
        target = self.view(slot)[: record.stored_bytes]
        await self._copy(target, stored[: record.stored_bytes], bool)
        if self._table.is_live(slot):
            self._store.committed(slot, record)

    def commit(self, slot: SlotRef, record: Record) -> None:
        """Note the block in a slot. See `PersistentBackend`."""
        if self._table.is_live(slot):
            self._store.committed(slot, record)

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Copy out of the slot and verify the copy. See `TierBackend`."""
        source = self.view(slot)[: record.stored_bytes]
        target = into[: record.stored_bytes]
        is_same = await self._copy(target, source, partial(matches, target, record, slot.stamp))
        if not is_same or not self._table.is_live(slot):
            raise BlockCorruptError(f"block {record.key} in extent {slot.extent} at {slot.offset}: checksum differs")

    async def _copy(self, target: memoryview, source: memoryview, then: Callable[[], bool]) -> bool:
        """Copy and do what follows, in one thread for both."""

        def work() -> bool:
            copy(target, source)
            return then()

        is_inline = len(target) <= _INLINE_BYTES_MAX
        done = work() if is_inline else await in_thread(self._copiers, work)
        if self._extra_latency_s:
            lines = -(-len(target) // 64)
            await asyncio.sleep(self._extra_latency_s * -(-lines // _LINES_IN_FLIGHT))
        return done

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back. See `TierBackend`."""
        if not self._table.is_live(slot):
            return
        self._store.dropped(slot)
        extent = self._table.drop(slot)
        if extent is not None:
            self._release(extent)
        elif self._idle is None and self._table.is_empty(slot.extent):
            self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._release_empty)

    def _release_empty(self) -> None:
        self._idle = None
        for extent in self._table.forget_empty():
            self._release(extent)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity; returns the extents that close. See `TierBackend`."""
        self._discard_spare()
        rounded = capacity_bytes // self._page_bytes * self._page_bytes
        self._table.target_bytes = self._target_bytes(rounded)
        closing, released = self._table.resize(rounded)
        for extent in released:
            self._release(extent)
        return closing

    def extents_to_free(self, scope: ScopeId, size_bytes: int, writer: str = NOBODY) -> frozenset[int]:
        """Extents whose emptying makes room for such a slot. See `MappableBackend`."""
        has_room = self._table.has_room(scope, size_bytes, sole_writer(scope) or writer)
        return frozenset() if has_room else self._table.extents_to_free(size_bytes)

    def compact(self) -> frozenset[int]:
        """Close sparse extents, and those that a client has damaged. See `TierBackend`."""
        self._await_releases(sum(1 for r in self._releases if r.done()))
        self._still_mapped.tend()
        for extent in self._damaged():
            _log.warning("a client has changed the size of an extent", extra={"extent": extent})
            self.close_extent(extent)
        return self._table.compact()

    def _damaged(self) -> list[int]:
        """Extents that a client has truncated, or made longer than they may be."""
        addresses = sigbus.lost()
        damaged = [i for i, memory in self._memory.items() if memory.address in addresses] if addresses else []
        if not self._unchecked:
            self._unchecked = [i for i, memory in self._memory.items() if not memory.is_sealed]
        checked, self._unchecked = self._unchecked[:_CHECKED_AT_ONCE], self._unchecked[_CHECKED_AT_ONCE:]
        return damaged + [i for i in checked if i in self._memory and self._memory[i].is_grown()]

    def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks of an earlier run, where the store keeps any. Their bytes are verified when they are read."""
        return each(self.recover_columns())

    async def recover_columns(self) -> AsyncIterator[Columns]:
        """The same, an extent at a time. See `ColumnarBackend`."""
        for found in self._store.found(self._table):
            self._memory[found.extent.id] = found.memory
            yield found.blocks

    async def close(self) -> None:
        """Let go of all memory; what the store keeps stays. Idempotent."""
        await self._end(self._shut)

    async def discard(self) -> None:
        """Release all memory and keep nothing. See `PersistentBackend`."""
        await self._end(self._clear)

    async def _end(self, finish: Callable[[], None]) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._idle is not None:
            self._idle.cancel()
        self._discard_spare()
        await asyncio.get_running_loop().run_in_executor(None, finish)

    def _shut(self) -> None:
        self._end_threads()
        while self._memory:
            self._store.let_go(self._memory.popitem()[1])
        self._store.close()

    def _clear(self) -> None:
        self._end_threads()
        while self._memory:
            self._still_mapped.add(self._store.released(*self._memory.popitem()))
        self._still_mapped.close()
        self._store.discard()

    def _end_threads(self) -> None:
        self._worker.shutdown()
        self._await_releases(len(self._releases))
        self._still_mapped.close()
        self._copiers.shutdown()

    def _discard_spare(self) -> None:
        memory = self._taken_spare(0)
        assert memory is None, "a spare has a size"

    def view(self, slot: SlotRef) -> memoryview:
        """Writable view of a slot; valid until the slot is dropped."""
        memory = self._memory.get(slot.extent)
        if memory is None:
            raise BlockCorruptError(f"extent {slot.extent} is gone: slot at {slot.offset} was dropped")
        return memory.view[slot.offset : slot.offset + slot.size_bytes]

    def extent_scope(self, extent: int) -> ScopeId:
        """Scope of an extent. See `MappableBackend`."""
        return self._table.extents[extent].scope

    def extent_writer(self, extent: int) -> str:
        """Tenant that may write an extent. See `MappableBackend`."""
        return self._table.extents[extent].writer

    def close_extent(self, extent: int) -> None:
        """Give no more slots of an extent. See `MappableBackend`."""
        empty = self._table.close_extent(extent)
        if empty is not None:
            self._release(empty)

    def extent_fd(self, extent: int, *, is_writable: bool) -> int:
        """Descriptor to hand to a client; owned by this object."""
        memory = self._memory[extent]
        return memory.writable_fd if is_writable else memory.readonly_fd

    def extent_bytes(self, extent: int) -> int:
        """Size of one extent."""
        return self._memory[extent].size_bytes

    def extent_view(self, extent: int) -> memoryview:
        """Whole extent in this process, for registration with a transport."""
        return self._memory[extent].view

    def on_release(self, listener: Callable[[int], None]) -> None:
        """Call `listener(extent)` before an extent goes away, so that transports and clients let go of it."""
        self._listeners.append(listener)


def _populate(made: Future[MappedExtent]) -> None:
    """Fault in what was prepared, unless it was not."""
    if not made.cancelled() and made.exception() is None:
        made.result().populate()
