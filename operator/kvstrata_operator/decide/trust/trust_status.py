"""The statuses of KVTenant and KVTrustDomain. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvstrata_api.conditions import Condition
from kvstrata_api.models.trust import KVTenant, KVTrustDomain
from kvstrata_api.trust import joined_domain
from kvstrata_operator.decide.plan.conditions import Says, conditions_only
from kvstrata_operator.decide.pool_conditions import refused
from kvstrata_operator.decide.trust import key_versions
from kvstrata_operator.decide.trust.erasure import Course, erase_condition
from kvstrata_operator.decide.trust.identity_conflicts import Fault, one_sided
from kvstrata_operator.decide.trust.tenant_usage import Held, Place, quota_conditions
from kvstrata_operator.observe.records import Declared


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """What a tenant's status needs besides the object itself."""

    fault: Fault | None
    """Why it is refused."""
    unmet: Fault | None
    """Why it is alone."""
    course: Course
    held: Held
    overcommit: Mapping[Place, str] = field(default_factory=dict)
    """Tiers in which guarantees are more than some node has."""


def tenant_status(
    tenant: Declared[KVTenant], domains: Mapping[str, KVTrustDomain], facts: TenantFacts, now: str
) -> dict[str, Any]:
    """Status of a tenant."""
    says, course, fault = Says(tenant.meta.generation), facts.course, facts.fault
    conditions = _tenant_conditions(says, fault, facts.unmet, course)
    if tenant.model is not None and not fault:
        quotas = quota_conditions(says, tenant.model.spec, facts.held, facts.overcommit)
        conditions = (*conditions, *quotas, *erase_condition(says, tenant, course, now))
    joined = joined_domain(tenant.model, domains.values()) if tenant.model and not fault else None
    said = {condition.type for condition in conditions} | {"EraseCompleted"}
    # Quotas that are not judged now are neither kept nor exceeded; what was erased stays erased.
    before = replace(tenant, conditions=tuple(c for c in tenant.conditions if c.type in said))
    return {
        **conditions_only(before, conditions, now),
        "keyVersion": course.key_version,
        "eraseStarted": course.started,
        "lastErase": course.last,
        "usage": facts.held.rows(),
        "effectiveDomain": joined.metadata.name if joined else "",
    }


def domain_status(
    domain: Declared[KVTrustDomain],
    tenants: Mapping[str, KVTenant],
    *,
    fault: Fault | None,
    key_version: int,
    now: str,
) -> dict[str, Any]:
    """Status of a domain; members are the tenants that both sides name.

    `key_version` is 0 while the version that it should have has no key: until then the status keeps the version that
    it told of and everybody who may hold that key, so that a departure is not forgotten.
    """
    says = Says(domain.meta.generation)
    members = frozenset() if domain.model is None else key_versions.members(domain.model, tenants)
    told = key_version or key_versions.told_version(domain)
    holders = members if key_version else members | key_versions.told_members(domain)
    if fault or domain.model is None:
        fault = fault or Fault("Invalid", domain.error)
        conditions = refused(says, fault.reason, fault.message)
    else:
        ready = says.true("Ready", "Ready", f"{len(members)} members, key version {key_version}")
        unmet = one_sided(domain.meta.name, domain.model, tenants)
        conditions = (accepted(says), _keyed(says, key_version) or ready, agreed(says, "MembersAgreed", unmet))
    return {**conditions_only(domain, conditions, now), "members": sorted(holders), "keyVersion": told}


def agreed(says: Says, type_: str, unmet: Fault | None) -> Condition:
    """Say whether all wishes are two-sided."""
    return says.false(type_, unmet.reason, unmet.message) if unmet else says.true(type_, "Agreed", "")


def _tenant_conditions(says: Says, fault: Fault | None, unmet: Fault | None, course: Course) -> tuple[Condition, ...]:
    if fault:
        return refused(says, fault.reason, fault.message)
    key_version = course.key_version if course.has_key else 0
    ready = _keyed(says, key_version) or says.true("Ready", "Ready", f"key version {key_version}")
    if unmet:
        ready = says.false("Ready", unmet.reason, unmet.message)
    return (accepted(says), ready)


def _keyed(says: Says, key_version: int) -> Condition | None:
    """Complain about a missing key; None when there is one."""
    if key_version:
        return None
    return says.false("Ready", "KeyMissing", "the Secret with the scope's key does not exist yet, or is not ours")


def accepted(says: Says) -> Condition:
    """Say that the object is taken for what it says."""
    return says.true("Accepted", "Accepted", "the spec is valid")
