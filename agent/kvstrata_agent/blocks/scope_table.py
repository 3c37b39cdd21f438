"""The blocks of one scope: those in use as entries, the others packed into rows. No clock, no I/O.

A block that nobody holds, that no session ends in and that something continues in the same place is no victim of
eviction and changes with nothing but its use, so a row can stand for it. Whoever asks for it by its digest gets an
entry again, and the same one as long as anybody has it: only what nobody else refers to is packed.

Keeps chains free of rings: no block comes before itself, whatever clients, peers and media state. No clock, no I/O.

Nobody can check a parent that somebody names. In a ring every block waits for another one to be evicted first, and a
walk from a head to its root never ends.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.block import TIERS_MAX, Entry, Residence, account_of
from kvstrata_agent.blocks.packed_blocks import PackedBlock, PackedKind
from kvstrata_agent.policy.priority import PriorityClass
from kvstrata_api.blocks import BlockKey, unpack_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.blocks.tier_contents import Packing
    from kvstrata_api.blocks import ScopeId


JUMPS_MAX: Final = 65_536
"""Walks of a scope that are remembered, and as many of a new walk: 20 MB. Only blocks that come after their children
ask for any."""

_REFERENCES: Final = 5
"""To an entry that nobody uses, while it is examined: the scope's table, its extent, two callers and the count."""


class Ancestry:
    """Finds the ends of a scope's chains. What a walk found is kept until a block goes, so a chain is walked once."""

    def __init__(self, parent_of: Callable[[bytes], bytes | None]) -> None:
        """`parent_of` returns the digest before a block, empty for a root and None for a block that is not here."""
        self._parent_of = parent_of
        self._jumps: dict[bytes, bytes] = {}
        """Some block before each one, the first of its chain when that was last searched."""

    def is_ring(self, digest: bytes, parent: bytes) -> bool:
        """True when the block `digest`, whose children are here already, would come before itself behind `parent`."""
        if self._parent_of(parent) is None:
            return digest == parent
        first = self._first(parent)
        return digest in (first, self._parent_of(first))

    def forget(self) -> None:
        """A block has gone, or has another parent."""
        if self._jumps:
            self._jumps.clear()

    def _first(self, digest: bytes) -> bytes:
        """The first block of the chain that a block which is here stands in. Asks once for each on the way."""
        passed: list[bytes] = []
        parent = self._parent_of(digest)
        while parent and (above := self._parent_of(parent)) is not None:
            if len(passed) < JUMPS_MAX:  # From the last ones on: they are what others come behind.
                passed.append(digest)
            known = self._jumps.get(digest)
            digest, parent = (parent, above) if known is None else (known, self._parent_of(known))
        if len(self._jumps) > JUMPS_MAX:
            self._jumps.clear()
        self._jumps |= dict.fromkeys(passed, digest)
        return digest


class BlockFacts(NamedTuple):
    """What is known of a block without making an entry of it."""

    digest: bytes
    tenant: str
    born_s: float
    used_at_s: float


class Copy(NamedTuple):
    """Where a block can be read fastest."""

    tier: Tier
    stamp: int
    stored_bytes: int


class Blocks:
    """A table by digest. Its owner, the index, keeps the tiers' books beside it."""

    def __init__(self, scope: ScopeId, packing: Packing) -> None:
        self.scope = scope
        self.account = account_of(scope)
        """Of blocks whose writer is not known."""
        self.in_use: dict[bytes, Entry] = {}
        self.children: dict[bytes, list[int]] = {}
        """For each parent digest, in use or absent, the number of its children at each level; rows have their own."""
        self.packed = 0
        """Blocks that are rows."""
        self.packings = 0
        """Rows that were made one by one since the scope was opened."""
        self.ancestry = Ancestry(self.parent_of)
        self._packing = packing
        self._rows = packing.packed

    def __len__(self) -> int:
        return len(self.in_use) + self.packed

    def account_in(self, tier: Tier, extent: int) -> str:
        """Account of what an earlier run has left in an extent: memory knows whose client wrote it."""
        writer = tier.backend.mappable.extent_writer(extent) if tier.backend.mappable is not None else ""
        return writer or self.account

    def __iter__(self) -> Iterator[bytes]:
        return self.digests()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.in_use or (self.packed > 0 and self._rows.find(self.scope, digest) is not None)

    def get(self, digest: bytes) -> Entry | None:
        """Return the entry of a block, or None."""
        entry = self.in_use.get(digest)
        if entry is None and self.packed:
            number = self._rows.find(self.scope, digest)
            return None if number is None else self.unpack(number)
        return entry

    def get_all(self, digests: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each block, None for absent ones."""
        found = list(map(self.in_use.get, digests))
        if self.packed and None in found:
            return [e if e is not None else self.get(d) for e, d in zip(found, digests, strict=True)]
        return found

    def absent(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of the digests that are not here, each once."""
        in_use = self.in_use
        missing = [d for d in dict.fromkeys(digests) if d not in in_use]
        return [d for d in missing if self._rows.find(self.scope, d) is None] if self.packed else missing

    def parent_of(self, digest: bytes) -> bytes | None:
        """Digest of the block before one that is here, empty for a root; None for one that is not here."""
        entry = self.in_use.get(digest)
        if entry is not None:
            return entry.parent
        number = self._rows.find(self.scope, digest) if self.packed else None
        return None if number is None else self._rows.parent(number)

    def digests(self, tenant: str = "") -> Iterator[bytes]:
        """Keys of all blocks that are here now, or of one account's; those that come later are left out."""
        in_use = [d for d, e in self.in_use.items() if tenant in ("", e.tenant)]

        def is_meant(kind: PackedKind) -> bool:
            return kind.scope == self.scope and tenant in ("", kind.tenant)

        found = self._rows.where(is_meant) if self.packed else []
        return _each(in_use, [self._rows.digests(part) for part in found])

    def older(self, used_by_s: float, born_by_s: float) -> Iterator[bytes]:
        """Keys of all entries that there are now, and of the blocks without one that were used, or came, by then."""
        parts = self._rows.where(lambda kind: kind.scope == self.scope) if self.packed else []
        older = [self._rows.digests(self._rows.older(part, used_by_s, born_by_s)) for part in parts]
        return _each(tuple(self.in_use), older)

    def entries(self, tenant: str = "") -> Iterator[Entry]:
        """Entries of all blocks that are here now, or of one account's, each made when it is asked for."""
        return (entry for digest in self.digests(tenant) if (entry := self.get(digest)) is not None)

    def facts(self, digests: Iterable[bytes]) -> Iterator[BlockFacts]:
        """Age and account of blocks, without making entries; absent ones are left out."""
        for digest in digests:
            entry = self.in_use.get(digest)
            if entry is not None:
                yield BlockFacts(digest, entry.tenant, entry.born_s, entry.used_at_s)
            elif self.packed and (number := self._rows.find(self.scope, digest)) is not None:
                row = self._rows.read(number)
                yield BlockFacts(digest, row.kind.tenant, row.born_s, row.used_at_s)

    def links(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys of all blocks that are no root, each with its parent's, in one step: ten times as fast as one by one."""
        yield from ((d, e.parent) for d, e in self.in_use.items() if e.parent)
        for part in self._rows.where(lambda kind: kind.scope == self.scope and not kind.is_root) if self.packed else ():
            digests, parents = self._rows.digests(part), self._rows.parents(part)
            yield from zip(unpack_digests(digests), unpack_digests(parents), strict=True)

    def is_held(self, digest: bytes) -> bool:
        """True while somebody uses a block, or waits for it."""
        entry = self.in_use.get(digest)
        return entry is not None and (entry.is_held or not entry.residences)

    def copy(self, digest: bytes) -> Copy | None:
        """Fastest copy of a block; None when it has none. Makes no entry."""
        entry = self.in_use.get(digest)
        if entry is not None:
            if not entry.residences:
                return None
            tier, slot, record = entry.residences[0]
            return Copy(tier, slot.stamp, record.stored_bytes)
        number = self._rows.find(self.scope, digest) if self.packed else None
        if number is None:
            return None
        row = self._rows.read(number)
        return Copy(row.kind.tier, row.stamp, row.stored_bytes)

    def counts(self, parent: bytes) -> list[int]:
        """Children of a block at each level, to be changed; of one that is absent, too."""
        counts = self.children.get(parent)
        if counts is None:
            if self.packed and parent not in self.in_use and (found := self._rows.find(self.scope, parent)) is not None:
                self.unpack(found)
            counts = self.children.setdefault(parent, [0] * TIERS_MAX)
        return counts

    def count_apart(self, parent: bytes, level: int) -> None:
        """Count a child without making an entry of its parent: for many at a time."""
        counts = self.children.get(parent)
        if counts is None and self.packed and parent not in self.in_use:
            number = self._rows.find(self.scope, parent)
            if number is not None and self._rows.count(number, level, 1):
                return
        self.counts(parent)[level] += 1

    def unpack(self, number: int) -> Entry:
        """Make the entry of a row again, and a possible victim of it where nothing continues it there."""
        row = self._rows.take(number)
        kind = row.kind
        key = BlockKey(kind.scope, row.digest)
        record = Record(
            key, row.parent, kind.layout_id, kind.codec, kind.raw_bytes, row.stored_bytes, row.checksum, kind.epoch
        )
        copy = Residence(kind.tier, SlotRef(row.extent, row.offset, kind.slot_bytes, row.stamp), record)
        entry = Entry(
            kind.scope, row.digest, row.parent, kind.layout_id, row.born_s, row.used_at_s, kind.tenant, (copy,),
            kind.tier.level, mark=row.mark, priority=kind.priority,
        )  # fmt: skip
        self.in_use[row.digest] = entry
        if any(row.counts):
            self.children[row.digest] = list(row.counts)
        self.packed -= 1
        self._packing.contents(kind.tier).unpacked(entry, row.extent)
        if not any(row.counts[: entry.level + 1]):
            self._packing.contents(kind.tier).offer(entry)
        return entry

    def pack(self, entry: Entry) -> bool:
        """Make a row of a block that nobody uses; False when somebody does, or when it is a possible victim."""
        if len(entry.residences) != 1 or entry.is_held or entry.followers or entry.is_cut:
            return False
        copy = entry.residences[0]
        counts = self.children.get(entry.digest)
        if counts is None or not any(counts[: entry.level + 1]):
            return False
        self._packing.contents(copy.tier).withdraw(entry)
        use = entry.born_s, entry.used_at_s, entry.mark
        row = packed_of(copy, entry.tenant, entry.parent, use, tuple(counts), entry.priority)
        if row is None or not row.fits or sys.getrefcount(entry) > _REFERENCES:
            return False
        del self.in_use[entry.digest], self.children[entry.digest]
        self._packing.contents(copy.tier).forget_entry(entry, copy.slot.extent)
        self.put(row)
        return True

    def put(self, row: PackedBlock) -> None:
        """Add a row, for a block of this scope that is not here."""
        self.packed += 1
        self.packings += 1
        self._packing.contents(row.kind.tier).note_packed((self._rows.put(row),), row.extent, self.scope, self._packing)

    def put_all(
        self, kinds: Sequence[PackedKind], of: NDArray[np.intp], rows: NDArray[np.void], identities: NDArray[np.void]
    ) -> None:
        """Add rows of blocks of one extent that are not here; see `PackedTable.put_all`."""
        self.packed += len(rows)
        numbers = self._rows.put_all(kinds, of, rows, identities).tolist()
        self._packing.contents(kinds[0].tier).note_packed(numbers, int(rows["extent"][0]), self.scope, self._packing)


def _each(in_use: Iterable[bytes], packed: Iterable[bytes]) -> Iterator[bytes]:
    """Keys one by one; those of rows are joined until then, which takes a third of the memory."""
    return chain(in_use, chain.from_iterable(map(unpack_digests, packed)))


def kind_of(copy: Residence, tenant: str, priority: PriorityClass = PriorityClass.STANDARD) -> PackedKind:
    """What a block with this copy has in common with many others."""
    tier, slot, record = copy
    return PackedKind(
        record.key.scope, record.layout_id, tenant, tier, record.codec, record.epoch, record.raw_bytes,
        slot.size_bytes, not record.parent, priority,
    )  # fmt: skip


def packed_of(
    copy: Residence,
    tenant: str,
    parent: bytes,
    use: tuple[float, float, int],
    counts: tuple[int, ...],
    priority: PriorityClass = PriorityClass.STANDARD,
) -> PackedBlock | None:
    """The row of a block with just this copy; None where its record names another parent than the block has.

    `use` is when it was born and last used, and its mark.
    """
    _, slot, record = copy
    born_s, used_at_s, mark = use
    if record.parent != parent:
        return None
    return PackedBlock(
        kind_of(copy, tenant, priority), record.key.digest, parent, record.checksum, born_s, used_at_s, slot.stamp,
        slot.offset, slot.extent, record.stored_bytes, counts, mark,
    )  # fmt: skip
