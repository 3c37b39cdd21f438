"""From declared tiers to steps: what is opened, resized and closed. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvstrata_api.models.poolnode import NodeTier


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
