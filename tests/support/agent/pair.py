"""Two cores, a directory and a way between them in one process, and an engine's view of either."""

import asyncio
from collections.abc import Sequence

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.client import Offer, Taken
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import BlockKey, ScopeId, ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_metadata.store.records import Announcement, Location, SessionRecord
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    Clock,
    DeclaredTenants,
    TestCodecs,
    bytes_of,
    caller,
    dict_tier,
    digest,
    dram_tier,
    make_node,
    secret,
)


class FakeDirectory:
    """Keeps announcements by scope; answers with what others announced."""

    def __init__(self, shared: dict[tuple[str, bytes], dict[str, Announcement]], me: str) -> None:
        self.is_up, self.owes_all = True, False
        self.answers_after_s = 0.0
        """Who waits less long is told of nothing."""
        self.sessions: dict[tuple[str, str], SessionRecord | None] = {}
        self._shared = shared
        self._me = me

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:
        for change in changes:
            held = self._shared.setdefault((secret.tag(), change.digest), {})
            if change.is_gone:
                held.pop(self._me, None)
            else:
                held[self._me] = change

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        self.sessions[secret.tag(), session] = record

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:
        return self.sessions.get((secret.tag(), session))

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        await asyncio.sleep(0)
        is_late = within_s < self.answers_after_s
        found = [{} if is_late else self._shared.get((secret.tag(), d), {}) for d in digests]
        return [
            tuple(Location(who, 7, a.tier, a.stamp, a.stored_bytes) for who, a in held.items() if who != self._me)
            for held in found
        ]


class FakePeers:
    """Copies out of the other core's memory, under its lease; may lose or damage blocks on the way."""

    def __init__(self) -> None:
        self.owner: AgentParts
        self.lost: set[bytes] = set()
        self.registered: set[int] = set()
        self.taker: AgentParts | None = None
        """Who answers offers; nobody while None."""
        self.offers: list[tuple[str, Offer]] = []

    def register_extent(self, extent: int, view: memoryview) -> None:  # noqa: ARG002  The port's signature.
        self.registered.add(extent)

    def unregister_extent(self, extent: int) -> None:
        self.registered.discard(extent)

    async def trace(self, key: BlockKey, at: Location, most: int) -> ChainSegment | None:
        assert at.agent == "pool.a"
        return self.owner.lender.trace(key, most)

    async def offer(self, agent: str, offer: Offer) -> Taken | None:
        self.offers.append((agent, offer))
        return await self.taker.adopter.adopt(offer) if self.taker is not None else None

    async def fetch(
        self,
        wanted: Sequence[Wanted],
        deadline_s: float,  # noqa: ARG002  The port's signature.
    ) -> list[bytes | None]:
        lent = await self.owner.lender.lend([w.key for w in wanted], wanted[0].layout_id, 5.0)
        parents: list[bytes | None] = []
        for want, loan in zip(wanted, lent, strict=True):
            if loan is None or want.key.digest in self.lost:
                parents.append(None)
                continue
            want.into[:] = loan.view
            want.seal()
            is_right = checksum(want.into, want.key.digest, loan.epoch, loan.slot.stamp) == loan.checksum
            parents.append(loan.parent if is_right else None)
        self.owner.lender.end([loan.lease for loan in lent if loan is not None])
        return parents


class Pair:
    """Node `a` holds blocks, node `b` reads them."""

    def __init__(self) -> None:
        shared: dict[tuple[str, bytes], dict[str, Announcement]] = {}
        self.peers = FakePeers()
        self.directories = {name: FakeDirectory(shared, f"pool.{name}") for name in "ab"}
        self.a, self.b = self._core("a"), self._core("b")
        self.peers.owner = self.a

    def _core(self, name: str) -> AgentParts:
        tiers = [dram_tier(16 * BLOCK_BYTES), dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)]
        node = make_node(tiers, Clock())
        node.name = name
        node.announcer = Announcer(node.index, self.directories[name], secret)
        return AgentParts(node, TestCodecs(), self.directories[name], self.peers)

    async def store(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            parent = digest(n - 1) if n > 1 else b""
            made, *_ = await self.a.cache.writer.reserve(place(), parent, [digest(n)])
            assert made[0] is not None
            mappable = made[0].tier.backend.mappable
            assert mappable is not None
            mappable.view(made[0].slot)[:BLOCK_BYTES] = bytes_of(n)
            self.a.cache.writer.publish_now(1, [made[0].id], [checksum(bytes_of(n), digest(n), 7, made[0].slot.stamp)])
        self.a.node.announcer.flush()

    async def close(self) -> None:
        for core in (self.a, self.b):
            await core.close()
            for tier in core.node.tiers:
                await tier.backend.close()


def place(scope: ScopeId = SCOPE) -> RequestContext:
    return RequestContext(1, "a", secret(scope), LAYOUT_ID, BLOCK_BYTES)


async def load(core: AgentParts, numbers: Sequence[int], scope: ScopeId = SCOPE) -> list[tuple[bytes, str]]:
    reads = (await core.cache.reader.acquire(AcquireCall(place(scope), [digest(n) for n in numbers], 30.0, 2.0))).reads
    found = []
    for read in reads:
        tier, slot, record = read.lease.residence
        mappable = tier.backend.mappable
        assert mappable is not None
        block = bytes(mappable.view(slot)[: record.raw_bytes])
        assert checksum(block, read.lease.entry.digest, core.node.epoch, slot.stamp) == record.checksum
        found.append((block, read.source))
    core.cache.release(1, [r.lease.id for r in reads])
    return found


def tenants(version: int = 1) -> DeclaredTenants:
    """Tenants `a` and `b`, each with a scope of its own."""
    declared = DeclaredTenants()
    declared.version = version
    declared.callers = {name: caller(name) for name in "ab"}
    return declared


def held(core: AgentParts, tier: str, scope: ScopeId = SCOPE) -> list[int]:
    found = core.node.index.blocks(scope).entries()
    return sorted(int.from_bytes(e.digest, "big") for e in found if any(r.tier.name == tier for r in e.residences))
