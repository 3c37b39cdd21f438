"""A tier in the memory of a device that engines cannot map by extents: blocks are copied in and out by this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from kvstrata_agent.backends.base import OptionalCapabilities
from kvstrata_agent.backends.slot_table import Extent, SlotTable, target_extent_bytes
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.errors import BackendFailedError, KvStrataError
from kvstrata_api.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvstrata_agent.backends.base import Capabilities, Record, SlotRef
    from kvstrata_api.blocks import ScopeId

T = TypeVar("T")

_EXTENT_PARTS: Final = 16
_EXTENT_BYTES_MAX: Final = 256 * MIB
_EXTENTS_MAX: Final = 4096


class DeviceMemory(Protocol):
    """Extents of a device's memory. All but `make` is called in one thread and may take its time."""

    def make(self, extent: int, size_bytes: int) -> None:
        """Give an extent memory. Raises `TierFullError` when the device has none left."""

    def release(self, extent: int) -> None:
        """Clear an extent's memory and take it back. Raises `BackendFailedError`; it is back all the same."""

    def broken(self) -> frozenset[int]:
        """Extents in which the device has failed: nothing more is to be put there."""

    def close(self) -> None:
        """Clear and release everything."""


Memory = TypeVar("Memory", bound=DeviceMemory)


class DeviceTier(OptionalCapabilities, Generic[Memory]):
    """Slots in a device's memory: what is the same for all tiers there (`TierBackend`). Copies run in one thread."""

    def __init__(
        self,
        capabilities: Capabilities,
        memory: Memory,
        capacity_bytes: int,
        *,
        page_bytes: int,
    ) -> None:
        """Take over `memory`; extents are multiples of `page_bytes`."""
        self.capabilities = capabilities
        self.memory = memory
        self._table = SlotTable(
            capacity_bytes=capacity_bytes // page_bytes * page_bytes,
            target_bytes=self._target_bytes(capacity_bytes),
            page_bytes=page_bytes,
            alignment_bytes=capabilities.alignment_bytes,
        )
        self._thread = ThreadPoolExecutor(1, "kvstrata-device")
        self._last_error = ""
        self._is_closed = False

    def _target_bytes(self, capacity_bytes: int) -> int:
        """Bytes that an extent has where it holds one slot at least."""
        return target_extent_bytes(
            capacity_bytes, parts=_EXTENT_PARTS, most_bytes=_EXTENT_BYTES_MAX, count_max=_EXTENTS_MAX
        )

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
        """The last failure of the device; empty when there was none."""
        return self._last_error

    def slot_bytes(self, size_bytes: int) -> int:
        """Bytes of such a slot. See `TierBackend`."""
        return self._table.stride(size_bytes)

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take a slot. See `TierBackend`."""
        slot = self._table.take(scope, size_bytes)
        if slot is None:
            self._open(scope, size_bytes)
            slot = self._table.take(scope, size_bytes)
        assert slot is not None, "a new extent has room"
        return slot

    def _open(self, scope: ScopeId, size_bytes: int) -> None:
        opening = self._table.open(scope, size_bytes)
        for extent in opening.retired:
            self._release(extent)
        extent = opening.extent
        try:
            self.memory.make(extent.id, extent.size_bytes)
        except KvStrataError as e:
            self._table.forget(extent.id)
            self._last_error = str(e)
            raise

    def _release(self, extent: Extent) -> None:
        self._thread.submit(self._released, extent.id)

    def _released(self, extent: int) -> None:
        try:
            self.memory.release(extent)
        except BackendFailedError as e:
            self._last_error = str(e)

    async def _run(self, copies: Callable[[], T]) -> T:
        """Copy in the thread of this tier. What fails is the tier's last error."""
        try:
            return await in_thread(self._thread, copies)
        except BackendFailedError as e:
            self._last_error = str(e)
            raise

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back. See `TierBackend`."""
        extent = self._table.drop(slot)
        if extent is not None:
            self._release(extent)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity; returns the extents that close. See `TierBackend`."""
        self._table.target_bytes = self._target_bytes(capacity_bytes)
        closing, released = self._table.resize(capacity_bytes)
        for extent in released:
            self._release(extent)
        return closing

    def extents_to_free(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        """Extents whose emptying makes room for such a slot. See `TierBackend`."""
        return frozenset() if self._table.has_room(scope, size_bytes) else self._table.extents_to_free(size_bytes)

    def compact(self) -> frozenset[int]:
        """Close sparse extents, and those in which the device has failed. See `TierBackend`."""
        for extent in self.memory.broken():
            closed = self._table.close_extent(extent)
            if closed is not None:
                self._release(closed)
        return self._table.compact()

    async def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Nothing: this memory does not survive its process."""
        return
        yield

    async def close(self) -> None:
        """Release the device memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await in_thread(self._thread, self.memory.close)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
