"""What a record store notes of each slot until its index is written: two thirds of what it takes there. Pure."""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.file.index_format import FIELDS, Kinds
from kvstrata_agent.backends.recovered import Columns, alike
from kvstrata_api.blocks import KEY_BYTES, LayoutId
from kvstrata_api.checksum import CHECKSUM_BYTES

_NOTE: Final = struct.Struct("<II16s20s20s")
"""traits (0: nothing to list), stored bytes, checksum, digest, parent. The slot's table knows the stamp."""

NOTE_BYTES: Final = _NOTE.size
_NOTE_FIELDS: Final = np.dtype(
    [
        ("traits", "<u4"), ("stored_bytes", "<u4"), ("checksum", "u1", CHECKSUM_BYTES), ("digest", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
    ]
)  # fmt: skip
"""The same for NumPy."""

_NOTHING: Final = bytes(NOTE_BYTES)
_STORED_BYTES_MAX: Final = 2**32 - 1
TRAITS_MAX: Final = 1 << 16

_Key = tuple[LayoutId, str, int, int, int]


class Traits:
    """What many records have in common, by number from 1. Numbers are kept: a store has few."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._numbers: dict[_Key, int] = {}
        self._table = np.zeros(16, FIELDS)

    def number(self, record: Record) -> int | None:
        """Return the number of a record's traits, new ones included; None when the index or a note has none left."""
        key = (record.layout_id, record.codec, record.epoch, record.raw_bytes, len(record.parent))
        found = self._numbers.get(key)
        return self._add(key) if found is None else found

    def _add(self, key: _Key) -> int | None:
        layout_id, codec, epoch, raw_bytes, parent_length = key
        kind, number = self.kinds.number(layout_id, codec), len(self._numbers) + 1
        if kind is None or number > TRAITS_MAX:
            return None
        if number == len(self._table):
            self._table = np.concatenate([self._table, np.zeros(number, FIELDS)])
        row = self._table[number : number + 1]
        row["kind"], row["epoch"], row["raw_bytes"], row["parent_length"] = kind, epoch, raw_bytes, parent_length
        self._numbers[key] = number
        return number

    def entries(self, numbers: NDArray[np.uint32]) -> NDArray[np.void]:
        """Entries of the index with what the numbers stand for and nothing else; all zeros for 0."""
        entries: NDArray[np.void] = self._table.take(numbers)
        return entries


class SlotNotes:
    """Notes of the slots of one segment: records that are durable and not dropped."""

    def __init__(self, slots: int) -> None:
        self._notes = bytearray(slots * NOTE_BYTES)

    def set(self, index: int, record: Record, traits: Traits) -> bool:
        """Note a record; False when there are no words for it, and nothing was noted."""
        number = traits.number(record)
        if number is None or record.stored_bytes > _STORED_BYTES_MAX:
            return False
        said = (number, record.stored_bytes, record.checksum, record.key.digest, record.parent)
        _NOTE.pack_into(self._notes, index * NOTE_BYTES, *said)
        return True

    def set_all(self, found: Columns, traits: Traits) -> bool:
        """Note what an earlier run has left; False when there are no words for some of it, and nothing was noted."""
        firsts, of = alike(found.records)
        numbers = [traits.number(found.record(first)) for first in firsts]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers) or found.records["stored_bytes"].max() > _STORED_BYTES_MAX:
            return False
        notes = np.zeros(len(found), _NOTE_FIELDS)
        notes["traits"] = np.array(known, np.uint32)[of]
        for name in ("stored_bytes", "checksum", "digest", "parent"):
            notes[name] = found.records[name]
        np.frombuffer(self._notes, _NOTE_FIELDS)[found.indices] = notes
        return True

    def clear(self, index: int) -> None:
        """Note that a slot holds nothing any more."""
        self._notes[index * NOTE_BYTES : (index + 1) * NOTE_BYTES] = _NOTHING

    def entries(self, stamps: Sequence[int], traits: Traits) -> memoryview:
        """What the index says of each slot, whose present use has this stamp: one `ENTRY_BYTES` after the other."""
        notes = np.frombuffer(self._notes, _NOTE_FIELDS)
        entries = traits.entries(notes["traits"])
        entries["stamp"] = np.where(notes["traits"] != 0, np.asarray(stamps, np.uint64), 0)
        for name in ("stored_bytes", "checksum", "digest", "parent"):
            entries[name] = notes[name]
        return memoryview(entries.view(np.uint8).data)


assert _NOTE_FIELDS.itemsize == NOTE_BYTES, "both say the same of a note"
