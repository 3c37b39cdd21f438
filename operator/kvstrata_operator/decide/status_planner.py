"""Which statuses should be written. Pure. `planner` decides everything else."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.pool import (
    KVPool,
)
from kvstrata_api.models.trust import KVTenant
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.trust import ScopeKind
from kvstrata_operator.decide.agents.agents import Agents, agents_of
from kvstrata_operator.decide.directory import redis
from kvstrata_operator.decide.directory.redis import RedisState
from kvstrata_operator.decide.incremental import FleetFacts, Members
from kvstrata_operator.decide.models.model_status import failure_notes, model_status
from kvstrata_operator.decide.operations import erase_operation, operations
from kvstrata_operator.decide.operations.operation_status import operation_notes, operation_status
from kvstrata_operator.decide.operations.operations import Operation
from kvstrata_operator.decide.plan.actions import Merge, Note, StatusWrite
from kvstrata_operator.decide.plan.conditions import ConditionMaker, Fault, conditions_only, differs, notes_of, refused
from kvstrata_operator.decide.pools import autoscaling, lifecycle, pool_status
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.trust import erasure, scope_keys
from kvstrata_operator.decide.trust import identity_conflicts as claims
from kvstrata_operator.decide.trust.tenant_usage import Asked, Held, overcommitted
from kvstrata_operator.decide.trust.trust_status import (
    ShareSeen,
    TenantFacts,
    domain_status,
    share_status,
    tenant_status,
)
from kvstrata_operator.observe.kinds import connection_ref, digest, format_time
from kvstrata_operator.observe.records import Declared, ScopeSecretSeen
from kvstrata_operator.observe.world import Setting, TrustSeen, View

USAGE_FIELDS: Final = frozenset(
    {
        "tiers", "usedOfCapacity", "hitPercent", "hits", "usage", "used", "quota", "denied", "evictionsPerSecond",
        "gcBacklog", "summary", "nodesInUse",
    }
)  # fmt: skip
"""Fields that move with the load; a change in nothing else may wait."""


def plan_statuses(view: View, fleet: FleetFacts, setting: Setting, now: datetime) -> tuple[StatusWrite, ...]:
    """Compare every status with what it should be, and return those that are not."""
    trust, pools = view.trust, view.pools.declared
    tenants = claims.models_of(trust.tenants)
    contested = claims.contested(tenants, trust.namespaces)
    accepted = len(tenants.keys() - contested.keys())
    wanted = [
        *_pools(view, fleet, setting, accepted, now),
        *_tenants(view, fleet, setting.namespace, tenants, contested, now),
        *_domains(trust, setting.namespace, tenants, now),
        *_shares(trust, pools, fleet.sums.share_hits, setting.namespace, tenants, now),
    ]
    writes = (_write(declared, status) for declared, status in wanted)
    more = (*_model_caches(view, fleet, now), *_operations(view, fleet, now))
    return tuple(write for write in (*writes, *more) if write is not None)


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


def _pools(view: View, fleet: FleetFacts, setting: Setting, tenants: int, now: datetime) -> _Wanted:
    directory = redis.redis_state(view, fleet, setting)
    for name, pool in sorted(view.pools.declared.items()):
        members = fleet.pools.get(name, Members())
        if members.placement is None:
            yield pool, _halted(pool, members, now)
            continue
        agents = agents_of(view, pool, members, setting, now)
        not_run = agents.rollout.outdated | agents.rollout.missing
        facts = members.tally.facts(members.placement, not_run, members.pods, now)
        inputs = pool_status.StatusInputs(
            hindrances=_hindrances(pool, agents, redis.for_pool(directory, pool, setting), view.pools.failures),
            revision=_revision(members.placement, agents),
            tenants=tenants,
            connection=connection_ref(name, setting.namespace),
            scales=autoscaling.scale(pool, members.seen, now),
            now=format_time(now),
        )
        status = pool_status.pool_status(pool, members.placement, facts, members.sums, inputs)
        yield pool, {"hitPercent": None, **status.to_json()}


def _hindrances(
    pool: Declared[KVPool], agents: Agents, directory: RedisState, failures: Mapping[str, str]
) -> pool_status.Hindrances:
    assert pool.model is not None, "only what can be read is placed"
    spec = pool.model.spec
    return pool_status.Hindrances(
        is_paused=spec.paused,
        failure=failures.get(pool.key, ""),
        agents_fault=agents.fault,
        agents_remark=agents.remark,
        outdated_nodes=len(agents.rollout.outdated),
        stuck_node=agents.rollout.stuck,
        rolls_by_itself=spec.update_strategy.type == "RollingUpdate",
        directory_fault=directory.fault,
        directory_remark=directory.remark,
    )


def _revision(placement: Placement, agents: Agents) -> str:
    """Name what all nodes should run: the spec, and the pod where we run agents."""
    return digest([placement.revision, agents.revision]) if agents.revision else placement.revision


def _halted(pool: Declared[KVPool], members: Members, now: datetime) -> dict[str, Any]:
    """Status of a pool that is refused or on its way out."""
    make = ConditionMaker(pool.meta.generation)
    left, draining = len(members.seen), len(members.draining)
    conditions = pool_status.leaving(make, left, draining) if pool.is_deleting else refused(make, "Invalid", pool.error)
    return conditions_only(pool, conditions, format_time(now))


def _tenants(
    view: View,
    fleet: FleetFacts,
    namespace: str,
    models: Mapping[str, KVTenant],
    contested: Mapping[str, Fault],
    now: datetime,
) -> _Wanted:
    trust, pools = view.trust, view.pools
    domains = {name: d.model for name, d in trust.domains.items() if d.model is not None}
    overcommit = overcommitted(models, fleet.pools)
    nodes = pools.pool_nodes.values() if any(t.spec.erase_requested for t in models.values()) else ()
    answering = lifecycle.answering(nodes, pools.alive, pools.silent)
    for name, tenant in sorted(trust.tenants.items()):
        if tenant.is_deleting:
            continue
        facts = TenantFacts(
            fault=_tenant_fault(pools.declared, tenant, contested),
            unmet=claims.unmet_domain(name, tenant.model.spec, trust.domains) if tenant.model else None,
            progress=erasure.progress_of(tenant, _secret(trust, ScopeKind.TENANT, name, namespace), nodes, answering),
            held=fleet.sums.held.get(name, Held()),
            asked=fleet.sums.asked.get(name, Asked()),
            nodes={pool: len(members.seen) for pool, members in fleet.pools.items()},
            overcommit=overcommit,
        )
        yield tenant, tenant_status(tenant, domains, facts, format_time(now))


def _tenant_fault(
    pools: Mapping[str, Declared[KVPool]], tenant: Declared[KVTenant], contested: Mapping[str, Fault]
) -> Fault | None:
    if tenant.error or tenant.model is None:
        return Fault("Invalid", tenant.error)
    return contested.get(tenant.key) or claims.dangling_quota(tenant.model.spec, pools)


def _domains(trust: TrustSeen, namespace: str, tenants: Mapping[str, KVTenant], now: datetime) -> _Wanted:
    for name, domain in sorted(trust.domains.items()):
        if domain.is_deleting:
            continue
        members = scope_keys.members(domain.model, tenants) if domain.model else ()
        wanted = scope_keys.domain_key_version(domain, members) if domain.model else 0
        has_key = scope_keys.has_key(domain, wanted, _secret(trust, ScopeKind.DOMAIN, name, namespace))
        fault = Fault("Invalid", domain.error) if domain.error else None
        key_version = wanted if has_key else 0
        yield domain, domain_status(domain, tenants, fault=fault, key_version=key_version, now=format_time(now))


def _shares(
    trust: TrustSeen,
    pools: Mapping[str, Declared[KVPool]],
    hits: Mapping[str, int],
    namespace: str,
    tenants: Mapping[str, KVTenant],
    now: datetime,
) -> _Wanted:
    """`hits` counts the blocks that readers were given on all nodes, by the share's uid."""
    declared = claims.declared_of(tenants, trust)
    for _, share in sorted(trust.shares.items()):
        if share.is_deleting:
            continue
        secret = _secret(trust, ScopeKind.SHARE, scope_keys.scope_name(share.meta), namespace)
        has_key = scope_keys.has_key(share, KEY_VERSION, secret)
        fault = claims.share_fault(share, declared, pools)
        yield share, share_status(share, ShareSeen(declared, fault, has_key, units.coarse(hits.get(share.uid, 0))), now)


def _model_caches(view: View, fleet: FleetFacts, now: datetime) -> Iterator[StatusWrite | None]:
    for name, cache in sorted(view.pools.model_caches.items()):
        if not cache.is_deleting and name in fleet.models:
            status = model_status(fleet.models[name], cache, now)
            write = _write(cache, status)
            notes = failure_notes(cache, status)
            yield _noting(write, write.action.notes + notes) if write is not None else None


def _noting(write: StatusWrite, notes: tuple[Note, ...]) -> StatusWrite:
    return replace(write, action=replace(write.action, notes=notes))


def _operations(view: View, fleet: FleetFacts, now: datetime) -> Iterator[StatusWrite | None]:
    """Operations that are not over; the status of one that is never changes."""
    under_way = [o for o in view.pools.operations.values() if operations.stored_end(o) is None and not o.is_deleting]
    if not under_way:
        return
    arounds = operations.arounds(view.pools, view.trust.tenants, fleet.seen_of, now)
    for operation in operations.in_order(under_way):
        progress = _progress(operation, view, arounds, now)
        write = _write(operation, operation_status(operation, progress, now))
        notes = operation_notes(operation, progress)
        yield _noting(write, notes) if write is not None else None


def _progress(
    operation: Operation, view: View, arounds: Mapping[str, operations.Around], now: datetime
) -> operations.Progress:
    spec = operation.model.spec if operation.model is not None else None
    if spec is not None and spec.erase is not None and not operation.error:
        return erase_operation.progress_of(
            operation, view.trust.tenants.get(spec.erase.tenant), view.pools.pool_nodes.values(), now
        )
    pool = (spec.pool_ref if spec is not None else None) or ""
    return operations.progress_of(operation, arounds.get(pool, operations.nowhere(now)))


def _secret(trust: TrustSeen, scope: ScopeKind, name: str, namespace: str) -> ScopeSecretSeen | None:
    return trust.secrets.get(scope_keys.scope_secret_ref(scope, name, namespace).name)
