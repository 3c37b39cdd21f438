"""Contested identities and references that lead nowhere: what CEL cannot see, as it takes two objects. Pure.

Law: of two tenants that claim one identity, neither is accepted (`kvstrata_api.trust.tenant_of` fails closed likewise).
"""

from collections import defaultdict
from collections.abc import Mapping

from kvstrata_api import shares
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTenantSpec, KVTrustDomain
from kvstrata_api.trust import Identity, claims
from kvstrata_operator.decide.plan.conditions import Fault
from kvstrata_operator.observe.records import Declared, NodeSeen
from kvstrata_operator.observe.world import TrustSeen

_WISHES_MAX = 8
"""One-sided wishes that a message names; the rest is counted."""

Tenants = Mapping[str, Declared[KVTenant]]
Pools = Mapping[str, Declared[KVPool]]
Domains = Mapping[str, Declared[KVTrustDomain]]


def models_of(tenants: Tenants) -> dict[str, KVTenant]:
    """Tenants that can be read and are there to stay, by name."""
    return {name: t.model for name, t in sorted(tenants.items()) if t.model is not None and not t.is_deleting}


def contested(tenants: Mapping[str, KVTenant], namespaces: Mapping[str, NodeSeen]) -> dict[str, Fault]:
    """Tenants whose identities another tenant claims as well, by name, with what is contested."""
    by_account: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for tenant in tenants.values():
        for account in tenant.spec.service_accounts:
            by_account[account.namespace, account.name].add(tenant.metadata.name)
    by_namespace = _selected(tenants, namespaces)
    faults: dict[str, Fault] = {}
    for (namespace, name), named in sorted(by_account.items()):
        _blame(faults, named | by_namespace.get(namespace, set()), f"ServiceAccount {namespace}/{name}")
    for namespace, selecting in sorted(by_namespace.items()):
        _blame(faults, selecting, f"namespace {namespace}")
    return faults


def dangling_quota(spec: KVTenantSpec, pools: Pools) -> Fault | None:
    """Return the first quota that speaks of a pool or a tier that does not exist."""
    for index, quota in enumerate(spec.quotas):
        pool = pools.get(quota.pool_ref)
        if pool is None:
            return Fault("UnknownPool", f"spec.quotas[{index}].poolRef: there is no KVPool {quota.pool_ref!r}")
        tiers = [tier.name for tier in pool.model.spec.tiers] if pool.model else [quota.tier]
        if quota.tier not in tiers:
            there = ", ".join(tiers)
            where = f"spec.quotas[{index}].tier"
            return Fault("UnknownTier", f"{where}: pool {quota.pool_ref} has no tier {quota.tier!r}, it has {there}")
    return None


def unmet_domain(name: str, spec: KVTenantSpec, domains: Domains) -> Fault | None:
    """Return why the tenant is not a member of the domain that it joins; None when it is, or joins none."""
    if spec.trust_domain is None:
        return None
    domain = domains.get(spec.trust_domain)
    private = "until then its blocks stay private"
    if domain is None or domain.is_deleting:
        return Fault("UnknownDomain", f"spec.trustDomain: there is no KVTrustDomain {spec.trust_domain!r}; {private}")
    if domain.model is not None and name not in domain.model.spec.tenants:
        wish = f"add it to spec.tenants of the KVTrustDomain; {private}"
        return Fault("NotAdmitted", f"KVTrustDomain {spec.trust_domain!r} does not admit tenant {name!r}: {wish}")
    return None


def declared_of(tenants: Mapping[str, KVTenant], trust: TrustSeen) -> shares.Declared:
    """Gather what shares are decided from, as agents do."""
    homes = {s.meta.namespace or "" for s in trust.shares.values()} & trust.namespaces.keys()
    return shares.Declared(
        tuple(tenants.values()),
        tuple(d.model for d in trust.domains.values() if d.model is not None),
        tuple(s.model for s in trust.shares.values() if s.model is not None),
        {name: trust.namespaces[name].labels for name in homes},
    )


def share_fault(share: Declared[KVPrefixShare], declared: shares.Declared, pools: Pools) -> Fault | None:
    """Return why a share grants nothing to anybody: it cannot be read, or nobody grants it, or of nothing."""
    if share.error or share.model is None:
        return Fault("Invalid", share.error or "the object cannot be read")
    if share.model.spec.pool_ref not in pools:
        return Fault("UnknownPool", f"spec.poolRef: there is no KVPool {share.model.spec.pool_ref!r}")
    if shares.granting_tenant(share.model, declared) is None:
        namespace = share.meta.namespace or ""
        who = ", ".join(t.metadata.name for t in shares.claimants(namespace, declared)) or "none"
        return Fault("NotGranted", f"namespace {namespace} must belong to exactly one tenant, the granting one: {who}")
    return None


def one_sided(name: str, domain: KVTrustDomain, tenants: Mapping[str, KVTenant]) -> Fault | None:
    """Return which tenants only one side wants in a domain; None when both agree on all."""
    admitted = set(domain.spec.tenants)
    joining = {n for n, t in tenants.items() if t.spec.trust_domain == name}
    wishes = [
        *(f"tenant {t} is admitted and there is no such KVTenant" for t in sorted(admitted - tenants.keys())),
        *(f"tenant {t} is admitted and does not join" for t in sorted((admitted & tenants.keys()) - joining)),
        *(f"tenant {t} joins and is not admitted" for t in sorted(joining - admitted)),
    ]
    more = [f"and {len(wishes) - _WISHES_MAX} more"] if len(wishes) > _WISHES_MAX else []
    return Fault("OneSided", "; ".join(wishes[:_WISHES_MAX] + more)) if wishes else None


def _selected(tenants: Mapping[str, KVTenant], namespaces: Mapping[str, NodeSeen]) -> dict[str, set[str]]:
    """Tenants that select each namespace by its labels."""
    selecting = {name: t for name, t in tenants.items() if t.spec.namespace_selector is not None}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for tenant_name, tenant in selecting.items():
        for namespace in namespaces.values():
            # No ServiceAccount has an empty name: this asks for the selector alone.
            if claims(tenant, Identity(namespace.key, ""), namespace.labels):
                found[namespace.key].add(tenant_name)
    return dict(found)


def _blame(faults: dict[str, Fault], claiming: set[str], what: str) -> None:
    """Put the fault on every tenant of a contested identity."""
    if len(claiming) < 2:
        return
    for name in claiming:
        others = ", ".join(sorted(claiming - {name}))
        faults.setdefault(
            name, Fault("IdentityConflict", f"{what} is also claimed by tenant {others}; neither gets it")
        )
