"""Where a block goes when it leaves a tier: the next slower one that takes it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


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


def _lasts(tier: TierFacts) -> bool:
    return tier.survives_restart and not tier.is_memory
