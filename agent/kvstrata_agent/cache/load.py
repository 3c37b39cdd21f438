"""The load side: how much of a prefix is there, lease it, bring it up, let it go."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvstrata_agent.backends.base import matches
from kvstrata_agent.backends.threads import together
from kvstrata_agent.cache.remote_fetch import REMOTE
from kvstrata_agent.codec.base import UNENCODED
from kvstrata_agent.policy.prefetch import LEAD_S, coming_up_s
from kvstrata_agent.policy.recompute import (
    CostChoice,
    CostInputs,
    EngineLoad,
    Split,
    choose,
    congestion_s,
    load_of,
    locate_s,
    split,
)
from kvstrata_api.errors import BlockCorruptError
from kvstrata_api.tiers import Lookup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.blocks.leases import Lease
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.ports import Directory
    from kvstrata_agent.cache.promotion import Promoter
    from kvstrata_agent.cache.remote_fetch import RemoteFetcher
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_api.wire import Handover
    from kvstrata_metadata.store.records import Location


REMOTE_BIT: Final = 128
"""Bit of a place: the copy is on another node (`wire.Found.places`)."""

_HIT: Final = int(Lookup.HIT)
_PENDING: Final = int(Lookup.PENDING)

LOCATE_KEYS_MAX: Final = 4096
"""Keys asked of the directory in one round trip; what lies behind them is found by the next lookup."""


BLOCKS_BEFORE_MAX: Final = 16_384
"""Of a chain that are counted before what is asked for: a few ms."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Answer to one lookup, as in `wire.Found`."""

    states: bytes
    """One `tiers.Lookup` code for each key."""
    places: bytes
    """For each leading block that is a hit the index of its tier's name, plus `REMOTE_BIT` on another node."""
    tier_names: tuple[str, ...]


def findings(entries: Sequence[Entry | None], remote: Mapping[int, str], absent: Lookup) -> Findings:
    """Put local and remote findings together.

    `entries` holds None for keys that are not here; `remote` names the tier of those among them that another agent
    has, by position; `absent` is the state of all others.
    """
    code = int(absent)
    held = [None if e is None else e.residences for e in entries]
    states = bytearray([code if r is None else _HIT if r else _PENDING for r in held])
    for position in remote:
        states[position] = _HIT
    hits = len(states) - len(states.lstrip(bytes((_HIT,))))
    tiers: list[Tier | str] = [remote[i] if r is None else r[0].tier for i, r in enumerate(held[:hits])]
    if tiers and tiers.count(tiers[0]) == hits and not isinstance(tiers[0], str):  # As nearly always.
        return Findings(bytes(states), bytes(hits), (tiers[0].name,))
    kinds = {t: t if isinstance(t, str) else t.name for t in dict.fromkeys(tiers)}
    names = tuple(dict.fromkeys(kinds.values()))
    codes = {t: names.index(name) | (REMOTE_BIT if isinstance(t, str) else 0) for t, name in kinds.items()}
    return Findings(bytes(states), bytes(map(codes.__getitem__, tiers)), names)


class Read(msgspec.Struct, frozen=True):
    """One leased block and where it was when it was asked for."""

    lease: Lease
    source: str


class AcquireCall(msgspec.Struct, frozen=True):
    """One request for the blocks of a prefix, within the bounds of the agent."""

    context: RequestContext
    digests: Sequence[bytes]
    lease_s: float
    """For so long from the answer on."""
    deadline_s: float
    """So many seconds may be spent on what is not in memory."""
    part_bytes: int = 0
    """Size of the parts whose checksums are wanted besides; 0 for none."""
    handover: Handover | None = None
    """Whose blocks these are while they are being written; None for whole blocks."""
    devices: frozenset[str] = frozenset()
    """Where blocks may be leased in place: the caller can open these, and may write the scope."""


class Prefetched(NamedTuple):
    """What came of asking for a prefix to be brought up."""

    started: int
    """Blocks that are on their way for it."""
    blocks: int
    """Leading ones that are up or on their way."""


class PrefetchedChains(NamedTuple):
    """What came of bringing a session's chains up."""

    blocks: int
    """That are on their way for it."""
    size_bytes: int
    """Of these, raw."""
    is_whole: bool
    """False when the pool's bound was reached before their ends."""


class Acquisition(NamedTuple):
    """What came of asking for a prefix."""

    reads: list[Read]
    """Of the leading blocks."""
    busy_s: float = 0.0
    """Estimated seconds until the next one is worth asking for again, where only its path's queue is against it."""
    may_grow: bool = False
    """True when `Reader.acquire` may get more of them, from slower tiers or other agents."""
    held: Sequence[str] = ()
    """Where each of the leading keys was that the fleet has: name of the tier, or `remote`."""
    captured: int = 0
    """Of these, leading ones that are on this node, or that were asked of the node that has them."""


class _Run(NamedTuple):
    """Leading keys that the fleet has; None stands for a block that is elsewhere."""

    wanted: list[Entry | None]
    """To be brought up."""
    left: list[Entry | None]
    """Those behind them, which the engine computes sooner."""
    choice: Split | None
    """Where there was one."""


class Reader:
    """Carries out the verbs of readers."""

    def __init__(
        self, node: Node, promoter: Promoter, remote: RemoteFetcher, mover: Mover, directory: Directory | None
    ) -> None:
        self._node = node
        self._promoter = promoter
        self._remote = remote
        self._mover = mover
        self._directory = directory

    def lookup_now(self, context: RequestContext, digests: Sequence[bytes]) -> list[Entry | None]:
        """Return the local entry of each key, None for those that are absent, of another layout, or away."""
        found, layout_id = self._node.index.blocks(context.scope).get_all(digests), context.layout_id
        entries = [e if e is not None and e.layout_id == layout_id else None for e in found]
        if self._node.is_any_away:
            return [None if e is not None and e.move is None and self._node.is_away(e) else e for e in entries]
        return entries

    def still(self, context: RequestContext, entries: Sequence[Entry | None]) -> Sequence[Entry | None]:
        """What `lookup_now` found before others were asked: nothing where the scope was erased meanwhile."""
        return [None] * len(entries) if self._node.index.is_erased(context.scope) else entries

    def needs_directory(self, entries: Sequence[Entry | None]) -> bool:
        """True when other agents may know of keys that this one does not hold."""
        return self._directory is not None and self._directory.is_up and None in entries

    def answer(self, entries: Sequence[Entry | None], located: dict[int, Location]) -> Findings:
        """Put local and remote findings together."""
        away = self._directory is not None and not self._directory.is_up
        remote = {position: location.tier for position, location in located.items()}
        return findings(entries, remote, Lookup.RETRY if away else Lookup.MISS)

    async def locate(
        self, context: RequestContext, digests: Sequence[bytes], entries: Sequence[Entry | None], left_s: float = 0.0
    ) -> dict[int, Location]:
        """Ask the directory for the keys that are absent here; returns one location for each that was found.

        Waits the longer for the answer the more there is to compute without it, within the reader's `left_s`.
        """
        if self._directory is None or not self._directory.is_up:
            return {}
        missing = [i for i, e in enumerate(entries) if e is None][:LOCATE_KEYS_MAX]
        spec = self._node.spec
        tokens, speed = len(missing) * spec.compatibility.block_tokens, self._engine(context).prefill_tokens_per_s
        within_s = locate_s(tokens, speed, left_s)
        copies = await self._directory.locate(context.secret, [digests[i] for i in missing], within_s=within_s)
        return {i: c[0] for i, c in zip(missing, copies, strict=True) if c}

    def acquire_now(self, call: AcquireCall) -> Acquisition:
        """Lease the leading blocks that are in the entry tier already."""
        node, tier = self._node, self._node.entry_tier
        entries = self.lookup_now(call.context, call.digests)
        node.used_by(call.context.session, entries)
        node.prefetches.asked(entries)
        now_s = node.clock()
        copies: list[tuple[Entry, Residence]] = []
        for entry in entries:
            if entry is None or not entry.residences:
                break
            copy = entry.residences[0]
            if call.devices and (lent := lent_copy(entry, call.devices)) is not None:
                copy = lent
            elif copy.tier is not tier:
                raised = node.entry_copy(entry)
                if raised is None:
                    break
                copy = raised
            node.signs.read(entry, now_s)
            copies.append((entry, copy))
        leases = node.leases.grant_all(call.context.owner, copies, now_s + call.lease_s)
        may_grow = len(copies) < len(entries) and self._can_be_had(entries[len(copies)], entries)
        held = [copy.tier.name for _, copy in copies]
        reads = [Read(lease, name) for lease, name in zip(leases, held, strict=True)]
        return Acquisition(reads, may_grow=may_grow, held=held, captured=len(held))

    def _can_be_had(self, first: Entry | None, entries: Sequence[Entry | None]) -> bool:
        """True when the first block that is not in memory may come from somewhere."""
        if first is None:
            return self.needs_directory(entries)
        return bool(first.residences) or first.move is not None

    async def acquire(self, call: AcquireCall, leased: Sequence[Read] = ()) -> Acquisition:
        """Lease the longest prefix that can be had within the deadline; transfers go on after that.

        `leased` are the leading blocks, where `acquire_now` got some. Cancelled, it leaves leases that their owner's
        end or expiry takes back.
        """
        count, context = len(leased), call.context
        before, digests = call.digests[count - 1] if count else b"", call.digests[count:]
        ends_s = self._node.clock() + call.deadline_s
        located = await self._located(context, digests, call.deadline_s)
        run = self._run(context, digests, located)
        held = [*(r.source for r in leased), *map(self._source, (*run.wanted, *run.left))]
        captured = len(leased) + len(run.wanted) + sum(1 for _ in takewhile(lambda e: e is not None, run.left))
        reads = await self._bring(call, (before, *digests), located, run, call.deadline_s)
        if run.wanted and not reads:
            # Those behind the first one took the room that it needed, and nobody has them now.
            left_s = max(0.0, ends_s - self._node.clock())
            again = await self._located(context, digests[:1], left_s)
            run = self._run(context, digests[:1], again)
            reads = await self._bring(call, (before, *digests[:1]), again, run, left_s)
        at = len(reads)
        elsewhere = next((i for i in range(at, len(digests)) if i not in located), len(digests)) - at
        busy_s = self._busy_s(context, digests[at:], elsewhere)
        return Acquisition([*leased, *reads], busy_s, held=held, captured=captured)

    async def _located(self, context: RequestContext, digests: Sequence[bytes], left_s: float) -> dict[int, Location]:
        entries = self.lookup_now(context, digests)
        return await self.locate(context, digests, entries, left_s) if self.needs_directory(entries) else {}

    def _busy_s(self, context: RequestContext, digests: Sequence[bytes], elsewhere: int) -> float:
        """How long the path keeps keys that were left out, the first `elsewhere` of which other agents have."""
        target, run = self._node.entry_tier, self.lookup_now(context, digests)
        if not run or target is None:
            return 0.0
        first, paths = run[0], self._mover.scheduler.paths
        if first is not None and first.residences:
            tier = self._tier(first)
            segment = [e for e in takewhile(lambda e: self._tier(e) is tier, run) if e is not None]
            source = self._source(first)
            inputs = self._inputs(context, segment, is_last=len(segment) == len(run))
        else:
            count = elsewhere if first is None else 1
            source, inputs = REMOTE, self._remote_inputs(context, count) if count else None
        return congestion_s(inputs, is_full=paths.is_full(source, target.name)) if inputs is not None else 0.0

    async def _bring(
        self,
        call: AcquireCall,
        chain: Sequence[bytes],
        located: dict[int, Location],
        found: _Run,
        deadline_s: float,
    ) -> list[Read]:
        """Bring up and lease what can be had of a run.

        `chain` holds the key that the first one continues, empty where it is not known, and the wanted ones behind it.
        """
        run, choice = found.wanted, found.choice
        sources = [self._source(e) for e in run]
        started_s = self._node.clock()
        self._start_remote(call.context, chain, located, run)
        self._node.used_by(call.context.session, run)
        reads = self._prefix(await self._raised(call, run, sources, deadline_s))
        if choice is not None and choice.compute_s > 0:
            self._node.regrets.computes(chain[1 + choice.blocks], choice, started_s)
        if choice is not None and run:
            took_s = self._node.clock() - started_s
            self._node.count_regret(self._node.regrets.fetched(chain[1], choice, took_s))
        return self.live(call, reads)

    def live(self, call: AcquireCall, reads: Sequence[Read]) -> list[Read]:
        """Leading reads whose leases still live, for their whole time from now; the others were waited for too long."""
        now_s, owner = self._node.clock(), call.context.owner
        ids = [r.lease.id for r in reads]
        count = self._node.leases.renew(owner, ids, now_s, now_s + call.lease_s)
        self._node.end_leases(self._node.leases.end(owner, ids[count:]))
        return list(reads[:count])

    def _run(self, context: RequestContext, digests: Sequence[bytes], located: dict[int, Location]) -> _Run:
        """Leading keys that are here or elsewhere, parted by whether fetching is cheaper than computing."""
        run: list[Entry | None] = []
        for i, entry in enumerate(self.lookup_now(context, digests)):
            if entry is None and i not in located:
                break
            if entry is not None and not entry.residences and entry.move is None:
                break
            run.append(entry)
        choice = self._choice(context, run)
        if choice is None:
            return _Run(run, [], None)
        return _Run(run[: choice.blocks], run[choice.blocks :], choice)

    def worth_fetching(self, context: RequestContext | None, run: Sequence[Entry | None]) -> int:
        """Leading blocks of the run to bring up; the engine computes what is behind them sooner than we bring it."""
        choice = self._choice(context, run)
        return len(run) if choice is None else choice.blocks

    def _choice(self, context: RequestContext | None, run: Sequence[Entry | None]) -> Split | None:
        """How much of a run to bring up; None for all: it is in memory, or nobody knows how fast engines compute."""
        if not self._engine(context).is_known:
            return None
        costs, start = list[CostInputs](), 0
        while start < len(run):
            end = start + 1
            place = self._place(run[start])
            while end < len(run) and self._place(run[end]) is place:
                end += 1
            costs.append(self._segment_inputs(context, run[start:end], is_last=end == len(run)))
            start = end
        if all(not cost.is_measured for cost in costs):
            return None  # As nearly always.
        before = self._tokens_before(run[0]) if costs[0].engine.half_rate_tokens else 0
        placed = list[CostInputs]()
        for cost in costs:
            placed.append(replace(cost, context_tokens=before))
            before += cost.tokens
        return split(placed)

    def _segment_inputs(
        self, context: RequestContext | None, segment: Sequence[Entry | None], *, is_last: bool
    ) -> CostInputs:
        """Of neighbours in one place; they are to be had at once where that costs nothing, or nobody knows what."""
        spec, engine = self._node.spec, self._engine(context)
        if segment[0] is None and context is not None and engine.reported_s > -math.inf:
            return self._remote_inputs(context, len(segment))
        inputs = self._inputs(context, [e for e in segment if e is not None], is_last=is_last)
        if inputs is not None:
            return inputs
        return CostInputs(
            spec.policy.recompute.type,
            len(segment),
            spec.compatibility.block_tokens,
            0,
            0,
            0.0,
            0.0,
            self._engine(context),
        )

    def _tokens_before(self, entry: Entry | None) -> int:
        """Tokens that stand before a block, as far as its chain is here."""
        ancestors = self._node.index.ancestors(entry) if entry is not None else ()
        return sum(1 for _ in islice(ancestors, BLOCKS_BEFORE_MAX)) * self._node.spec.compatibility.block_tokens

    def compute_s(self, context: RequestContext | None, tokens: int) -> float:
        """Seconds in which whoever asks would compute so many tokens, as if nothing stood before them."""
        return self._engine(context).compute_s(0, tokens)

    def _engine(self, context: RequestContext | None) -> EngineLoad:
        return self.engine(context.tenant, context.owner) if context is not None else self.engine("")

    def engine(self, tenant: str, owner: int = -1) -> EngineLoad:
        """How fast a tenant's engines compute: as they report, as the pool declares, or as it seems from here.

        `owner` is the connection that asks, whose own report comes first.
        """
        node = self._node
        declared = node.spec.policy.recompute.prefill_tokens_per_second
        otherwise = (
            EngineLoad(float(declared))
            if declared is not None
            else EngineLoad(node.prefill_rates.of(tenant), is_lower_bound=True)
        )
        reported = node.engines.get(tenant)
        return load_of(reported, owner, otherwise, node.clock()) if reported else otherwise

    def cost(
        self, segment: Sequence[Entry], context: RequestContext | None = None, *, is_last: bool = False
    ) -> CostChoice | None:
        """Compare fetching a segment of blocks of one slower tier with computing it; None when there is no choice.

        Where the chain goes on behind the last segment of a request, the next one will ask for that: the latency of the
        tier, which is paid once, is not held against the few blocks that happened to end this one.
        """
        inputs = self._inputs(context, segment, is_last=is_last)
        return choose(inputs) if inputs is not None else None

    def _inputs(self, context: RequestContext | None, segment: Sequence[Entry], *, is_last: bool) -> CostInputs | None:
        best = self._node.best_copy(segment[0]) if segment else None
        if best is None or best.tier.backend.mappable is not None:
            return None
        tier, spec = best.tier, self._node.spec
        entry_tier = self._node.entry_tier
        target = entry_tier.name if entry_tier is not None else ""
        stored_bytes = sum(e.residences[0].record.stored_bytes for e in segment if e.residences)
        goes_on = is_last and self._node.index.is_continued(segment[-1])
        return CostInputs(
            policy=spec.policy.recompute.type,
            blocks=len(segment),
            block_tokens=spec.compatibility.block_tokens,
            stored_bytes=stored_bytes,
            queued_bytes=self._mover.scheduler.paths.ahead_bytes(tier.name, target, stored_bytes),
            read_latency_s=0.0 if goes_on or tier.probe is None else tier.probe.read_latency_microseconds / 1e6,
            read_bytes_per_s=float(tier.probe.read_bytes_per_second) if tier.probe else 0.0,
            engine=self._engine(context),
            path=tier.name,
        )

    def _remote_inputs(self, context: RequestContext, blocks: int) -> CostInputs:
        """Of blocks that other agents have: nobody measured them, so the path's own speed of late counts.

        The pool's assumed rate of the engine does not stand against them: only a rate that an engine has told does.
        """
        entry_tier, spec, paths = self._node.entry_tier, self._node.spec, self._mover.scheduler.paths
        target, size_bytes = entry_tier.name if entry_tier is not None else "", blocks * context.raw_bytes
        return CostInputs(
            policy=spec.policy.recompute.type,
            blocks=blocks,
            block_tokens=spec.compatibility.block_tokens,
            stored_bytes=size_bytes,
            queued_bytes=paths.ahead_bytes(REMOTE, target, size_bytes),
            read_latency_s=0.0,
            read_bytes_per_s=paths.measured_bytes_per_s(REMOTE, target, size_bytes, self._node.clock()),
            engine=self._engine(context),
            path=REMOTE,
        )

    def _start_remote(
        self, context: RequestContext, chain: Sequence[bytes], located: dict[int, Location], run: list[Entry | None]
    ) -> None:
        """Start transfers of what lies elsewhere, and put the pending entries into the run.

        `chain` is one longer than the run: each key stands behind its parent.
        """
        blocks = self._node.index.blocks(context.scope)
        first = {chain[i + 1]: i for i in reversed(range(len(run))) if run[i] is None and chain[i + 1] not in blocks}
        wanted = sorted(first.values())
        pairs = [(chain[i + 1], chain[i]) for i in wanted]
        compute_s = self._engine(context).compute_s(0, self._node.spec.compatibility.block_tokens)
        self._remote.start(context, pairs, [located[i] for i in wanted], compute_s=compute_s)
        blocks = self._node.index.blocks(context.scope)
        for i, entry in enumerate(run):
            found = entry or blocks.get(chain[i + 1])
            run[i] = found if found is not None and found.layout_id == context.layout_id else None

    def _tier(self, entry: Entry | None) -> Tier | None:
        """Tier that a block is read from."""
        best = self._node.best_copy(entry) if entry is not None else None
        return best.tier if best is not None else None

    def _place(self, entry: Entry | None) -> Tier | str | None:
        """Where a block of a run is: `REMOTE` for one that is not here, None for one that is on its way."""
        return REMOTE if entry is None else self._tier(entry)

    def _source(self, entry: Entry | None) -> str:
        tier = self._tier(entry)
        return tier.name if tier is not None else REMOTE

    async def _raised(
        self, call: AcquireCall, run: Sequence[Entry | None], sources: Sequence[str], deadline_s: float
    ) -> list[Read | None]:
        """Bring the run up and lease each block as it arrives; those of one move are waited for together."""
        context = call.context
        reads: list[Read | None] = [None] * len(run)

        def lease(i: int, entry: Entry, residence: Residence) -> None:
            reads[i] = self._leased(call, entry, residence, sources[i])

        async def one(i: int, entry: Entry) -> None:
            residence = await self._promoter.promote(entry, context.tenant)
            if residence is not None:
                lease(i, entry, residence)

        async def all_of(pairs: Sequence[tuple[int, Entry]]) -> None:
            await self._promoter.wait_together([e for _, e in pairs], context.tenant)
            slow = []
            for i, entry in pairs:
                if (up := self._promoter.promoted(entry)) is not None:
                    lease(i, entry, up)
                else:
                    slow.append(one(i, entry))
            await together(slow)

        lent = lent_copies(run, call.devices)
        for i, (entry, copy) in lent.items():
            lease(i, entry, copy)
        away = [None if i in lent else entry for i, entry in enumerate(run)]
        self._promoter.start_promotions([e for e in away if e is not None])
        tasks = [asyncio.ensure_future(all_of(pairs)) for pairs in _by_move(away)]
        if tasks:
            try:
                _, late = await asyncio.wait(tasks, timeout=deadline_s)
            finally:
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return reads

    def _leased(self, call: AcquireCall, entry: Entry, residence: Residence, source: str) -> Read | None:
        """Lease a copy that is up; None where its scope was erased while it was waited for."""
        if self._node.index.is_erased(entry.scope):
            return None
        now_s = self._node.clock()
        self._node.signs.read(entry, now_s)
        return Read(self._node.leases.grant(call.context.owner, entry, residence, now_s + call.lease_s), source)

    def _prefix(self, reads: Sequence[Read | None]) -> list[Read]:
        """Keep the leases before the first gap and end the others."""
        gap = next((i for i, r in enumerate(reads) if r is None), len(reads))
        for read in reads[gap:]:
            if read is not None:
                self._node.end_leases(self._node.leases.end(read.lease.owner, [read.lease.id]))
        return [r for r in reads[:gap] if r is not None]

    def inspect(self, owner: int, leases: Sequence[int]) -> int:
        """Look at blocks whose readers got other bytes than they were promised; returns how many are corrupt.

        A corrupt copy is dropped. It would be a miss to every reader, and its key could not be published again.
        """
        held = [lease for i in leases if (lease := self._node.leases.find(owner, i)) is not None]
        corrupt = [lease for lease in held if not _is_intact(lease)]
        for lease in corrupt:
            self._node.copy_failed(lease.entry, lease.residence, is_corrupt=True)
        return len(corrupt)

    def prefetch_chains(self, chains: Sequence[Sequence[Entry]]) -> PrefetchedChains:
        """Start to bring chains up, root first, within the pool's bound."""
        now_s, blocks, size_bytes = self._node.clock(), 0, 0
        for entry in [e for chain in chains for e in chain]:
            if not self.may_prefetch:
                break
            if not self._is_within_bound(entry):
                return PrefetchedChains(blocks, size_bytes, is_whole=False)
            if self._promoter.start_prefetch(entry):
                blocks += 1
                size_bytes += entry.residences[0].record.raw_bytes
            if not self._node.returns.are_followed:
                entry.used_at_s = max(entry.used_at_s, now_s)  # By last use it would be the first to leave again.
        return PrefetchedChains(blocks, size_bytes, is_whole=True)

    def coming_up_s(self, chains: Sequence[Sequence[Entry]]) -> float:
        """How long before it is wanted a session's blocks begin to come up, by what lies where now."""
        entry_tier, waits_s = self._node.entry_tier, [LEAD_S]
        target = entry_tier.name if entry_tier is not None else ""
        sizes: dict[Tier, int] = {}
        for entry in [e for chain in chains for e in chain]:
            if entry.residences and self._promoter.mapped(entry) is None:
                tier, _, record = entry.residences[0]
                sizes[tier] = sizes.get(tier, 0) + record.stored_bytes
        for tier, size_bytes in sizes.items():
            queued_bytes = self._mover.scheduler.paths.ahead_bytes(tier.name, target, size_bytes)
            probe = tier.probe
            latency_s = probe.read_latency_microseconds / 1e6 if probe else 0.0
            bytes_per_s = float(probe.read_bytes_per_second) if probe else 0.0
            waits_s.append(coming_up_s(latency_s, size_bytes + queued_bytes, bytes_per_s))
        return max(waits_s)

    @property
    def may_prefetch(self) -> bool:
        """True where the pool wants blocks to be brought up before they are asked for."""
        return self._node.spec.policy.prefetch.type != "None"

    def prefetch(self, context: RequestContext, digests: Sequence[bytes]) -> Prefetched:
        """Start to bring a local prefix up, within the bound of the pool's policy."""
        return self._prefetch(context, self.lookup_now(context, digests))

    async def fetch(self, context: RequestContext, digests: Sequence[bytes]) -> Prefetched:
        """The same of a prefix wherever it is: what other agents have is asked for, too."""
        located = await self._located(context, digests, 0.0)
        policy = self._node.spec.policy.prefetch
        most = max(0, policy.max_inflight_bytes - self._mover.bytes_under_way) // context.raw_bytes
        run = self._run(context, digests, located).wanted[:most]
        away = run.count(None)
        self._start_remote(context, (b"", *digests), located, run)
        begun = self._prefetch(context, run)
        return Prefetched(begun.started + away, begun.blocks)

    def _prefetch(self, context: RequestContext, entries: Sequence[Entry | None]) -> Prefetched:
        started = 0
        self._node.used_by(context.session, entries)
        for i, entry in enumerate(entries):
            if entry is None or not (entry.residences or entry.move) or not self._is_within_bound(entry):
                return Prefetched(started, i)
            started += self._promoter.start_prefetch(entry)
        return Prefetched(started, len(entries))

    def _is_within_bound(self, entry: Entry) -> bool:
        """False where a block would have to come up and as many bytes are under way as the pool's policy permits."""
        most_bytes = self._node.spec.policy.prefetch.max_inflight_bytes
        return self._mover.bytes_under_way < most_bytes or self._promoter.is_coming(entry)


def _is_intact(lease: Lease) -> bool:
    tier, slot, record = lease.residence
    mappable, lending = tier.backend.mappable, tier.backend.lending
    if lending is not None:
        return lending.is_intact(slot)
    assert mappable is not None, "leases are given on mapped and on lent copies only"
    try:
        with mappable.view(slot) as whole, whole[: record.stored_bytes] as view:
            return matches(view, record, slot.stamp)
    except BlockCorruptError:
        return True  # The slot has gone, and the lease with it.


def lent_copy(entry: Entry, devices: frozenset[str]) -> Residence | None:
    """The copy of a block that lies as it is in one of these devices, or None."""
    for copy in entry.residences:
        tier, slot, record = copy
        lending = tier.backend.lending
        if lending is None or tier.is_closed or record.codec not in UNENCODED:
            continue
        if lending.sum_of(slot) and lending.device_of(slot.extent) in devices:
            return copy
    return None


def lent_copies(run: Sequence[Entry | None], devices: frozenset[str]) -> dict[int, tuple[Entry, Residence]]:
    """Those blocks of a run, by position, that lie in one of these devices."""
    if not devices:
        return {}
    copies = ((i, e, lent_copy(e, devices)) for i, e in enumerate(run) if e is not None)
    return {i: (entry, copy) for i, entry, copy in copies if copy is not None}


def _by_move(run: Sequence[Entry | None]) -> list[list[tuple[int, Entry]]]:
    """Positions and blocks, those together that come with one move or are here; others alone."""
    groups: dict[object, list[tuple[int, Entry]]] = {}
    for i, entry in enumerate(run):
        if entry is not None:
            groups.setdefault(entry.move, []).append((i, entry))
    return list(groups.values())
