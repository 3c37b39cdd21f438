"""How much of a tier's wish this machine can grant. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.units import MIB, format_rounded

MEMORY_PERCENT_MAX: Final = 90
"""Part of the physical memory that memory tiers may take together; engine, kernel and agent need the rest."""
DISK_PERCENT_MAX: Final = 99
"""Part of a file system's room that a tier may take: file systems slow down and fragment when they are full."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one tier gets."""

    wanted_bytes: int
    granted_bytes: int
    """At most `wanted_bytes`; 0 when the machine has no room at all."""
    message: str = ""
    """With numbers, when less is granted than wanted."""


def grant(tiers: Iterable[NodeTier], memory_bytes: int, disk_bytes: Mapping[str, int]) -> dict[str, Limit]:
    """Clamp each tier to what is there; memory tiers share one budget, the faster ones first.

    `disk_bytes` gives, by tier name, what its file system has free plus what the tier itself holds there.
    """
    left_bytes = memory_bytes * MEMORY_PERCENT_MAX // 100
    limits: dict[str, Limit] = {}
    for tier in tiers:
        room_bytes = _room(tier, left_bytes, disk_bytes)
        granted = tier.capacity_bytes if room_bytes is None else min(tier.capacity_bytes, room_bytes)
        if tier.type is TierType.HOST_DRAM:
            left_bytes -= granted
        if granted < tier.capacity_bytes:
            granted = granted // MIB * MIB
        limits[tier.name] = Limit(tier.capacity_bytes, granted, _message(tier, granted))
    return limits


def _room(tier: NodeTier, memory_left_bytes: int, disk_bytes: Mapping[str, int]) -> int | None:
    """Room of the medium; None when it is not known or has no bound of ours."""
    if tier.type is TierType.HOST_DRAM:
        return max(0, memory_left_bytes)
    if tier.name in disk_bytes:
        return disk_bytes[tier.name] * DISK_PERCENT_MAX // 100
    return None


def _message(tier: NodeTier, granted_bytes: int) -> str:
    if granted_bytes >= tier.capacity_bytes:
        return ""
    medium = "memory" if tier.type is TierType.HOST_DRAM else "the file system"
    wanted, has = format_rounded(tier.capacity_bytes), format_rounded(granted_bytes)
    return f"tier {tier.name} wants {wanted}; {medium} of this node has room for {has}"
