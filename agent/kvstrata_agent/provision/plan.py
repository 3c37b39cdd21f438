"""From declared tiers to steps: what is opened, resized and closed, and how much of its capacity each one is granted.

Only `disk_bytes` asks file systems; everything else is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.file.devices import measure_room, room_of_all
from kvstrata_api.directories import directories_of
from kvstrata_api.tiers import TierType
from kvstrata_api.units import MIB, format_rounded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kvstrata_api.models.poolnode import NodeTier

MEMORY_PERCENT_MAX: Final = 90
"""Part of the physical memory that memory tiers may take together; engine, kernel and agent need the rest."""
DISK_PERCENT_MAX: Final = 99
"""Part of a file system's room that a tier may take: file systems slow down and fragment when they are full."""


@dataclass(frozen=True, slots=True)
class Open:
    """Set a tier up."""

    spec: NodeTier


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the capacity of a tier that is up."""

    spec: NodeTier


@dataclass(frozen=True, slots=True)
class Close:
    """Take a tier down; blocks that have no other copy by then are lost to this node, files stay."""

    name: str


Step = Open | Resize | Close


def gone(wanted: Sequence[NodeTier], have: Mapping[str, NodeTier]) -> frozenset[str]:
    """Tiers of `have` that are not wanted, or only with other settings than the capacity."""
    by_name = {t.name: t for t in wanted}
    return frozenset(n for n, spec in have.items() if n not in by_name or _settings(by_name[n]) != _settings(spec))


def is_abandoned(spec: NodeTier, wanted: Sequence[NodeTier]) -> bool:
    """True when no wanted tier has the name of this one or lies where it lay."""
    return all(
        t.name != spec.name
        and not (t.nvme is not None and spec.nvme is not None and {*t.nvme.directories} & {*spec.nvme.directories})
        and (spec.remote_flash is None or t.remote_flash != spec.remote_flash)
        and (spec.object is None or t.object != spec.object)
        for t in wanted
    )


def levels(wanted: Sequence[NodeTier], before: Sequence[str], leaving: Collection[str]) -> dict[str, int]:
    """Level of each tier: the wanted ones in their order, each of `leaving` behind what it stood behind in `before`."""
    order = [t.name for t in wanted]
    for at, name in enumerate(before):
        if name in leaving and name not in order:
            order.insert(max((order.index(n) + 1 for n in before[:at] if n in order), default=0), name)
    return {name: level for level, name in enumerate(order)}


def plan(wanted: Sequence[NodeTier], have: Mapping[str, NodeTier], *, is_retry_due: bool = True) -> tuple[Step, ...]:
    """Steps that turn `have` into `wanted`, closings first, so that a path is free before somebody else opens it.

    `have` holds the tiers that are up, as they were asked for. Tiers that are not up are opened (again) only when
    `is_retry_due`. Applied, the plan for the same wish is empty.
    """
    goes = gone(wanted, have)
    closes = tuple(Close(name) for name in have if name in goes)
    stays = have.keys() - goes
    resizes = tuple(Resize(t) for t in wanted if t.name in stays and t.capacity_bytes != have[t.name].capacity_bytes)
    opens = tuple(Open(t) for t in wanted if t.name not in stays and (is_retry_due or t.name in goes))
    return closes + resizes + opens


def _settings(spec: NodeTier) -> NodeTier:
    """Everything but the capacity, which alone can change while a tier is up."""
    return spec.model_copy(update={"capacity_bytes": 1})


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
        room_bytes = room_of_all([measure_room(path) for path in filled])
        if room_bytes is not None:
            rooms[tier.name] = room_bytes
    return rooms
