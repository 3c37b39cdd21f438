"""Sums over KVPoolNodes that are kept while these come, change and go. Pure.

Laws: a sum depends on the KVPoolNodes that are in it and not on the order in which they came or went; of tenants and
shares that none of them tells of nothing is kept.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kvstrata_operator.decide.trust.tenant_usage import Held
from kvstrata_operator.observe.records import PoolNodeSeen


@dataclass(slots=True)
class PoolSums:
    """What a pool's agents report, added up."""

    used_bytes: Counter[str] = field(default_factory=Counter)
    """By tier."""
    blocks: int = 0
    """Copies over all tiers, each node's count rounded down by an eighth at most."""
    queried_blocks: int = 0
    hit_blocks: int = 0
    _capacities: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """How many nodes offer how many bytes, by tier: fleets have few sizes."""

    def add(self, node: PoolNodeSeen, sign: int) -> None:
        """Take in what one node reports (`sign` 1), or take it out again (-1)."""
        self.queried_blocks += sign * node.queried_blocks
        self.hit_blocks += sign * node.hit_blocks
        for tier in node.tiers:
            self.used_bytes[tier.name] += sign * tier.used_bytes
            self.blocks += sign * tier.blocks
            sizes = self._capacities[tier.name]
            sizes[tier.capacity_bytes] += sign
            if not sizes[tier.capacity_bytes]:
                del sizes[tier.capacity_bytes]

    def allocatable_bytes(self, tier: str) -> int:
        """Bytes that agents offer of a tier."""
        return sum(size * nodes for size, nodes in self._sizes(tier).items())

    def least_bytes(self, tier: str) -> int | None:
        """Bytes of the node that offers the least, if any offers something."""
        return min((size for size in self._sizes(tier) if size), default=None)

    def _sizes(self, tier: str) -> Counter[int]:
        return self._capacities.get(tier, Counter())


@dataclass(slots=True)
class FleetSums:
    """What all agents report of tenants and shares, added up."""

    held: defaultdict[str, Held] = field(default_factory=lambda: defaultdict(Held))
    """By tenant."""
    share_hits: Counter[str] = field(default_factory=Counter)
    """Blocks that readers of a share were given, by its uid."""

    def add(self, node: PoolNodeSeen, sign: int) -> None:
        """Take in what one node reports (`sign` 1), or take it out again (-1)."""
        for row in node.tenants:
            self.held[row.tenant].add((node.pool, row.tier), node.node, row, sign)
            if self.held[row.tenant].is_empty:
                del self.held[row.tenant]
        for uid, count in node.share_hits:
            self.share_hits[uid] += sign * count
            if not self.share_hits[uid]:
                del self.share_hits[uid]
