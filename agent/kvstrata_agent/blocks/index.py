"""Every block of this node, by scope and digest, and the tree that the chains form. No clock, no I/O.

Lookups are O(1). A block's level is that of its fastest copy; a parent's level never becomes slower than that of a
child by eviction, which `blockers` answers without a walk: for each parent, children are counted by level.
An entry takes more than a kilobyte, so blocks that nobody uses are packed into rows while there are many of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import GONE, TIERS_MAX, Entry, Residence
from kvstrata_agent.blocks.packed_blocks import PackedTable
from kvstrata_agent.blocks.scope_table import Blocks, packed_of
from kvstrata_agent.blocks.tier_contents import TierContents
from kvstrata_agent.policy.expected_reuse import UNMARKED
from kvstrata_api.blocks import ScopeId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.policy.priority import PriorityClass
    from kvstrata_api.blocks import BlockKey, LayoutId

IN_USE_MAX: Final = 16_384
"""Entries that are kept whether somebody uses them or not: 20 MB."""
LAYOUT_SAMPLE: Final = 1024
"""Entries looked at for the layouts of a scope: those of one engine come together."""
PACK_SCAN: Final = 2048
"""Entries examined in one step: at most 10 ms."""


class Index:
    """All blocks, and which of them lie in each tier: both change together."""

    def __init__(self, in_use_max: int = IN_USE_MAX) -> None:
        """Fold what nobody uses while there are more entries than `in_use_max`."""
        self.packed = PackedTable()
        self._in_use_max = in_use_max
        self._scopes: dict[ScopeId, Blocks] = {}
        self._contents: dict[Tier, TierContents] = {}
        self._nothing = Blocks(ScopeId("none/none"), self)
        self._erased: dict[ScopeId, Iterator[Entry] | None] = {}
        """Scopes whose blocks nobody finds, each with those still to be named in this round, if it has begun."""
        self._round: Iterator[tuple[ScopeId, bytes]] = iter(())
        """What is still to be examined in this round of packing."""
        self._continued: dict[Entry, None] | None = None
        """What blocks have continued that left, while they are `leaving_together`."""

    def __iter__(self) -> Iterator[Entry]:
        for blocks in tuple(self._scopes.values()):
            yield from blocks.entries()

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def contents(self, tier: Tier) -> TierContents:
        """What lies in a tier. Do not change it."""
        contents = self._contents.get(tier)
        if contents is None:
            contents = self._contents[tier] = TierContents(tier)
        return contents

    def forget_tier(self, tier: Tier) -> None:
        """Forget a tier whose blocks have all been taken out."""
        self._contents.pop(tier, None)

    @property
    def in_use(self) -> int:
        """Blocks that are entries."""
        return sum(len(b.in_use) for b in self._scopes.values())

    def scopes(self) -> list[ScopeId]:
        """Scopes that have blocks here."""
        return list(self._scopes)

    def blocks(self, scope: ScopeId) -> Blocks:
        """Blocks of one scope by digest, none of an erased one. Do not change it."""
        return self._nothing if scope in self._erased else self._scopes.get(scope, self._nothing)

    @property
    def erased(self) -> list[ScopeId]:
        """Scopes that were erased and may have blocks here still."""
        return list(self._erased)

    def is_erased(self, scope: ScopeId) -> bool:
        """True while blocks of an erased scope are dropped: nobody may be given one, or begin one."""
        return scope in self._erased

    def erase(self, scope: ScopeId) -> int:
        """Have nobody find the blocks of a scope from this step on; returns how many they are.

        All books have them until they are dropped. 0 where there are none, or where that was so already.
        """
        blocks = self._scopes.get(scope)
        if blocks is None or scope in self._erased:
            return 0
        self._erased[scope] = None
        return len(blocks)

    def leaving(self, most: int) -> list[Entry]:
        """Up to so many blocks of erased scopes, others each time until all were named; then the first ones again."""
        found: list[Entry] = []
        for scope in [s for s in self._erased if s in self._scopes]:
            entries = self._erased[scope] or self._scopes[scope].entries()
            found += islice(entries, most - len(found))
            self._erased[scope] = entries if len(found) == most else None
            if len(found) == most:
                break
        return found

    def end_erasures(self) -> list[ScopeId]:
        """Let scopes be used again that were erased and have no block any more; returns them."""
        ended = [scope for scope in self._erased if scope not in self._scopes]
        for scope in ended:
            del self._erased[scope]
        return ended

    def opened(self, scope: ScopeId) -> Blocks:
        """Blocks of one scope, erased or not, to be changed together with the tiers' books; never left empty."""
        blocks = self._scopes.get(scope)
        if blocks is None:
            blocks = self._scopes[scope] = Blocks(scope, self)
        return blocks

    @property
    def room(self) -> int:
        """Entries more that are kept whether somebody uses them or not; negative when there are too many."""
        return self._in_use_max - self.in_use

    def layouts(self, scope: ScopeId) -> set[LayoutId]:
        """Layouts of a scope's blocks; of those in use, of the last ones that came."""
        if scope in self._erased:
            return set()
        newest = islice(reversed(self.blocks(scope).in_use.values()), LAYOUT_SAMPLE)
        return {entry.layout_id for entry in newest} | self.packed.layouts(scope)

    def find(self, scope: ScopeId, digest: bytes) -> Entry | None:
        """Return one entry, or None."""
        return self.blocks(scope).get(digest)

    def parent(self, entry: Entry) -> Entry | None:
        """Return the block before `entry` in its chain, or None when it is a root, or cut off, or that is not here."""
        return None if entry.is_cut else self._scopes[entry.scope].get(entry.parent)

    def ancestors(self, entry: Entry) -> Iterator[Entry]:
        """Blocks before `entry` in its chain that are here without a gap, the nearest first."""
        parent = self.parent(entry) if entry.level != GONE else None
        while parent is not None:
            yield parent
            parent = self.parent(parent)

    def rank(self, entry: Entry, priority: PriorityClass) -> None:
        """Give a block a class, by which it is queued among the possible victims."""
        contents = (self.contents(residence.tier) for residence in entry.residences)
        queued = [queues for queues in contents if queues.withdraw(entry)]
        entry.priority = priority
        for queues in queued:
            queues.offer(entry)

    def unpack(self, number: int) -> Entry:
        """Make the entry of a row again."""
        return self._scopes[self.packed.kind(number).scope].unpack(number)

    def pack(self, used_before_s: float, scan: int = PACK_SCAN) -> int:
        """Make rows of blocks that nobody uses while there are too many entries; returns how many.

        Blocks used since `used_before_s` stay entries, unless there are twice too many. It examines `scan` at most and
        goes on where it ended: those that became entries first come first.
        """
        excess = -self.room
        if excess <= 0:
            return 0
        is_pressing, packed, is_new = excess > self._in_use_max, 0, False
        for _ in range(scan):
            due = next(self._round, None)
            if due is None:
                if is_new:
                    break  # All of them were examined.
                is_new, self._round = True, self._keys()
                continue
            blocks = self._scopes.get(due[0], self._nothing)
            entry = blocks.in_use.get(due[1])
            if entry is not None and (is_pressing or entry.used_at_s < used_before_s):
                packed += blocks.pack(entry)
                if packed == excess:
                    break
        return packed

    def _keys(self) -> Iterator[tuple[ScopeId, bytes]]:
        """Keys of all entries that there are now."""
        keys = [(b.scope, tuple(b.in_use)) for b in self._scopes.values()]
        return ((scope, digest) for scope, digests in keys for digest in digests)

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
        """Make a pending entry of each digest that is absent, None for the others; each is the parent of the next.

        Not in a scope that is erased.
        """
        assert scope not in self._erased, f"scope {scope} is erased"
        blocks = self.opened(scope)
        entries, account = blocks.in_use, tenant or blocks.account
        made: list[Entry | None] = []
        for digest in digests:
            if digest in entries or (blocks.packed and digest in blocks):
                made.append(None)
            else:
                before = self._before(blocks, digest, parent)
                entry = entries[digest] = Entry(scope, digest, before, layout_id, now_s, now_s, account)
                self._count(blocks, entry, 1)
                if (not made or made[-1] is None) and (continued := entries.get(before)) is not None:
                    self._queue(continued)  # If it was a leaf, it is none now.
                made.append(entry)
            parent = digest
        return made

    @staticmethod
    def _before(blocks: Blocks, digest: bytes, parent: bytes) -> bytes:
        """The parent that a block may have: the one that was named, or none where that would make a ring."""
        may_ring = parent == digest or digest in blocks.children
        return b"" if may_ring and blocks.ancestry.is_ring(digest, parent) else parent

    def adopt(self, entry: Entry, parent: bytes) -> None:
        """Set the parent of a pending entry, which its reader did not know; one that continues it is left out."""
        blocks = self._scopes[entry.scope]
        parent = self._before(blocks, entry.digest, parent) if parent != entry.parent else parent
        self._count(blocks, entry, -1)
        self._queue_parent(blocks, entry)
        entry.parent = parent
        self._count(blocks, entry, 1)
        blocks.ancestry.forget()

    def cut(self, entry: Entry) -> None:
        """Let what comes before a block leave while the block stays: whoever reads it needs them no more."""
        if entry.parent and not entry.is_cut:
            blocks = self._scopes[entry.scope]
            self._count(blocks, entry, -1)
            entry.is_cut = True
            self._queue_parent(blocks, entry)

    def join(self, entry: Entry) -> None:
        """Take a cut back, so that what comes before the block stays as long as it does: unless that is slower already.

        Else it could not leave there before a block that is faster.
        """
        if entry.is_cut:
            blocks = self._scopes[entry.scope]
            parent = blocks.get(entry.parent)
            if parent is None or parent.level <= entry.level:
                entry.is_cut = False
                self._count(blocks, entry, 1)

    def add(self, entry: Entry, residence: Residence) -> None:
        """Note a copy that can be read. See `add_all`."""
        self.add_all(((entry, residence),))

    def add_all(self, copies: Sequence[tuple[Entry, Residence]]) -> None:
        """Note copies that can be read; the first one of a block publishes it.

        Blocks become possible victims here only where no child is in their way: else that happens when the last one
        goes. So all of them are here before the first is asked.
        """
        promoted: list[Entry] = []
        """Not behind another one: what they continue is asked again."""
        last = b""
        for entry, residence in copies:
            tier, before = residence.tier, entry.residences
            if before:
                assert entry.residence(tier) is None, "one copy in each tier"
                entry.residences = tuple(sorted((*before, residence), key=lambda r: r.tier.level))
            else:
                entry.residences = (residence,)
            if entry.residences[0].tier.level != entry.level:
                self._relevel(entry)
                if entry.parent != last:
                    promoted.append(entry)
            self.contents(tier).note(entry, residence.slot)
            last = entry.digest
        for entry, _ in copies:
            self._queue(entry)
        for entry in promoted:
            self._queue_parent(self._scopes[entry.scope], entry)

    def publish(self, tier: Tier, copies: Sequence[tuple[Entry, Residence]]) -> None:
        """Note the first copies, in one tier, of pending blocks. Does what `add` does, for many at a time."""
        for entry, residence in copies:
            assert not entry.residences, "published once"
            entry.residences = (residence,)
            if entry.level != tier.level:
                self._relevel(entry)
        contents = self.contents(tier)
        contents.note_all([(entry, residence.slot) for entry, residence in copies])
        for entry, _ in copies:
            counts = self._scopes[entry.scope].children.get(entry.digest)
            if counts is None or not any(counts[: tier.level + 1]):
                contents.offer(entry)

    def restore(
        self, copies: Iterable[Residence], born_at_s: Callable[[int], float]
    ) -> tuple[list[BlockKey], list[Residence]]:
        """Note copies that an earlier run has left; returns the keys of the blocks, and the copies that nobody wants.

        Those are second ones in one tier and ones of another layout. Does what `begin` and `add` do, for many at a
        time: an agent starts with millions. Blocks whose children came before them are no victims until those go;
        beyond `in_use_max` they are rows at once. `born_at_s` derives the monotonic second from a record's epoch.
        """
        entered: list[BlockKey] = []
        unwanted: list[Residence] = []
        room = self.room
        for copy in copies:
            key = copy.record.key
            blocks = self.opened(key.scope)
            entry = blocks.get(key.digest)
            if entry is None:
                room -= 1
                tenant = self._restored(blocks, copy, born_at_s(copy.record.epoch), may_pack=room < 0)
            elif entry.residence(copy.tier) is None and entry.layout_id == copy.record.layout_id and entry.residences:
                self.add(entry, copy)
                tenant = entry.tenant
            else:
                unwanted.append(copy)
                continue
            copy.tier.charge(tenant, copy.slot.size_bytes)
            entered.append(key)
        return entered, unwanted

    def _restored(self, blocks: Blocks, copy: Residence, born_s: float, *, may_pack: bool) -> str:
        """Enter a block that only this copy is known of; returns its account."""
        tier, slot, record = copy
        digest = record.key.digest
        parent = self._before(blocks, digest, record.parent)
        tenant = blocks.account_in(tier, slot.extent)
        counts = blocks.children.get(digest)
        is_leaf = counts is None or not any(counts[: tier.level + 1])
        use = born_s, 0.0, UNMARKED
        row = packed_of(copy, tenant, parent, use, tuple(counts)) if counts and may_pack and not is_leaf else None
        if row is not None and row.fits:
            del blocks.children[digest]
            blocks.put(row)
        else:
            self._enter(blocks, copy, parent, born_s, tenant, is_leaf=is_leaf)
        if parent:
            blocks.count_apart(parent, tier.level)
        return tenant

    def enter(self, copy: Residence, tenant: str, born_s: float, children: int) -> None:
        """Make the entry of a block that is absent, with so many children in the same tier that nobody counted here.

        For those who count the block with its own parent themselves.
        """
        key, blocks = copy.record.key, self.opened(copy.record.key.scope)
        if children:
            blocks.children[key.digest] = [0] * TIERS_MAX
            blocks.children[key.digest][copy.tier.level] = children
        self._enter(blocks, copy, copy.record.parent, born_s, tenant, is_leaf=not children)

    def _enter(
        self, blocks: Blocks, copy: Residence, parent: bytes, born_s: float, tenant: str, *, is_leaf: bool
    ) -> None:
        tier, slot, record = copy
        key = record.key
        entry = Entry(key.scope, key.digest, parent, record.layout_id, born_s, 0.0, tenant, (copy,), tier.level)
        blocks.in_use[key.digest] = entry
        contents = self.contents(tier)
        contents.note(entry, slot)
        if is_leaf:
            contents.offer(entry)

    def unpack_leaves(self, tier: Tier) -> None:
        """Make entries, and so possible victims, of rows in a tier that nothing continues there or faster."""
        for number in self.packed.childless(tier):
            self.unpack(number)

    def remove(self, entry: Entry, tier: Tier) -> Residence:
        """Note that the copy in `tier` is gone; the last one takes the block out of the index."""
        gone = entry.residence(tier)
        assert gone is not None, "no copy there"
        entry.residences = tuple([r for r in entry.residences if r is not gone])
        self.contents(tier).remove(entry, gone.slot)
        if entry.residences:
            self._relevel(entry)
        else:
            self.forget(entry)
        return gone

    @contextmanager
    def leaving_together(self) -> Iterator[None]:
        """Ask what blocks continued only once all of them have left: of a chain most of that leaves, too."""
        assert self._continued is None, "not within another one"
        self._continued = {}
        try:
            yield
        finally:
            continued, self._continued = self._continued, None
            for entry in continued:
                if entry.level != GONE:
                    self._queue(entry)

    def swap(self, entry: Entry, old: Residence, new: Residence) -> None:
        """Put a copy in another slot of the same tier in place of the old one."""
        entry.residences = tuple(new if r is old else r for r in entry.residences)
        self.contents(old.tier).remove(entry, old.slot)
        self.contents(new.tier).note(entry, new.slot)
        self._queue(entry)

    def forget(self, entry: Entry) -> None:
        """Take a block without copies out of the index."""
        assert not entry.residences, "copies are removed first"
        blocks = self._scopes[entry.scope]
        del blocks.in_use[entry.digest]
        self._count(blocks, entry, -1)
        entry.level = GONE
        self._queue_parent(blocks, entry)
        if not blocks:
            del self._scopes[entry.scope]
        blocks.ancestry.forget()

    def is_continued(self, entry: Entry) -> bool:
        """True when a block that continues this one is here, or on its way."""
        return entry.digest in self._scopes[entry.scope].children

    def blockers(self, entry: Entry, level: int) -> int:
        """Count children whose fastest copy is at `level` or faster."""
        counts = self._scopes[entry.scope].children.get(entry.digest)
        return sum(counts[: level + 1]) if counts is not None else 0

    def may_leave(self, entry: Entry) -> bool:
        """True when one copy can go without a loss: another one stays, or nothing continues the block."""
        return len(entry.residences) > 1 or not self.is_continued(entry)

    def leaves_in_order(self, entry: Entry, tier: Tier) -> bool:
        """True when no child would be left in a faster place than its parent if the copy in `tier` went."""
        level = min((r.tier.level for r in entry.residences if r.tier is not tier), default=GONE)
        return level <= entry.level or not self.blockers(entry, level - 1)

    def relevel(self, tiers: Iterable[Tier]) -> None:
        """Recount everything after some of these tiers, which are all, got other levels.

        Whether children are in a block's way has changed with their levels, so all blocks are offered as victims.
        """
        for number in self.packed.crowded():
            self.unpack(number)  # Else that happened while it is counted, and its own parent would miss it.
        self.packed.clear_counts()
        for blocks in self._scopes.values():
            blocks.children.clear()
            for entry in blocks.in_use.values():
                entry.residences = tuple(sorted(entry.residences, key=lambda r: r.tier.level))
                entry.level = entry.residences[0].tier.level if entry.residences else 0
        for blocks in self._scopes.values():
            for entry in tuple(blocks.in_use.values()):
                if entry.parent and not entry.is_cut:
                    blocks.count_apart(entry.parent, entry.level)
        for number in [int(n) for part in self.packed.where(lambda _: True) for n in part]:
            row = self.packed.peek(number)
            if row is not None and row.parent:
                self._scopes[row.kind.scope].count_apart(row.parent, row.kind.tier.level)
        self._offer_all()
        for tier in tiers:
            self.unpack_leaves(tier)

    def _offer_all(self) -> None:
        for blocks in self._scopes.values():
            for entry in blocks.in_use.values():
                for residence in entry.residences:
                    self.contents(residence.tier).offer(entry)

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
            self._queue(entry)
            self._queue_parent(blocks, entry)
            if entry.is_cut and entry.used_at_s <= 0.0:  # No window begins with it any more.
                self.join(entry)

    @staticmethod
    def _count(blocks: Blocks, entry: Entry, step: int) -> None:
        if not entry.parent or entry.is_cut:
            return
        counts = blocks.counts(entry.parent)
        counts[entry.level] += step
        if step < 0 and not any(counts):
            del blocks.children[entry.parent]

    def _queue_parent(self, blocks: Blocks, entry: Entry) -> None:
        parent = blocks.get(entry.parent)
        if parent is not None and self._continued is not None:
            self._continued[parent] = None
        elif parent is not None:
            self._queue(parent)

    def _queue(self, entry: Entry) -> None:
        """Have a block among the possible victims of its tiers where nothing is in its way, and nowhere else.

        A copy that a faster one doubles is free to go.
        """
        for number, residence in enumerate(entry.residences):
            contents = self.contents(residence.tier)
            if number or not self.blockers(entry, entry.level):
                contents.offer(entry)
            else:
                contents.withdraw(entry)
