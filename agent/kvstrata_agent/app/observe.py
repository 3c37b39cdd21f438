"""Reads the agent's own state into the values that `report` and the gauges are made of. Changes nothing."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from kvstrata_agent.kube.report import Observed, TierObserved
from kvstrata_api import __version__
from kvstrata_api.models.poolnode import ERASING_MAX, TENANTS_MAX, TenantBytes, TenantErased, TenantLookups

if TYPE_CHECKING:
    from kvstrata_agent.app.wiring import AgentParts
    from kvstrata_agent.app.world import Network
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.provision.provisioner import Provisioner, TierState
    from kvstrata_api.models.inventory import NodeReport
    from kvstrata_api.models.poolnode import KVPoolNode, NodeDrain


MINUTE_S: Final = 60.0


class LastMinute:
    """How much a count has grown within the last minute. Asked every second or so, and never more often remembered."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def growth(self, count: int, now_s: float) -> int:
        """Note what the count is now; returns by how much it has grown since a minute ago, or since the first time."""
        self._seen.append((now_s, count))
        while now_s - self._seen[0][0] > MINUTE_S:
            self._seen.popleft()
        return count - self._seen[0][1]


def observe(
    parts: AgentParts,
    provisioner: Provisioner,
    pool_node: KVPoolNode,
    network: Network,
    machine: NodeReport | None = None,
    engine: str = "",
) -> Observed:
    """Read everything that the status reports; `machine` is what node preparation has written, `engine` of blocks."""
    node, cache = parts.node, parts.cache
    drain = pool_node.spec.drain
    left = (0 if drain.mode == "Drop" else drain_left(node)) if drain.requested else None
    return Observed(
        pool_node=pool_node,
        epoch=node.epoch,
        version=__version__,
        engine=engine,
        tiers=tuple(_tier(s, node) for s in provisioner.states.values()),
        demand=cache.demand.of_tiers(),
        directory=network.state,
        queried=node.counters.blocks_queried,
        hit=node.counters.blocks_hit,
        share_hits=dict(node.counters.share_hits),
        tenants=_tenants(node),
        tenant_lookups=tuple(
            TenantLookups(tenant=tenant, queried=c.queried, hit=c.hit, denied=c.denied)
            for tenant, c in sorted(node.counters.tenants.items())
        ),
        evicted_per_minute=node.counters.evicted_per_minute,
        directory_backlog=network.backlog,
        erased=tuple(TenantErased(uid=uid, key_version=v) for uid, v in cache.tenancy.erased()[:ERASING_MAX]),
        orders=parts.orders.answers(),
        models=parts.models.reports() if parts.models is not None else (),
        memory_bytes=provisioner.memory_bytes,
        drain_left_blocks=left,
        is_drain_late=left is not None and is_late(drain.deadline),
        departure=provisioner.departure,
        node=machine,
        peer_address=network.address,
        drift=cache.mover.coding.drift,
        pathologies=node.signs.found,
    )


def _tenants(node: Node) -> tuple[TenantBytes, ...]:
    held = [(used, tenant, tier) for tier in node.tiers for tenant, used in tier.tenant_bytes.items()]
    most = nsmallest(TENANTS_MAX, held, key=lambda h: (-h[0], h[1], h[2].level))
    return tuple(_tenant(tenant, used, node.tenants.hard_bytes(tier, tenant), tier) for used, tenant, tier in most)


def _tenant(tenant: str, used_bytes: int, hard_bytes: int | None, tier: Tier) -> TenantBytes:
    over_hard = hard_bytes is not None and used_bytes > hard_bytes
    return TenantBytes(tenant=tenant, tier=tier.name, used_bytes=used_bytes, over_hard=over_hard)


def is_drained(node: Node, drain: NodeDrain) -> bool:
    """True when nothing is left to bring to safety, or no time for it."""
    return drain.mode == "Drop" or is_late(drain.deadline) or not drain_left(node)


def drain_left(node: Node) -> int:
    """Blocks of memory tiers that have no copy in a tier that survives, as far as there is such a tier."""
    if not any(t.backend.capabilities.survives_restart for t in node.tiers):
        return 0
    memory = [t for t in node.tiers if not t.backend.capabilities.survives_restart]
    return sum(
        residents.packed + sum(1 for entry in residents.in_use if not _is_surviving(entry))
        for tier in memory
        for residents in node.contents(tier).extents.values()
    )  # What is packed has no other copy.


def _is_surviving(entry: Entry) -> bool:
    return any(r.tier.backend.capabilities.survives_restart for r in entry.residences)


def is_late(deadline: str) -> bool:
    """True when an RFC 3339 time is past; an empty or unreadable one never is."""
    try:
        return bool(deadline) and datetime.fromisoformat(deadline) <= datetime.now(UTC)
    except (ValueError, TypeError):
        return False


def _tier(state: TierState, node: Node) -> TierObserved:
    tier, now_s = state.tier, node.clock()
    if tier is None:
        return TierObserved(
            state.spec,
            "Failed",
            is_up=False,
            is_absent=state.is_absent,
            error=state.error,
            shortage=state.limit.message,
        )
    backend = tier.backend
    can, paced = backend.capabilities, backend.paced
    return TierObserved(
        spec=state.spec,
        phase=tier.phase(now_s),
        is_up=True,
        medium=can.medium,
        is_emulated=can.is_emulated,
        is_encrypted=can.is_encrypted,
        is_mappable=backend.mappable is not None,
        fallback=can.fallback,
        capacity_bytes=backend.capacity_bytes,
        used_bytes=backend.used_bytes,
        blocks=node.contents(tier).blocks,
        recovered_blocks=tier.recovered_blocks,
        probe=tier.probe,
        devices=tier.devices,
        refusing_s=paced.refusing_s if paced is not None else 0.0,
        error=state.error or (tier.last_error or backend.last_error if tier.phase(now_s) != "Ready" else ""),
        leaving_blocks=node.contents(tier).blocks if tier.is_leaving else 0,
        shrinking_blocks=node.contents(tier).count(tier.shrinking & tier.closing),
        shortage=state.limit.message,
    )
