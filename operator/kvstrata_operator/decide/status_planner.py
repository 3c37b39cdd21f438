"""Which statuses should be written. Pure. `planner` decides everything else.

The status of a KVPool, gathered from its KVPoolNodes. Pure.

Laws: a node counts as ready only while its agent is not silent; no count exceeds `matched`; the same view gives the
same status, so a steady fleet causes no writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.pool import (
    ConfigMapRef,
    KVPool,
    KVPoolStatus,
    PoolConnection,
    PoolNodeCounts,
    PoolTierStatus,
    TierScale,
)
from kvstrata_api.models.trust import KVTenant
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.trust import ScopeKind
from kvstrata_operator.decide.agents.agents import Agents, agents_of
from kvstrata_operator.decide.directory import redis
from kvstrata_operator.decide.directory.redis import RedisState
from kvstrata_operator.decide.incremental import Census, Members
from kvstrata_operator.decide.operations import erase_operation, operations
from kvstrata_operator.decide.operations.operation_status import operation_notes, operation_status
from kvstrata_operator.decide.operations.operations import Operation
from kvstrata_operator.decide.plan import objects
from kvstrata_operator.decide.plan.actions import Merge
from kvstrata_operator.decide.plan.conditions import Says, conditions_only, differs, notes_of, settle
from kvstrata_operator.decide.planner import operations_around
from kvstrata_operator.decide.pool_conditions import Course, leaving, pool_conditions, refused
from kvstrata_operator.decide.pools import autoscaling, liveness
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.pool_facts import Facts
from kvstrata_operator.decide.pools.sums import PoolSums
from kvstrata_operator.decide.trust import erasure, key_versions, scope_keys
from kvstrata_operator.decide.trust import identity_conflicts as claims
from kvstrata_operator.decide.trust.identity_conflicts import Fault
from kvstrata_operator.decide.trust.tenant_usage import Held, overcommitted
from kvstrata_operator.decide.trust.trust_status import (
    ShareSeen,
    TenantFacts,
    domain_status,
    share_status,
    tenant_status,
)
from kvstrata_operator.observe.digest import digest
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.moments import format_time
from kvstrata_operator.observe.records import Declared, ScopeSecretSeen
from kvstrata_operator.observe.setting import Setting
from kvstrata_operator.observe.world import View, census_of

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


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """One status that is not as it should be."""

    action: Merge
    is_usage_only: bool
    """True when only figures that move with the load differ."""


def plan_statuses(view: View, setting: Setting, now: datetime) -> tuple[StatusWrite, ...]:
    """Compare every status with what it should be, and return those that are not."""
    tenants = claims.models_of(view.tenants)
    contested = claims.contested(tenants, view.namespaces)
    census = census_of(view)
    accepted = len(tenants.keys() - contested.keys())
    wanted = [
        *_pools(view, census, setting, accepted, now),
        *_tenants(view, census, setting.namespace, tenants, contested, now),
        *_domains(view, setting.namespace, tenants, now),
        *_shares(view, census.sums.share_hits, setting.namespace, tenants, now),
    ]
    writes = (_write(declared, status) for declared, status in wanted)
    return tuple(write for write in (*writes, *_operations(view, census, now)) if write is not None)


_Wanted = Iterator[tuple[Declared[Any], dict[str, Any]]]
"""Objects with the status fields that they should have."""


def _write(declared: Declared[Any], wanted: dict[str, Any]) -> StatusWrite | None:
    if not differs(declared.status, wanted):
        return None
    conditions = [Condition.model_validate(c) for c in wanted["conditions"]]
    action = Merge(
        declared.ref,
        notes=notes_of(declared, conditions) + autoscaling.notes_of(declared, wanted.get("autoscaling", ())),
        body={"status": wanted},
        subresource="status",
        resource_version=declared.meta.resource_version,
    )
    return StatusWrite(action, is_usage_only=not differs(declared.status, wanted, USAGE_FIELDS))


def _pools(view: View, census: Census, setting: Setting, tenants: int, now: datetime) -> _Wanted:
    directory = redis.redis_state(view, census, setting)
    for name, pool in sorted(view.pools.items()):
        members = census.pools.get(name, Members())
        if members.placement is None:
            yield pool, _halted(pool, members, now)
            continue
        agents = agents_of(view, pool, members, setting, now)
        not_run = agents.rollout.outdated | agents.rollout.missing
        facts = members.tally.facts(members.placement, not_run, members.pods)
        around = Around(
            agents=agents,
            tenants=tenants,
            connection=objects.connection_ref(name, setting.namespace),
            failure=view.failures.get(name, ""),
            redis=redis.for_pool(directory, pool, setting),
            scales=autoscaling.scale(pool, members.seen, now),
            now=format_time(now),
        )
        status = pool_status(pool, members.placement, facts, members.sums, around)
        yield pool, {"hitPercent": None, **status.to_json()}


def _halted(pool: Declared[KVPool], members: Members, now: datetime) -> dict[str, Any]:
    """Status of a pool that is refused or on its way out."""
    says = Says(pool.meta.generation)
    left, draining = len(members.seen), len(members.draining)
    conditions = leaving(says, left, draining) if pool.is_deleting else refused(says, "Invalid", pool.error)
    return conditions_only(pool, conditions, format_time(now))


def _tenants(
    view: View,
    census: Census,
    namespace: str,
    models: Mapping[str, KVTenant],
    contested: Mapping[str, Fault],
    now: datetime,
) -> _Wanted:
    domains = {name: d.model for name, d in view.domains.items() if d.model is not None}
    overcommit = overcommitted(models, census.pools)
    nodes = view.pool_nodes.values() if any(t.spec.erase_requested for t in models.values()) else ()
    answering = liveness.answering(nodes, view.alive, view.silent)
    for name, tenant in sorted(view.tenants.items()):
        if tenant.is_deleting:
            continue
        facts = TenantFacts(
            fault=_tenant_fault(view, tenant, contested),
            unmet=claims.unmet_domain(name, tenant.model.spec, view.domains) if tenant.model else None,
            course=erasure.course(tenant, _secret(view, ScopeKind.TENANT, name, namespace), nodes, answering),
            held=census.sums.held.get(name, Held()),
            overcommit=overcommit,
        )
        yield tenant, tenant_status(tenant, domains, facts, format_time(now))


def _tenant_fault(view: View, tenant: Declared[KVTenant], contested: Mapping[str, Fault]) -> Fault | None:
    if tenant.error or tenant.model is None:
        return Fault("Invalid", tenant.error)
    return contested.get(tenant.key) or claims.dangling_quota(tenant.model.spec, view.pools)


def _domains(view: View, namespace: str, tenants: Mapping[str, KVTenant], now: datetime) -> _Wanted:
    for name, domain in sorted(view.domains.items()):
        if domain.is_deleting:
            continue
        members = key_versions.members(domain.model, tenants) if domain.model else ()
        wanted = key_versions.domain_key_version(domain, members) if domain.model else 0
        has_key = scope_keys.has_key(domain, wanted, _secret(view, ScopeKind.DOMAIN, name, namespace))
        fault = Fault("Invalid", domain.error) if domain.error else None
        key_version = wanted if has_key else 0
        yield domain, domain_status(domain, tenants, fault=fault, key_version=key_version, now=format_time(now))


def _shares(
    view: View, hits: Mapping[str, int], namespace: str, tenants: Mapping[str, KVTenant], now: datetime
) -> _Wanted:
    """`hits` counts the blocks that readers were given on all nodes, by the share's uid."""
    declared = claims.declared_of(tenants, view)
    for _, share in sorted(view.shares.items()):
        if share.is_deleting:
            continue
        secret = _secret(view, ScopeKind.SHARE, objects.scope_name(share.meta), namespace)
        has_key = scope_keys.has_key(share, KEY_VERSION, secret)
        fault = claims.share_fault(share, declared, view.pools)
        yield share, share_status(share, ShareSeen(declared, fault, has_key, units.coarse(hits.get(share.uid, 0))), now)


def _operations(view: View, census: Census, now: datetime) -> Iterator[StatusWrite | None]:
    """Operations that are not over; the status of one that is never changes."""
    under_way = [o for o in view.operations.values() if operations.stored_end(o) is None and not o.is_deleting]
    if not under_way:
        return
    arounds = operations_around(view, census, now)
    for operation in operations.in_order(under_way):
        course = _course(operation, view, arounds, now)
        write = _write(operation, operation_status(operation, course, now))
        notes = operation_notes(operation, course)
        yield replace(write, action=replace(write.action, notes=notes)) if write is not None else None


def _course(
    operation: Operation, view: View, arounds: Mapping[str, operations.Around], now: datetime
) -> operations.Course:
    spec = operation.model.spec if operation.model is not None else None
    if spec is not None and spec.erase is not None and not operation.error:
        return erase_operation.course(operation, view.tenants.get(spec.erase.tenant), view.pool_nodes.values(), now)
    pool = (spec.pool_ref if spec is not None else None) or ""
    return operations.course(operation, arounds.get(pool, operations.nowhere(now)))


def _secret(view: View, scope: ScopeKind, name: str, namespace: str) -> ScopeSecretSeen | None:
    return view.secrets.get(objects.scope_secret_ref(scope, name, namespace).name)
