"""What tenants hold over the fleet, and whether their quotas are kept. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.trust import KVTenant, KVTenantSpec, TenantUsage
from kvstrata_operator.decide.plan.conditions import ConditionMaker
from kvstrata_operator.observe.records import PoolNodeSeen, TenantAsked, TenantSeen

ROWS_MAX: Final = 64
"""`maxItems` of status.usage."""
NAMED_MAX: Final = 3
"""Nodes that a message names; more are counted."""

TierKey = tuple[str, str]
"""Names of pool and tier."""


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

    used_bytes: Counter[TierKey] = field(default_factory=Counter)
    over_hard: defaultdict[TierKey, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Nodes on which the tenant is over its hard quota."""
    _rows: Counter[TierKey] = field(default_factory=Counter)
    """Nodes that report anything; a tier that none reports is no row."""

    def add(self, key: TierKey, node: str, row: TenantSeen, sign: int) -> None:
        """Take in one node's row (`sign` 1), or take it out again (-1)."""
        self.used_bytes[key] += sign * row.used_bytes
        self._rows[key] += sign
        if row.over_hard and sign > 0:
            self.over_hard[key].add(node)
        elif row.over_hard:
            self.over_hard[key].discard(node)
        if not self.over_hard[key]:
            del self.over_hard[key]
        if not self._rows[key]:
            del self._rows[key], self.used_bytes[key]

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


@dataclass(slots=True)
class Asked:
    """What one tenant asked for, found and was denied, over all nodes, in blocks."""

    queried: int = 0
    hit: int = 0
    denied: int = 0
    _nodes: int = 0
    """That report anything of it."""

    def add(self, row: TenantAsked, sign: int) -> None:
        """Take in one node's row (`sign` 1), or take it out again (-1)."""
        self.queried += sign * row.queried
        self.hit += sign * row.hit
        self.denied += sign * row.denied
        self._nodes += sign

    @property
    def is_empty(self) -> bool:
        """True when no node reports anything."""
        return not self._nodes


def quota_bytes(spec: KVTenantSpec, nodes: Mapping[str, int]) -> int | None:
    """Most that a tenant may hold of tiers where it has a hard quota, on all nodes of their pools; None without any."""
    hard = [quota.hard * nodes.get(quota.pool_ref, 0) for quota in spec.quotas if quota.hard is not None]
    return sum(hard) if hard else None


def _most_first(row: tuple[TierKey, int]) -> tuple[int, TierKey]:
    """Sort key that keeps equal amounts apart, so that a status does not flap between them."""
    key, used_bytes = row
    return (-used_bytes, key)


def promised(tenants: Mapping[str, KVTenant]) -> Counter[TierKey]:
    """Bytes that all tenants together are guaranteed on each node, where that is anything."""
    found: Counter[TierKey] = Counter()
    for tenant in tenants.values():
        for quota in tenant.spec.quotas:
            found[quota.pool_ref, quota.tier] += quota.guaranteed or 0
    return +found


def overcommitted(tenants: Mapping[str, KVTenant], pools: Mapping[str, Pool]) -> dict[TierKey, str]:
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
    make: ConditionMaker, spec: KVTenantSpec, held: Held, overcommit: Mapping[TierKey, str]
) -> tuple[Condition, ...]:
    """State whether a tenant's quotas are kept; nothing for a tenant without any."""
    if not spec.quotas:
        return ()
    over = [_over(key, nodes) for key, nodes in sorted(held.over_hard.items())]
    if over:
        message = "; ".join(over)
        return (make.false("QuotaEnforced", "OverHard", message), make.true("OverQuota", "OverHard", message))
    within = make.false("OverQuota", "WithinHard", "no node reports more than a hard quota")
    short = [overcommit[q.pool_ref, q.tier] for q in spec.quotas if q.guaranteed and (q.pool_ref, q.tier) in overcommit]
    if short:
        return (make.false("QuotaEnforced", "OverGuarantee", "; ".join(short)), within)
    return (
        make.true("QuotaEnforced", "Enforced", f"{len(spec.quotas)} quotas, each on every node of its pool"),
        within,
    )


def _over(key: TierKey, nodes: Iterable[str]) -> str:
    pool, tier = key
    return f"more than the hard quota in tier {tier} of pool {pool} on {named(nodes)}"


def named(nodes: Iterable[str]) -> str:
    """Name a few nodes and count the others."""
    listed = sorted(nodes)
    more = f" and {len(listed) - NAMED_MAX} more" if len(listed) > NAMED_MAX else ""
    return ", ".join(listed[:NAMED_MAX]) + more
