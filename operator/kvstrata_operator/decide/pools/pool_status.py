"""The status of a KVPool, from what its KVPoolNodes add up to. Pure.

Laws: a node counts as ready only while its agent is not silent; no count exceeds `matched`; the same facts give the
same status, so a steady fleet causes no writes.
"""

from dataclasses import dataclass

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.pool import (
    ConfigMapRef,
    KVPool,
    KVPoolStatus,
    PoolConnection,
    PoolNodeCounts,
    PoolTierStatus,
    TierScale,
)
from kvstrata_operator.decide.plan.conditions import PASSING, ConditionMaker, Fault, settle
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.pool_facts import Facts, PoolSums
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.records import Declared


@dataclass(frozen=True, slots=True)
class Hindrances:
    """What holds a pool up, whatever its nodes report."""

    is_paused: bool = False
    failure: str = ""
    """Last error of what was tried for the pool; empty when all went well."""
    agents_fault: Fault | None = None
    """Why its agents are not run as they should be."""
    agents_remark: str = ""
    """What an administrator should know of its agents although all is well."""
    outdated_nodes: int = 0
    """Nodes whose pod is of another revision."""
    stuck_node: str = ""
    """A node whose new pod is not ready in time; empty when there is none."""
    rolls_by_itself: bool = True
    """False where people delete the pods that are to be replaced."""
    directory_fault: Fault | None = None
    """Why no agent reaches the directory."""
    directory_remark: str = ""
    """What an administrator should know of the directory although all is well."""


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """What a pool's status needs besides what its nodes add up to."""

    hindrances: Hindrances
    revision: str
    """Name of what all nodes should run."""
    tenants: int
    connection: Ref
    scales: tuple[TierScale, ...]
    """Where autoscaling brings the pool's tiers."""
    now: str
    """RFC 3339."""


def pool_status(
    pool: Declared[KVPool], placement: Placement, facts: Facts, sums: PoolSums, inputs: StatusInputs
) -> KVPoolStatus:
    """Put the status of an accepted pool together from what its nodes add up to."""
    revision = inputs.revision
    conditions = pool_conditions(ConditionMaker(pool.meta.generation), facts, inputs.hindrances, revision)
    return KVPoolStatus(
        observed_generation=pool.meta.generation,
        conditions=settle(pool, conditions, inputs.now),
        nodes=_counts(facts),
        tiers=_tiers(placement, sums),
        autoscaling=inputs.scales,
        nodes_ready=f"{facts.ready}/{facts.matched}",
        used_of_capacity=_used_of_capacity(placement, sums),
        hit_percent=units.percent(sums.hit_blocks, sums.queried_blocks),
        evictions_per_second=units.format_rate(units.coarse(sums.evicted_per_minute) / 60),
        gc_backlog=units.coarse(sums.directory_backlog),
        tenants=inputs.tenants,
        current_revision=_current_revision(pool, revision, facts),
        update_revision=revision,
        connection=PoolConnection(
            config_map_ref=ConfigMapRef(namespace=inputs.connection.namespace, name=inputs.connection.name)
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
    """Sum each declared tier up over all nodes; what agents report of other tiers is history."""
    return tuple(
        PoolTierStatus(
            name=tier.name,
            capacity=units.whole_quantity(tier.capacity_bytes * len(placement.nodes)) or None,
            allocatable=units.format_rounded(sums.allocatable_bytes(tier.name)),
            used=units.format_rounded(sums.used_bytes[tier.name]),
        )
        for tier in placement.tiers
    )


def _used_of_capacity(placement: Placement, sums: PoolSums) -> str:
    capacity_bytes = sum(t.capacity_bytes for t in placement.tiers) * len(placement.nodes)
    return f"{units.format_rounded(sums.used_bytes.total())}/{units.format_rounded(capacity_bytes)}"


def _current_revision(pool: Declared[KVPool], revision: str, facts: Facts) -> str:
    """Return the revision that all nodes run; the former one while a rollout is under way."""
    if facts.matched and facts.updated == facts.matched:
        return revision
    return str(pool.status.get("currentRevision", ""))


def pool_conditions(make: ConditionMaker, facts: Facts, hindrances: Hindrances, revision: str) -> tuple[Condition, ...]:
    """All conditions of a pool whose spec is accepted."""
    capacity = _capacity(make, facts)
    return (
        make.true("Accepted", "Accepted", "the spec is valid"),
        _provisioned(make, facts, hindrances),
        capacity,
        _metadata(make, facts, hindrances),
        _progressing(make, facts, hindrances, revision),
        _degraded(make, facts, hindrances),
        _ready(make, facts, capacity),
    )


def leaving(make: ConditionMaker, left: int, draining: int) -> tuple[Condition, ...]:
    """Conditions of a pool that is being deleted; what was observed before stays as it was."""
    return (
        make.true("Progressing", "Deleting", f"{left} KVPoolNodes are left, {draining} of them draining"),
        make.false("Ready", "Deleting", "the pool is being deleted"),
    )


def _provisioned(make: ConditionMaker, facts: Facts, hindrances: Hindrances) -> Condition:
    wrong = _hindrance(facts, hindrances)
    if wrong is not None:
        return make.false("Provisioned", *wrong)
    counted = f"{facts.current} of {facts.matched} KVPoolNodes are as wanted"
    if facts.current == facts.matched:
        return make.true("Provisioned", "Provisioned", "; ".join(filter(None, (counted, hindrances.agents_remark))))
    return make.false("Provisioned", "Paused" if hindrances.is_paused else "Provisioning", counted)


def _hindrance(facts: Facts, hindrances: Hindrances) -> tuple[str, str] | None:
    """Reason and message of the first thing in the way."""
    if hindrances.failure:
        return "ApplyFailed", hindrances.failure
    if hindrances.agents_fault is not None:
        return hindrances.agents_fault.reason, hindrances.agents_fault.message
    if not facts.matched:
        return "NoMatchingNodes", "no node has the labels of spec.nodeSelector"
    worst = facts.excluded or facts.unrun
    return (worst.reason, worst.describe(facts.matched)) if worst else None


def _capacity(make: ConditionMaker, facts: Facts) -> Condition:
    type_ = "CapacitySatisfied"
    if facts.over_capacity:
        return make.false(type_, facts.over_capacity.reason, facts.over_capacity.describe(facts.matched))
    if not facts.capacity_known:
        return make.unknown(type_, "NoReport", "no agent has reported what its node has")
    return make.true(type_, "Satisfied", "no node that reported has less than the tiers ask for")


def _metadata(make: ConditionMaker, facts: Facts, hindrances: Hindrances) -> Condition:
    type_ = "MetadataAvailable"
    if hindrances.directory_fault is not None:
        return make.false(type_, hindrances.directory_fault.reason, hindrances.directory_fault.message)
    if facts.without_metadata:
        return make.false(type_, facts.without_metadata.reason, facts.without_metadata.describe(facts.matched))
    if not facts.metadata_known:
        return make.unknown(type_, "NoReport", "no agent has reported whether it reaches the directory")
    messages = ("every agent that reported reaches the directory", hindrances.directory_remark)
    return make.true(type_, "Available", "; ".join(filter(None, messages)))


def _progressing(make: ConditionMaker, facts: Facts, hindrances: Hindrances, revision: str) -> Condition:
    type_ = "Progressing"
    if hindrances.is_paused:
        return make.false(type_, "Paused", "spec.paused is set; agents keep serving")
    counted = f"{facts.updated} of {facts.matched} nodes run revision {revision}"
    if hindrances.stuck_node:
        why = f"the new pod of node {hindrances.stuck_node} is not ready by the deadline"
        return make.false(type_, "ProgressDeadlineExceeded", f"{counted}; {why}")
    if hindrances.outdated_nodes and not hindrances.rolls_by_itself:
        return make.false(
            type_, "OnDelete", f"{counted}; {hindrances.outdated_nodes} pods are replaced when somebody deletes them"
        )
    if facts.updated < facts.matched:
        return make.true(type_, "RollingOut", counted)
    if facts.unsettled:
        return make.true(type_, facts.unsettled.reason, facts.unsettled.describe(facts.matched))
    return make.false(type_, "Complete", f"all {facts.matched} nodes run revision {revision}")


def _degraded(make: ConditionMaker, facts: Facts, hindrances: Hindrances) -> Condition:
    if (
        hindrances.directory_fault is not None
        and hindrances.directory_fault.reason not in PASSING
        and not facts.degraded
    ):
        return make.true("Degraded", hindrances.directory_fault.reason, hindrances.directory_fault.message)
    worst = facts.degraded or facts.without_metadata
    if worst:
        return make.true("Degraded", worst.reason, worst.describe(facts.matched))
    return make.false("Degraded", "Healthy", "no node reports a fault")


def _ready(make: ConditionMaker, facts: Facts, capacity: Condition) -> Condition:
    if not facts.matched:
        return make.false("Ready", "NoMatchingNodes", "no node has the labels of spec.nodeSelector")
    if capacity.status is Status.FALSE:
        return make.false("Ready", "CapacityNotSatisfied", capacity.message)
    counted = f"{facts.ready} of {facts.matched} nodes are ready"
    if facts.ready == facts.updated == facts.matched:
        return make.true("Ready", "AllNodesReady", counted)
    if facts.ready == facts.matched:
        return make.false(
            "Ready", "NodesNotUpdated", f"{counted}, {facts.updated} of them with what the pool declares now"
        )
    why = facts.unready or facts.excluded
    return make.false("Ready", "NodesNotReady", f"{counted}; {why.node}: {why.message}" if why else counted)
