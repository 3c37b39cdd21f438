"""The status of a KVPool, gathered from its KVPoolNodes. Pure.

Laws: a node counts as ready only while its agent is not silent; no count exceeds `matched`; the same view gives the
same status, so a steady fleet causes no writes.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kvfleet_api import units
from kvfleet_api.models.pool import ConfigMapRef, KVPool, KVPoolStatus, PoolConnection, PoolNodeCounts, PoolTierStatus
from kvfleet_operator.kinds import Ref
from kvfleet_operator.placement import Placement
from kvfleet_operator.pool_conditions import Course, pool_conditions
from kvfleet_operator.pool_facts import Facts, gather
from kvfleet_operator.records import Declared, PoolNodeSeen
from kvfleet_operator.verdicts import Says, settle

USAGE_FIELDS: Final = frozenset({"tiers", "usedOfCapacity", "hitPercent", "hits", "usage"})
"""Fields that move with the load; a change in nothing else may wait."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a pool's status needs besides its own KVPoolNodes."""

    silent: Collection[str]
    claimed_before: Mapping[str, int]
    """Memory in bytes that older pools take, by node."""
    tenants: int
    connection: Ref
    failure: str
    now: str
    """RFC 3339."""


def pool_status(
    pool: Declared[KVPool], placement: Placement, seen: Mapping[str, PoolNodeSeen], around: Around
) -> KVPoolStatus:
    """Gather the status of an accepted pool. `seen` maps node names to its KVPoolNodes."""
    assert pool.model is not None
    facts = gather(placement, seen, around.silent, around.claimed_before)
    course = Course(pool.model.spec.paused, around.failure)
    conditions = pool_conditions(Says(pool.meta.generation), facts, course, placement.revision)
    tiers = _tiers(placement, seen)
    return KVPoolStatus(
        observed_generation=pool.meta.generation,
        conditions=settle(pool, conditions, around.now),
        nodes=_counts(facts),
        tiers=tiers,
        nodes_ready=f"{facts.ready}/{facts.matched}",
        used_of_capacity=_used_of_capacity(placement, seen),
        hit_percent=_hit_percent(seen),
        tenants=around.tenants,
        current_revision=_current_revision(pool, placement, facts),
        update_revision=placement.revision,
        connection=PoolConnection(
            config_map_ref=ConfigMapRef(namespace=around.connection.namespace, name=around.connection.name)
        ),
    )


def _counts(facts: Facts) -> PoolNodeCounts:
    return PoolNodeCounts(
        matched=facts.matched,
        ready=facts.ready,
        updated=facts.updated,
        draining=facts.draining,
        degraded=facts.degraded.nodes,
    )


def _tiers(placement: Placement, seen: Mapping[str, PoolNodeSeen]) -> tuple[PoolTierStatus, ...]:
    """Sum each declared tier over the nodes; what agents report of other tiers is history."""
    allocatable, used = _sums(seen)
    return tuple(
        PoolTierStatus(
            name=tier.name,
            capacity=tier.capacity_bytes * len(placement.nodes) or None,
            allocatable=units.format_rounded(allocatable[tier.name]),
            used=units.format_rounded(used[tier.name]),
        )
        for tier in placement.tiers
    )


def _sums(seen: Mapping[str, PoolNodeSeen]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that agents offer and hold, by tier name."""
    allocatable: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for node in seen.values():
        for tier in node.tiers:
            allocatable[tier.name] += tier.capacity_bytes
            used[tier.name] += tier.used_bytes
    return allocatable, used


def _used_of_capacity(placement: Placement, seen: Mapping[str, PoolNodeSeen]) -> str:
    _, used = _sums(seen)
    capacity_bytes = sum(t.capacity_bytes for t in placement.tiers) * len(placement.nodes)
    return f"{units.format_rounded(used.total())}/{units.format_rounded(capacity_bytes)}"


def _hit_percent(seen: Mapping[str, PoolNodeSeen]) -> int | None:
    """Hits per hundred blocks asked for; None before anybody has asked."""
    queried = sum(node.queried_blocks for node in seen.values())
    hit = sum(node.hit_blocks for node in seen.values())
    return min(100, 100 * hit // queried) if queried else None


def _current_revision(pool: Declared[KVPool], placement: Placement, facts: Facts) -> str:
    """Return the revision that all nodes run; the former one while a rollout is under way."""
    if facts.matched and facts.updated == facts.matched:
        return placement.revision
    return str(pool.status.get("currentRevision", ""))
