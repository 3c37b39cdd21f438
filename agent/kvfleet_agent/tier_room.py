"""How much room the tiers of a node share: memory by their declaration, disks by asking the file systems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet_agent.backends import disk_room
from kvfleet_api.tiers import TierType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfleet_api.models.poolnode import NodeTier


def memory_of(spec: NodeTier) -> int:
    """Bytes of a tier that share the budget of host memory with others."""
    return spec.capacity_bytes if spec.type is TierType.HOST_DRAM else 0


def disk_bytes(tiers: Sequence[NodeTier]) -> dict[str, int]:
    """Room for each tier with a path: free bytes of the file system plus what the tier's own files take."""
    rooms: dict[str, int] = {}
    for tier in tiers:
        room_bytes = disk_room.all_bytes([disk_room.look(Path(path)) for path in paths_of(tier)])
        if room_bytes is not None:
            rooms[tier.name] = room_bytes
    return rooms


def paths_of(tier: NodeTier) -> tuple[str, ...]:
    """Directories whose file system a tier fills by itself."""
    if tier.type is TierType.NVME and tier.nvme is not None:
        return tier.nvme.directories
    if tier.type is TierType.CXL and tier.cxl is not None and tier.cxl.emulated is not None:
        return (tier.cxl.emulated.path,)
    return ()
