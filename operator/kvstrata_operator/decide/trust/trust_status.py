"""The statuses of KVTenant, KVTrustDomain and KVPrefixShare. Pure.

That of a share states who may read it now, and why others whom it names may not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from kvstrata_api import shares, units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.shares import Reading, Refusal
from kvstrata_api.trust import joined_domain
from kvstrata_operator.decide.plan.conditions import ConditionMaker, Fault, conditions_only, refused
from kvstrata_operator.decide.trust import scope_keys
from kvstrata_operator.decide.trust.erasure import ErasureProgress, erase_condition
from kvstrata_operator.decide.trust.identity_conflicts import one_sided
from kvstrata_operator.decide.trust.tenant_usage import Asked, Held, TierKey, quota_bytes, quota_conditions
from kvstrata_operator.observe.kinds import format_time
from kvstrata_operator.observe.records import Declared

_NAMED_MAX: Final = 8
"""Readers that a message names; the rest is counted."""


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """What a tenant's status needs besides the object itself."""

    fault: Fault | None
    """Why it is refused."""
    unmet: Fault | None
    """Why it is alone."""
    progress: ErasureProgress
    held: Held
    asked: Asked = field(default_factory=Asked)
    nodes: Mapping[str, int] = field(default_factory=dict)
    """How many nodes each pool has."""
    overcommit: Mapping[TierKey, str] = field(default_factory=dict)
    """Tiers in which guarantees are more than some node has."""


def tenant_status(
    tenant: Declared[KVTenant], domains: Mapping[str, KVTrustDomain], facts: TenantFacts, now: str
) -> dict[str, Any]:
    """Status of a tenant."""
    make, progress, fault = ConditionMaker(tenant.meta.generation), facts.progress, facts.fault
    conditions = _tenant_conditions(make, fault, facts.unmet, progress)
    if tenant.model is not None and not fault:
        quotas = quota_conditions(make, tenant.model.spec, facts.held, facts.overcommit)
        conditions = (*conditions, *quotas, *erase_condition(make, tenant, progress, now))
    quota = quota_bytes(tenant.model.spec, facts.nodes) if tenant.model is not None else None
    joined = joined_domain(tenant.model, domains.values()) if tenant.model and not fault else None
    types = {condition.type for condition in conditions} | {"EraseCompleted"}
    # Quotas that are not judged now are neither kept nor exceeded; what was erased stays erased.
    before = replace(tenant, conditions=tuple(c for c in tenant.conditions if c.type in types))
    return {
        **conditions_only(before, conditions, now),
        "keyVersion": progress.key_version,
        "eraseStarted": progress.started,
        "lastErase": progress.last,
        "usage": facts.held.rows(),
        "quota": units.format_rounded(quota) if quota is not None else "",
        "used": units.format_rounded(units.coarse(facts.held.used_bytes.total())),
        "hitPercent": units.percent(facts.asked.hit, facts.asked.queried),
        "denied": units.coarse(facts.asked.denied),
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
    it has and everybody who may hold that key, so that a departure is not forgotten.
    """
    make = ConditionMaker(domain.meta.generation)
    members = frozenset() if domain.model is None else scope_keys.members(domain.model, tenants)
    version = key_version or scope_keys.status_version(domain)
    holders = members if key_version else members | scope_keys.status_members(domain)
    if fault or domain.model is None:
        fault = fault or Fault("Invalid", domain.error)
        conditions = refused(make, fault.reason, fault.message)
    else:
        ready = make.true("Ready", "Ready", f"{len(members)} members, key version {key_version}")
        unmet = one_sided(domain.meta.name, domain.model, tenants)
        conditions = (accepted(make), _keyed(make, key_version) or ready, agreed(make, "MembersAgreed", unmet))
    return {**conditions_only(domain, conditions, now), "members": sorted(holders), "keyVersion": version}


def agreed(make: ConditionMaker, type_: str, unmet: Fault | None) -> Condition:
    """State whether all wishes are two-sided."""
    return make.false(type_, unmet.reason, unmet.message) if unmet else make.true(type_, "Agreed", "")


def _tenant_conditions(
    make: ConditionMaker, fault: Fault | None, unmet: Fault | None, progress: ErasureProgress
) -> tuple[Condition, ...]:
    if fault:
        return refused(make, fault.reason, fault.message)
    key_version = progress.key_version if progress.has_key else 0
    ready = _keyed(make, key_version) or make.true("Ready", "Ready", f"key version {key_version}")
    if unmet:
        ready = make.false("Ready", unmet.reason, unmet.message)
    return (accepted(make), ready)


def _keyed(make: ConditionMaker, key_version: int) -> Condition | None:
    """Complain about a missing key; None when there is one."""
    if key_version:
        return None
    return make.false("Ready", "KeyMissing", "the Secret with the scope's key does not exist yet, or is not ours")


def accepted(make: ConditionMaker) -> Condition:
    """State that the spec is valid."""
    return make.true("Accepted", "Accepted", "the spec is valid")


_WHY: Final = {
    Refusal.UNKNOWN_READER: "does not exist",
    Refusal.NOT_ACCEPTED: "neither lists the granting tenant in spec.acceptSharesFrom nor has it as a publisher of its"
    " domain",
    Refusal.DOMAIN_PRIVATE: "has spec.sharing Private",
    Refusal.TOO_MANY_SHARES: f"gets {shares.SHARES_MAX} shares of the pool, which come before this one",
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
    make = ConditionMaker(share.meta.generation)
    readings = _readings(share.model, seen, now)
    conditions = _conditions(make, share.model, seen, readings, now)
    types = {condition.type for condition in conditions}
    # What is not stated now does not hold any more: a share that nobody grants has neither readers nor an end.
    before = replace(share, conditions=tuple(c for c in share.conditions if c.type in types))
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
    return shares.readings(share, granting, seen.declared, now) if granting else ()


def _is_written(share: KVPrefixShare, seen: ShareSeen, now: datetime) -> bool:
    """Whether engines of the granting tenant store blocks in the share's scope."""
    granting = shares.granting_tenant(share, seen.declared)
    return granting is None or shares.is_given(share, granting, seen.declared, now)


def _count(readings: Sequence[Reading]) -> int:
    """Tenants that may read; one may be named twice, as a tenant and by its domain."""
    return len({r.reader for r in readings if r.refusal is None})


def _conditions(
    make: ConditionMaker, share: KVPrefixShare | None, seen: ShareSeen, readings: Sequence[Reading], now: datetime
) -> tuple[Condition, ...]:
    if seen.fault or share is None:
        fault = seen.fault or Fault("Invalid", "the object cannot be read")
        return tuple(make.false(type_, fault.reason, fault.message) for type_ in ("Accepted", "Active"))
    end = shares.share_end(share)
    if end is not None and now >= end:
        over = f"expired at {format_time(end)}"
        return (accepted(make), make.false("Active", "Expired", over), make.true("Expired", "Expired", over))
    until = f"until {format_time(end)}" if end else "without end"
    return (
        accepted(make),
        _active(make, _count(readings), until, has_key=seen.has_key, is_written=_is_written(share, seen, now)),
        make.false("Expired", "NotExpired", until),
        agreed(make, "ReadersAgreed", _unmet(readings)),
    )


def _active(make: ConditionMaker, count: int, until: str, *, has_key: bool, is_written: bool) -> Condition:
    if not has_key:
        return make.false("Active", "KeyMissing", "the Secret with the scope's key is not there yet, or is not ours")
    if not is_written:
        most = f"the granting tenant's first {shares.SHARES_MAX} shares of the pool, by name, are written, not this one"
        return make.false("Active", "TooManyShares", most)
    if not count:
        return make.false("Active", "NoReader", "nobody whom spec.to names may read")
    return make.true("Active", "Granted", f"{count} tenants may read {until}")


def _unmet(readings: Sequence[Reading]) -> Fault | None:
    """Wishes of one side only; the reason is that of the first."""
    wishes = [f"{r.by}: {r.reader} {_WHY[r.refusal]}" for r in readings if r.refusal]
    more = [f"and {len(wishes) - _NAMED_MAX} more"] if len(wishes) > _NAMED_MAX else []
    reasons = [str(r.refusal) for r in readings if r.refusal]
    return Fault(reasons[0], "; ".join(wishes[:_NAMED_MAX] + more)) if reasons else None
