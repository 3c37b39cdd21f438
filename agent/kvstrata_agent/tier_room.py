"""How much room the tiers of a node share: memory by their declaration, disks by asking the file systems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata_agent.backends.file import disk_space as disk_room
from kvstrata_api.directories import directories_of
from kvstrata_api.tiers import TierType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_api.models.poolnode import NodeTier


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
