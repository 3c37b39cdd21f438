"""T14: one tenant floods a node with four times what all its tiers hold; another one goes on finding its blocks.

The victim reads a working set that lies within its guarantee, or has only the weight that everybody has, once after
each flood, and stores again what it missed, as an engine does. Real core, real memory tiers, a record store on a disk
in memory, virtual time. The same reads without a flood give the ratio to compare with. Floods: new blocks, new blocks
in a scope that both share, blocks read up from below again and again, and new blocks while every lease that can be had
is held. The control makes room as if there were one tenant: the victim finds next to nothing then, or only in slow
tiers where there are any.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from sim.volume import MemoryVolume

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.file.record_store import open_store
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import SlotRequest, Tier
from kvstrata_agent.cache.eviction import Evictor
from kvstrata_agent.cache.eviction_candidates import EvictionRequest
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.quota import Bound, Rules
from kvstrata_api.blocks import ScopeId
from kvstrata_api.models.pool import NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    Clock,
    DeclaredTenants,
    FakeAuthenticator,
    digest,
    dram_tier,
    make_core,
    secret,
    store_chain,
)
from support.runner.outcome import Outcome, Scale
from support.runner.virtual_loop import run_virtually

SLOTS: Final = 64
"""Of each memory tier."""
RECORDS: Final = 64
RECORD_BYTES: Final = 2 * BLOCK_BYTES
"""A block and its header, in pages."""
TIERS: Final = (("dram",), ("dram", "cxl"), ("dram", "nvme"), ("dram", "cxl", "nvme"))
FLOOD_PARTS: Final = 4
"""Bytes of one flood in capacities of all tiers together."""
CHAIN: Final = 4
FALL_MAX: Final = 0.01
"""One point of hit ratio."""
COLLAPSED: Final = 0.5
"""Of the blocks that were found before: what a flood leaves where nobody is isolated."""
HELD_MAX: Final = 48
"""Blocks that the flood holds leases of."""
DOMAIN: Final = ScopeId("domain/d/uid-d/v1")


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of the attack."""

    tiers: tuple[str, ...]
    protection: str
    """`guarantee` or `weight`."""
    flood: str
    """`store`, `share`, `read` or `hold`."""

    @property
    def working_set(self) -> int:
        """Victim's blocks: all of a guarantee beyond its share, or three quarters of an equal share of a tier."""
        return 5 * SLOTS // 8 if self.protection == "guarantee" else 3 * SLOTS // 8

    def __str__(self) -> str:
        return f"{'+'.join(self.tiers)}, {self.protection}, {self.flood}"


CASES: Final = tuple(
    Case(tiers, protection, flood)
    for tiers in TIERS
    for protection in ("guarantee", "weight")
    for flood in ("store", "share", "read", "hold")
)
SHORT: Final = (
    Case(("dram",), "guarantee", "store"),
    Case(("dram",), "weight", "hold"),
    Case(("dram", "nvme"), "guarantee", "share"),
    Case(("dram", "nvme"), "weight", "read"),
    Case(("dram", "cxl", "nvme"), "guarantee", "store"),
)


@dataclass(slots=True)
class Hits:
    """What the victim found."""

    asked: int = 0
    found: int = 0
    fast: int = 0
    """In the fastest tier."""

    @property
    def ratio(self) -> float:
        """Blocks found of blocks asked for."""
        return self.found / self.asked

    @property
    def fast_ratio(self) -> float:
        """Blocks found in the fastest tier of blocks asked for."""
        return self.fast / self.asked


class OpenEvictor(Evictor):
    """Makes room as if all blocks were one tenant's: the least recently used leaf goes, whosever it is."""

    async def _make_room(self, request: SlotRequest, attempt: int) -> bool:
        extents = request.tier.extents_to_free(request.scope, request.size_bytes, request.writer)
        freed_bytes = 0
        for extent in extents:
            eviction = EvictionRequest(request.tier.backend.capacity_bytes, "room", extents=frozenset({extent}))
            own_bytes = 0 if attempt % 2 else await self._evict(request.tier, eviction)
            eviction = EvictionRequest(request.tier.backend.capacity_bytes // 8, "room")
            freed_bytes += own_bytes or await self._evict(request.tier, eviction)
        return freed_bytes > 0 or not extents

    async def _evict_shares(self, tier: Tier, need_bytes: int, reason: str) -> int:
        return await self._evict(tier, EvictionRequest(need_bytes, reason, Priority.DEMOTE))


@dataclass(slots=True)
class Node:
    """One node under attack."""

    case: Case
    core: AgentParts
    rng: random.Random
    sweeper: Sweeper
    next_block: int = 100_000
    held: list[int] = field(default_factory=list)

    async def victim_reads(self, hits: Hits) -> None:
        """Read the whole working set, one chain after the other, and store again what is missing."""
        chains = [list(range(i, i + CHAIN)) for i in range(1, 1 + self.case.working_set, CHAIN)]
        self.rng.shuffle(chains)
        at, fastest = place("victim"), self.core.node.tiers[0]
        for chain in chains:
            digests = [digest(n) for n in chain]
            entries = self.core.cache.reader.lookup_now(at, digests)
            hits.asked += len(chain)
            hits.fast += sum(e is not None and e.residence(fastest) is not None for e in entries)
            reads = (await self.core.cache.reader.acquire(AcquireCall(at, digests, 30.0, 5.0))).reads
            hits.found += len(reads)
            self.core.cache.release(at.owner, [r.lease.id for r in reads])
            if len(reads) < len(chain):
                await store_fresh(self.core, at, chain)
            await self.rest()

    async def flood(self) -> None:
        """Bring in, or up, four times what all tiers hold."""
        blocks = FLOOD_PARTS * sum(t.backend.capacity_bytes for t in self.core.node.tiers) // BLOCK_BYTES
        at = place("flood", DOMAIN if self.case.flood == "share" else None)
        first = self.next_block
        for i in range(0, blocks, CHAIN):
            if self.case.flood == "read" and i >= blocks // FLOOD_PARTS:
                await self._read_up(at, first, i)
            else:
                await self._store(at)
            if i % (8 * CHAIN) == 0:
                await self.rest()

    async def _store(self, at: RequestContext) -> None:
        chain = list(range(self.next_block, self.next_block + CHAIN))
        self.next_block += CHAIN
        await store_fresh(self.core, at, chain)
        if self.case.flood == "hold" and len(self.held) < HELD_MAX:
            reads = (
                await self.core.cache.reader.acquire(AcquireCall(at, [digest(n) for n in chain], 3600.0, 0.0))
            ).reads
            self.held += [r.lease.id for r in reads]

    async def _read_up(self, at: RequestContext, first: int, at_block: int) -> None:
        """Read what the flood has stored before, the most recent first; what is below comes up."""
        back = at_block % max(CHAIN, self.next_block - first)
        start = self.next_block - CHAIN - back // CHAIN * CHAIN
        reads = (
            await self.core.cache.reader.acquire(
                AcquireCall(at, [digest(n) for n in range(start, start + CHAIN)], 30.0, 0.5)
            )
        ).reads
        self.core.cache.release(at.owner, [r.lease.id for r in reads])

    async def rest(self) -> None:
        """Let the sweep come round."""
        await self.sweeper._tend()


def place(tenant: str, scope: ScopeId | None = None) -> RequestContext:
    """A caller of its own connection, in its own scope unless another is given."""
    own = ScopeId(f"tenant/{tenant}/uid-{tenant}/v1")
    return RequestContext(1 if tenant == "victim" else 2, tenant, secret(scope or own), LAYOUT_ID, BLOCK_BYTES)


async def store_fresh(core: AgentParts, at: RequestContext, chain: Sequence[int]) -> None:
    """Store those blocks of a chain that are not there."""
    blocks = core.node.index.blocks(at.scope)
    missing = [n for n in chain if digest(n) not in blocks]
    if missing:
        await store_chain(core, at, missing, missing[0] - 1 if missing[0] > chain[0] else None)


async def make(case: Case, *, is_open: bool) -> Node:
    """A node with the tiers of a case, and what the victim is promised; `is_open`: isolation is off."""
    core = make_core([await _tier(name, i) for i, name in enumerate(case.tiers)], Ticking())
    if is_open:
        core.cache.evictor = OpenEvictor(core.node, core.cache.mover)
        core.cache.archiver._demoter = core.cache.demoter = core.cache.evictor.demoter
        core.cache.promoter._evictor = core.cache.writer._room = core.cache.evictor
    wanted = case.working_set
    bounds = {t: Bound(None, (RECORD_BYTES if t == "nvme" else BLOCK_BYTES) * wanted) for t in case.tiers}
    guarded = Rules(bounds=bounds) if case.protection == "guarantee" else Rules()
    core.cache.tenancy.follow(DeclaredTenants(victim=guarded, flood=Rules()))
    return Node(case, core, random.Random(str(case)), Sweeper(core.cache, FakeAuthenticator()))


class Ticking(Clock):
    """Time that passes with every look, so that no two uses are at the same time."""

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


async def _tier(name: str, level: int) -> Tier:
    if name != "nvme":
        tier = dram_tier(SLOTS * BLOCK_BYTES, level, level + 1)
        tier.spec = tier.spec.model_copy(update={"name": name})
        return tier
    capacity_bytes = RECORDS * RECORD_BYTES
    backend = await open_store(MemoryVolume(), capacity_bytes)
    async for _ in backend.recover():
        raise AssertionError("the disk is empty")
    spec = NodeTier(name=name, type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=NvmeTier(path="/memory"))
    return Tier(spec, level, backend, level + 1)


async def _measure(case: Case, rounds: int, *, is_flooded: bool, is_open: bool = False) -> Hits:
    node = await make(case, is_open=is_open)
    hits = Hits()
    await node.victim_reads(Hits())
    for _ in range(rounds):
        if is_flooded:
            await node.flood()
        await node.victim_reads(hits)
    await node.core.close()
    for tier in node.core.node.tiers:
        await tier.backend.close()
    return hits


def measure(case: Case, rounds: int, *, is_flooded: bool, is_open: bool = False) -> Hits:
    """Play one case in a loop of its own."""
    return run_virtually(_measure(case, rounds, is_flooded=is_flooded, is_open=is_open), limit_s=1e9)


def _broken(case: Case, calm: Hits, flooded: Hits) -> Iterator[str]:
    for what, before, after in (
        ("hit ratio", calm.ratio, flooded.ratio),
        ("hit ratio of the fastest tier", calm.fast_ratio, flooded.fast_ratio),
    ):
        if before - after > FALL_MAX:
            yield f"{case}: {what} falls from {before:.3f} to {after:.3f}"


def run(scale: Scale) -> Outcome:
    """Compare every case with and without the flood, then once with isolation off."""
    rounds = scale.of(8, 1)
    calm, flooded = Hits(), Hits()
    violations: list[str] = []
    for case in scale.of(CASES, SHORT):
        before, after = (measure(case, rounds, is_flooded=f) for f in (False, True))
        violations += _broken(case, before, after)
        for sum_, part in ((calm, before), (flooded, after)):
            sum_.asked, sum_.found, sum_.fast = (
                sum_.asked + part.asked, sum_.found + part.found, sum_.fast + part.fast,
            )  # fmt: skip
    dram, tiered = (measure(case, 1, is_flooded=True, is_open=True) for case in (SHORT[0], SHORT[-1]))
    values = {
        "calm_hit_ratio": calm.ratio,
        "flooded_hit_ratio": flooded.ratio,
        "calm_fast_ratio": calm.fast_ratio,
        "flooded_fast_ratio": flooded.fast_ratio,
        "control_hit_ratio": dram.ratio,
        "control_fast_ratio": tiered.fast_ratio,
    }
    is_caught = dram.ratio < COLLAPSED and tiered.fast_ratio < COLLAPSED
    return Outcome(flooded.asked, "blocks asked for", tuple(violations), is_caught, values)
