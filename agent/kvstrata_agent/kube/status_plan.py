"""When a status is worth a write, and what is written. Pure.

Facts (conditions, phases, epochs) are written at once. Counters (fill, hits) are compared rounded, and written
at most every `COUNTERS_S`: a fleet's API server carries some 300 status writes a second.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.models import conditions
from kvstrata_api.models.poolnode import KVPoolNodeStatus, NodeTierStatus
from kvstrata_kube.answers import Json

COUNTERS_S: Final = 10.0
FACTS_S: Final = 1.0
"""Shortest time between two writes, whatever they say: two writers that disagree must not race."""


_NO_FACTS: Final = {"lookups", "conditions", "tiers", "shares", "tenants", "erased", "orders", "node"}
"""Counters, what is compared by itself, and what node preparation writes."""


class Urgency(IntEnum):
    """How soon a status should be written."""

    NONE = 0
    COUNTERS = 1
    FACTS = 2


def urgency(wanted: KVPoolNodeStatus, stored: Mapping[str, Any]) -> Urgency:
    """Compare what the agent sees with what the API server holds."""
    before = _parsed(stored)
    if before is None or _facts(wanted, wanted) != _facts(before, wanted):
        return Urgency.FACTS
    return Urgency.NONE if _counters(wanted) == _counters(before) else Urgency.COUNTERS


def due_s(need: Urgency, written_at_s: float | None, chance: float) -> float:
    """Monotonic second at which a write is due; `chance` in [0, 1) spreads counters of a fleet by half a period."""
    if written_at_s is None:
        return 0.0
    return written_at_s + (FACTS_S if need is Urgency.FACTS else COUNTERS_S * (1 + chance / 2))


def document(name: str, wanted: KVPoolNodeStatus, stored: Mapping[str, Any], now: str) -> Json:
    """Build the server-side apply document that makes the stored status say what is wanted.

    Transition times are kept wherever the stored condition has the same status, also across agent restarts.
    """
    before = _parsed(stored)
    ours = {c.type for c in wanted.conditions}
    kept = [c for c in before.conditions if c.type in ours] if before else []
    merged = {c.type: c for c in conditions.merge(kept, wanted.conditions, now)}
    ordered = tuple(merged[c.type] for c in wanted.conditions)
    status = _rounded(wanted).model_copy(update={"conditions": ordered})
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPoolNode",
        "metadata": {"name": name},
        "status": status.to_json(),
    }


def round_used(tier: NodeTierStatus) -> int:
    """Round used bytes to whole hundredths of the capacity; a tier that holds something never says 0.

    To the nearest byte, so that what was rounded stays as it is when it is rounded again.
    """
    if tier.capacity_bytes <= 0 or tier.used_bytes <= 0:
        return 0
    percent = max(1, min(100, round(tier.used_bytes * 100 / tier.capacity_bytes)))
    return (tier.capacity_bytes * percent + 50) // 100


def hit_percent(status: KVPoolNodeStatus) -> int:
    """Hits per hundred lookups, 0 without lookups."""
    queried = status.lookups.queried
    return round(status.lookups.hit * 100 / queried) if queried > 0 else 0


def _parsed(stored: Mapping[str, Any]) -> KVPoolNodeStatus | None:
    """Parse a stored status; None when it was never written or cannot be read, so that it is written anew."""
    if not stored:
        return None
    try:
        return KVPoolNodeStatus.model_validate(stored)
    except ValueError:
        return None


def _rounded(status: KVPoolNodeStatus) -> KVPoolNodeStatus:
    """Round the fills and write them out for the printer columns."""
    return status.model_copy(update={"tiers": tuple(_rounded_tier(t) for t in status.tiers)})


def _rounded_tier(tier: NodeTierStatus) -> NodeTierStatus:
    """Round one fill."""
    used_bytes = round_used(tier)
    shown = f"{units.format_rounded(used_bytes)}/{units.format_rounded(tier.capacity_bytes)}"
    return tier.model_copy(update={"used_bytes": used_bytes, "used_of_capacity": shown})


def _facts(status: KVPoolNodeStatus, ours: KVPoolNodeStatus) -> Json:
    """Everything but counters and transition times; of the conditions only the types that `ours` has.

    Confirmations and answers that nobody waits for any more go with the next write.
    """
    types = {c.type for c in ours.conditions}
    facts = status.model_dump(exclude=_NO_FACTS)
    facts["erased"] = sorted((e.uid, e.key_version) for e in status.erased if e in ours.erased)
    asked = {answer.uid for answer in ours.orders}
    facts["orders"] = sorted((a.uid, a.phase, a.reason, a.message) for a in status.orders if a.uid in asked)
    facts["tiers"] = [
        t.model_dump(exclude={"used_bytes", "used_of_capacity", "blocks", "demand"}) for t in status.tiers
    ]
    said = (c.model_dump(exclude={"last_transition_time"}) for c in status.conditions if c.type in types)
    facts["conditions"] = {c["type"]: c for c in said}
    return facts


def _counters(status: KVPoolNodeStatus) -> tuple[object, ...]:
    """Fill of and demand for each tier, the hit ratio and the use of shares and of room by tenants, rounded.

    Block counts ride along but cause no write.
    """
    tenants = sorted((t.tenant, t.tier, t.used_bytes, t.over_hard) for t in status.tenants)
    fills = ((round_used(t), t.demand) for t in status.tiers)
    return (
        *fills,
        hit_percent(status),
        *status.shares,
        *tenants,
        *status.erased,
        *status.orders,
    )
