"""Which nodes take part in which pool, and with how many bytes of each tier. Pure.

Law: the shares of a shared tier never add up to more than its capacity. Law: of two pools that want one directory of
one node which only one of them can have, the older has it. Law: whether a node takes part depends on that node and the
pools alone, so nodes can be picked one by one or all at once.

NVMe and RemoteFlash tiers claim their directory for one pool: its agents refuse one that another pool has claimed.
Emulated CXL and file:// stores keep a directory of each pool's own in theirs, so pools share one; but none of that may
lie in what another pool has claimed. That several pools share one mount is fine where each names a directory in it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.directories import Directory, collide, directories_of, normal
from kvstrata_api.models.pool import KVPool, KVPoolSpec, PoolTier, TierAutoscale
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_operator.observe.kinds import digest
from kvstrata_operator.observe.records import Declared, NodeSeen, PoolNodeSeen

_NOT_OF_THE_AGENT: Final = {
    "nodeSelector",
    "tolerations",
    "updateStrategy",
    "deletionPolicy",
    "destroyConfirmation",
    "paused",
}
"""Parts of a KVPool's spec that declare where and how to roll out, not what an agent should be."""

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
    nodes: AbstractSet[str]
    """Nodes that should have a KVPoolNode; may be a view that follows the fleet."""
    excluded: Mapping[str, Excluded]
    """Nodes that match and cannot have one."""

    @property
    def matched(self) -> int:
        """How many nodes the selector picks."""
        return len(self.nodes) + len(self.excluded)

    def is_current(self, seen: PoolNodeSeen) -> bool:
        """True when a KVPoolNode has the tiers and the revision that are wanted, and is to stay."""
        is_same = seen.revision == self.revision and seen.tiers_digest == self.tiers_digest
        return is_same and seen.is_marked and not seen.is_deleting


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


def resolve_tiers(
    tiers: Iterable[PoolTier], nodes: int, scales: Mapping[str, int] = MappingProxyType({})
) -> tuple[NodeTier, ...]:
    """Turn declared tiers into what each of so many nodes should set up; `scales` has the sizes of those that scale."""
    return tuple(_resolve(tier, nodes, size_of(tier, scales)) for tier in tiers)


def size_of(tier: PoolTier, scales: Mapping[str, int]) -> int | None:
    """Bytes of a tier on each node; None for one that is shared by all nodes."""
    policy = policy_of(tier)
    if policy is None or tier.capacity_per_node is None:
        return tier.capacity_per_node
    page_bytes = _page_bytes(tier)
    wanted = scales.get(tier.name, tier.capacity_per_node) // page_bytes * page_bytes
    return max(policy.min_per_node, min(policy.max_per_node, wanted))


def policy_of(tier: PoolTier) -> TierAutoscale | None:
    """How a tier scales, with bounds of whole pages: Kubernetes refuses any other amount of huge pages.

    Where no whole page lies between the bounds, the upper one is kept.
    """
    if tier.autoscale is None:
        return None
    page_bytes = _page_bytes(tier)
    most = max(page_bytes, tier.autoscale.max_per_node // page_bytes * page_bytes)
    least = min(most, -(-tier.autoscale.min_per_node // page_bytes) * page_bytes)
    return tier.autoscale.model_copy(update={"min_per_node": least, "max_per_node": most})


def _page_bytes(tier: PoolTier) -> int:
    return units.PAGE_BYTES[tier.host_dram.page_size] if tier.host_dram is not None else 1


def scales_of(status: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that a pool's stored status has brought its tiers to."""
    return {s["tier"]: int(s["capacityPerNode"]) for s in status.get("autoscaling") or () if "capacityPerNode" in s}


@dataclass(slots=True)
class Picked:
    """Nodes that a pool's selector picks."""

    nodes: set[str] = field(default_factory=set)
    """Those that take part."""
    excluded: dict[str, Excluded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rules:
    """What all pools that can be read ask of nodes; worked out once for each change of a pool.

    A pool that is being deleted keeps its directories until it is gone, so it takes part in conflicts.
    """

    specs: Mapping[str, KVPoolSpec]
    """By pool, the oldest first."""
    placed: tuple[str, ...]
    """Pools that are not on their way out, the oldest first."""
    revisions: Mapping[str, str]
    clashes: tuple[tuple[str, str, tuple[str, str]], ...]
    """Older pool, younger pool, fields and directories of the younger and of the older that collide; in the order in
    which they are settled."""
    scales: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Sizes that tiers of each pool have been scaled to."""

    def pick(self, nodes: Mapping[str, NodeSeen]) -> dict[str, Picked]:
        """Return for each of these nodes which pools it takes part in."""
        matched = {name: matching(spec.node_selector, nodes) for name, spec in self.specs.items()}
        conflicts = self._conflicts(matched)
        picked = {}
        for name in self.placed:
            excluded = conflicts.get(name, {}) | _too_long(name, matched[name])
            picked[name] = Picked(set(matched[name] - excluded.keys()), excluded)
        return picked

    def placement(self, pool: str, picked: Picked) -> Placement:
        """Resolve the tiers of a pool for as many nodes as it has."""
        tiers = resolve_tiers(self.specs[pool].tiers, len(picked.nodes), self.scales[pool])
        found = digest([t.to_json() for t in tiers])
        return Placement(pool, self.revisions[pool], tiers, found, picked.nodes, picked.excluded)

    def has_shared_tier(self, pool: str) -> bool:
        """True when what each node sets up depends on how many nodes there are."""
        return any(tier.capacity_per_node is None for tier in self.specs[pool].tiers)

    def _conflicts(self, matched: Mapping[str, frozenset[str]]) -> dict[str, dict[str, Excluded]]:
        """Nodes that each pool must leave out because an older pool has its directory there."""
        conflicts: dict[str, dict[str, Excluded]] = {}
        for older, younger, (mine, theirs) in self.clashes:
            held = matched[older] - conflicts.get(older, {}).keys()
            found = conflicts.setdefault(younger, {})
            for node in matched[younger] & held:
                message = f"{mine} of pool {younger} collides on node {node} with {theirs} of the older pool {older}"
                found.setdefault(node, Excluded(Exclusion.PATH_CONFLICT, message))
        return conflicts


def rules_of(pools: Iterable[Declared[KVPool]]) -> Rules:
    """Work out what all pools ask of nodes; those that cannot be read ask for nothing."""
    readable = {p.key: (p, p.model.spec) for p in sorted(pools, key=_age) if p.model is not None}
    specs = {name: spec for name, (_, spec) in readable.items()}
    return Rules(
        specs=specs,
        placed=tuple(name for name, (pool, _) in readable.items() if not pool.is_deleting),
        revisions={name: revision_of(spec) for name, spec in specs.items()},
        clashes=tuple(
            (older, younger, clash)
            for (older, older_spec), (younger, younger_spec) in combinations(specs.items(), 2)
            if (clash := collision(older_spec, younger_spec)) is not None
        ),
        scales={name: scales_of(pool.status) for name, (pool, _) in readable.items()},
    )


def place(pools: Iterable[Declared[KVPool]], nodes: Mapping[str, NodeSeen]) -> dict[str, Placement]:
    """Place all pools that can be read and are not on their way out on all nodes, the oldest first."""
    rules = rules_of(pools)
    return {pool: rules.placement(pool, picked) for pool, picked in rules.pick(nodes).items()}


def _age(pool: Declared[Any]) -> tuple[str, str]:
    """Sort key: the older first, equal ages by name."""
    return (pool.meta.creation_timestamp, pool.key)


def _resolve(tier: PoolTier, nodes: int, per_node_bytes: int | None) -> NodeTier:
    capacity_bytes = per_node_bytes or share_bytes(tier.capacity or 1, nodes)
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


def _too_long(pool: str, picked: Iterable[str]) -> dict[str, Excluded]:
    """Nodes whose agent's Lease, the longest name made of the pair, would have one that Kubernetes refuses."""
    limit = names.NAME_CHARS_MAX
    return {
        node: Excluded(Exclusion.NAME_TOO_LONG, f"name {lease} is longer than {limit} characters")
        for node in picked
        if len(lease := names.agent_lease_name(pool, node)) > limit
    }


def collision(older: KVPoolSpec, younger: KVPoolSpec) -> tuple[str, str] | None:
    """Field and path of the first directory of `younger` that `older` does not leave to it, and the same of `older`.

    None where both can be on one node.
    """
    theirs = list(_fields(older))
    for mine, mine_text in _fields(younger):
        for other, other_text in theirs:
            if collide(mine, other):
                return mine_text, other_text
    return None


def _fields(spec: KVPoolSpec) -> Iterable[tuple[Directory, str]]:
    for number, tier in enumerate(spec.tiers):
        for found in directories_of(tier):
            yield found, f"spec.tiers[{number}].{found.field} {normal(found.path)}"
