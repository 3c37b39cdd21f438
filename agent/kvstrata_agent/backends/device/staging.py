"""Blocks between the callers' memory and a device, through a few pieces of host memory that take turns.

While the device copies one block, the processor copies and hashes its neighbours. What comes up is verified in a piece,
where nobody else can write, before any of it reaches the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.file.transfers import handed_over, proven
from kvstrata_api.checksum import bind
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError
from kvstrata_native import copy, copy_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvstrata_agent.backends.base import Reading, SlotRef, Writing
    from kvstrata_agent.backends.device.queue import DeviceQueue, Wait

PIECES: Final = 4
"""One at the device, one at the processor, and one more each so that neither waits for the other's last byte."""


class Slots(Protocol):
    """Where blocks lie on the device."""

    def part(self, slot: SlotRef, size_bytes: int) -> tuple[DeviceQueue, torch.Tensor]:
        """Queue of the device, and the first bytes of a slot. Raises `BackendFailedError` where that is gone."""


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
    """Pieces of host memory for all devices of a tier. For one thread."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()

    def write(self, writings: Sequence[Writing], slots: Slots) -> list[Record | KvStrataError]:
        """Copy records to their slots; on return each is there, or why not is said."""
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
                source = piece.memory[: len(target)]
                piece.wait = queue.start(lambda: target.copy_(source, non_blocking=True))
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
            target = piece.memory[: len(source)]
            piece.wait = queue.start(lambda: target.copy_(source, non_blocking=True))
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
    record, sound = writing.record, writing.sound
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
