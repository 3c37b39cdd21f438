"""Every block of this node, by scope and digest, and the tree that the chains form. No clock, no I/O.

Lookups are O(1). A block's level is that of its fastest copy; a parent's level never becomes slower than that of a
child by eviction, which `blockers` tells without a walk: for each parent the number of children at each level is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvfleet_agent.ancestry import Ancestry

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Iterator

    from kvfleet_agent.backends.base import Record, SlotRef
    from kvfleet_agent.sessions import Session
    from kvfleet_agent.tiers import Tier
    from kvfleet_api.blocks import LayoutId, ScopeId

TIERS_MAX: Final = 8
"""`maxItems` of spec.tiers."""
GONE: Final = TIERS_MAX
"""Level of a block without any copy: slower than every tier."""


class Residence(NamedTuple):
    """One copy of a block. A tuple: there is one for each copy, and they are made on the hot path."""

    tier: Tier
    slot: SlotRef
    record: Record


class Entry(msgspec.Struct, eq=False):
    """One block. Compared by identity; an entry that was forgotten never comes back."""

    scope: ScopeId
    digest: bytes
    parent: bytes
    layout_id: LayoutId
    born_s: float
    """Monotonic second since which it exists, as far as this node can tell."""
    used_at_s: float
    tenant: str = ""
    """Account that its slots are on: who wrote it or brought it here."""
    residences: tuple[Residence, ...] = ()
    """Fastest first; empty while a writer or a transfer fills the first one."""
    level: int = 0
    """Of the fastest copy; 0 while the block is pending, because it will appear in the fastest tier."""
    leases: set[int] | None = None
    pins: set[int] | None = None
    guards: set[str] | None = None
    """Decoding sessions whose head this is."""
    followers: set[Session] | None = None
    """All sessions whose head this is."""
    move: asyncio.Future[bool] | None = None
    """Set while a copy of the block is being made; done with True when it was."""

    @property
    def is_published(self) -> bool:
        """True when the block has bytes that may be read."""
        return bool(self.residences)

    @property
    def is_held(self) -> bool:
        """True while somebody leases, pins, decodes from or moves the block."""
        return bool(self.leases or self.pins or self.guards or self.move)

    def residence(self, tier: Tier) -> Residence | None:
        """Return the copy in one tier, or None."""
        for residence in self.residences:
            if residence.tier is tier:
                return residence
        return None


def account_of(scope: ScopeId) -> str:
    """Account of a scope's blocks whose writer is not known: the tenant, or `<kind>/<name>` of a shared scope."""
    kind, name, *_ = scope.split("/")
    return name if kind == "tenant" else f"{kind}/{name}"


class _Scope:
    __slots__ = ("account", "children", "entries")

    def __init__(self, account: str) -> None:
        self.account = account
        """Of blocks whose writer is not known."""
        self.entries: dict[bytes, Entry] = {}
        self.children: dict[bytes, list[int]] = {}
        """For each parent digest, present or not, the number of its children at each level."""


class Index:
    """All blocks. Methods change the index and the tiers' own books together."""

    def __init__(self) -> None:
        self._scopes: dict[ScopeId, _Scope] = {}
        self._ancestry = Ancestry()

    def __iter__(self) -> Iterator[Entry]:
        for scope in self._scopes.values():
            yield from scope.entries.values()

    def __len__(self) -> int:
        return sum(len(s.entries) for s in self._scopes.values())

    def scopes(self) -> list[ScopeId]:
        """Scopes that have blocks here."""
        return list(self._scopes)

    def blocks(self, scope: ScopeId) -> dict[bytes, Entry]:
        """Entries of one scope by digest, for batched lookups. Do not change it."""
        found = self._scopes.get(scope)
        return found.entries if found else {}

    def find(self, scope: ScopeId, digest: bytes) -> Entry | None:
        """Return one entry, or None."""
        return self.blocks(scope).get(digest)

    def parent(self, entry: Entry) -> Entry | None:
        """Return the block before `entry` in its chain, or None when it is a root or not here."""
        return self._scopes[entry.scope].entries.get(entry.parent)

    def begin(
        self, scope: ScopeId, digest: bytes, parent: bytes, layout_id: LayoutId, now_s: float, tenant: str = ""
    ) -> Entry:
        """Make a pending entry on a tenant's account, or else on that of its scope; the digest must be absent.

        A parent that continues the block itself is left out.
        """
        assert digest not in self.blocks(scope), f"block {digest.hex()[:8]} is there already"
        (made,) = self.begin_chain(scope, (digest,), parent, layout_id, now_s, tenant)
        assert made is not None
        return made

    def begin_chain(
        self, scope: ScopeId, digests: Iterable[bytes], parent: bytes, layout_id: LayoutId, now_s: float, tenant: str
    ) -> list[Entry | None]:
        """Make a pending entry of each digest that is absent, None for the others; each is the parent of the next."""
        blocks = self._scopes.get(scope)
        if blocks is None:
            blocks = self._scopes[scope] = _Scope(account_of(scope))
        entries, account = blocks.entries, tenant or blocks.account
        made: list[Entry | None] = []
        for digest in digests:
            if digest in entries:
                made.append(None)
            else:
                before = self._before(blocks, digest, parent)
                entry = entries[digest] = Entry(scope, digest, before, layout_id, now_s, now_s, account)
                self._count(blocks, entry, 1)
                made.append(entry)
            parent = digest
        return made

    def _before(self, blocks: _Scope, digest: bytes, parent: bytes) -> bytes:
        """The parent that a block may have: the one that was named, or none where that would make a ring."""
        may_ring = parent == digest or digest in blocks.children
        return b"" if may_ring and self._ancestry.is_ring(blocks.entries, digest, parent) else parent

    def adopt(self, entry: Entry, parent: bytes) -> None:
        """Tell a pending entry its parent, which its reader did not know; one that continues it is left out."""
        blocks = self._scopes[entry.scope]
        parent = self._before(blocks, entry.digest, parent) if parent != entry.parent else parent
        self._count(blocks, entry, -1)
        self._offer_parent(blocks, entry)
        entry.parent = parent
        self._count(blocks, entry, 1)
        self._ancestry.forget()

    def add(self, entry: Entry, residence: Residence) -> None:
        """Note a copy that can be read; the first one publishes the block.

        It becomes a possible victim here only where no child is in its way: else that happens when the last child goes.
        """
        tier, before = residence.tier, entry.residences
        if before:
            assert entry.residence(tier) is None, "one copy in each tier"
            entry.residences = tuple(sorted((*before, residence), key=lambda r: r.tier.level))
        else:
            entry.residences = (residence,)
        if entry.residences[0].tier.level != entry.level:
            self._relevel(entry)
        tier.note(entry, residence.slot)
        if entry.level < tier.level or not self.blockers(entry, tier.level):
            tier.offer(entry)
        for slower in entry.residences[1:]:
            slower.tier.offer(entry)  # A copy that a faster one doubles is free to go.

    def restore(self, copies: Iterable[Residence]) -> tuple[list[Entry], list[Residence]]:
        """Note copies that an earlier run has left; returns the entries, and the copies that nobody wants.

        Those are second ones in one tier and ones of another layout. Does what `begin` and `add` do, for many at a
        time: an agent starts with millions. Blocks whose children came before them are no victims until those go.
        """
        entered: list[Entry] = []
        unwanted: list[Residence] = []
        for copy in copies:
            record = copy.record
            scope = record.key.scope
            blocks = self._scopes.get(scope)
            if blocks is None:
                blocks = self._scopes[scope] = _Scope(account_of(scope))
            entry = blocks.entries.get(record.key.digest)
            if entry is None:
                entry = self._restored(blocks, copy)
            elif entry.residence(copy.tier) is None and entry.layout_id == record.layout_id and entry.residences:
                self.add(entry, copy)
            else:
                unwanted.append(copy)
                continue
            copy.tier.charge(entry.tenant, copy.slot)
            entered.append(entry)
        return entered, unwanted

    def _restored(self, blocks: _Scope, copy: Residence) -> Entry:
        """Make the entry of a block that only this copy is known of; memory knows whose client wrote an extent."""
        tier, slot, record = copy
        key = record.key
        digest = key.digest
        parent = self._before(blocks, digest, record.parent)
        writer = tier.mappable.extent_writer(slot.extent) if tier.mappable is not None else ""
        entry = Entry(key.scope, digest, parent, record.layout_id, 0.0, 0.0, writer or blocks.account)
        blocks.entries[digest] = entry
        entry.level, entry.residences = tier.level, (copy,)
        self._count(blocks, entry, 1)
        tier.note(entry, slot)
        counts = blocks.children.get(digest)
        if counts is None or not (counts[tier.level] or any(counts[: tier.level])):
            tier.offer(entry)
        return entry

    def remove(self, entry: Entry, tier: Tier) -> Residence:
        """Note that the copy in `tier` is gone; the last one takes the block out of the index."""
        gone = entry.residence(tier)
        assert gone is not None, "no copy there"
        entry.residences = tuple([r for r in entry.residences if r is not gone])
        tier.remove(entry, gone.slot)
        if entry.residences:
            self._relevel(entry)
        else:
            self.forget(entry)
        return gone

    def swap(self, entry: Entry, old: Residence, new: Residence) -> None:
        """Put a copy in another slot of the same tier in place of the old one."""
        entry.residences = tuple(new if r is old else r for r in entry.residences)
        old.tier.remove(entry, old.slot)
        new.tier.add(entry, new.slot)

    def forget(self, entry: Entry) -> None:
        """Take a block without copies out of the index."""
        assert not entry.residences, "copies are removed first"
        blocks = self._scopes[entry.scope]
        del blocks.entries[entry.digest]
        self._count(blocks, entry, -1)
        entry.level = GONE
        self._offer_parent(blocks, entry)
        if not blocks.entries:
            del self._scopes[entry.scope]
        self._ancestry.forget()

    def is_continued(self, entry: Entry) -> bool:
        """True when a block that continues this one is here, or on its way."""
        return entry.digest in self._scopes[entry.scope].children

    def blockers(self, entry: Entry, level: int) -> int:
        """Count children whose fastest copy is at `level` or faster."""
        counts = self._scopes[entry.scope].children.get(entry.digest)
        return sum(counts[: level + 1]) if counts is not None else 0

    def may_leave(self, entry: Entry, tier: Tier) -> bool:
        """True when the copy in `tier` can go without a child being left in a faster place than its parent."""
        if len(entry.residences) == 1:
            return not self.is_continued(entry)
        rest = [r.tier.level for r in entry.residences if r.tier is not tier]
        level = min(rest, default=GONE)
        return level <= entry.level or self.blockers(entry, level - 1) == 0

    def relevel(self) -> None:
        """Count everything anew after tiers got other levels."""
        for blocks in self._scopes.values():
            blocks.children.clear()
            for entry in blocks.entries.values():
                entry.residences = tuple(sorted(entry.residences, key=lambda r: r.tier.level))
                entry.level = entry.residences[0].tier.level if entry.residences else 0
                self._count(blocks, entry, 1)

    def _relevel(self, entry: Entry) -> None:
        level = entry.residences[0].tier.level
        if level == entry.level:
            return
        blocks = self._scopes[entry.scope]
        is_slower = level > entry.level
        self._count(blocks, entry, -1)
        entry.level = level
        self._count(blocks, entry, 1)
        if is_slower:
            self._offer_parent(blocks, entry)

    @staticmethod
    def _count(blocks: _Scope, entry: Entry, step: int) -> None:
        if not entry.parent:
            return
        counts = blocks.children.get(entry.parent)
        if counts is None:
            counts = blocks.children[entry.parent] = [0] * TIERS_MAX
        counts[entry.level] += step
        if step < 0 and not any(counts):
            del blocks.children[entry.parent]

    @staticmethod
    def _offer_parent(blocks: _Scope, entry: Entry) -> None:
        parent = blocks.entries.get(entry.parent)
        if parent is not None:
            for residence in parent.residences:
                residence.tier.offer(parent)
