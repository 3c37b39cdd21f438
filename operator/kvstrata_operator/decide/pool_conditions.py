"""The conditions of a KVPool, from facts. Pure."""

from dataclasses import dataclass, field

from kvstrata_api.models.conditions import Condition, Status
from kvstrata_operator.decide.agents.agents import Agents
from kvstrata_operator.decide.directory.redis import PASSING, RedisState
from kvstrata_operator.decide.plan.conditions import Says
from kvstrata_operator.decide.pools.pool_facts import Facts


@dataclass(frozen=True, slots=True)
class Course:
    """What holds a pool up, whatever its nodes say."""

    is_paused: bool = False
    failure: str = ""
    """Last error of what was tried for the pool; empty when all went well."""
    agents: Agents = field(default_factory=Agents)
    rolls_by_itself: bool = True
    """False where people delete the pods that are to be replaced."""
    redis: RedisState = field(default_factory=RedisState)


def pool_conditions(says: Says, facts: Facts, course: Course, revision: str) -> tuple[Condition, ...]:
    """All conditions of a pool whose spec is accepted."""
    capacity = _capacity(says, facts)
    return (
        says.true("Accepted", "Accepted", "the spec is valid"),
        _provisioned(says, facts, course),
        capacity,
        _metadata(says, facts, course.redis),
        _progressing(says, facts, course, revision),
        _degraded(says, facts, course.redis),
        _ready(says, facts, capacity),
    )


def refused(says: Says, reason: str, message: str) -> tuple[Condition, ...]:
    """Conditions of an object whose spec cannot be acted upon; what was observed before stays as it was."""
    return (
        says.false("Accepted", reason, message),
        says.false("Ready", "NotAccepted", f"the spec is not accepted: {message}"),
    )


def leaving(says: Says, left: int, draining: int) -> tuple[Condition, ...]:
    """Conditions of a pool that is being deleted; what was observed before stays as it was."""
    return (
        says.true("Progressing", "Deleting", f"{left} KVPoolNodes are left, {draining} of them draining"),
        says.false("Ready", "Deleting", "the pool is being deleted"),
    )


def _provisioned(says: Says, facts: Facts, course: Course) -> Condition:
    wrong = _hindrance(facts, course)
    if wrong is not None:
        return says.false("Provisioned", *wrong)
    told = f"{facts.current} of {facts.matched} KVPoolNodes are as wanted"
    if facts.current == facts.matched:
        return says.true("Provisioned", "Provisioned", told)
    return says.false("Provisioned", "Paused" if course.is_paused else "Provisioning", told)


def _hindrance(facts: Facts, course: Course) -> tuple[str, str] | None:
    """Reason and message of the first thing in the way."""
    if course.failure:
        return "ApplyFailed", course.failure
    if course.agents.fault is not None:
        return course.agents.fault.reason, course.agents.fault.message
    if not facts.matched:
        return "NoMatchingNodes", "no node has the labels of spec.nodeSelector"
    worst = facts.excluded or facts.unrun
    return (worst.reason, worst.tell(facts.matched)) if worst else None


def _capacity(says: Says, facts: Facts) -> Condition:
    type_ = "CapacitySatisfied"
    if facts.over_capacity:
        return says.false(type_, facts.over_capacity.reason, facts.over_capacity.tell(facts.matched))
    if not facts.capacity_known:
        return says.unknown(type_, "NoReport", "no agent has reported what its node has")
    return says.true(type_, "Satisfied", "no node that reported has less than the tiers ask for")


def _metadata(says: Says, facts: Facts, redis: RedisState) -> Condition:
    type_ = "MetadataAvailable"
    if redis.fault is not None:
        return says.false(type_, redis.fault.reason, redis.fault.message)
    if facts.without_metadata:
        return says.false(type_, facts.without_metadata.reason, facts.without_metadata.tell(facts.matched))
    if not facts.metadata_known:
        return says.unknown(type_, "NoReport", "no agent has reported whether it reaches the directory")
    told = ("every agent that reported reaches the directory", redis.remark)
    return says.true(type_, "Available", "; ".join(filter(None, told)))


def _progressing(says: Says, facts: Facts, course: Course, revision: str) -> Condition:
    type_ = "Progressing"
    if course.is_paused:
        return says.false(type_, "Paused", "spec.paused is set; agents keep serving")
    told = f"{facts.updated} of {facts.matched} nodes run revision {revision}"
    if course.agents.rollout.stuck:
        why = f"the new pod of node {course.agents.rollout.stuck} is not ready by the deadline"
        return says.false(type_, "ProgressDeadlineExceeded", f"{told}; {why}")
    if course.agents.rollout.outdated and not course.rolls_by_itself:
        left = len(course.agents.rollout.outdated)
        return says.false(type_, "OnDelete", f"{told}; {left} pods are replaced when somebody deletes them")
    if facts.updated < facts.matched:
        return says.true(type_, "RollingOut", told)
    if facts.unsettled:
        return says.true(type_, facts.unsettled.reason, facts.unsettled.tell(facts.matched))
    return says.false(type_, "Complete", f"all {facts.matched} nodes run revision {revision}")


def _degraded(says: Says, facts: Facts, redis: RedisState) -> Condition:
    if redis.fault is not None and redis.fault.reason not in PASSING and not facts.degraded:
        return says.true("Degraded", redis.fault.reason, redis.fault.message)
    worst = facts.degraded or facts.without_metadata
    if worst:
        return says.true("Degraded", worst.reason, worst.tell(facts.matched))
    return says.false("Degraded", "Healthy", "no node reports a fault")


def _ready(says: Says, facts: Facts, capacity: Condition) -> Condition:
    if not facts.matched:
        return says.false("Ready", "NoMatchingNodes", "no node has the labels of spec.nodeSelector")
    if capacity.status is Status.FALSE:
        return says.false("Ready", "CapacityNotSatisfied", capacity.message)
    told = f"{facts.ready} of {facts.matched} nodes are ready"
    if facts.ready == facts.updated == facts.matched:
        return says.true("Ready", "AllNodesReady", told)
    if facts.ready == facts.matched:
        return says.false(
            "Ready", "NodesNotUpdated", f"{told}, {facts.updated} of them with what the pool declares now"
        )
    why = facts.unready or facts.excluded
    return says.false("Ready", "NodesNotReady", f"{told}; {why.node}: {why.message}" if why else told)
