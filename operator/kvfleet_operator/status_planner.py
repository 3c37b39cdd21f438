"""Which statuses should be written. Pure. `planner` decides everything else."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvfleet_api import units
from kvfleet_api.conditions import Condition
from kvfleet_api.models.pool import KVPool
from kvfleet_api.models.trust import KVTenant
from kvfleet_api.trust import KEY_VERSION, ScopeKind
from kvfleet_operator import claims, erasure, key_versions, objects, scope_keys
from kvfleet_operator.actions import Merge
from kvfleet_operator.claims import Fault
from kvfleet_operator.moments import format_time
from kvfleet_operator.planner import Setting, nodes_by_pool, placements_of
from kvfleet_operator.pool_conditions import leaving, refused
from kvfleet_operator.pool_facts import claims_before
from kvfleet_operator.records import Declared, PoolNodeSeen, ScopeSecretSeen
from kvfleet_operator.share_status import ShareSeen, share_status
from kvfleet_operator.status import USAGE_FIELDS, Around, pool_status
from kvfleet_operator.tenant_usage import held_by_tenant, overcommitted
from kvfleet_operator.trust_status import TenantFacts, domain_status, tenant_status
from kvfleet_operator.verdicts import Says, conditions_only, differs, notes_of
from kvfleet_operator.world import View


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
    accepted = len(tenants.keys() - contested.keys())
    wanted = [
        *_pools(view, setting, accepted, now),
        *_tenants(view, setting.namespace, tenants, contested, now),
        *_domains(view, setting.namespace, tenants, now),
        *_shares(view, setting.namespace, tenants, now),
    ]
    writes = (_write(declared, status) for declared, status in wanted)
    return tuple(write for write in writes if write is not None)


_Wanted = Iterator[tuple[Declared[Any], dict[str, Any]]]
"""Objects with the status fields that they should have."""


def _write(declared: Declared[Any], wanted: dict[str, Any]) -> StatusWrite | None:
    if not differs(declared.status, wanted):
        return None
    conditions = [Condition.model_validate(c) for c in wanted["conditions"]]
    action = Merge(
        declared.ref,
        notes=notes_of(declared, conditions),
        body={"status": wanted},
        subresource="status",
        resource_version=declared.meta.resource_version,
    )
    return StatusWrite(action, is_usage_only=not differs(declared.status, wanted, USAGE_FIELDS))


def _pools(view: View, setting: Setting, tenants: int, now: datetime) -> _Wanted:
    placements = placements_of(view)
    before = claims_before(placements.values())
    by_pool = nodes_by_pool(view.pool_nodes.values())
    for name, pool in sorted(view.pools.items()):
        if name not in placements:
            yield pool, _halted(pool, by_pool[name], now)
            continue
        around = Around(
            silent=view.silent,
            claimed_before=before[name],
            tenants=tenants,
            connection=objects.connection_ref(name, setting.namespace),
            failure=view.failures.get(name, ""),
            now=format_time(now),
        )
        status = pool_status(pool, placements[name], by_pool[name], around)
        yield pool, {"hitPercent": None, **status.to_json()}


def _halted(pool: Declared[KVPool], seen: Mapping[str, PoolNodeSeen], now: datetime) -> dict[str, Any]:
    """Status of a pool that is refused or on its way out."""
    says = Says(pool.meta.generation)
    draining = sum(1 for node in seen.values() if node.drain.requested)
    conditions = leaving(says, len(seen), draining) if pool.is_deleting else refused(says, "Invalid", pool.error)
    return conditions_only(pool, conditions, format_time(now))


def _tenants(
    view: View, namespace: str, models: Mapping[str, KVTenant], contested: Mapping[str, Fault], now: datetime
) -> _Wanted:
    domains = {name: d.model for name, d in view.domains.items() if d.model is not None}
    nodes = tuple(view.pool_nodes.values())
    held, overcommit = held_by_tenant(nodes), overcommitted(models, nodes)
    for name, tenant in sorted(view.tenants.items()):
        if tenant.is_deleting:
            continue
        facts = TenantFacts(
            fault=_tenant_fault(view, tenant, contested),
            unmet=claims.unmet_domain(name, tenant.model.spec, view.domains) if tenant.model else None,
            course=erasure.course(tenant, _secret(view, ScopeKind.TENANT, name, namespace), nodes, view.alive),
            held=held[name],
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


def _shares(view: View, namespace: str, tenants: Mapping[str, KVTenant], now: datetime) -> _Wanted:
    if not view.shares:
        return
    declared, hits = claims.declared_of(tenants, view), _share_hits(view)
    for _, share in sorted(view.shares.items()):
        if share.is_deleting:
            continue
        secret = _secret(view, ScopeKind.SHARE, objects.scope_name(share.meta), namespace)
        has_key = scope_keys.has_key(share, KEY_VERSION, secret)
        fault = claims.share_fault(share, declared, view.pools)
        yield share, share_status(share, ShareSeen(declared, fault, has_key, units.coarse(hits[share.uid])), now)


def _share_hits(view: View) -> Counter[str]:
    """Blocks that readers were given on all nodes, by the share's uid."""
    hits: Counter[str] = Counter()
    for node in view.pool_nodes.values():
        for uid, count in node.share_hits:
            hits[uid] += count
    return hits


def _secret(view: View, scope: ScopeKind, name: str, namespace: str) -> ScopeSecretSeen | None:
    return view.secrets.get(objects.scope_secret_ref(scope, name, namespace).name)
