"""Takes blocks of another pool's agent over: implements `server.Adopter`. They come as any blocks of other agents."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.request import NOBODY, RequestContext
from kvstrata_agent.cache.promotion import FETCH_BLOCKS
from kvstrata_agent.fleet.peers.client import Taken
from kvstrata_agent.policy.eviction import excess_bytes
from kvstrata_api.errors import RetryableError

if TYPE_CHECKING:
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.tenant_lifecycle import Tenancy
    from kvstrata_agent.fleet.peers.client import Offer
    from kvstrata_agent.operations.warm import Warmer
    from kvstrata_api.blocks import ScopeSecret

ADOPTIONS_MAX: Final = 4
"""Offers worked on at once, from all agents together; others wait."""


class Adopter:
    """Believes nothing of an offer but that it may be looked at: rights, quotas and checksums are those of a read."""

    def __init__(self, node: Node, warmer: Warmer, tenancy: Tenancy) -> None:
        self._node = node
        self._warmer = warmer
        self._tenancy = tenancy
        self._gate = asyncio.Semaphore(ADOPTIONS_MAX)

    async def adopt(self, offer: Offer) -> Taken:
        """Bring what is offered to its tier, the first block of the chain first. May be repeated."""
        tier = self._tier(offer.tier)
        if tier is None or self._node.is_draining:
            return Taken(0, "TierAbsent" if tier is None else "Draining")
        async with self._gate:
            return await self._adopted(offer, tier)

    async def _adopted(self, offer: Offer, tier: Tier) -> Taken:
        chain = (offer.before, *offer.digests)
        links = list(zip(offer.digests, chain, strict=False))
        most_bytes = self._node.spec.policy.prefetch.max_inflight_bytes
        step = max(1, min(FETCH_BLOCKS, most_bytes // offer.raw_bytes))
        for start in range(0, len(links), step):
            secret = self._secret(offer)  # Looked at again for each batch: a right may end.
            if secret is None:
                return Taken(start, "NoRight")
            batch = links[start : start + step]
            if not self._has_room(offer, tier, len(batch) * offer.raw_bytes):
                return Taken(start, "NoRoom")
            context = RequestContext(NOBODY, offer.tenant, secret, offer.layout_id, offer.raw_bytes)
            await self._warmer.bring(context, batch, tier)
            whole = self._warmer.leading(context, batch, tier)
            if whole < len(batch):
                return Taken(start + whole, "NotFetched")
        return Taken(len(links))

    def _secret(self, offer: Offer) -> ScopeSecret | None:
        """Key of the scope, where the tenant may write there; None where not, or while that cannot be told."""
        try:
            access = self._tenancy.access(offer.tenant)
        except RetryableError:
            return None
        return next((s for a, s in access if a.can_write and s.scope == offer.scope), None)

    def _tier(self, name: str) -> Tier | None:
        """The tier that is meant, where blocks can come to it."""
        entry_tier, tiers = self._node.entry_tier, [t for t in self._node.tiers if not t.is_closed]
        if entry_tier is None:
            return None
        if name:
            return next((t for t in tiers if t.name == name and t.level >= entry_tier.level), None)
        return next((t for t in tiers if t.backend.capabilities.survives_restart), entry_tier)

    def _has_room(self, offer: Offer, tier: Tier, more_bytes: int) -> bool:
        """True when nothing would be lost for so much more: this tier or a slower one stays below its watermark.

        Whoever offers drops its own copies, so what came before must not give way to what comes next.
        """
        policy, now_s = self._node.spec.policy.eviction, self._node.clock()
        hard_bytes = self._node.tenants.hard_bytes(tier, offer.tenant)
        if hard_bytes is not None and tier.tenant_bytes.get(offer.tenant, 0) + more_bytes > hard_bytes:
            return False
        low, high = policy.low_watermark_percent, policy.high_watermark_percent
        open_tiers = (t for t in self._node.tiers if t.level >= tier.level and t.facts(now_s).takes_writes)
        return any(
            excess_bytes(t.backend.used_bytes + more_bytes, t.backend.capacity_bytes, high, low) <= 0
            for t in open_tiers
        )
