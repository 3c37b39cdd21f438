"""The view of one tier's blocks that the eviction planner works on. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfleet_agent.index import Entry, Index
    from kvfleet_agent.tiers import Tier
    from kvfleet_api.blocks import ScopeId


class TierCandidates:
    """Implements `policy.eviction.Candidates` over a tier: all of it, or one tenant, one scope, some extents of it.

    Victims are ordered by last use alone. A policy that knows better (classes of sessions, say) belongs into the order
    of `LeafQueue`, and nowhere else.
    """

    def __init__(
        self,
        index: Index,
        tier: Tier,
        scope: ScopeId | None = None,
        extents: frozenset[int] | None = None,
        tenant: str | None = None,
    ) -> None:
        self._index = index
        self._tier = tier
        self._extents = extents
        self._tenant = tenant
        self._keys = dict.fromkeys(key for key in tier.queues if scope in (None, key[0]) and tenant in (None, key[1]))
        self._pushed: set[Entry] = set()
        """Blocks that the planner put in: their children are victims of the same plan."""

    def pop(self) -> Entry | None:
        """Take the least recently used leaf; entries that are no leaf (any more) are left out on the way."""
        while (key := self._oldest_key()) is not None:
            entry = self._tier.queues[key].pop()
            if entry is not None and (entry in self._pushed or self.children(entry) == 0):
                return entry
        return None

    def push(self, block: Entry) -> None:
        """Put a block in, if it is still here."""
        if block.residence(self._tier) is not None:
            self._pushed.add(block)
            self._tier.offer(block)
            self._keys[block.scope, block.tenant] = None

    def is_free(self, block: Entry) -> bool:
        """True when nobody holds the block and it lies where room is wanted."""
        if block.is_held:
            return False
        residence = block.residence(self._tier)
        return self._extents is None or (residence is not None and residence.slot.extent in self._extents)

    def size_bytes(self, block: Entry) -> int:
        """Bytes that the tier gets back."""
        residence = block.residence(self._tier)
        return residence.slot.size_bytes if residence else 0

    def parent(self, block: Entry) -> Entry | None:
        """The parent, when this tier holds the fastest copy of both: otherwise neither waits for the other.

        That of another tenant is no candidate where one tenant's blocks are asked for.
        """
        if block.level != self._tier.level:
            return None
        parent = self._index.parent(block)
        if parent is None or parent.level != self._tier.level or self._tenant not in (None, parent.tenant):
            return None
        return parent

    def children(self, block: Entry) -> int:
        """Children here or faster; a block with a faster copy is free to go whatever its children do."""
        if block.level < self._tier.level:
            return 0
        return self._index.blockers(block, self._tier.level)

    def oldest_s(self) -> float | None:
        """Last use of the least recently used possible leaf, or None."""
        key = self._oldest_key()
        entry = self._tier.queues[key].oldest() if key is not None else None
        return entry.used_at_s if entry is not None else None

    def _oldest_key(self) -> tuple[ScopeId, str] | None:
        best: tuple[float, tuple[ScopeId, str]] | None = None
        for key in self._keys:
            queue = self._tier.queues.get(key)
            entry = queue.oldest() if queue is not None else None
            if entry is not None and (best is None or entry.used_at_s < best[0]):
                best = (entry.used_at_s, key)
        return best[1] if best else None
