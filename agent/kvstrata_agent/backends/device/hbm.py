"""GPU memory as a tier, on torch. The CPU device is a double for tests and has to be asked for by name.

Everything that touches a tier's memory goes through the queue of its device, allocation included: torch's default
stream knows nothing of others, and zeroes of an allocation there could arrive after the first block. Blocks pass
through a few pieces of host memory that take turns: while the device copies one block, the processor copies and hashes
its neighbours, several at a time where there are cores for it. What comes up is verified in a piece, where nobody else
can write, before any of it reaches the caller.

A tier that lends lets clients open its extents and copy on the device. Each extent is an allocation of its own then,
and each block has a sum that the device made of the bytes which were proven on their way to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import torch

from kvstrata_agent.backends.base import Capabilities, GroupBackend, Reading, Record, SlotRef, Writing
from kvstrata_agent.backends.device.device_tier import DeviceTier
from kvstrata_agent.backends.file.transfers import handed_over, proven
from kvstrata_api.checksum import bind
from kvstrata_api.errors import (
    BackendFailedError,
    BlockCorruptError,
    InvalidInputError,
    KvStrataError,
    TierFullError,
    UnsupportedError,
)
from kvstrata_native import copy, copy_digests, copy_threads
from kvstrata_native.devices import (
    SUM_BYTES,
    Allocation,
    allocate_cuda,
    allocate_host,
    block_sum,
    packed,
    runtime,
    start_copy,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.backends.base import LendingBackend
    from kvstrata_api.blocks import ScopeId


Wait = Callable[[], None]
"""Returns when the work is done; raises `RuntimeError` when the device failed at it or before it."""

DOUBLE: Final = "cpu"

PIECES: Final = 4
"""One at the device, one at the processor, and one more each so that neither waits for the other's last byte."""
_ALIGNMENT_BYTES: Final = 512
"""What the CUDA allocator aligns to, and enough for any vector load."""


class DeviceQueue(Protocol):
    """One device. Any thread may start work; what one thread starts is done in its order."""

    @property
    def name(self) -> str:
        """The device, as torch calls it."""

    @property
    def memory_bytes(self) -> int | None:
        """All memory of the device; None where it has no limit of its own."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory of the device with anything in it. Raises `torch.OutOfMemoryError`."""

    def allocate_shared(self, size_bytes: int) -> Allocation:
        """Memory of the device that other processes can open, with anything in it. Raises `RuntimeError`."""

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Memory of the host that the device reaches by itself."""

    def start(self, work: Callable[[], object]) -> Wait:
        """Let the device do `work` after all that was started before. Raises `RuntimeError`."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """The same of a copy between memory of the device and of `staging`."""

    def trim(self) -> None:
        """Let others on the device have what was freed."""


class CudaQueue:
    """A CUDA stream of our own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self.name = str(self._device)
        self.memory_bytes: int | None = torch.cuda.get_device_properties(self._device).total_memory

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`. The memory belongs to our stream, so it is used again only behind our work."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def allocate_shared(self, size_bytes: int) -> Allocation:
        """See `DeviceQueue`: of the driver itself, as torch cuts several tensors out of what it asks the driver for."""
        return allocate_cuda(self._device.index, size_bytes)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`: pinned, without which copies would go through the driver's buffers and block."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def start(self, work: Callable[[], object]) -> Wait:
        """See `DeviceQueue`."""
        with torch.cuda.stream(self._stream):
            work()
            return self._end()

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """See `DeviceQueue`."""
        start_copy(target, source, self._stream.cuda_stream)
        return self._end()

    def _end(self) -> Wait:
        """Whoever waits sleeps: engines want the cores."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        wait: Wait = done.synchronize
        return wait

    def trim(self) -> None:
        """See `DeviceQueue`: torch keeps freed memory, and engines are other processes."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


class HostQueue:
    """A double on the host, for tests: everything is done at once."""

    name = DOUBLE
    memory_bytes: int | None = None

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def allocate_shared(self, size_bytes: int) -> Allocation:
        """See `DeviceQueue`."""
        return allocate_host(size_bytes)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """See `DeviceQueue`."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, work: Callable[[], object]) -> Wait:
        """See `DeviceQueue`."""
        work()
        return _done

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """See `DeviceQueue`."""
        target.copy_(source)
        return _done

    def trim(self) -> None:
        """See `DeviceQueue`."""


def _done() -> None:
    pass


def open_queues(device: str) -> tuple[DeviceQueue, ...]:
    """Queues of all CUDA devices for `cuda`, or of the double for `cpu`.

    Raises `UnsupportedError` where torch sees no device or has no runtime, and for any other name.
    """
    if device == DOUBLE:
        return (HostQueue(),)
    if device != "cuda":
        raise UnsupportedError(f"HBM tier: device {device!r}: must be 'cuda', or {DOUBLE!r} as a double")
    if not torch.cuda.is_available():
        raise UnsupportedError("HBM tier: torch sees no CUDA device; install the driver and the `cuda` extra")
    try:
        runtime()
    except RuntimeError as e:
        raise UnsupportedError(f"HBM tier: {e}: install torch with the CUDA runtime that it asks for") from e
    return tuple(CudaQueue(index) for index in range(torch.cuda.device_count()))


class Slots(Protocol):
    """Where blocks lie on the device."""

    def part(self, slot: SlotRef, size_bytes: int) -> tuple[DeviceQueue, torch.Tensor]:
        """Queue of the device, and the first bytes of a slot. Raises `BackendFailedError` where that is gone."""

    def behind(self, slot: SlotRef, target: torch.Tensor) -> Callable[[], object] | None:
        """What the device has to do behind the copy to a slot, if anything."""


@dataclass(slots=True)
class _Piece:
    """Host memory that one block passes through at a time."""

    memory: torch.Tensor
    view: memoryview
    wait: Wait | None = None
    """For the last copy from or to it; None once that is over."""

    def settle(self) -> None:
        """Wait for the copy under way, if there is one. Raises `RuntimeError` when the device failed."""
        wait, self.wait = self.wait, None
        if wait is not None:
            wait()


class Staging:
    """Pieces of host memory for all devices of a tier. For one thread at a time."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()

    def write(self, writings: Sequence[Writing], slots: Slots) -> list[Record | KvStrataError]:
        """Copy records to their slots; on return each is there, or the error that kept it out."""
        ends: list[Record | KvStrataError] = []
        under_way: deque[tuple[Record | KvStrataError, _Piece | None]] = deque()
        for writing in writings:
            if len(under_way) == PIECES:
                ends.append(_written(*under_way.popleft()))
            under_way.append(self._start_write(writing, slots))
        return ends + [_written(*one) for one in under_way]

    def _start_write(self, writing: Writing, slots: Slots) -> tuple[Record | KvStrataError, _Piece | None]:
        try:
            queue, target = slots.part(writing.slot, len(writing.stored))
            piece = self._piece(queue, len(target))
            end = staged(writing, piece.view[: len(target)])
            if isinstance(end, Record):
                piece.wait = queue.start_copy(target, piece.memory[: len(target)])
                behind = slots.behind(writing.slot, target)
                piece.wait = piece.wait if behind is None else queue.start(behind)
        except RuntimeError as e:  # torch's device errors share no closer base.
            return _failed(writing.slot, e), None
        except KvStrataError as e:
            return e, None
        return end, piece

    def read(self, readings: Sequence[Reading], slots: Slots) -> list[bytes | KvStrataError]:
        """Fill memory of the callers with verified records; checksums for them, or why there is none."""
        ends: list[bytes | KvStrataError] = []
        under_way: deque[tuple[Reading, _Piece | KvStrataError]] = deque()
        for reading in readings:
            if len(under_way) == PIECES:
                ends.append(_arrived(*under_way.popleft()))
            under_way.append((reading, self._start_read(reading, slots)))
        return ends + [_arrived(*one) for one in under_way]

    def _start_read(self, reading: Reading, slots: Slots) -> _Piece | KvStrataError:
        try:
            queue, source = slots.part(reading.slot, reading.record.stored_bytes)
            piece = self._piece(queue, len(source))
            piece.wait = queue.start_copy(piece.memory[: len(source)], source)
        except RuntimeError as e:
            return _failed(reading.slot, e)
        except KvStrataError as e:
            return e
        return piece

    def _piece(self, queue: DeviceQueue, size_bytes: int) -> _Piece:
        """The piece that was used longest ago, when nobody is at it any more; a larger one where it is too small."""
        piece = self._pieces.popleft() if len(self._pieces) == PIECES else None
        if piece is not None:
            piece.settle()
        if piece is None or len(piece.view) < size_bytes:
            memory = queue.staging(size_bytes)
            piece = _Piece(memory, memoryview(memory.numpy()))
        self._pieces.append(piece)
        return piece

    def close(self) -> None:
        """Release the memory: no copy is under way between calls."""
        self._pieces.clear()


def staged(writing: Writing, room: memoryview) -> Record | KvStrataError:
    """Copy a record into memory that is ours, and prove the copy where that is asked; its record, or an error."""
    record, sound = writing.record, writing.expected
    if sound is None:
        copy(room, writing.stored)
        return record
    ours = bind(record.key.digest, record.epoch, writing.slot.stamp)
    return proven(writing, sound, *copy_digests(room, writing.stored, ours, bind(record.key.digest, *sound.use)))


def _failed(slot: SlotRef, error: RuntimeError) -> BackendFailedError:
    return BackendFailedError(f"HBM slot at {slot.offset} of extent {slot.extent}: {error}")


def _written(end: Record | KvStrataError, piece: _Piece | None) -> Record | KvStrataError:
    """Wait until a record is on its device, if it is on its way there."""
    try:
        if piece is not None:
            piece.settle()
    except RuntimeError as e:
        return BackendFailedError(f"copy to HBM: {e}")
    return end


def _arrived(reading: Reading, piece: _Piece | KvStrataError) -> bytes | KvStrataError:
    """Hand a record over that came up, if it is the one."""
    if isinstance(piece, KvStrataError):
        return piece
    try:
        piece.settle()
    except RuntimeError as e:
        return BackendFailedError(f"copy from HBM: {e}")
    payload = piece.view[: reading.record.stored_bytes]
    (bound,) = handed_over([(reading, payload)], is_sealed=False)
    if not bound:
        where = f"extent {reading.slot.extent} at {reading.slot.offset}"
        return BlockCorruptError(f"block {reading.record.key} in {where}: checksum differs")
    return bound


End = TypeVar("End")
Task = TypeVar("Task")


def open_hbm(device: str, capacity_bytes: int, *, lends: bool = False) -> HbmTier:
    """Tier in the memory of all devices of a kind: `cuda`, or `cpu` as a double. Clients may open it where it `lends`.

    Raises `UnsupportedError` when torch sees no such device, and `InvalidInputError` for more than the devices have.
    """
    return HbmTier(open_queues(device), capacity_bytes, lends=lends)


class HbmTier(DeviceTier["HbmMemory"]):
    """Blocks in device memory (`GroupBackend`). One group at a time, each by several threads."""

    def __init__(
        self, queues: Sequence[DeviceQueue], capacity_bytes: int, threads: int = copy_threads, *, lends: bool = False
    ) -> None:
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
        super().__init__(
            capabilities, HbmMemory(queues, threads, lends=lends), capacity_bytes, page_bytes=_ALIGNMENT_BYTES
        )

    @property
    def group(self) -> GroupBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def lending(self) -> LendingBackend | None:
        """Itself, where it lends. See `OptionalCapabilities`."""
        return self if self.memory.lends else None

    def device_of(self, extent: int) -> str:
        """See `LendingBackend`."""
        return self.memory.shared[extent].device

    def extent_scope(self, extent: int) -> ScopeId:
        """See `LendingBackend`."""
        return self._table.extents[extent].scope

    def extent_bytes(self, extent: int) -> int:
        """See `LendingBackend`."""
        return self._table.extents[extent].size_bytes

    def close_extent(self, extent: int) -> None:
        """See `LendingBackend`."""
        closed = self._table.close_extent(extent)
        if closed is not None:
            self._release(closed)

    def sum_of(self, slot: SlotRef) -> bytes:
        """See `LendingBackend`."""
        return self.memory.sum_of(slot) if self._table.is_live(slot) else b""

    def is_intact(self, slot: SlotRef) -> bool:
        """See `LendingBackend`."""
        return not self.sum_of(slot) or self.memory.is_intact(slot)

    def lend(self, extent: int, borrower: int) -> int:
        """See `LendingBackend`."""
        allocation = self.memory.shared[extent]
        self._thread.submit(self.memory.lend, extent, borrower)  # In order with all that releases an extent.
        return allocation.fd

    def give_back(self, borrower: int, extents: Sequence[int] | None = None) -> None:
        """See `LendingBackend`."""
        if not self._is_closed:
            self._thread.submit(self.memory.give_back, borrower, extents)

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

    def __init__(self, queues: Sequence[DeviceQueue], threads: int, *, lends: bool = False) -> None:
        self._queues = tuple(queues)
        self.lends = lends
        self.shared: dict[int, Allocation] = {}
        """Extents as other processes open them."""
        self._sums: dict[int, dict[int, tuple[int, torch.Tensor | bytes, int]]] = {}
        """Of each extent by offset: stamp, sum on the device and bytes of what was written last."""
        self._borrowers: dict[int, set[int]] = {}
        """Connections that have an extent open, as far as they have not said otherwise."""
        self._lent: dict[int, Allocation] = {}
        """Released, cleared, and still open somewhere."""
        self._stagings = tuple(Staging() for _ in range(threads))
        self._copying = ThreadPoolExecutor(threads, "kvstrata-copy")
        self._homes: dict[int, DeviceQueue] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def make(self, extent: int, size_bytes: int) -> None:
        """Allocate zeroed memory on the device where this tier has least. See `DeviceMemory`."""
        refused = []
        for queue in sorted(self._queues, key=self._used_bytes):
            try:
                tensor = self._allocated(queue, extent, size_bytes)
                queue.start(tensor.zero_)
            except RuntimeError as e:  # Out of memory, mostly: engines share it.
                refused.append(f"{queue.name}: {e}")
                self.shared.pop(extent, None)
                self._sums.pop(extent, None)
                continue
            self._homes[extent], self.tensors[extent] = queue, tensor
            return
        raise TierFullError(f"{size_bytes} B of HBM: {'; '.join(refused)}")

    def _allocated(self, queue: DeviceQueue, extent: int, size_bytes: int) -> torch.Tensor:
        if not self.lends:
            return queue.allocate(size_bytes)
        self.shared[extent], self._sums[extent] = queue.allocate_shared(size_bytes), {}
        return self.shared[extent].memory

    def _used_bytes(self, queue: DeviceQueue) -> int:
        there = tuple(self.tensors.items())  # The thread of the copies takes extents away meanwhile.
        return sum(len(tensor) for extent, tensor in there if self._homes.get(extent) is queue)

    def release(self, extent: int) -> None:
        """Clear and free, so that nobody on the device finds there what was a prompt. See `DeviceMemory`."""
        queue, tensor = self._homes.pop(extent), self.tensors.pop(extent)
        allocation = self.shared.pop(extent, None)
        self._sums.pop(extent, None)
        if allocation is not None and self._borrowers.get(extent):
            self._lent[extent] = allocation
        del allocation
        try:
            queue.start(tensor.zero_)()
            del tensor
            queue.trim()
        except RuntimeError as e:
            raise BackendFailedError(f"{queue.name}: extent {extent} was not cleared: {e}") from e

    def lend(self, extent: int, borrower: int) -> None:
        """Note that a connection may have an extent open from now on."""
        if extent in self.shared:
            self._borrowers.setdefault(extent, set()).add(borrower)

    def give_back(self, borrower: int, extents: Sequence[int] | None) -> None:
        """Note that it has not any more; what was released meanwhile is freed with its last borrower."""
        for extent in tuple(self._borrowers) if extents is None else extents:
            borrowers = self._borrowers.get(extent, set())
            borrowers.discard(borrower)
            if not borrowers:
                self._borrowers.pop(extent, None)
                self._lent.pop(extent, None)

    def behind(self, slot: SlotRef, target: torch.Tensor) -> Callable[[], object] | None:
        """Keep the sum of a block that is being put into a slot, where that is lent and the block has whole words."""
        sums = self._sums.get(slot.extent)
        if sums is None or len(target) % SUM_BYTES != 0:
            return None

        def keep() -> None:
            sums[slot.offset] = slot.stamp, block_sum(target), len(target)

        return keep

    def sum_of(self, slot: SlotRef) -> bytes:
        """Sum of what was written last under this use of a slot; empty where there is none."""
        sums = self._sums.get(slot.extent, {})
        stamp, total, size_bytes = sums.get(slot.offset, (0, b"", 0))
        if stamp != slot.stamp:
            return b""
        if not isinstance(total, bytes):
            total = packed(total)
            sums[slot.offset] = stamp, total, size_bytes
        return total

    def is_intact(self, slot: SlotRef) -> bool:
        """Whether a slot still has the sum that is kept of it."""
        *_, size_bytes = self._sums[slot.extent][slot.offset]
        return packed(block_sum(self.part(slot, size_bytes)[1])) == self.sum_of(slot)

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
        return self._shared(writings, lambda staging, part: staging.write(part, self))

    def read(self, readings: Sequence[Reading]) -> list[bytes | KvStrataError]:
        """Copy records from their slots and verify them."""
        return self._shared(readings, lambda staging, part: staging.read(part, self))

    def _shared(
        self, works: Sequence[Task], copies: Callable[[Staging, Sequence[Task]], list[End | KvStrataError]]
    ) -> list[End | KvStrataError]:
        """Have all stagings take a part of a group; returns when all of it is done."""
        size = -(-len(works) // len(self._stagings)) or 1
        parts = [works[at : at + size] for at in range(0, len(works), size)]
        others = [
            self._copying.submit(copies, staging, part)
            for staging, part in zip(self._stagings[1:], parts[1:], strict=False)
        ]
        try:
            ends = copies(self._stagings[0], parts[0]) if parts else []
        finally:
            futures.wait(others)
        return ends + [end for other in others for end in other.result()]

    def broken(self) -> frozenset[int]:
        """A device that failed once is asked again."""
        return frozenset()

    def close(self) -> None:
        """Clear everything."""
        self._copying.shutdown()
        for staging in self._stagings:
            staging.close()
        for extent in tuple(self.tensors):
            with suppress(BackendFailedError):  # A driver clears what a process leaves.
                self.release(extent)
        self._lent.clear()
