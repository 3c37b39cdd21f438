"""From declared tiers to steps: what is opened, resized and closed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfleet_api.models.poolnode import NodeTier


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
    """Take a tier down; blocks that have no other copy are lost to this node, files stay."""

    name: str


Step = Open | Resize | Close


def plan(wanted: Sequence[NodeTier], have: Mapping[str, NodeTier], *, is_retry_due: bool = True) -> tuple[Step, ...]:
    """Steps that turn `have` into `wanted`, closings first, so that a path is free before somebody else opens it.

    `have` holds the tiers that are up, as they were asked for. Tiers that are not up are opened (again) only when
    `is_retry_due`. Applied, the plan for the same wish is empty.
    """
    by_name = {t.name: t for t in wanted}
    gone = [n for n, spec in have.items() if n not in by_name or _settings(by_name[n]) != _settings(spec)]
    closes = tuple(Close(name) for name in gone)
    stays = have.keys() - set(gone)
    resizes = tuple(Resize(t) for t in wanted if t.name in stays and t.capacity_bytes != have[t.name].capacity_bytes)
    opens = tuple(Open(t) for t in wanted if t.name not in stays and (is_retry_due or t.name in gone))
    return closes + resizes + opens


def _settings(spec: NodeTier) -> NodeTier:
    """Everything but the capacity, which alone can change while a tier is up."""
    return spec.model_copy(update={"capacity_bytes": 1})
