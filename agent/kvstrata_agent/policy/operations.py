"""What a node does for KVOperations: how far one has come, drains of a tier, warmings and migrations. Pure.

Laws of a drain: an empty tier is done at once; nothing is given up while somebody holds a block, or while a tier that
could take blocks is only away for a moment; what has no place is reported after `IDLE_POLLS` polls in a row, and stays.

Laws of a warming: what is brought is closed under ancestors, for a block without those before it is found by nobody;
each block counts once, however many prefixes run through it; it all fits below the budget, so that a warming never
evicts what it brought itself.

Laws of a migration: what is offered is closed under ancestors, as far as they are here; each block belongs to some
chain that is offered; a block leaves only when the other pool has it, nobody here holds it, and nothing here continues
it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret

UNKNOWN_ORDER: Final = "UnknownOrder"
"""Reason of an order that this version cannot read. Not final: the node's next version may know it."""
MESSAGE_CHARS_MAX: Final = 256
"""`maxLength` of an answer's message."""

IDLE_POLLS: Final = 3
"""Polls in a row that find nothing to move: what is only being copied is free soon."""


@dataclass(frozen=True, slots=True)
class Count:
    """Blocks and bytes that there were, or are to be, and that were dealt with; fields as in `OrderAnswer`."""

    blocks_done: int = 0
    blocks_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    blocks_missing: int = 0
    """Of the total, those that nobody has."""


class Ended(NamedTuple):
    """What the work on an order came to."""

    message: str
    reason: str = ""
    """CamelCase cause of a failure; empty when it is done."""


ReportProgress = Callable[[Count, Ended | None], None]
"""Takes how far it has come, and what keeps it from going on."""


class DrainProgress(Enum):
    """Where the drain of a tier stands; the value is the reason that is reported."""

    MOVING = ""
    HELD = "BlocksHeld"
    WAITING = "TiersAway"
    EMPTY = "Drained"
    NO_PLACE = "NoPlace"

    @property
    def is_over(self) -> bool:
        """True when nothing more will happen by itself."""
        return self in (DrainProgress.EMPTY, DrainProgress.NO_PLACE)


@dataclass(frozen=True, slots=True)
class TierReading:
    """What is seen of a tier that takes no blocks."""

    blocks: int
    is_stuck: bool
    """True when the last try to empty it moved nothing."""
    is_held: bool
    """True while somebody leases, pins, decodes from, writes or moves a block in it."""
    are_others_away: bool
    """True while another tier takes no writes for the moment."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What the polls so far have come to."""

    progress: DrainProgress = DrainProgress.MOVING
    idle_polls: int = 0
    blocks: int | None = None
    """At the last poll; None before the first one."""

    def after(self, seen: TierReading) -> "Watch":
        """Add one more poll."""
        if seen.blocks == 0 and not seen.is_held:
            return Watch(DrainProgress.EMPTY, 0, 0)
        if self.blocks is None or seen.blocks < self.blocks:
            return Watch(DrainProgress.MOVING, 0, seen.blocks)
        if seen.is_held:
            return Watch(DrainProgress.HELD, 0, seen.blocks)
        if not seen.is_stuck:
            return Watch(DrainProgress.MOVING, 0, seen.blocks)
        if seen.are_others_away:
            return Watch(DrainProgress.WAITING, 0, seen.blocks)
        idle_polls = self.idle_polls + 1
        return Watch(
            DrainProgress.NO_PLACE if idle_polls >= IDLE_POLLS else DrainProgress.MOVING, idle_polls, seen.blocks
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """A block with all those before it."""

    secret: ScopeSecret
    layout_id: LayoutId
    raw_bytes: int
    """Of each block."""
    digests: tuple[bytes, ...]
    """Root first."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Blocks of a chain from `start` up to, not including, `end`; those before `start` come with another portion."""

    chain: Chain
    start: int
    end: int

    def link(self, at: int) -> tuple[bytes, bytes]:
        """Digest of a block and of the one before it, empty at the root."""
        return self.chain.digests[at], self.chain.digests[at - 1] if at else b""


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """What is to be brought, in this order."""

    portions: tuple[Portion, ...]
    left_out: int
    """Blocks for which the budget is too small."""

    @property
    def blocks(self) -> int:
        """Blocks of all portions."""
        return sum(p.end - p.start for p in self.portions)

    @property
    def size_bytes(self) -> int:
        """Raw bytes of all portions."""
        return sum((p.end - p.start) * p.chain.raw_bytes for p in self.portions)


def budget_bytes(capacity_bytes: int, low_percent: int, hard_bytes: int | None, max_bytes: int) -> int:
    """Bytes that a warming may bring into a tier: below its low watermark, the tenant's quota and what was asked.

    `hard_bytes` is None for a tenant without a quota; `max_bytes` is 0 when nothing was asked.
    """
    bounds = [capacity_bytes * low_percent // 100]
    bounds += [hard_bytes] if hard_bytes is not None else []
    bounds += [max_bytes] if max_bytes > 0 else []
    return min(bounds)


def plan_warming(chains: Sequence[Chain], budget: int) -> WarmPlan:
    """Take as much of each chain, root first, as is not taken already and fits into what is left of `budget` bytes."""
    taken: set[tuple[ScopeId, bytes]] = set()
    portions: list[Portion] = []
    left_out: set[tuple[ScopeId, bytes]] = set()
    for chain in chains:
        keys = [(chain.secret.scope, digest) for digest in chain.digests]
        start = next((i for i, key in enumerate(keys) if key not in taken), len(keys))
        end = min(len(keys), start + budget // chain.raw_bytes)
        budget -= (end - start) * chain.raw_bytes
        taken.update(keys[start:end])
        left_out.update(keys[end:])
        if end > start:
            portions.append(Portion(chain, start, end))
    return WarmPlan(tuple(portions), len(left_out - taken))


def leaves(digests: set[bytes], parents: set[bytes]) -> set[bytes]:
    """Blocks that none of `digests` continues: these with all that stands before them are all.

    `parents` has what each of `digests` continues.
    """
    return digests - parents


def first_missing(chain: Sequence[bytes], taken: Collection[bytes]) -> int:
    """Where to begin with a chain, the leading blocks of which may have been taken with another one."""
    return next((i for i, digest in enumerate(chain) if digest not in taken), len(chain))


def may_leave(*, is_taken: bool, is_held: bool, is_continued: bool) -> bool:
    """True when a block may be dropped here."""
    return is_taken and not is_held and not is_continued
