"""GPU memory as a tier, on torch. The CPU device is a double for tests and has to be asked for by name."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch

from kvfleet_agent.backends.base import Capabilities, Record, SlotRef
from kvfleet_agent.backends.slots import Extent, SlotTable, target_extent_bytes
from kvfleet_agent.backends.waiting import in_thread
from kvfleet_api.blocks import ScopeId
from kvfleet_api.checksum import checksum
from kvfleet_api.errors import BackendFailedError, BlockCorruptError, TierFullError, UnsupportedError
from kvfleet_api.units import MIB

_ALIGNMENT_BYTES: Final = 512
"""What the CUDA allocator aligns to, and enough for any vector load."""

_EXTENT_PARTS: Final = 16
_EXTENT_BYTES_MAX: Final = 256 * MIB
_EXTENTS_MAX: Final = 4096


class HbmTier:
    """Blocks in tensors of one device (`TierBackend`). Copies run on a stream of their own in one thread."""

    def __init__(self, device: str, capacity_bytes: int) -> None:
        """Raises `UnsupportedError` when torch sees no such device."""
        self._device = torch.device(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError("HBM tier: torch sees no CUDA device; install the driver and the `cuda` extra")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._table = SlotTable(
            capacity_bytes=capacity_bytes,
            target_bytes=_target_bytes(capacity_bytes),
            page_bytes=_ALIGNMENT_BYTES,
            alignment_bytes=_ALIGNMENT_BYTES,
        )
        self._tensors: dict[int, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "kvfleet-hbm")
        self._last_error = ""
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """State what the medium can do."""
        return Capabilities(
            medium=f"torch-{self._device.type}",
            is_memory=True,
            survives_restart=False,
            is_emulated=self._device.type != "cuda",
            alignment_bytes=_ALIGNMENT_BYTES,
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

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take a slot; a new extent is zeroed device memory. See `TierBackend`."""
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
            self._tensors[extent.id] = torch.zeros(extent.size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as e:
            self._table.forget(extent.id)
            self._last_error = str(e)
            raise TierFullError(f"{extent.size_bytes} B of {self._device}: {e}") from e

    def _release(self, extent: Extent) -> None:
        # torch keeps freed memory for itself: what was a prompt does not wait there for the next extent.
        self._thread.submit(self._tensors.pop(extent.id).zero_)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Copy host bytes to the device; on return they are there. See `TierBackend`."""
        await self._run(partial(self._copy_in, self._tensor(slot, record), stored[: record.stored_bytes]))

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Copy to host memory and verify the copy. See `TierBackend`."""
        target = into[: record.stored_bytes]
        await self._run(partial(self._copy_out, self._tensor(slot, record), target))
        is_same = checksum(target, record.key.digest, record.epoch, slot.stamp) == record.checksum
        if not is_same or not self._table.is_live(slot):
            raise BlockCorruptError(f"block {record.key} in extent {slot.extent} at {slot.offset}: checksum differs")

    def _tensor(self, slot: SlotRef, record: Record) -> torch.Tensor:
        tensor = self._tensors.get(slot.extent)
        if tensor is None:
            raise BackendFailedError(f"extent {slot.extent} is gone: slot at {slot.offset} was dropped")
        return tensor[slot.offset : slot.offset + record.stored_bytes]

    async def _run(self, copy: "partial[None]") -> None:
        try:
            await in_thread(self._thread, copy)
        except RuntimeError as e:  # torch's device errors share no closer base.
            self._last_error = str(e)
            raise BackendFailedError(f"{self._device}: {e}") from e

    def _copy_in(self, target: torch.Tensor, source: memoryview) -> None:
        host = torch.frombuffer(bytearray(source) if source.readonly else source, dtype=torch.uint8)
        self._copy(target, host)

    def _copy_out(self, source: torch.Tensor, target: memoryview) -> None:
        self._copy(torch.frombuffer(target, dtype=torch.uint8), source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source)
        self._stream.synchronize()

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back. See `TierBackend`."""
        extent = self._table.drop(slot)
        if extent is not None:
            self._release(extent)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity; returns the extents that close. See `TierBackend`."""
        self._table.target_bytes = _target_bytes(capacity_bytes)
        closing, released = self._table.resize(capacity_bytes)
        for extent in released:
            self._release(extent)
        return closing

    def relief(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        """Extents whose emptying makes room for such a slot. See `TierBackend`."""
        return frozenset() if self._table.has_room(scope, size_bytes) else self._table.relief(size_bytes)

    def compact(self) -> frozenset[int]:
        """Close sparse extents. See `TierBackend`."""
        return self._table.compact()

    async def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Nothing: device memory does not survive its process."""
        return
        yield

    async def close(self) -> None:
        """Release the device memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        self._tensors.clear()


def _target_bytes(capacity_bytes: int) -> int:
    return target_extent_bytes(
        capacity_bytes, parts=_EXTENT_PARTS, most_bytes=_EXTENT_BYTES_MAX, count_max=_EXTENTS_MAX
    )
