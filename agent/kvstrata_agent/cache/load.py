"""The load side: how much of a prefix is there, lease it, bring it up, let it go."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvstrata_agent.backends.base import matches
from kvstrata_agent.backends.threads import together
from kvstrata_agent.cache.lookup import Findings, findings
from kvstrata_agent.cache.promotion import REMOTE
from kvstrata_agent.policy.recompute import CostChoice, CostInputs, Source, choose, congestion_s, locate_s
from kvstrata_api.errors import BlockCorruptError
from kvstrata_api.tiers import Lookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.blocks.leases import Lease
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import Place
    from kvstrata_agent.cache.ports import Directory
    from kvstrata_agent.cache.promotion import Fetcher
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_metadata.store.records import Location

LOCATE_KEYS_MAX: Final = 4096
"""Keys asked of the directory in one round trip; what lies behind them is found by the next lookup."""


class Read(msgspec.Struct, frozen=True):
    """One leased block and where it was when it was asked for."""

    lease: Lease
    source: str


class Acquisition(NamedTuple):
    """What came of asking for a prefix."""

    reads: list[Read]
    """Of the leading blocks."""
    busy_s: float = 0.0
    """Estimated seconds until the next one is worth asking for again, where only its path's queue is against it."""


class Reader:
    """Carries out the verbs of readers."""

    def __init__(self, node: Node, fetcher: Fetcher, mover: Mover, directory: Directory | None) -> None:
        self._node = node
        self._fetcher = fetcher
        self._mover = mover
        self._directory = directory

    def lookup_now(self, place: Place, digests: Sequence[bytes]) -> list[Entry | None]:
        """Return the local entry of each key, None for those that are absent or of another layout."""
        found, layout_id = self._node.index.blocks(place.scope).get_all(digests), place.layout_id
        return [e if e is not None and e.layout_id == layout_id else None for e in found]

    def needs_directory(self, entries: Sequence[Entry | None]) -> bool:
        """True when other agents may know of keys that this one does not hold."""
        return self._directory is not None and self._directory.is_up and None in entries

    def answer(self, entries: Sequence[Entry | None], located: dict[int, Location]) -> Findings:
        """Put local and remote findings together."""
        away = self._directory is not None and not self._directory.is_up
        remote = {position: location.tier for position, location in located.items()}
        return findings(entries, remote, Lookup.RETRY if away else Lookup.MISS)

    async def locate(
        self, place: Place, digests: Sequence[bytes], entries: Sequence[Entry | None], left_s: float = 0.0
    ) -> dict[int, Location]:
        """Ask the directory for the keys that are absent here; returns one location for each that was found.

        Waits the longer for the answer the more there is to compute without it, within the reader's `left_s`.
        """
        if self._directory is None or not self._directory.is_up:
            return {}
        missing = [i for i, e in enumerate(entries) if e is None][:LOCATE_KEYS_MAX]
        spec = self._node.spec
        tokens, speed = len(missing) * spec.compatibility.block_tokens, spec.policy.recompute.prefill_tokens_per_second
        within_s = locate_s(tokens, speed, left_s)
        copies = await self._directory.locate(place.secret, [digests[i] for i in missing], within_s=within_s)
        return {i: c[0] for i, c in zip(missing, copies, strict=True) if c}

    def acquire_now(self, place: Place, entries: Sequence[Entry | None], expires_s: float) -> list[Read]:
        """Lease the leading blocks that are in the entry tier already."""
        node, tier = self._node, self._node.entry_tier
        now_s = node.clock()
        copies: list[tuple[Entry, Residence]] = []
        for entry in entries:
            if entry is None or not entry.residences or entry.residences[0].tier is not tier:
                break
            entry.used_at_s = now_s
            copies.append((entry, entry.residences[0]))
        name = tier.name if tier is not None else ""
        return [Read(lease, name) for lease in node.leases.grant_all(place.owner, copies, expires_s)]

    async def acquire(
        self, place: Place, digests: Sequence[bytes], lease_s: float, deadline_s: float, *, before: bytes = b""
    ) -> Acquisition:
        """Lease the longest prefix that can be had within `deadline_s` seconds; transfers go on after that.

        `before` is the key that the first one continues, where that is known. Cancelled, it leaves leases that
        their owner's end or expiry takes back.
        """
        ends_s = self._node.clock() + deadline_s
        located = await self._located(place, digests, deadline_s)
        reads, hoped = await self._brought(place, digests, located, lease_s, deadline_s, before)
        if hoped and not reads:  # Those behind the first one took the room that it needed, and nobody has them now.
            left_s = max(0.0, ends_s - self._node.clock())
            again = await self._located(place, digests[:1], left_s)
            reads, _ = await self._brought(place, digests[:1], again, lease_s, left_s, before)
        at = len(reads)
        elsewhere = next((i for i in range(at, len(digests)) if i not in located), len(digests)) - at
        return Acquisition(reads, self._busy_s(place, digests[at:], elsewhere))

    async def _located(self, place: Place, digests: Sequence[bytes], left_s: float) -> dict[int, Location]:
        entries = self.lookup_now(place, digests)
        return await self.locate(place, digests, entries, left_s) if self.needs_directory(entries) else {}

    def _busy_s(self, place: Place, digests: Sequence[bytes], elsewhere: int) -> float:
        """How long the path keeps keys that were left out, the first `elsewhere` of which other agents have."""
        target, run = self._node.entry_tier, self.lookup_now(place, digests)
        if not run or target is None:
            return 0.0
        first, paths = run[0], self._mover.traffic.paths
        if first is not None and first.residences:
            stretch = [e for e in takewhile(lambda e: _tier(e) is _tier(first), run) if e is not None]
            source, inputs = first.residences[0].tier.name, self._inputs(stretch, is_last=len(stretch) == len(run))
        else:
            count = elsewhere if first is None else 1
            source, inputs = REMOTE, self._remote_inputs(place, count) if count else None
        return congestion_s(inputs, is_full=paths.is_full(source, target.name)) if inputs is not None else 0.0

    async def _brought(
        self,
        place: Place,
        digests: Sequence[bytes],
        located: dict[int, Location],
        lease_s: float,
        deadline_s: float,
        before: bytes,
    ) -> tuple[list[Read], int]:
        """Bring up and lease what can be had; returns also how many blocks that might have been."""
        run = self._run(place, digests, located)
        sources = [_source(e) for e in run]
        self._start_remote(place, (before, *digests), located, run)
        reads = self._prefix(await self._raised(place, run, sources, lease_s, deadline_s))
        return self.live(place, reads, lease_s), len(run)

    def live(self, place: Place, reads: Sequence[Read], lease_s: float) -> list[Read]:
        """Leading reads whose leases still live, for `lease_s` from now; the others were waited for too long."""
        now_s = self._node.clock()
        ids = [r.lease.id for r in reads]
        count = self._node.leases.renew(place.owner, ids, now_s, now_s + lease_s)
        self._node.end_leases(self._node.leases.end(place.owner, ids[count:]))
        return list(reads[:count])

    def _run(self, place: Place, digests: Sequence[bytes], located: dict[int, Location]) -> list[Entry | None]:
        """Leading keys that are here or elsewhere and cheaper to fetch than to compute; None stands for elsewhere."""
        run: list[Entry | None] = []
        for i, entry in enumerate(self.lookup_now(place, digests)):
            if entry is None and i not in located:
                break
            if entry is not None and not entry.residences and entry.move is None:
                break
            run.append(entry)
        return run[: self.worth_fetching(run)]

    def worth_fetching(self, run: Sequence[Entry | None]) -> int:
        """Blocks of the run up to the first slow stretch that the engine computes faster than we bring it up."""
        start = 0
        while start < len(run):
            end = start + 1
            tier = _tier(run[start])
            while end < len(run) and _tier(run[end]) is tier:
                end += 1
            choice = self.cost([e for e in run[start:end] if e is not None], is_last=end == len(run))
            if choice is not None and choice.source is Source.RECOMPUTE:
                return start
            start = end
        return len(run)

    def cost(self, stretch: Sequence[Entry], *, is_last: bool = False) -> CostChoice | None:
        """Compare fetching a stretch of blocks of one slower tier with computing it; None when there is no choice.

        Where the chain goes on behind the last stretch of a request, the next one will ask for that: the latency of the
        tier, which is paid once, is not held against the few blocks that happened to end this one.
        """
        inputs = self._inputs(stretch, is_last=is_last)
        return choose(inputs) if inputs is not None else None

    def _inputs(self, stretch: Sequence[Entry], *, is_last: bool) -> CostInputs | None:
        if not stretch or not stretch[0].residences or stretch[0].residences[0].tier.mappable is not None:
            return None
        tier, spec = stretch[0].residences[0].tier, self._node.spec
        entry_tier = self._node.entry_tier
        target = entry_tier.name if entry_tier is not None else ""
        stored_bytes = sum(e.residences[0].record.stored_bytes for e in stretch if e.residences)
        goes_on = is_last and self._node.index.is_continued(stretch[-1])
        return CostInputs(
            policy=spec.policy.recompute.type,
            blocks=len(stretch),
            block_tokens=spec.compatibility.block_tokens,
            stored_bytes=stored_bytes,
            queued_bytes=self._mover.traffic.paths.ahead_bytes(tier.name, target, stored_bytes),
            read_latency_s=0.0 if goes_on or tier.probe is None else tier.probe.read_latency_microseconds / 1e6,
            read_bytes_per_s=float(tier.probe.read_bytes_per_second) if tier.probe else 0.0,
            prefill_tokens_per_s=float(spec.policy.recompute.prefill_tokens_per_second),
        )

    def _remote_inputs(self, place: Place, blocks: int) -> CostInputs:
        """Of blocks that other agents have: nobody measured them, so the path's own speed of late counts."""
        entry_tier, spec, paths = self._node.entry_tier, self._node.spec, self._mover.traffic.paths
        target, size_bytes = entry_tier.name if entry_tier is not None else "", blocks * place.raw_bytes
        return CostInputs(
            policy=spec.policy.recompute.type,
            blocks=blocks,
            block_tokens=spec.compatibility.block_tokens,
            stored_bytes=size_bytes,
            queued_bytes=paths.ahead_bytes(REMOTE, target, size_bytes),
            read_latency_s=0.0,
            read_bytes_per_s=paths.bytes_per_s(REMOTE, target),
            prefill_tokens_per_s=float(spec.policy.recompute.prefill_tokens_per_second),
        )

    def _start_remote(
        self, place: Place, chain: Sequence[bytes], located: dict[int, Location], run: list[Entry | None]
    ) -> None:
        """Start transfers of what lies elsewhere, and put the pending entries into the run.

        `chain` is one longer than the run: each key stands behind its parent.
        """
        blocks = self._node.index.blocks(place.scope)
        first = {chain[i + 1]: i for i in reversed(range(len(run))) if run[i] is None and chain[i + 1] not in blocks}
        wanted = sorted(first.values())
        pairs = [(chain[i + 1], chain[i]) for i in wanted]
        self._fetcher.start_fetch(place, pairs, [located[i] for i in wanted])
        blocks = self._node.index.blocks(place.scope)
        for i, entry in enumerate(run):
            found = entry or blocks.get(chain[i + 1])
            run[i] = found if found is not None and found.layout_id == place.layout_id else None

    async def _raised(
        self, place: Place, run: Sequence[Entry | None], sources: Sequence[str], lease_s: float, deadline_s: float
    ) -> list[Read | None]:
        """Bring the run up and lease each block as it arrives; those of one move are waited for together."""
        reads: list[Read | None] = [None] * len(run)

        def lease(i: int, entry: Entry, residence: Residence) -> None:
            now_s = entry.used_at_s = self._node.clock()
            reads[i] = Read(self._node.leases.grant(place.owner, entry, residence, now_s + lease_s), sources[i])

        async def one(i: int, entry: Entry) -> None:
            residence = await self._fetcher.raise_up(entry, place.tenant)
            if residence is not None:
                lease(i, entry, residence)

        async def all_of(pairs: Sequence[tuple[int, Entry]]) -> None:
            await self._fetcher.wait_together([e for _, e in pairs], place.tenant)
            slow = []
            for i, entry in pairs:
                if (up := self._fetcher.up_already(entry)) is not None:
                    lease(i, entry, up)
                else:
                    slow.append(one(i, entry))
            await together(slow)

        self._fetcher.start_all([e for e in run if e is not None])
        tasks = [asyncio.ensure_future(all_of(pairs)) for pairs in _by_move(run)]
        if tasks:
            try:
                _, late = await asyncio.wait(tasks, timeout=deadline_s)
            finally:
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return reads

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

    def prefetch_chains(self, chains: Sequence[Sequence[Entry]]) -> bool:
        """Start to bring chains up, root first; false when the pool's bound was reached before their ends."""
        policy = self._node.spec.policy.prefetch
        for entry in [e for chain in chains for e in chain]:
            if policy.type == "None":
                break
            if self._mover.bytes_under_way >= policy.max_inflight_bytes:
                return False
            self._fetcher.start_prefetch(entry)
        return True

    def prefetch(self, place: Place, digests: Sequence[bytes]) -> int:
        """Start to bring a local prefix up; returns how many blocks were started, bounded by the pool's policy."""
        policy = self._node.spec.policy.prefetch
        if policy.type == "None":
            return 0
        started = 0
        for entry in self.lookup_now(place, digests):
            if entry is None or not entry.residences or self._mover.bytes_under_way >= policy.max_inflight_bytes:
                break
            started += self._fetcher.start_prefetch(entry)
        return started


def _is_intact(lease: Lease) -> bool:
    tier, slot, record = lease.residence
    mappable = tier.mappable
    assert mappable is not None, "leases are given on mapped copies only"
    try:
        with mappable.view(slot) as whole, whole[: record.stored_bytes] as view:
            return matches(view, record, slot.stamp)
    except BlockCorruptError:
        return True  # The slot has gone, and the lease with it.


def _by_move(run: Sequence[Entry | None]) -> list[list[tuple[int, Entry]]]:
    """Positions and blocks, those together that come with one move or are here; others alone."""
    groups: dict[object, list[tuple[int, Entry]]] = {}
    for i, entry in enumerate(run):
        if entry is not None:
            groups.setdefault(entry.move, []).append((i, entry))
    return list(groups.values())


def _tier(entry: Entry | None) -> object:
    return entry.residences[0].tier if entry is not None and entry.residences else None


def _source(entry: Entry | None) -> str:
    return entry.residences[0].tier.name if entry is not None and entry.residences else REMOTE
