"""GPU memory as a tier, on torch. The CPU device is a double for tests and has to be asked for by name."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import torch

from kvstrata_agent.backends.base import Capabilities, Reading, Record, SlotRef, Writing
from kvstrata_agent.backends.device.device_tier import DeviceTier
from kvstrata_agent.backends.device.queue import DOUBLE, DeviceQueue, open_queues
from kvstrata_agent.backends.device.staging import Staging
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, KvStrataError, TierFullError

End = TypeVar("End")

_ALIGNMENT_BYTES: Final = 512
"""What the CUDA allocator aligns to, and enough for any vector load."""


def open_hbm(device: str, capacity_bytes: int) -> "HbmTier":
    """Tier in the memory of all devices of a kind: `cuda`, or `cpu` as a double.

    Raises `UnsupportedError` when torch sees no such device, and `InvalidInputError` for more than the devices have.
    """
    return HbmTier(open_queues(device), capacity_bytes)


class HbmTier(DeviceTier["HbmMemory"]):
    """Blocks in device memory (`GroupBackend`). Copies run in one thread, several under way at a time."""

    def __init__(self, queues: Sequence[DeviceQueue], capacity_bytes: int) -> None:
        """Use one queue for each device. Raises `InvalidInputError` for more than the devices have."""
        _check_fits(queues, capacity_bytes)
        kind = queues[0].name.partition(":")[0]
        capabilities = Capabilities(
            medium=f"torch-{kind}",
            is_memory=True,
            survives_restart=False,
            is_emulated=kind == DOUBLE,
            alignment_bytes=_ALIGNMENT_BYTES,
        )
        super().__init__(capabilities, HbmMemory(queues), capacity_bytes, page_bytes=_ALIGNMENT_BYTES)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """See `TierBackend`."""
        (end,) = await self.write_group([Writing(slot, stored[: record.stored_bytes], record)])
        if isinstance(end, KvStrataError):
            raise end

    async def write_group(self, writings: Sequence[Writing]) -> Sequence[Record | KvStrataError]:
        """Copy records to the devices. See `GroupBackend`."""
        return await self._group(partial(self.memory.write, writings))

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """See `TierBackend`."""
        (end,) = await self.read_group([Reading(slot, record, into)])
        if isinstance(end, KvStrataError):
            raise end

    async def read_group(self, readings: Sequence[Reading]) -> Sequence[bytes | KvStrataError]:
        """Copy records to the host and verify them. See `GroupBackend`."""
        ends = await self._group(partial(self.memory.read, readings))
        return [self._live(r, end) for r, end in zip(readings, ends, strict=True)]

    def _live(self, reading: Reading, end: bytes | KvStrataError) -> bytes | KvStrataError:
        if isinstance(end, KvStrataError) or self._table.is_live(reading.slot):
            return end
        return BlockCorruptError(f"block {reading.record.key}: its slot was dropped while it was read")

    async def _group(self, copies: Callable[[], Sequence[End | KvStrataError]]) -> Sequence[End | KvStrataError]:
        ends = await self._run(copies)
        failures = [str(end) for end in ends if type(end) is BackendFailedError]
        self._last_error = failures[0] if failures else self._last_error
        return ends


def _check_fits(queues: Sequence[DeviceQueue], capacity_bytes: int) -> None:
    limits = [q.memory_bytes for q in queues if q.memory_bytes is not None]
    if limits and capacity_bytes > sum(limits):
        there = ", ".join(f"{q.name} has {q.memory_bytes} B" for q in queues)
        raise InvalidInputError(f"HBM tier: {capacity_bytes} B asked for; {there}")


class HbmMemory:
    """Extents on one or more devices (`DeviceMemory`), each whole on one of them."""

    def __init__(self, queues: Sequence[DeviceQueue]) -> None:
        self._queues = tuple(queues)
        self._staging = Staging()
        self._homes: dict[int, DeviceQueue] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def make(self, extent: int, size_bytes: int) -> None:
        """Allocate zeroed memory on the device where this tier has least. See `DeviceMemory`."""
        refused = []
        for queue in sorted(self._queues, key=self._used_bytes):
            try:
                tensor = queue.allocate(size_bytes)
                queue.start(tensor.zero_)
            except RuntimeError as e:  # Out of memory, mostly: engines share it.
                refused.append(f"{queue.name}: {e}")
                continue
            self._homes[extent], self.tensors[extent] = queue, tensor
            return
        raise TierFullError(f"{size_bytes} B of HBM: {'; '.join(refused)}")

    def _used_bytes(self, queue: DeviceQueue) -> int:
        there = tuple(self.tensors.items())  # The thread of the copies takes extents away meanwhile.
        return sum(len(tensor) for extent, tensor in there if self._homes.get(extent) is queue)

    def release(self, extent: int) -> None:
        """Clear and free, so that nobody on the device finds there what was a prompt. See `DeviceMemory`."""
        queue, tensor = self._homes.pop(extent), self.tensors.pop(extent)
        try:
            queue.start(tensor.zero_)()
            del tensor
            queue.trim()
        except RuntimeError as e:
            raise BackendFailedError(f"{queue.name}: extent {extent} was not cleared: {e}") from e

    def part(self, slot: SlotRef, size_bytes: int) -> tuple[DeviceQueue, torch.Tensor]:
        """See `Slots`. Raises `InvalidInputError` for more than the slot holds: a neighbour may lie behind it."""
        if size_bytes > slot.size_bytes:
            raise InvalidInputError(f"{size_bytes} B in an HBM slot of {slot.size_bytes} B")
        home = self._homes.get(slot.extent)
        if home is None:
            raise BackendFailedError(f"extent {slot.extent} is gone: slot at {slot.offset} was dropped")
        return home, self.tensors[slot.extent][slot.offset : slot.offset + size_bytes]

    def write(self, writings: Sequence[Writing]) -> list[Record | KvStrataError]:
        """Copy records to their slots."""
        return self._staging.write(writings, self)

    def read(self, readings: Sequence[Reading]) -> list[bytes | KvStrataError]:
        """Copy records from their slots and verify them."""
        return self._staging.read(readings, self)

    def broken(self) -> frozenset[int]:
        """A device that failed once is asked again."""
        return frozenset()

    def close(self) -> None:
        """Clear everything."""
        self._staging.close()
        for extent in tuple(self.tensors):
            with suppress(BackendFailedError):  # A driver clears what a process leaves.
                self.release(extent)
