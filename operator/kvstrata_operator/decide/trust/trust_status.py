"""The statuses of KVTenant and KVTrustDomain. Pure.

The status of a KVPrefixShare: who may read it now, and why others whom it names may not. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from kvstrata_api import shares
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.shares import Reading, Refusal
from kvstrata_api.trust import joined_domain
from kvstrata_operator.decide.plan.conditions import Says, conditions_only
from kvstrata_operator.decide.pool_conditions import refused
from kvstrata_operator.decide.trust import key_versions
from kvstrata_operator.decide.trust.erasure import Course, erase_condition
from kvstrata_operator.decide.trust.identity_conflicts import Fault, one_sided
from kvstrata_operator.decide.trust.tenant_usage import Held, Place, quota_conditions
from kvstrata_operator.observe.moments import format_time
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


_TOLD_MAX: Final = 8
"""Readers that a message names; the rest is counted."""

_WHY: Final = {
    Refusal.UNKNOWN_READER: "does not exist",
    Refusal.NOT_ACCEPTED: "neither lists the granting tenant in spec.acceptSharesFrom nor has it as a publisher of its"
    " domain",
    Refusal.DOMAIN_PRIVATE: "has spec.sharing Private",
}


@dataclass(frozen=True, slots=True)
class ShareSeen:
    """What a share's status needs besides the share."""

    declared: shares.Declared
    fault: Fault | None
    """Why it grants nothing to anybody."""
    has_key: bool
    hits: int
    """Blocks that its readers were given, as agents report."""


def share_status(share: Declared[KVPrefixShare], seen: ShareSeen, now: datetime) -> dict[str, Any]:
    """Status of a share."""
    says = Says(share.meta.generation)
    readings = _readings(share.model, seen, now)
    conditions = _conditions(says, share.model, seen, readings, now)
    said = {condition.type for condition in conditions}
    # What is not said now does not hold any more: a share that nobody grants has neither readers nor an end.
    before = replace(share, conditions=tuple(c for c in share.conditions if c.type in said))
    return {
        **conditions_only(before, conditions, format_time(now)),
        "consumers": _count(readings) if seen.has_key else 0,
        "hits": seen.hits,
    }


def _readings(share: KVPrefixShare | None, seen: ShareSeen, now: datetime) -> tuple[Reading, ...]:
    """Everybody whom a share names; nobody when it is not in force."""
    if share is None or seen.fault or not shares.is_open(share, now):
        return ()
    granting = shares.granting_tenant(share, seen.declared)
    return shares.readings(share, granting, seen.declared) if granting else ()


def _count(readings: Sequence[Reading]) -> int:
    """Tenants that may read; one may be named twice, as a tenant and by its domain."""
    return len({r.reader for r in readings if r.refusal is None})


def _conditions(
    says: Says, share: KVPrefixShare | None, seen: ShareSeen, readings: Sequence[Reading], now: datetime
) -> tuple[Condition, ...]:
    if seen.fault or share is None:
        fault = seen.fault or Fault("Invalid", "the object cannot be read")
        return tuple(says.false(type_, fault.reason, fault.message) for type_ in ("Accepted", "Active"))
    end = shares.share_end(share)
    if end is not None and now >= end:
        over = f"expired at {format_time(end)}"
        return (accepted(says), says.false("Active", "Expired", over), says.true("Expired", "Expired", over))
    until = f"until {format_time(end)}" if end else "without end"
    return (
        accepted(says),
        _active(says, _count(readings), until, has_key=seen.has_key),
        says.false("Expired", "NotExpired", until),
        agreed(says, "ReadersAgreed", _unmet(readings)),
    )


def _active(says: Says, count: int, until: str, *, has_key: bool) -> Condition:
    if not has_key:
        return says.false("Active", "KeyMissing", "the Secret with the scope's key is not there yet, or is not ours")
    if not count:
        return says.false("Active", "NoReader", "nobody whom spec.to names may read")
    return says.true("Active", "Granted", f"{count} tenants may read {until}")


def _unmet(readings: Sequence[Reading]) -> Fault | None:
    """Wishes of one side only; the reason is that of the first."""
    told = [f"{r.by}: {r.reader} {_WHY[r.refusal]}" for r in readings if r.refusal]
    more = [f"and {len(told) - _TOLD_MAX} more"] if len(told) > _TOLD_MAX else []
    reasons = [str(r.refusal) for r in readings if r.refusal]
    return Fault(reasons[0], "; ".join(told[:_TOLD_MAX] + more)) if reasons else None
