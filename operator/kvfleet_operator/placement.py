"""Which nodes take part in which pool, and with how many bytes of each tier. Pure.

Law: the shares of a shared tier never add up to more than its capacity. Law: of two pools that want one NVMe
directory of one node, the older has it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any, Final

from kvfleet_api import names
from kvfleet_api.models.pool import KVPool, KVPoolSpec, PoolTier
from kvfleet_api.models.poolnode import NodeTier
from kvfleet_operator.digest import digest
from kvfleet_operator.records import Declared, NodeSeen

_NOT_OF_THE_AGENT: Final = {
    "nodeSelector",
    "tolerations",
    "updateStrategy",
    "deletionPolicy",
    "destroyConfirmation",
    "paused",
}
"""Parts of a KVPool's spec that say where and how to roll out, not what an agent should be."""

_SHARE_GRAIN_BYTES: Final = 4096
"""Shares are whole file-system blocks, so that no tier begins with a fraction of one."""

_EXACT_NODES_MAX: Final = 4
"""Up to here a shared tier is divided exactly; beyond it in steps, see `divisor_of`."""


class Exclusion(StrEnum):
    """Why a node that matches gets no KVPoolNode; a condition's reason."""

    PATH_CONFLICT = "PathConflict"
    NAME_TOO_LONG = "NameTooLong"


@dataclass(frozen=True, slots=True)
class Excluded:
    """One node that matches and is left out."""

    reason: Exclusion
    message: str


@dataclass(frozen=True, slots=True)
class Placement:
    """What one pool should be on its nodes."""

    pool: str
    revision: str
    tiers: tuple[NodeTier, ...]
    """The same for all nodes."""
    tiers_digest: str
    nodes: frozenset[str]
    """Nodes that should have a KVPoolNode."""
    excluded: Mapping[str, Excluded]
    """Nodes that match and cannot have one."""

    @property
    def matched(self) -> int:
        """How many nodes the selector picks."""
        return len(self.nodes) + len(self.excluded)


def revision_of(spec: KVPoolSpec) -> str:
    """Name the parts of a spec that agents act upon; moving or pausing a pool changes no revision."""
    return digest({k: v for k, v in spec.to_json().items() if k not in _NOT_OF_THE_AGENT})


def matching(selector: Mapping[str, str], nodes: Mapping[str, NodeSeen]) -> frozenset[str]:
    """Names of the nodes that carry every label of the selector; all nodes for an empty one."""
    wanted = tuple(selector.items())
    return frozenset(name for name, node in nodes.items() if all(node.labels.get(k) == v for k, v in wanted))


def divisor_of(nodes: int) -> int:
    """Into how many shares a shared tier is cut for so many nodes: never fewer, at most half as many again.

    Exact for a few nodes, then in steps (6, 8, 12, 16, 24, ...), so that a node that comes or goes does not
    rewrite every KVPoolNode of a large pool.
    """
    if nodes <= _EXACT_NODES_MAX:
        return max(1, nodes)
    power = 1 << (nodes - 1).bit_length()
    return power * 3 // 4 if nodes <= power * 3 // 4 else power


def share_bytes(capacity_bytes: int, nodes: int) -> int:
    """One node's part of a tier that all nodes share, in whole 4 KiB where that is not nothing."""
    share = capacity_bytes // divisor_of(nodes)
    return max(1, share // _SHARE_GRAIN_BYTES * _SHARE_GRAIN_BYTES or share)


def resolve_tiers(tiers: Iterable[PoolTier], nodes: int) -> tuple[NodeTier, ...]:
    """Turn declared tiers into what each of so many nodes should set up."""
    return tuple(_resolve(tier, nodes) for tier in tiers)


def place(pools: Iterable[Declared[KVPool]], nodes: Mapping[str, NodeSeen]) -> dict[str, Placement]:
    """Place all pools that can be read and are not on their way out.

    A pool that is being deleted keeps its directories until it is gone, so it takes part in conflicts.
    """
    readable = {p.key: (p, p.model) for p in sorted(pools, key=_age) if p.model is not None}
    picked = {name: matching(model.spec.node_selector, nodes) for name, (_, model) in readable.items()}
    conflicts = _path_conflicts({name: model for name, (_, model) in readable.items()}, picked)
    return {
        name: _placement(name, model.spec, picked[name], conflicts.get(name, {}))
        for name, (pool, model) in readable.items()
        if not pool.is_deleting
    }


def _placement(name: str, spec: KVPoolSpec, picked: frozenset[str], conflicts: Mapping[str, Excluded]) -> Placement:
    excluded = dict(conflicts) | _too_long(name, picked)
    placed = picked - excluded.keys()
    tiers = resolve_tiers(spec.tiers, len(placed))
    return Placement(name, revision_of(spec), tiers, digest([t.to_json() for t in tiers]), placed, excluded)


def _age(pool: Declared[Any]) -> tuple[str, str]:
    """Sort key: the older first, equal ages by name."""
    return (pool.meta.creation_timestamp, pool.key)


def _resolve(tier: PoolTier, nodes: int) -> NodeTier:
    capacity_bytes = tier.capacity_per_node or share_bytes(tier.capacity or 1, nodes)
    return NodeTier(
        name=tier.name,
        type=tier.type,
        capacity_bytes=capacity_bytes,
        hbm=tier.hbm,
        host_dram=tier.host_dram,
        cxl=tier.cxl,
        nvme=tier.nvme,
        remote_flash=tier.remote_flash,
        object=tier.object,
        encryption=tier.encryption,
    )


def _path_conflicts(
    models: Mapping[str, KVPool], picked: Mapping[str, frozenset[str]]
) -> dict[str, dict[str, Excluded]]:
    """Nodes that each pool must leave out because an older pool has its directory there. `models` is oldest first."""
    conflicts: dict[str, dict[str, Excluded]] = {}
    for (older, older_model), (younger, younger_model) in combinations(models.items(), 2):
        clash = _clash(older_model.spec, younger_model.spec)
        if clash is None:
            continue
        held = picked[older] - conflicts.get(older, {}).keys()
        found = conflicts.setdefault(younger, {})
        for node in picked[younger] & held:
            message = f"directory {clash} of node {node} belongs to the older pool {older}"
            found.setdefault(node, Excluded(Exclusion.PATH_CONFLICT, message))
    return conflicts


def _clash(older: KVPoolSpec, younger: KVPoolSpec) -> str | None:
    """Return a directory of `younger` that is, holds or lies in one of `older`."""
    for mine in _directories(younger):
        for theirs in _directories(older):
            if mine == theirs or mine in theirs.parents or theirs in mine.parents:
                return str(mine)
    return None


def _directories(spec: KVPoolSpec) -> tuple[PurePosixPath, ...]:
    tiers = (tier.nvme for tier in spec.tiers if tier.nvme is not None)
    return tuple(PurePosixPath(normpath(path)) for nvme in tiers for path in nvme.directories)


def _too_long(pool: str, picked: Iterable[str]) -> dict[str, Excluded]:
    """Nodes whose KVPoolNode would have a name that Kubernetes refuses."""
    limit = names.NAME_CHARS_MAX
    return {
        node: Excluded(Exclusion.NAME_TOO_LONG, f"name {pool}.{node} is longer than {limit} characters")
        for node in picked
        if len(pool) + len(node) + 1 > limit
    }
