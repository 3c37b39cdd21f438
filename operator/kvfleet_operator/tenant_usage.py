"""What tenants hold over the fleet, and whether their quotas are kept. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvfleet_api import units
from kvfleet_api.conditions import Condition
from kvfleet_api.models.trust import KVTenant, KVTenantSpec, TenantUsage
from kvfleet_operator.records import PoolNodeSeen
from kvfleet_operator.verdicts import Says

ROWS_MAX: Final = 64
"""`maxItems` of status.usage."""
NAMED_MAX: Final = 3
"""Nodes that a message names; more are counted."""

Place = tuple[str, str]
"""Pool and tier."""


@dataclass(slots=True)
class Held:
    """One tenant's bytes, as its nodes report them."""

    used_bytes: Counter[Place] = field(default_factory=Counter)
    over_hard: dict[Place, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Nodes on which the tenant is over its hard quota."""

    def rows(self) -> list[dict[str, object]]:
        """`status.usage`, the most first."""
        return [
            TenantUsage(pool_ref=pool, tier=tier, used=units.format_rounded(units.coarse(used))).to_json()
            for (pool, tier), used in self.used_bytes.most_common(ROWS_MAX)
        ]


def held_by_tenant(nodes: Iterable[PoolNodeSeen]) -> defaultdict[str, Held]:
    """Sum what all nodes report."""
    found: defaultdict[str, Held] = defaultdict(Held)
    for node in nodes:
        for row in node.tenants:
            held = found[row.tenant]
            held.used_bytes[node.pool, row.tier] += row.used_bytes
            if row.over_hard:
                held.over_hard[node.pool, row.tier].append(node.node)
    return found


def overcommitted(tenants: Mapping[str, KVTenant], nodes: Iterable[PoolNodeSeen]) -> dict[Place, str]:
    """Tiers in which guarantees are more than some node has, each with the numbers of the worst such node."""
    promised: Counter[Place] = Counter()
    for tenant in tenants.values():
        for quota in tenant.spec.quotas:
            promised[quota.pool_ref, quota.tier] += quota.guaranteed or 0
    least: dict[Place, tuple[int, str]] = {}
    for node in nodes:
        for tier in node.tiers:
            place = (node.pool, tier.name)
            if tier.capacity_bytes and promised[place] > tier.capacity_bytes:
                least[place] = min(least.get(place, (tier.capacity_bytes, node.node)), (tier.capacity_bytes, node.node))
    return {
        (pool, tier): f"guarantees in tier {tier} of pool {pool} are {units.format_rounded(promised[pool, tier])} "
        f"together, node {node} has {units.format_rounded(capacity_bytes)}"
        for (pool, tier), (capacity_bytes, node) in least.items()
    }


def quota_conditions(
    says: Says, spec: KVTenantSpec, held: Held, overcommit: Mapping[Place, str]
) -> tuple[Condition, ...]:
    """Say whether a tenant's quotas are kept; nothing for a tenant without any."""
    if not spec.quotas:
        return ()
    over = [_over(place, nodes) for place, nodes in sorted(held.over_hard.items())]
    if over:
        told = "; ".join(over)
        return (says.false("QuotaEnforced", "OverHard", told), says.true("OverQuota", "OverHard", told))
    within = says.false("OverQuota", "WithinHard", "no node reports more than a hard quota")
    short = [overcommit[q.pool_ref, q.tier] for q in spec.quotas if q.guaranteed and (q.pool_ref, q.tier) in overcommit]
    if short:
        return (says.false("QuotaEnforced", "OverGuarantee", "; ".join(short)), within)
    return (
        says.true("QuotaEnforced", "Enforced", f"{len(spec.quotas)} quotas, each on every node of its pool"),
        within,
    )


def _over(place: Place, nodes: list[str]) -> str:
    pool, tier = place
    return f"more than the hard quota in tier {tier} of pool {pool} on {named(nodes)}"


def named(nodes: Iterable[str]) -> str:
    """Name a few nodes and count the others."""
    listed = sorted(nodes)
    more = f" and {len(listed) - NAMED_MAX} more" if len(listed) > NAMED_MAX else ""
    return ", ".join(listed[:NAMED_MAX]) + more
