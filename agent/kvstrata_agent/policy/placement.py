"""Where a block goes when it leaves a tier, how it gets from one tier to another, and with which others. Pure."""

import math
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
    stays_s: float = math.inf
    """How long what comes now stays until others need its place: capacity over what comes in of late."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen tier and why; `target` is None when no tier is left."""

    target: str | None
    reason: str


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


CATCHES: Final = 0.9
"""Part of the returns which any slower tier would see that a faster one has to see, for a block to go there."""


def by_reuse_interval(
    tiers: Sequence[TierFacts], level: int, chance: Callable[[float], float], *, must_survive: bool = False
) -> Placement:
    """The fastest slower tier in which the block is likely still there when it is asked for again.

    `chance` gives the probability of a return within so many seconds. A tier whose blocks leave before that is passed
    over: it would take the block only to send it on.
    """
    fitting = [t for t in tiers if t.takes_writes and t.level > level and (not must_survive or _lasts(t))]
    nearest = next_lower(tiers, level, must_survive=must_survive)
    if len(fitting) < 2:
        return nearest
    chances = {t.name: chance(t.stays_s) for t in sorted(fitting, key=lambda t: t.level)}
    most = max(chances.values())
    target = next(name for name, seen in chances.items() if seen >= CATCHES * most)
    if target == nearest.target:
        return nearest
    told = ", ".join(f"{name} {seen:.0%}" for name, seen in chances.items())
    return Placement(target, f"reuse interval: chance of a return while it is there: {told}")


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
