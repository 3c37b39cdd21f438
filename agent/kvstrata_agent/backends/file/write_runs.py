"""Records that lie one behind the other go to the medium as one write. Pure."""

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.backends.base import Record, SlotRef, Writing
from kvstrata_api.errors import KvStrataError
from kvstrata_api.units import KIB

_GAP_BYTES_MAX: Final = 128 * KIB
"""Unused ends of slots up to this are written over with zeros: a write of its own costs more. A slot of 2 MiB leaves
60 KiB; the ends of larger ones break a run."""

_ZEROS: Final = memoryview(mmap.mmap(-1, _GAP_BYTES_MAX)).toreadonly()


@dataclass(slots=True, eq=False)
class Laid:
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


def runs_of(laid: Iterable[Laid]) -> list[list[Laid]]:
    """Records of neighbouring slots together, in the order of their offsets."""
    runs: list[list[Laid]] = []
    for one in sorted(laid, key=lambda r: (r.slot.extent, r.slot.offset)):
        if runs and _is_next(runs[-1][-1], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _is_next(before: Laid, one: Laid) -> bool:
    slot = before.slot
    has_place = (slot.extent, slot.offset + slot.size_bytes) == (one.slot.extent, one.slot.offset)
    return has_place and slot.size_bytes - before.size_bytes <= _GAP_BYTES_MAX


def made(
    run: Sequence[Laid], sealed: Callable[[Sequence[Writing]], Sequence[Record | KvStrataError]]
) -> list[memoryview]:
    """Lay the records of a run out; what one write of it consists of, nothing when there is no record in it.

    `sealed` gives records with the checksums of their bytes. One that is not to be written leaves a page of zeros where
    its header would be, so that a run stays one write.
    """
    for one, record in zip(run, sealed([one.writing for one in run]), strict=True):
        if isinstance(record, KvStrataError):
            one.parts[0][:] = bytes(len(one.parts[0]))  # The buffer's last user may have been another scope.
        else:
            one.lay_out(record)
        one.end = record
    return parts_of(run) if any(isinstance(one.end, Record) for one in run) else []


def parts_of(run: Sequence[Laid]) -> list[memoryview]:
    """What one write of a run consists of."""
    parts: list[memoryview] = []
    for one in run:
        parts += one.parts
        gap_bytes = one.slot.size_bytes - one.size_bytes
        if gap_bytes and one is not run[-1]:
            parts.append(_ZEROS[:gap_bytes])
    return parts
