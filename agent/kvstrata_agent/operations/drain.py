"""Tells how far the drain of one tier has come. The sweep empties it, as a tier that is declared no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvstrata_agent.policy.operations import Count, DrainProgress, Ended, TierReading, Watch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.policy.operations import ReportProgress
    from kvstrata_api.models.poolnode import NodeOrder, TierDrainOrder

LOOK_S: Final = 1.0
"""Between two looks."""

_KEPT: Final = {
    DrainProgress.HELD: "blocks are leased, pinned, decoded from or written",
    DrainProgress.WAITING: "another tier takes no blocks for the moment",
}


def drained_tiers(orders: Iterable[NodeOrder]) -> frozenset[str]:
    """Names of the tiers that are to be empty: as long as an order stands, also after it was answered."""
    return frozenset(order.drain.tier for order in orders if order.drain is not None)


async def watch_drain(node: Node, order: TierDrainOrder, tell: ReportProgress) -> Ended:
    """Return when the tier is empty, or when nothing that is left has a place to go. Changes nothing."""
    watch, blocks_total, bytes_total = Watch(), 0, 0
    while True:
        tier = node.tier(order.tier)
        if tier is None:
            return Ended(f"tier {order.tier} is not up on this node", "TierAbsent")
        size_bytes = sum(tier.tenant_bytes.values())
        blocks_total, bytes_total = max(blocks_total, node.contents(tier).blocks), max(bytes_total, size_bytes)
        watch = watch.after(_look(node, tier))
        kept = _KEPT.get(watch.progress)
        count = Count(blocks_total - node.contents(tier).blocks, blocks_total, bytes_total - size_bytes, bytes_total)
        tell(count, Ended(kept, watch.progress.value) if kept else None)
        if watch.progress.is_over:
            left = f"{node.contents(tier).blocks} blocks of {size_bytes} B stay: no other tier takes them"
            return Ended("nothing is left" if watch.progress is DrainProgress.EMPTY else left)
        await asyncio.sleep(LOOK_S)


def _look(node: Node, tier: Tier) -> TierReading:
    now_s = node.clock()
    is_written = any(reservation.tier is tier for reservation in node.reservations)
    others = (t for t in node.tiers if t is not tier and not t.is_closed)
    return TierReading(
        blocks=node.contents(tier).blocks,
        is_stuck=tier.is_stuck,
        is_held=is_written or node.contents(tier).has_held,
        are_others_away=any(not t.facts(now_s).takes_writes for t in others),
    )
