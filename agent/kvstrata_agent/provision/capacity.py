"""How much of a tier's wish this machine can grant. Pure.

How much room the tiers of a node share: memory by their declaration, disks by asking the file systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.file import disk_space as disk_room
from kvstrata_api.directories import directories_of
from kvstrata_api.tiers import TierType
from kvstrata_api.units import MIB, format_rounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstrata_api.models.poolnode import NodeTier


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


def memory_of(spec: NodeTier) -> int:
    """Bytes of a tier that share the budget of host memory with others."""
    return spec.capacity_bytes if spec.type is TierType.HOST_DRAM else 0


def disk_bytes(tiers: Sequence[NodeTier]) -> dict[str, int]:
    """Room for each tier with a path: free bytes of the file system plus what the tier's own files take."""
    rooms: dict[str, int] = {}
    for tier in tiers:
        filled = [Path(directory.path) for directory in directories_of(tier) if directory.is_filled]
        room_bytes = disk_room.all_bytes([disk_room.look(path) for path in filled])
        if room_bytes is not None:
            rooms[tier.name] = room_bytes
    return rooms
