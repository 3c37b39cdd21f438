"""The status of a KVPool, gathered from its KVPoolNodes. Pure.

Laws: a node counts as ready only while its agent is not silent; no count exceeds `matched`; the same view gives the
same status, so a steady fleet causes no writes.
"""

from dataclasses import dataclass
from typing import Final

from kvstrata_api import units
from kvstrata_api.models.pool import (
    ConfigMapRef,
    KVPool,
    KVPoolStatus,
    PoolConnection,
    PoolNodeCounts,
    PoolTierStatus,
    TierScale,
)
from kvstrata_operator.decide.agents.agents import Agents
from kvstrata_operator.decide.directory.redis import RedisState
from kvstrata_operator.decide.plan.conditions import Says, settle
from kvstrata_operator.decide.pool_conditions import Course, pool_conditions
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.pool_facts import Facts
from kvstrata_operator.decide.pools.sums import PoolSums
from kvstrata_operator.observe.digest import digest
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.records import Declared

USAGE_FIELDS: Final = frozenset({"tiers", "usedOfCapacity", "hitPercent", "hits", "usage"})
"""Fields that move with the load; a change in nothing else may wait."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a pool's status needs besides its own KVPoolNodes."""

    agents: Agents
    tenants: int
    connection: Ref
    failure: str
    redis: RedisState
    scales: tuple[TierScale, ...]
    """Where autoscaling brings the pool's tiers."""
    now: str
    """RFC 3339."""


def pool_status(
    pool: Declared[KVPool], placement: Placement, facts: Facts, sums: PoolSums, around: Around
) -> KVPoolStatus:
    """Put the status of an accepted pool together from what its nodes add up to."""
    assert pool.model is not None
    spec = pool.model.spec
    rolls_by_itself = spec.update_strategy.type == "RollingUpdate"
    course = Course(spec.paused, around.failure, around.agents, rolls_by_itself, around.redis)
    revision = revision_of(placement, around.agents)
    conditions = pool_conditions(Says(pool.meta.generation), facts, course, revision)
    tiers = _tiers(placement, sums)
    return KVPoolStatus(
        observed_generation=pool.meta.generation,
        conditions=settle(pool, conditions, around.now),
        nodes=_counts(facts),
        tiers=tiers,
        autoscaling=around.scales,
        nodes_ready=f"{facts.ready}/{facts.matched}",
        used_of_capacity=_used_of_capacity(placement, sums),
        hit_percent=_hit_percent(sums),
        tenants=around.tenants,
        current_revision=_current_revision(pool, revision, facts),
        update_revision=revision,
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


def _tiers(placement: Placement, sums: PoolSums) -> tuple[PoolTierStatus, ...]:
    """Tell each declared tier over all nodes; what agents report of other tiers is history."""
    return tuple(
        PoolTierStatus(
            name=tier.name,
            capacity=tier.capacity_bytes * len(placement.nodes) or None,
            allocatable=units.format_rounded(sums.allocatable_bytes(tier.name)),
            used=units.format_rounded(sums.used_bytes[tier.name]),
        )
        for tier in placement.tiers
    )


def _used_of_capacity(placement: Placement, sums: PoolSums) -> str:
    capacity_bytes = sum(t.capacity_bytes for t in placement.tiers) * len(placement.nodes)
    return f"{units.format_rounded(sums.used_bytes.total())}/{units.format_rounded(capacity_bytes)}"


def _hit_percent(sums: PoolSums) -> int | None:
    """Hits per hundred blocks asked for; None before anybody has asked."""
    return min(100, 100 * sums.hit_blocks // sums.queried_blocks) if sums.queried_blocks else None


def revision_of(placement: Placement, agents: Agents) -> str:
    """Name what all nodes should run: the spec, and the pod where we run agents."""
    return digest([placement.revision, agents.revision]) if agents.revision else placement.revision


def _current_revision(pool: Declared[KVPool], revision: str, facts: Facts) -> str:
    """Return the revision that all nodes run; the former one while a rollout is under way."""
    if facts.matched and facts.updated == facts.matched:
        return revision
    return str(pool.status.get("currentRevision", ""))
