"""What tenants hold over the fleet, and whether their quotas are kept. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.trust import KVTenant, KVTenantSpec, TenantUsage
from kvstrata_operator.decide.plan.conditions import Says
from kvstrata_operator.observe.records import PoolNodeSeen, TenantSeen

ROWS_MAX: Final = 64
"""`maxItems` of status.usage."""
NAMED_MAX: Final = 3
"""Nodes that a message names; more are counted."""

Place = tuple[str, str]
"""Pool and tier."""


class Summed(Protocol):
    """What is known of a pool's capacity."""

    def least_bytes(self, tier: str) -> int | None: ...  # noqa: D102


class Pool(Protocol):
    """What is known of a pool's nodes."""

    @property
    def sums(self) -> Summed: ...  # noqa: D102
    @property
    def seen(self) -> Mapping[str, PoolNodeSeen]: ...  # noqa: D102


@dataclass(slots=True)
class Held:
    """One tenant's bytes, as its nodes report them."""

    used_bytes: Counter[Place] = field(default_factory=Counter)
    over_hard: defaultdict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Nodes on which the tenant is over its hard quota."""
    _rows: Counter[Place] = field(default_factory=Counter)
    """Nodes that report anything; a place that none reports is no row."""

    def add(self, place: Place, node: str, row: TenantSeen, sign: int) -> None:
        """Take in one node's row (`sign` 1), or take it out again (-1)."""
        self.used_bytes[place] += sign * row.used_bytes
        self._rows[place] += sign
        if row.over_hard and sign > 0:
            self.over_hard[place].add(node)
        elif row.over_hard:
            self.over_hard[place].discard(node)
        if not self.over_hard[place]:
            del self.over_hard[place]
        if not self._rows[place]:
            del self._rows[place], self.used_bytes[place]

    @property
    def is_empty(self) -> bool:
        """True when no node reports anything."""
        return not self._rows

    def rows(self) -> list[dict[str, object]]:
        """`status.usage`, the most first."""
        return [
            TenantUsage(pool_ref=pool, tier=tier, used=units.format_rounded(units.coarse(used))).to_json()
            for (pool, tier), used in sorted(self.used_bytes.items(), key=_most_first)[:ROWS_MAX]
        ]


def _most_first(row: tuple[Place, int]) -> tuple[int, Place]:
    """Sort key that tells equal amounts apart, so that a status does not flap between them."""
    place, used_bytes = row
    return (-used_bytes, place)


def promised(tenants: Mapping[str, KVTenant]) -> Counter[Place]:
    """Bytes that all tenants together are guaranteed on each node, where that is anything."""
    found: Counter[Place] = Counter()
    for tenant in tenants.values():
        for quota in tenant.spec.quotas:
            found[quota.pool_ref, quota.tier] += quota.guaranteed or 0
    return +found


def overcommitted(tenants: Mapping[str, KVTenant], pools: Mapping[str, Pool]) -> dict[Place, str]:
    """Tiers in which guarantees are more than some node has, each with the numbers of the worst such node."""
    found = {}
    for (pool, tier), promised_bytes in promised(tenants).items():
        least_bytes = pools[pool].sums.least_bytes(tier) if pool in pools else None
        if least_bytes is None or promised_bytes <= least_bytes:
            continue
        node = min(n.node for n in pools[pool].seen.values() if _has_tier(n, tier, least_bytes))
        found[pool, tier] = (
            f"guarantees in tier {tier} of pool {pool} are {units.format_rounded(promised_bytes)} together, "
            f"node {node} has {units.format_rounded(least_bytes)}"
        )
    return found


def _has_tier(node: PoolNodeSeen, tier: str, capacity_bytes: int) -> bool:
    return any(t.name == tier and t.capacity_bytes == capacity_bytes for t in node.tiers)


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


def _over(place: Place, nodes: Iterable[str]) -> str:
    pool, tier = place
    return f"more than the hard quota in tier {tier} of pool {pool} on {named(nodes)}"


def named(nodes: Iterable[str]) -> str:
    """Name a few nodes and count the others."""
    listed = sorted(nodes)
    more = f" and {len(listed) - NAMED_MAX} more" if len(listed) > NAMED_MAX else ""
    return ", ".join(listed[:NAMED_MAX]) + more
