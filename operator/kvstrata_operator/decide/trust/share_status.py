"""The status of a KVPrefixShare: who may read it now, and why others whom it names may not. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from kvstrata_api import shares
from kvstrata_api.conditions import Condition
from kvstrata_api.models.trust import KVPrefixShare
from kvstrata_api.shares import Reading, Refusal
from kvstrata_operator.decide.plan.conditions import Says, conditions_only
from kvstrata_operator.decide.trust.identity_conflicts import Fault
from kvstrata_operator.decide.trust.trust_status import accepted, agreed
from kvstrata_operator.observe.moments import format_time
from kvstrata_operator.observe.records import Declared

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
