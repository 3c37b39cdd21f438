"""Blocks that nobody uses just now, as rows of 56 bytes and identities of 60: objects for the same take ten times that.

What many blocks have in common (scope, layout, account, tier, codec, epoch, sizes) is kept once, as a kind. What no two
have in common, their identity, is kept once as well: where the medium notes it for each of its slots, a row has none of
its own. Rows lie in chunks that never move; a row is found by its digest in one of 256 small open-addressing tables, so
that none of them is large enough for its growth to be felt. No clock, no I/O.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvstrata_agent.backends.base import DIGEST_AT, IDENTITIES, IDENTITY
from kvstrata_agent.blocks.block import TIERS_MAX
from kvstrata_agent.policy.priority import PriorityClass
from kvstrata_api.blocks import KEY_BYTES, unpack_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstrata_agent.backends.base import Notes
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_api.blocks import LayoutId, ScopeId

_ROW: Final = struct.Struct(f"<ddQQQII{TIERS_MAX}B")
"""born, last use, mark, stamp, offset, extent, kind, children at each level."""
PACKED_BYTES: Final = _ROW.size
FIELDS: Final = np.dtype(
    [
        ("born_s", "<f8"), ("used_at_s", "<f8"), ("mark", "<u8"), ("stamp", "<u8"), ("offset", "<u8"),
        ("extent", "<u4"), ("kind", "<u4"), ("counts", "u1", TIERS_MAX),
    ]
)  # fmt: skip
_IDENTITY_BYTES: Final = IDENTITY.size
_COUNTS: Final = struct.Struct(f"<{TIERS_MAX}B")
_COUNTS_AT: Final = PACKED_BYTES - _COUNTS.size
_KIND_AT: Final = _COUNTS_AT - 4
_EXTENT_AT: Final = _KIND_AT - 4
_PLACE: Final = struct.Struct("<QII")
_PLACE_AT: Final = _EXTENT_AT - 8
"""Offset, extent and kind: they lie together."""
_U32: Final = struct.Struct("<I")
NUMBER_MAX: Final = 2**32 - 1
COUNT_MAX: Final = 2**8 - 1

_CHUNK_BITS: Final = 12
_CHUNK_ROWS: Final = 1 << _CHUNK_BITS
_SHARDS: Final = 256
_SLOTS_MIN: Final = 16
_EMPTY: Final = 0
_DELETED: Final = 1
_FIRST: Final = 2
"""A table holds a row's number and this; what is below means that there is none."""
_FREE: Final = 0
"""Kind of a row that holds no block."""


class PackedKind(NamedTuple):
    """What a row has in common with many others."""

    scope: ScopeId
    layout_id: LayoutId
    tenant: str
    tier: Tier
    codec: str
    epoch: int
    raw_bytes: int
    slot_bytes: int
    is_root: bool
    """The block continues none."""
    priority: PriorityClass = PriorityClass.STANDARD


class PackedBlock(NamedTuple):
    """A block with one copy."""

    kind: PackedKind
    digest: bytes
    parent: bytes
    checksum: bytes
    born_s: float
    used_at_s: float
    stamp: int
    offset: int
    extent: int
    stored_bytes: int
    counts: tuple[int, ...]
    """Children at each level."""
    mark: int = 0
    """What is known of its uses, see `policy.expected_reuse`."""

    @property
    def fits(self) -> bool:
        """True when no field is too large for a row."""
        return max(self.stored_bytes, self.extent) <= NUMBER_MAX and max(self.counts) <= COUNT_MAX


class _PackedKinds:
    """Kinds by number, as long as a row is of them."""

    def __init__(self) -> None:
        self._numbers: dict[PackedKind, int] = {}
        self.values: list[PackedKind | None] = [None]
        self._uses = [0]
        self._unused: list[int] = []

    def take(self, kind: PackedKind, count: int = 1) -> int:
        number = self._numbers.get(kind)
        if number is None:
            if self._unused:
                number = self._unused.pop()
                self.values[number] = kind
            else:
                number = len(self.values)
                self.values.append(kind)
                self._uses.append(0)
            self._numbers[kind] = number
        self._uses[number] += count
        return number

    def give_back(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            kind = self.values[number]
            assert kind is not None, "a row was of it"
            del self._numbers[kind]
            self.values[number] = None
            self._unused.append(number)

    def layouts(self, scope: ScopeId) -> set[LayoutId]:
        return {kind.layout_id for kind in self._numbers if kind.scope == scope}

    def where(self, is_meant: Callable[[PackedKind], bool]) -> list[int]:
        return [number for kind, number in self._numbers.items() if is_meant(kind)]


class _Chunk:
    """Rows with neighbouring numbers, all with identities of their own or all without."""

    __slots__ = ("identities", "rows")

    def __init__(self, *, is_noted: bool) -> None:
        self.rows = bytearray(_CHUNK_ROWS * PACKED_BYTES)
        self.identities = None if is_noted else bytearray(_CHUNK_ROWS * _IDENTITY_BYTES)

    @property
    def fields(self) -> NDArray[np.void]:
        """The rows with NumPy, to be read and written."""
        return np.frombuffer(self.rows, FIELDS)


@dataclass(slots=True)
class _Noted:
    """An extent whose medium notes what lies there."""

    notes: Notes
    rows: int = 0
    """As many rows rely on it."""


class PackedTable:
    """All rows of a node. A row's number is good until the row is taken out."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._noted: dict[tuple[Tier, int], _Noted] = {}
        """By tier and extent; those that rows rely on, whatever becomes of the medium."""
        self._kinds = _PackedKinds()
        self._tables = [array("I", bytes(4 * _SLOTS_MIN)) for _ in range(_SHARDS)]
        self._filled = [0] * _SHARDS
        """Places of each table that are not empty, deleted ones included."""
        self._unused = {False: array("I"), True: array("I")}
        """Numbers of rows that hold no block, with identities of their own and without."""
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def find(self, scope: ScopeId, digest: bytes) -> int | None:
        """Number of a block's row; None when it has none, or when that is no key: a root's parent is asked for, too."""
        at = self._place(scope, digest) if len(digest) == KEY_BYTES else None
        if at is None:
            return None
        table, place = at
        return table[place] - _FIRST

    def _place(self, scope: ScopeId, digest: bytes) -> tuple[array[int], int] | None:
        hashed = hash(digest)  # Of a secret that is drawn at the start, so nobody can choose keys that collide.
        table = self._tables[hashed & (_SHARDS - 1)]
        mask = len(table) - 1
        place = (hashed >> 8) & mask
        while (held := table[place]) != _EMPTY:
            if held != _DELETED:
                number = held - _FIRST
                identities, at = self._identity(number)
                if identities.startswith(digest, at + DIGEST_AT) and self.kind(number).scope == scope:
                    return table, place
            place = (place + 1) & mask
        return None

    def _identity(self, number: int) -> tuple[bytearray, int]:
        """Where the identity of a row's block lies."""
        identities = self._chunks[number >> _CHUNK_BITS].identities
        if identities is not None:
            return identities, (number & (_CHUNK_ROWS - 1)) * _IDENTITY_BYTES
        rows, start = self._at(number)
        offset, extent, of = _PLACE.unpack_from(rows, start + _PLACE_AT)
        kind = self._kinds.values[of]
        assert kind is not None, f"row {number} holds no block"
        notes = self._noted[kind.tier, extent].notes
        return notes.buffer, notes.position(offset // kind.slot_bytes)

    def _noted_in(self, tier: Tier, extent: int) -> _Noted | None:
        """An extent that rows rely on, or could; None where its medium notes nothing."""
        known = self._noted.get((tier, extent))
        if known is not None or tier.backend.noting is None:
            return known
        notes = tier.backend.noting.notes(extent)
        return None if notes is None else _Noted(notes)

    def put(self, row: PackedBlock) -> int:
        """Add a row whose block has none; returns its number. It must fit."""
        kind = row.kind
        identity = IDENTITY.pack(row.stored_bytes, row.checksum, row.digest, row.parent)
        noted = self._noted_in(kind.tier, row.extent)
        if noted is not None and not noted.notes.holds(row.offset // kind.slot_bytes, identity):
            noted = None
        unused = self._unused[noted is not None]
        if not unused:
            self._add_chunk(is_noted=noted is not None)
        number = unused.pop()
        rows, start = self._at(number)
        of = self._kinds.take(kind)
        _ROW.pack_into(
            rows, start, row.born_s, row.used_at_s, row.mark, row.stamp, row.offset, row.extent, of, *row.counts
        )
        if noted is not None:
            self._noted[kind.tier, row.extent] = noted
            noted.rows += 1
        else:
            identities, at = self._identity(number)
            identities[at : at + _IDENTITY_BYTES] = identity
        self._rows += 1
        self._enter(hash(row.digest), number)
        return number

    def put_all(
        self, kinds: Sequence[PackedKind], of: NDArray[np.intp], rows: NDArray[np.void], identities: NDArray[np.void]
    ) -> NDArray[np.uint32]:
        """Add `FIELDS` and `IDENTITIES` of blocks of one extent that have no rows; returns their numbers.

        Each is of the kind that `of` gives.
        """
        uses = np.bincount(of, minlength=len(kinds)).tolist()
        rows["kind"] = np.array([self._kinds.take(kind, count) for kind, count in zip(kinds, uses, strict=True)])[of]
        tier, extent = kinds[0].tier, int(rows["extent"][0])
        noted = self._noted_in(tier, extent)
        if noted is not None:  # Slots of one size, in an extent of such a medium.
            indices = (rows["offset"] // kinds[0].slot_bytes).astype(np.intp)
            noted = noted if noted.notes.holds_all(indices, identities) else None
        numbers = self._free_numbers(len(rows), is_noted=noted is not None)
        if noted is not None:
            self._noted[tier, extent] = noted
            noted.rows += len(rows)
        chunks = numbers >> _CHUNK_BITS
        for at in np.unique(chunks).tolist():
            chosen, chunk = chunks == at, self._chunks[at]
            places = numbers[chosen] & (_CHUNK_ROWS - 1)
            chunk.fields.put(places, rows.compress(chosen))
            if chunk.identities is not None:
                np.frombuffer(chunk.identities, IDENTITIES).put(places, identities.compress(chosen))
        self._rows += len(rows)
        self._enter_all(unpack_digests(identities["digest"].tobytes()), numbers)
        return numbers

    def _free_numbers(self, count: int, *, is_noted: bool) -> NDArray[np.uint32]:
        unused = self._unused[is_noted]
        while len(unused) < count:
            self._add_chunk(is_noted=is_noted)
        kept = len(unused) - count
        numbers = np.array(unused[kept:], np.uint32)[::-1]
        del unused[kept:]
        return numbers

    def _add_chunk(self, *, is_noted: bool) -> None:
        """Numbers are handed out one after the other, a chunk at a time when there are none."""
        first = len(self._chunks) << _CHUNK_BITS
        self._chunks.append(_Chunk(is_noted=is_noted))
        self._unused[is_noted].extend(range(first + _CHUNK_ROWS - 1, first - 1, -1))

    def _enter_all(self, digests: Sequence[bytes], numbers: NDArray[np.uint32]) -> None:
        """Enter rows a table at a time: one by one they take five times as long."""
        hashes = np.fromiter(map(hash, digests), np.int64, len(digests))
        shards = hashes & (_SHARDS - 1)
        order = np.argsort(shards.astype(np.uint8), kind="stable")
        hashes, held = hashes[order] >> 8, (numbers[order] + np.uint32(_FIRST)).tolist()
        ends = np.bincount(shards, minlength=_SHARDS).cumsum().tolist()
        for shard, (start, end) in enumerate(pairwise([0, *ends])):
            if 3 * (self._filled[shard] + end - start) > 2 * len(self._tables[shard]):
                self._rebuild(shard, end - start)
            self._filled[shard] += _fill(self._tables[shard], hashes[start:end], held[start:end])

    def _enter(self, hashed: int, number: int) -> None:
        shard = hashed & (_SHARDS - 1)
        if 3 * (self._filled[shard] + 1) > 2 * len(self._tables[shard]):
            self._rebuild(shard)
        table = self._tables[shard]
        mask = len(table) - 1
        place = (hashed >> 8) & mask
        while table[place] >= _FIRST:
            place = (place + 1) & mask
        self._filled[shard] += table[place] == _EMPTY
        table[place] = number + _FIRST

    def expect(self, rows: int) -> None:
        """Make room in the tables for so many rows more, where there is less."""
        more = rows // _SHARDS + 1
        for shard, table in enumerate(self._tables):
            if 3 * (self._filled[shard] + more) > 2 * len(table):
                self._rebuild(shard, more)

    def _rebuild(self, shard: int, more: int = 1) -> None:
        """Rebuild a table, at most half full with so many more, and without what was deleted."""
        held = [h for h in self._tables[shard] if h >= _FIRST]
        slots = max(_SLOTS_MIN, 1 << (2 * (len(held) + more) - 1).bit_length())
        table = self._tables[shard] = array("I", bytes(4 * slots))
        self._filled[shard] = len(held)
        for h in held:
            identities, at = self._identity(h - _FIRST)
            digest = bytes(identities[at + DIGEST_AT : at + DIGEST_AT + KEY_BYTES])
            place = (hash(digest) >> 8) & (slots - 1)
            while table[place]:
                place = (place + 1) & (slots - 1)
            table[place] = h

    def take(self, number: int) -> PackedBlock:
        """Take a row out and return it."""
        row = self.read(number)
        at = self._place(row.kind.scope, row.digest)
        assert at is not None, "every row is in its table"
        table, place = at
        table[place] = _DELETED
        rows, start = self._at(number)
        self._kinds.give_back(_U32.unpack_from(rows, start + _KIND_AT)[0])
        _U32.pack_into(rows, start + _KIND_AT, _FREE)
        is_noted = self._chunks[number >> _CHUNK_BITS].identities is None
        if is_noted:
            known = self._noted[row.kind.tier, row.extent]
            known.rows -= 1
            if not known.rows:
                del self._noted[row.kind.tier, row.extent]
        self._rows -= 1
        self._unused[is_noted].append(number)
        return row

    def read(self, number: int) -> PackedBlock:
        """Return a row."""
        row = self.peek(number)
        assert row is not None, f"row {number} holds no block"
        return row

    def peek(self, number: int) -> PackedBlock | None:
        """Return a row; None when it holds no block any more."""
        born_s, used_at_s, mark, stamp, offset, extent, of, *counts = _ROW.unpack_from(*self._at(number))
        kind = self._kinds.values[of]
        if kind is None:
            return None
        stored, checksum, digest, parent = IDENTITY.unpack_from(*self._identity(number))
        before = b"" if kind.is_root else parent
        return PackedBlock(
            kind, digest, before, checksum, born_s, used_at_s, stamp, offset, extent, stored, tuple(counts), mark
        )

    def lies_in(self, number: int, tier: Tier, extent: int) -> bool:
        """True when a row holds a block of this extent."""
        rows, start = self._at(number)
        _, found, of = _PLACE.unpack_from(rows, start + _PLACE_AT)
        kind = self._kinds.values[of]
        return found == extent and kind is not None and kind.tier is tier

    def parent(self, number: int) -> bytes:
        """Digest of the block before a row's, empty for a root."""
        if self.kind(number).is_root:
            return b""
        identities, at = self._identity(number)
        return bytes(identities[at + DIGEST_AT + KEY_BYTES : at + DIGEST_AT + 2 * KEY_BYTES])

    def kind(self, number: int) -> PackedKind:
        """Kind of a row."""
        chunk, start = self._at(number)
        kind: PackedKind | None = self._kinds.values[_U32.unpack_from(chunk, start + _KIND_AT)[0]]
        assert kind is not None, f"row {number} holds no block"
        return kind

    def count(self, number: int, level: int, step: int) -> bool:
        """Count children of a block at a level; False when there are more than a row can count."""
        chunk, start = self._at(number)
        counts = list(_COUNTS.unpack_from(chunk, start + _COUNTS_AT))
        if counts[level] + step > COUNT_MAX:
            return False
        counts[level] += step
        _COUNTS.pack_into(chunk, start + _COUNTS_AT, *counts)
        return True

    def clear_counts(self) -> None:
        """Forget the children of all rows."""
        for fields in self._fields():
            fields["counts"] = 0

    def layouts(self, scope: ScopeId) -> set[LayoutId]:
        """Layouts of a scope's rows."""
        return self._kinds.layouts(scope)

    def where(self, is_meant: Callable[[PackedKind], bool]) -> list[NDArray[np.uint32]]:
        """Numbers of the rows whose kind is meant, in arrays of one chunk each, none of them empty."""
        kinds = self._kinds.where(is_meant)
        if not kinds:
            return []
        chosen = np.zeros(len(self._kinds.values), np.bool_)
        chosen[kinds] = True
        found = (np.flatnonzero(chosen[fields["kind"]]) for fields in self._fields())
        return [(at + (i << _CHUNK_BITS)).astype(np.uint32) for i, at in enumerate(found) if len(at)]

    def crowded(self) -> list[int]:
        """Numbers of rows with more children in all than a row can count at one level."""
        parts = (
            (part, self._column("counts", part).sum(axis=1, dtype=np.int64)) for part in self.where(lambda _: True)
        )
        return [number for part, children in parts for number in part[children > COUNT_MAX].tolist()]

    def childless(self, tier: Tier) -> list[int]:
        """Numbers of rows in a tier without a child there or faster."""
        parts = self.where(lambda kind: kind.tier is tier)
        found = (part[~self._column("counts", part)[:, : tier.level + 1].any(axis=1)] for part in parts)
        return [number for part in found for number in part.tolist()]

    def _column(self, name: str, numbers: NDArray[np.uint32]) -> NDArray[Any]:
        """One field of rows of one chunk, of which there is one at least."""
        fields = self._chunks[int(numbers[0]) >> _CHUNK_BITS].fields
        column: NDArray[Any] = fields[name][numbers & (_CHUNK_ROWS - 1)]
        return column

    def _identities(self, numbers: NDArray[np.uint32]) -> NDArray[np.void]:
        """Identities of rows of one chunk, of which there is one at least."""
        chunk, at = self._chunks[int(numbers[0]) >> _CHUNK_BITS], numbers & (_CHUNK_ROWS - 1)
        if chunk.identities is not None:
            own: NDArray[np.void] = np.frombuffer(chunk.identities, IDENTITIES)[at]
            return own
        rows, found = chunk.fields[at], np.zeros(len(numbers), IDENTITIES)
        places = rows["extent"].astype(np.uint64) << np.uint64(32) | rows["kind"]
        for place in np.unique(places).tolist():
            chosen, kind = places == place, self._kinds.values[place & NUMBER_MAX]
            assert kind is not None, "the rows hold blocks"
            indices = (rows["offset"][chosen] // kind.slot_bytes).astype(np.intp)
            found[chosen] = self._noted[kind.tier, place >> 32].notes.identities(indices)
        return found

    def older(self, numbers: NDArray[np.uint32], used_by_s: float, born_by_s: float) -> NDArray[np.uint32]:
        """Those rows of one chunk that were used, or born, by then; birth counts as a use."""
        born_s, used_at_s = self._column("born_s", numbers), self._column("used_at_s", numbers)
        is_old: NDArray[np.bool_] = (np.maximum(born_s, used_at_s) <= used_by_s) | (born_s <= born_by_s)
        return numbers[is_old]

    def digests(self, numbers: NDArray[np.uint32]) -> bytes:
        """Joined digests of rows of one chunk."""
        return self._joined("digest", numbers)

    def parents(self, numbers: NDArray[np.uint32]) -> bytes:
        """Joined parents of rows of one chunk; zeros stand for none."""
        return self._joined("parent", numbers)

    def _joined(self, name: str, numbers: NDArray[np.uint32]) -> bytes:
        return self._identities(numbers)[name].tobytes() if len(numbers) else b""

    def _fields(self) -> Iterator[NDArray[np.void]]:
        return (chunk.fields for chunk in self._chunks)

    def _at(self, number: int) -> tuple[bytearray, int]:
        return self._chunks[number >> _CHUNK_BITS].rows, (number & (_CHUNK_ROWS - 1)) * PACKED_BYTES


def _fill(table: array[int], hashes: NDArray[np.int64], held: Sequence[int]) -> int:
    """Put rows into a table that has room for them; returns how many empty places that took."""
    mask, first, filled = len(table) - 1, _FIRST, 0
    for start, row in zip((hashes & mask).tolist(), held, strict=True):
        place = start
        while (there := table[place]) >= first:
            place = (place + 1) & mask
        filled += there == _EMPTY
        table[place] = row
    return filled


assert FIELDS.itemsize == PACKED_BYTES, "both describe the same row"
assert FIELDS.fields is not None
assert FIELDS.fields["kind"][1] == _KIND_AT
assert FIELDS.fields["extent"][1] == _EXTENT_AT
assert FIELDS.fields["counts"][1] == _COUNTS_AT
assert FIELDS.fields["offset"][1] == _PLACE_AT
assert IDENTITIES.itemsize == _IDENTITY_BYTES, "both describe the same identity"
