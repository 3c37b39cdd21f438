"""Moves blocks to agents of another pool: this side offers, chain by chain, and drops what was taken; that side adopts.

The other agent fetches what it is offered by itself, by the way that all its reads take, and answers which blocks are
whole in their tier. All that is remembered is which those are: after a restart everything that is still here is
offered again, and what is there already is answered at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from kvstrata_agent.blocks.block import account_of
from kvstrata_agent.blocks.request import NOBODY, RequestContext
from kvstrata_agent.cache.remote_fetch import FETCH_BLOCKS
from kvstrata_agent.fleet.peers.chain_lookup import CHAIN_MAX, SEGMENT_BLOCKS_MAX, segment_of
from kvstrata_agent.fleet.peers.client import Offer, Taken
from kvstrata_agent.policy.operations import Count, DrainProgress, Ended, first_missing, leaves, may_leave
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import RetryableError
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.ports import Peers
    from kvstrata_agent.cache.tenant_lifecycle import Tenancy
    from kvstrata_agent.operations.warm import Warmer
    from kvstrata_agent.policy.operations import ReportProgress
    from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret
    from kvstrata_api.models.poolnode import MigrateOrder


POLL_INTERVAL_S: Final = 1.0
"""Between two rounds of agents that do not answer, and polling interval of blocks that are held."""
POLLS_MAX: Final = 3
"""Rounds in which every agent refuses the first batch that is refused: one may be restarting, or lag behind."""
STEP_BLOCKS: Final = 1024
"""Blocks looked at, or dropped, between two turns of the loop."""

ADOPTIONS_MAX: Final = 4
"""Offers worked on at once, from all agents together; others wait."""

_AWAY: Final = Ended("no agent of the other pool answers", "TargetsAway")
_HELD: Final = Ended("blocks are leased, pinned, decoded from or written", DrainProgress.HELD.value)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A block with those before it, as far as they are here."""

    scope: ScopeId
    account: str
    layout_id: LayoutId
    raw_bytes: int
    digests: tuple[bytes, ...]
    """The first one of the chain first."""
    before: bytes


@dataclass(slots=True)
class _Run:
    """One order under way."""

    order: MigrateOrder
    report: ReportProgress
    blocks_total: int
    at: int = 0
    """Which of the order's nodes is asked."""
    count: Count = field(default_factory=Count)
    taken: dict[ScopeId, set[bytes]] = field(default_factory=dict)
    waiting: list[tuple[ScopeId, str, bytes]] = field(default_factory=list)
    """Ends of chains of which something stays because it is held: scope, account, block."""
    refusals: Counter[str] = field(default_factory=Counter)

    def report_progress(self, kept: Ended | None = None) -> None:
        """Report how far it is."""
        self.report(self.count, kept)

    def add(self, chain: _Chain, digests: Sequence[bytes], ours: int) -> None:
        """Note what the other pool has now; `ours` of them are blocks of the account."""
        self.taken.setdefault(chain.scope, set()).update(digests)
        blocks, size_bytes = self.count.blocks_done + ours, self.count.bytes_done + ours * chain.raw_bytes
        self.count = Count(blocks, self.blocks_total, size_bytes, self.blocks_total * chain.raw_bytes)


@runtime_checkable
class OfferedPeers(Protocol):
    """Agents of other pools (`kvstrata_agent.fleet.peers`)."""

    async def offer(self, agent: str, offer: Offer) -> Taken | None:
        """What the agent of this name answers (`Adopter.adopt`); None when it does not. Never raises."""


class Migrator:
    """Carries out one order at a time."""

    def __init__(self, node: Node, peers: Peers | None) -> None:
        self._node = node
        self._peers = _offered(peers)

    async def migrate(self, order: MigrateOrder, report: ReportProgress) -> Ended:
        """Offer what is here now, drop what was taken, and wait for what is held. May be repeated."""
        if self._peers is None:
            return Ended("this agent has no way to others", "NoPeers")
        accounts = list(self._accounts(order.tenant))
        run = _Run(order, report, sum([await self._size(*a) for a in accounts]))
        run.count = Count(blocks_total=run.blocks_total)
        run.report_progress()
        for scope, account in accounts:
            await self._migrate(self._peers, run, scope, account)
        while run.waiting and not order.keep_source:
            run.report_progress(_HELD)
            await asyncio.sleep(POLL_INTERVAL_S)
            waiting, run.waiting = run.waiting, []
            for scope, account, leaf in waiting:
                await self._drop(run, await self._chain(scope, account, leaf), leaf)
        return self._ended(run)

    def _accounts(self, tenant: str | None) -> Iterator[tuple[ScopeId, str]]:
        """Scopes that have blocks here, with each account that may have some there."""
        held = {account for tier in self._node.tiers for account in tier.tenant_bytes}
        for scope in self._node.index.scopes():
            is_own = scope.split("/")[0] == ScopeKind.TENANT
            for account in {account_of(scope)} if is_own else held:
                if tenant in (None, account):
                    yield scope, account

    async def _size(self, scope: ScopeId, account: str) -> int:
        count = 0
        async for _ in _gently(self._node.index.blocks(scope).digests(account)):
            count += 1
        return count

    async def _migrate(self, peers: OfferedPeers, run: _Run, scope: ScopeId, account: str) -> None:
        blocks, digests, parents = self._node.index.blocks(scope), set[bytes](), set[bytes]()
        async for digest in _gently(blocks.digests(account)):
            digests.add(digest)
            parents.add(blocks.parent_of(digest) or b"")
        for leaf in leaves(digests, parents):
            chain = await self._chain(scope, account, leaf)
            if chain is not None:
                await self._offer(peers, run, chain, digests)
                await self._drop(run, chain, leaf)
                run.report_progress()
            await asyncio.sleep(0)

    async def _chain(self, scope: ScopeId, account: str, leaf: bytes) -> _Chain | None:
        """A block with those before it; None when it is not here any more."""
        index, found, at = self._node.index, list[bytes](), leaf
        first = segment = segment_of(index, BlockKey(scope, leaf), SEGMENT_BLOCKS_MAX)
        while segment is not None and first is not None and segment.layout_id == first.layout_id:
            found += segment.digests
            at = segment.before
            if not at or at in segment.digests or len(found) > CHAIN_MAX:
                break
            await asyncio.sleep(0)
            segment = segment_of(index, BlockKey(scope, at), SEGMENT_BLOCKS_MAX)
        if first is None:
            return None
        return _Chain(scope, account, first.layout_id, first.raw_bytes, tuple(reversed(found)), at)

    async def _offer(self, peers: OfferedPeers, run: _Run, chain: _Chain, ours: set[bytes]) -> None:
        """Offer what was not taken yet in batches; what stands behind a refused block is left with it."""
        if "/" in chain.account:
            run.refusals["WriterUnknown"] += 1
            return
        at = first_missing(chain.digests, run.taken.get(chain.scope, ()))
        while at < len(chain.digests):
            batch = chain.digests[at : at + FETCH_BLOCKS]
            before = chain.digests[at - 1] if at else chain.before
            place = (chain.scope, chain.account, chain.layout_id, chain.raw_bytes)
            taken = await self._taken(peers, run, Offer(*place, batch, before, run.order.tier or ""))
            if not taken.count:
                run.refusals[taken.reason] += 1
                return
            new = batch[: taken.count]
            run.add(chain, new, sum(d in ours for d in new))
            run.report_progress()
            at += taken.count

    async def _taken(self, peers: OfferedPeers, run: _Run, offer: Offer) -> Taken:
        """What becomes of a batch: the next agent is asked where one does not answer or takes nothing."""
        nodes, polls, polls_max = run.order.nodes, 0, 1 if run.refusals else POLLS_MAX
        while True:
            refused: Taken | None = None
            for _ in nodes:
                agent = names.pool_node_name(run.order.to, nodes[run.at])
                taken = await peers.offer(agent, offer)
                if taken is not None and taken.count:
                    return taken
                refused = taken or refused
                run.at = (run.at + 1) % len(nodes)
            polls += refused is not None
            if refused is not None and polls >= polls_max:
                return refused
            run.report_progress(None if refused else _AWAY)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _drop(self, run: _Run, chain: _Chain | None, leaf: bytes) -> None:
        """Drop what the other pool has, from the end of the chain, as far as nobody needs it here."""
        if chain is None or run.order.keep_source:
            return
        index, taken = self._node.index, run.taken.get(chain.scope, set())
        async for digest in _gently(reversed(chain.digests)):
            entry = index.find(chain.scope, digest)
            if entry is None or entry.tenant != chain.account:
                return
            is_held, is_continued = entry.is_held, index.is_continued(entry)
            if not may_leave(is_taken=digest in taken, is_held=is_held, is_continued=is_continued):
                if digest in taken and is_held:
                    run.waiting.append((chain.scope, chain.account, leaf))
                return
            self._node.drop_block(entry, "migrated")
            taken.discard(digest)  # Who stores it again has not been taken.

    def _ended(self, run: _Run) -> Ended:
        done, total = run.count.blocks_done, run.blocks_total
        message = f"{done} of {total} blocks are in pool {run.order.to}"
        if run.refusals:
            reasons = ", ".join(f"{reason} ({n} chains)" for reason, n in run.refusals.most_common())
            return Ended(f"{message}; not taken: {reasons}", "NotMigrated")
        return Ended(message)


async def _gently(digests: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The same, with turns of the loop for others in between."""
    for number, digest in enumerate(digests, start=1):
        yield digest
        if number % STEP_BLOCKS == 0:
            await asyncio.sleep(0)


def _offered(peers: object) -> OfferedPeers | None:
    """The peers, where blocks can be offered to them."""
    return peers if isinstance(peers, OfferedPeers) else None


class Adopter:
    """Takes blocks of another pool's agent over: implements `server.Adopter`.

    Believes nothing of an offer but that it may be looked at: rights, quotas and checksums are those of a read.
    """

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
        """Key of the scope, where the tenant may write there; None where not, or while that is unknown."""
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
        now_s = self._node.clock()
        hard_bytes = self._node.tenants.hard_bytes(tier, offer.tenant)
        if hard_bytes is not None and tier.tenant_bytes.get(offer.tenant, 0) + more_bytes > hard_bytes:
            return False
        open_tiers = (t for t in self._node.tiers if t.level >= tier.level and t.facts(now_s).takes_writes)
        return any(self._node.excess_bytes(t, more_bytes) <= 0 for t in open_tiers)
