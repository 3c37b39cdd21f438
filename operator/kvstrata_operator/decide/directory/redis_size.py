"""How much memory the directory's Redis gets: from what agents may hold to `maxmemory`. Pure.

Laws: more blocks never ask for less; what a Redis holds now is never more than it keeps while nothing else replaces it;
a Redis is replaced for memory alone only when what agents may hold does not fit into it any more, or its bounds moved.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstrata_api.units import KIB, MIB

LOCATION_BYTES: Final = 75
"""Of one location among many of its scope and agent (this and the next three: metadata/README.md, Figures)."""

SCOPE_BYTES: Final = 8 * MIB
"""What the buckets of one scope take at most beside what is in them."""

STREAM_BYTES: Final = 512 * KIB
"""What the reverse index of one agent in one scope takes at most beside what is in it."""

SPARSE_LOCATION_BYTES: Final = 320
"""Of one location whose buckets hold nothing else."""

EMPTY_BYTES: Final = 32 * MIB
"""Redis itself, its scripts, the registry, and buffers of agents' connections."""

HEADROOM_PERCENT: Final = 25
"""Sessions, and counts that agents round down by an eighth."""

BLOCKS_KNOWN: Final = 1_000
"""From so many blocks on, their mean size is taken from what agents report."""

FILL_KNOWN: Final = 16
"""And from a fill of one part in so many: agents round what they use to 1 % of a tier."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the chart's values say."""

    min_bytes: int
    max_bytes: int
    block_bytes: int
    """Of a block as it is stored, where agents hold too few to tell."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What one pool may come to hold, and holds."""

    capacity_bytes: int
    """Of all tiers on all nodes."""
    used_bytes: int = 0
    blocks: int = 0
    """Copies that agents report now; each is a location."""
    agents: int = 0

    def locations(self, bounds: Bounds) -> int:
        """Locations when every tier is full; never fewer than there are."""
        is_known = self.blocks >= BLOCKS_KNOWN and self.used_bytes * FILL_KNOWN >= self.capacity_bytes
        block_bytes = max(1, self.used_bytes // self.blocks) if is_known else bounds.block_bytes
        return max(self.blocks, -(-self.capacity_bytes // block_bytes))


@dataclass(frozen=True, slots=True)
class Need:
    """What full tiers would take of Redis."""

    locations: int = 0
    scopes: int = 0
    agents: int = 0

    @property
    def size_bytes(self) -> int:
        """`used_memory` of a Redis that knows all of it, without headroom."""
        buckets_bytes = self.scopes * (SCOPE_BYTES + STREAM_BYTES * self.agents)
        filled_bytes = LOCATION_BYTES * self.locations + buckets_bytes
        return EMPTY_BYTES + min(filled_bytes, SPARSE_LOCATION_BYTES * self.locations)


def need(pools: Iterable[PoolLoad], scopes: int, bounds: Bounds) -> Need:
    """Add up what all pools of one Redis may come to hold."""
    loads = tuple(pools)
    return Need(sum(load.locations(bounds) for load in loads), scopes, sum(load.agents for load in loads))


def fresh_bytes(wanted: Need, bounds: Bounds) -> int:
    """`maxmemory` of a Redis that is made now: a step above the need, within the bounds."""
    with_headroom = wanted.size_bytes * (100 + HEADROOM_PERCENT) // 100
    return min(bounds.max_bytes, max(bounds.min_bytes, _step_above(with_headroom)))


def kept_bytes(held_bytes: int, wanted: Need, bounds: Bounds) -> int:
    """`maxmemory` of a Redis that has `held_bytes` and is not replaced for another reason.

    A restart loses the directory for as long as agents need to report it again, so nobody is restarted to save memory.
    """
    is_within = bounds.min_bytes <= held_bytes <= bounds.max_bytes
    is_enough = wanted.size_bytes <= held_bytes or held_bytes == bounds.max_bytes
    return held_bytes if is_within and is_enough else fresh_bytes(wanted, bounds)


def _step_above(size_bytes: int) -> int:
    """Round up to a power of two MiB or one and a half of one: few sizes, so few restarts."""
    size_mib = -(-size_bytes // MIB)
    power = 1 << max(0, size_mib - 1).bit_length()
    return (power * 3 // 4 if power > 2 and size_mib <= power * 3 // 4 else power) * MIB
