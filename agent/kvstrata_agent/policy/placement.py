"""Where a block goes when it leaves a tier, how it gets from one tier to another, and with which others. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Final, TypeVar

from kvstrata_api.units import MIB

T = TypeVar("T")

GROUP_BYTES_MAX: Final = 4 * MIB
"""One durable write of 16 neighbours of 256 KiB goes at the disk's speed, where 16 single ones go at 0.7 of it."""

DEPTH: Final = 16
"""Groups under way that saturate the measured disks: blocks are not put together while there are fewer."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What a placement may know about one tier."""

    name: str
    level: int
    """0 is the fastest."""
    takes_writes: bool
    """False while the tier failed, is paused after write errors, or drains."""
    survives_restart: bool
    is_memory: bool
    price_per_s: float = 0.0
    """Uses for each second held that a place costs: what those bring that leave for want of room. 0: there is some."""


PRICE_PART: Final = 1 / 16
"""Of a price that the newest eviction makes: a burst that leaves at once does not set it alone."""


@dataclass(slots=True)
class Price:
    """What a place in a full tier costs, in uses for each second held: what the blocks bring that leave it of late."""

    per_s: float = 0.0

    def paid(self, uses_per_s: float) -> None:
        """Something worth so much has left for want of room."""
        self.per_s += (max(0.0, uses_per_s) - self.per_s) * PRICE_PART


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen tier and why; `target` is None when no tier is left."""

    target: str | None
    reason: str
    is_declined: bool = False
    """True for a block that is not worth a write."""


def next_lower(tiers: Sequence[TierFacts], level: int, *, must_survive: bool = False) -> Placement:
    """Cascade: the fastest tier slower than `level` that takes writes.

    With `must_survive` memory tiers are passed over, lasting ones too: archives and drains want blocks that outlive the
    node's power.
    """
    slower = sorted((t for t in tiers if t.level > level), key=lambda t: t.level)
    if not slower:
        return Placement(None, "last tier")
    fitting = [t for t in slower if t.takes_writes and (not must_survive or _lasts(t))]
    if not fitting:
        return Placement(None, "no slower tier survives a restart" if must_survive else "slower tiers take no writes")
    skipped = slower.index(fitting[0])
    return Placement(fitting[0].name, f"cascade, {skipped} tiers passed over" if skipped else "cascade")


class ReuseInterval:
    """Chooses among slower tiers: the fastest that has room, or where the block is worth more than what leaves.

    Else the slowest: what is worth less would leave at once again. To judge a tier by how long blocks stay in it leaves
    it empty: what passes it over makes them stay longer, and nothing says that those who are there bring more.
    """

    def __init__(self, tiers: Sequence[TierFacts], level: int) -> None:
        """For blocks that leave a tier of that level, as long as the facts hold."""
        self.nearest = next_lower(tiers, level)
        """Where all of them go that there is no choice for."""
        self._fitting = sorted((t for t in tiers if t.takes_writes and t.level > level), key=lambda t: t.level)

    @property
    def has_choice(self) -> bool:
        """False where it does not matter what a block is worth."""
        return len(self._fitting) > 1

    def placement(self, uses_per_s: float) -> Placement:
        """Where a block goes that is worth so much."""
        if not self.has_choice:
            return self.nearest
        fitting = self._fitting
        target = next((t for t in fitting[:-1] if max(0.0, uses_per_s) >= t.price_per_s), fitting[-1])
        if target.name == self.nearest.target:
            return self.nearest
        prices = ", ".join(f"{t.name} {t.price_per_s:.2g}" for t in fitting[: fitting.index(target)])
        return Placement(target.name, f"reuse interval: {uses_per_s:.2g} uses/s, where a place costs {prices}")


def by_reuse_interval(tiers: Sequence[TierFacts], level: int, uses_per_s: float) -> Placement:
    """Where one block goes. See `ReuseInterval`."""
    return ReuseInterval(tiers, level).placement(uses_per_s)


@dataclass(frozen=True, slots=True)
class Replica:
    """A copy here of what another agent has: without it there is a fetch, and nothing is computed."""

    fetch_s: float
    """What it took to bring one block from there."""
    compute_s: float
    """What it takes to compute one; 0.0 where nobody knows."""
    until_s: float
    """Monotonic second until which the other copy is believed to be there."""

    @property
    def part(self) -> float:
        """Of what a block is worth that would have to be computed, what this one is: the time that having it saves."""
        return min(1.0, self.fetch_s / self.compute_s) if self.compute_s > 0 else 1.0


def is_raised(tier: TierFacts, uses_per_s: float, *, is_decoded: bool) -> bool:
    """Whether a block is copied up to a tier that is faster than the memory which engines map.

    What is decoded from is, and else what brings more there than what leaves.
    """
    return tier.takes_writes and (is_decoded or uses_per_s > tier.price_per_s)


def _lasts(tier: TierFacts) -> bool:
    return tier.survives_restart and not tier.is_memory


class CopyPath(StrEnum):
    """How a block gets from one tier to another."""

    RAW_GROUP = "raw_group"
    """As it lies, together with others."""
    CODED_GROUP = "coded_group"
    """Through a codec, together with others."""
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """What decides how one block is copied."""

    is_source_mapped: bool
    """It lies in memory that engines map. False for memory that stands in for slower one: that shows in its `read`."""
    is_source_grouped: bool
    """The source's medium takes several blocks at a time."""
    is_target_grouped: bool
    fills_mapped_slot: bool
    """Its slot in memory that engines map is taken already."""
    is_encoded: bool
    """Its source went through a codec."""
    gets_encoded: bool
    """The pool wants it encoded in the target."""


def copy_path(facts: CopyFacts) -> CopyPath:
    """With others where it goes between mapped memory and a medium that takes groups."""
    if facts.is_source_grouped:
        if not facts.fills_mapped_slot:
            return CopyPath.SINGLE
        return CopyPath.CODED_GROUP if facts.is_encoded else CopyPath.RAW_GROUP
    if not facts.is_source_mapped or not facts.is_target_grouped or facts.is_encoded:
        return CopyPath.SINGLE
    return CopyPath.CODED_GROUP if facts.gets_encoded else CopyPath.RAW_GROUP


def grouped(blocks: Sequence[T], bytes_of: Callable[[T], int], account_of: Callable[[T], str]) -> list[list[T]]:
    """Divide `blocks` into groups of one account each, in order; a block over the limit is a group of its own.

    Enough to share what a transfer costs, few enough to keep a disk's queue full.
    """
    limit_bytes = min(GROUP_BYTES_MAX, sum(map(bytes_of, blocks)) // DEPTH)
    return [group for _, run in groupby(blocks, account_of) for group in _groups(run, bytes_of, limit_bytes)]


def _groups(blocks: Iterable[T], bytes_of: Callable[[T], int], limit_bytes: int) -> list[list[T]]:
    groups: list[list[T]] = []
    left_bytes = 0
    for block in blocks:
        size_bytes = bytes_of(block)
        if not groups or size_bytes > left_bytes:
            groups.append([])
            left_bytes = limit_bytes
        groups[-1].append(block)
        left_bytes -= size_bytes
    return groups
