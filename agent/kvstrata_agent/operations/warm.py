"""Brings prefixes of a tenant to this node before its engines ask for them: from slower tiers, and from other agents.

Only what an engine of that tenant would find is looked for and brought, on the accounts that its own reads would use.
Blocks come in behind all that engines want, and room is made as for an engine's prefetch: nothing that somebody leases,
pins or decodes from gives way. Whoever is cancelled leaves a batch under way, which ends by itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.request import NOBODY, RequestContext
from kvstrata_agent.cache.remote_fetch import FETCH_BLOCKS
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.operations import Chain, Count, Ended, Portion, WarmPlan, budget_bytes, plan_warming
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import RetryableError
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.cache import Cache
    from kvstrata_agent.fleet.peers.chain_lookup import Chains
    from kvstrata_api.models.poolnode import WarmOrder
    from kvstrata_api.trust import Access

POLLS_MAX: Final = 15
"""Attempts to find a prefix before it counts as missing: as many seconds as the Lease of an agent that restarts."""
TRIES_MAX: Final = 3
"""Attempts at a batch's blocks before those that lack room, or do not come, are left."""
POLL_INTERVAL_S: Final = 1.0
"""Between two of them; a directory that was slow is asked again after as long."""
SINKS_AT_ONCE: Final = 16
"""Copies to a slower tier under way, as many as an archive makes."""

Link = tuple[bytes, bytes]
"""Digest of a block, and of the one before it."""


class Warmer:
    """Carries out one order at a time."""

    def __init__(self, cache: Cache, chains: Chains) -> None:
        self._cache = cache
        self._chains = chains
        self._node = cache.node

    async def warm(self, order: WarmOrder, report: Callable[[Count], None]) -> Ended:
        """Find the prefixes, bring them, and count. May be repeated: what is here is not brought again."""
        target = self._target(order.tier)
        if isinstance(target, Ended):
            return target
        access = await self._access(order.tenant)
        if not access:
            return Ended(f"tenant {order.tenant} does not exist, or is being deleted", "TenantNotFound")
        policy, hard_bytes = self._node.spec.policy.eviction, self._node.tenants.hard_bytes(target, order.tenant)
        capacity_bytes = target.backend.capacity_bytes
        budget = budget_bytes(capacity_bytes, policy.low_watermark_percent, hard_bytes, order.max_bytes)
        named, missing = await self._named(order, [secret for _, secret in access])
        plan = plan_warming([*named, *await self._archived(order, access, budget)], budget)
        count = Count(0, plan.blocks + missing, 0, plan.size_bytes, missing)
        report(count)
        for portion in plan.portions:
            async for warm in self._bring_portion(order, portion, target):
                if isinstance(warm, Ended):
                    return warm
                size_bytes = warm * portion.chain.raw_bytes
                count = replace(count, blocks_done=count.blocks_done + warm, bytes_done=count.bytes_done + size_bytes)
                report(count)
        blocks, size_bytes = self._warm_now(plan, target)
        count = replace(count, blocks_done=blocks, bytes_done=size_bytes)
        report(count)
        return _ended(count, plan, target.name)

    def _target(self, name: str | None) -> Tier | Ended:
        entry_tier = self._node.entry_tier
        if entry_tier is None:
            return Ended("no tier that engines read from is up on this node", "TierAbsent")
        target = entry_tier if name is None else self._node.tier(name)
        if target is None or target.is_closed:
            return Ended(f"tier {name} is not up on this node", "TierAbsent")
        if target.level < entry_tier.level:
            return Ended(f"tier {name} is faster than {entry_tier.name}, where blocks come in", "TierTooFast")
        return target

    async def _access(self, tenant: str) -> Sequence[tuple[Access, ScopeSecret]]:
        """What the tenant's engines may use, once that is known."""
        while True:
            try:
                return self._cache.tenancy.access(tenant)
            except RetryableError:
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _named(self, order: WarmOrder, secrets: Sequence[ScopeSecret]) -> tuple[list[Chain], int]:
        """Chains of the prefixes that are named, in their order, and how many of these nobody has as a whole."""
        left = {digest: bytes.fromhex(digest) for digest in order.prefixes}
        found: dict[str, Chain] = {}
        for attempt in range(POLLS_MAX if left else 0):
            await asyncio.sleep(POLL_INTERVAL_S if attempt else 0)
            for name, digest in tuple(left.items()):
                chain = await self._found(secrets, digest)
                if chain is not None:
                    found[name] = chain
                    del left[name]
            if not left:
                break
            await self._directory_is_up()
        return [found[name] for name in order.prefixes if name in found], len(left)

    async def _directory_is_up(self) -> None:
        """Wait for the directory: while it is away, what is absent here may be elsewhere or nowhere."""
        directory = self._cache.directory
        while directory is not None and not directory.is_up:  # noqa: ASYNC110  It has no event for that.
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _found(self, secrets: Sequence[ScopeSecret], digest: bytes) -> Chain | None:
        for secret in secrets:
            chain = await self._chains.anywhere(secret, digest)
            if chain is not None:
                return chain
        return None

    async def _archived(
        self, order: WarmOrder, access: Sequence[tuple[Access, ScopeSecret]], budget: int
    ) -> list[Chain]:
        """Chains of archived sessions that are whole on this node, the last archived first, as far as there is room."""
        if not order.archived_sessions:
            return []
        own = {secret.scope: secret for a, secret in access if a.can_write and a.kind is not ScopeKind.SHARE}
        chains: list[Chain] = []
        for scope, digest in self._cache.life.archived_heads():
            secret = own.get(ScopeId(scope))
            chain = await self._chains.here(secret, digest) if secret is not None else None
            if chain is not None:
                chains.append(chain)
                if plan_warming(chains, budget).left_out:
                    break
            await asyncio.sleep(0)
        return chains

    async def _bring_portion(self, order: WarmOrder, portion: Portion, target: Tier) -> AsyncIterator[int | Ended]:
        """Bring one portion in batches, and yield after each how many of its blocks are warm, or why it may not go on.

        It ends with a batch that did not come as a whole: nobody would find what stands behind that.
        """
        chain, most_bytes = portion.chain, self._node.spec.policy.prefetch.max_inflight_bytes
        context = RequestContext(NOBODY, order.tenant, chain.secret, chain.layout_id, chain.raw_bytes)
        step = max(1, min(FETCH_BLOCKS, most_bytes // chain.raw_bytes))
        for start in range(portion.start, portion.end, step):
            if chain.secret not in [secret for _, secret in await self._access(order.tenant)]:
                yield Ended(f"tenant {order.tenant} may not read all of it any more", "AccessLost")
                return
            if self._node.is_draining:
                yield Ended("the node is being drained", "Draining")
                return
            if not self._node.has(target):
                yield Ended(f"tier {target.name} has gone", "TierAbsent")
                return
            links = [portion.link(at) for at in range(start, min(start + step, portion.end))]
            cold = await self.bring(context, links, target)
            yield len(links) - cold
            if cold:
                return

    async def bring(self, context: RequestContext, links: Sequence[Link], target: Tier) -> int:
        """Bring one batch, root first; returns how many have no room or do not come, after a few attempts."""
        for attempt in range(TRIES_MAX):
            cold = self._cold(context.scope, links, target)
            if not cold:
                return 0
            await asyncio.sleep(POLL_INTERVAL_S if attempt else 0)
            await self._fetch(context, cold, attempt)
            if target is self._node.entry_tier:
                self._raise(context, cold)
            await self._moves(context, cold)
            if target is not self._node.entry_tier:
                await self._sink(context, cold, target)
        return len(self._cold(context.scope, links, target))

    def leading(self, context: RequestContext, links: Sequence[Link], target: Tier) -> int:
        """How many of the leading blocks are in a tier now."""
        cold = dict(self._cold(context.scope, links, target))
        return next((i for i, (digest, _) in enumerate(links) if digest in cold), len(links))

    async def _fetch(self, context: RequestContext, links: Sequence[Link], attempt: int) -> None:
        """Start to fetch what is not here from whoever has it, another agent at each attempt."""
        directory, index = self._cache.directory, self._node.index
        absent = set(index.blocks(context.scope).absent([digest for digest, _ in links]))
        wanted = [link for link in links if link[0] in absent]
        if not wanted or directory is None:
            return
        copies = await directory.locate(context.secret, [digest for digest, _ in wanted])
        here = index.blocks(context.scope)
        ready = [
            (link, at[attempt % len(at)]) for link, at in zip(wanted, copies, strict=True) if at and link[0] not in here
        ]
        if ready:
            self._cache.remote.start(context, [it[0] for it in ready], [it[1] for it in ready], Priority.ARCHIVE)

    def _raise(self, context: RequestContext, links: Sequence[Link]) -> None:
        """Start to copy up what is here in a slower context."""
        for entry in self._entries(context, links):
            if entry.residences:
                self._cache.promoter.start_warming(entry)

    async def _moves(self, context: RequestContext, links: Sequence[Link]) -> None:
        """Wait for what is on its way, whoever started it."""
        moves = {entry.move for entry in self._entries(context, links) if entry.move is not None}
        if moves:
            await asyncio.wait(moves)

    async def _sink(self, context: RequestContext, links: Sequence[Link], target: Tier) -> None:
        """Copy what is here to a tier that engines do not read from, root first."""
        entries = [e for e in self._entries(context, links) if e.residences and e.residence(target) is None]
        for i in range(0, len(entries), SINKS_AT_ONCE):
            copies = (
                self._cache.demoter.demote_to(entry, entry.residences[0].tier, target, Priority.ARCHIVE)
                for entry in entries[i : i + SINKS_AT_ONCE]
                if entry.residences
            )
            await asyncio.gather(*copies)

    def _entries(self, context: RequestContext, links: Sequence[Link]) -> list[Entry]:
        return [e for e in self._cache.reader.lookup_now(context, [d for d, _ in links]) if e is not None]

    def _cold(self, scope: ScopeId, links: Sequence[Link], target: Tier) -> list[Link]:
        """Blocks that are not where they should be; the others count as used, as if an engine had prefetched them."""
        cold = []
        for link in links:
            entry = self._node.index.find(scope, link[0])
            if entry is None or entry.residence(target) is None:
                cold.append(link)
            else:
                entry.used_at_s = self._node.clock()
        return cold

    def _warm_now(self, plan: WarmPlan, target: Tier) -> tuple[int, int]:
        """Blocks and raw bytes of the plan that are where they should be now, whoever brought them."""
        blocks = size_bytes = 0
        for portion in plan.portions:
            found = self._node.index.blocks(portion.chain.secret.scope)
            digests = portion.chain.digests[portion.start : portion.end]
            here = sum(e is not None and e.residence(target) is not None for e in found.get_all(digests))
            blocks += here
            size_bytes += here * portion.chain.raw_bytes
        return blocks, size_bytes


def _ended(count: Count, plan: WarmPlan, tier: str) -> Ended:
    """What people read, and programs where it had no success."""
    left = count.blocks_total - count.blocks_done - count.blocks_missing
    message = f"{count.blocks_done} of {count.blocks_total} blocks are in {tier}"
    if count.blocks_missing:
        message += f"; {count.blocks_missing} prefixes are nowhere as a whole"
    if plan.left_out:
        message += f"; {plan.left_out} blocks more are beyond the bound in bytes"
    if left:
        return Ended(f"{message}; {left} found no room or did not arrive", "NotWarmed")
    return Ended(message, "NotFound" if count.blocks_missing and not count.blocks_done else "")
