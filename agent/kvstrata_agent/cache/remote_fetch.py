"""Fetches blocks of other agents into memory. One transfer for a block at a time, promotions included."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.block import GONE, Entry, Residence
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.movement.path import BYTES_AT_ONCE, Priority
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import BackendFailedError, RetryableError, TierFullError
from kvstrata_kube.tasks import TaskSet
from kvstrata_telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.eviction import Evictor
    from kvstrata_agent.cache.ports import Peers
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_metadata.store.records import Location

FETCH_BLOCKS: Final = 64
"""Blocks asked of a peer at a time, so that the first ones arrive while the rest is under way."""
REMOTE: Final = "remote"
"""Source of a path, of a copy and of a lease: another agent."""
FETCH_S: Final = 30.0
"""Bound on one batch, whatever a reader's own deadline: others may want the same blocks."""


class RegisteredExtents:
    """Extents that the transport between agents knows: registered on first use, let go of before they vanish."""

    def __init__(self, peers: Peers | None) -> None:
        self.peers = peers
        self._registered: set[int] = set()
        self._watched: set[Tier] = set()

    def ensure(self, tier: Tier, extent: int) -> None:
        """Make an extent of a mappable tier a source and target of transfers. Idempotent."""
        number = tier.extent_number(extent)
        mappable = tier.backend.mappable
        if self.peers is None or mappable is None or number in self._registered:
            return
        if tier not in self._watched:
            self._watched.add(tier)
            mappable.on_release(lambda gone: self._let_go(tier.extent_number(gone)))
        self.peers.register_extent(number, mappable.extent_view(extent))
        self._registered.add(number)

    def _let_go(self, number: int) -> None:
        if number in self._registered and self.peers is not None:
            self._registered.discard(number)
            self.peers.unregister_extent(number)


class RemoteFetcher:
    """Starts transfers into the entry tier. They go on when the reader gives up: the next one will want them."""

    def __init__(self, node: Node, evictor: Evictor, mover: Mover, extents: RegisteredExtents) -> None:
        self._node = node
        self._evictor = evictor
        self._mover = mover
        self._extents = extents
        self._tasks: TaskSet[None] = TaskSet()

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._tasks.close()

    def start(
        self,
        context: RequestContext,
        links: Sequence[tuple[bytes, bytes]],
        locations: Sequence[Location],
        urgency: Priority = Priority.PREFETCH,
        compute_s: float = 0.0,
    ) -> None:
        """Start to fetch blocks from peers; `links` gives (digest, parent or empty when unknown) for each location.

        With `compute_s`, what computing one takes, they stay for what fetching them again would take; without, as if
        they had been made here. Nothing is fetched for a scope that is erased.
        """
        if self._node.index.is_erased(context.scope):
            return
        step = min(FETCH_BLOCKS, max(1, BYTES_AT_ONCE // context.raw_bytes))
        for i in range(0, len(links), step):
            entries = [
                self._node.index.begin(
                    context.scope, digest, parent, context.layout_id, self._node.clock(), context.tenant
                )
                for digest, parent in links[i : i + step]
            ]
            self._mover.begin(entries, context.raw_bytes)
            self._tasks.spawn(self._fetch(context, entries, locations[i : i + step], urgency, compute_s))

    async def _fetch(
        self,
        context: RequestContext,
        entries: Sequence[Entry],
        locations: Sequence[Location],
        urgency: Priority,
        compute_s: float,
    ) -> None:
        slots: list[SlotRef] = []
        arrived: set[SlotRef] = set()
        tier = self._node.entry_tier
        try:
            if tier is not None and self._extents.peers is not None:
                await self._take_slots(tier, context, len(entries), slots)
            if tier is not None and slots:
                async with self._path(tier, entries, len(slots), len(slots) * context.raw_bytes, urgency):
                    took_s = await self._transfer(tier, context, entries, locations, slots, arrived)
                self._note_replicas([e for e in entries if e.residences], took_s, compute_s)
        except RetryableError:
            return  # Too much under way from peers: the reader takes what it has.
        finally:
            for slot in slots:
                if tier is not None and slot not in arrived:
                    self._node.free(tier, slot, context.tenant)
            self._close_fetch(entries)

    @asynccontextmanager
    async def _path(
        self, tier: Tier, entries: Sequence[Entry], blocks: int, size_bytes: int, urgency: Priority
    ) -> AsyncIterator[None]:
        """Wait until the path from peers lets this batch through, as a load once somebody waits for it."""
        async with self._mover.scheduler.enter(entries, REMOTE, tier.name, urgency, size_bytes, FETCH_S):
            with span("kvstrata.fetch", source=REMOTE, blocks=blocks, bytes=size_bytes):
                yield

    async def _take_slots(self, tier: Tier, context: RequestContext, count: int, slots: list[SlotRef]) -> None:
        """Take up to `count` slots; those that were taken are in `slots` also when this is cancelled or fails."""
        deadline_s = self._node.clock() + FETCH_S
        request = SlotRequest(tier, context.scope, context.tenant, context.raw_bytes)
        slots += self._node.allocate_run(request, count)
        try:
            while len(slots) < count:  # The rest has to be made room for.
                slots.append(await self._evictor.reserve(request, deadline_s))
        except (TierFullError, BackendFailedError):
            return  # As many as there was room for.

    async def _transfer(
        self,
        tier: Tier,
        context: RequestContext,
        entries: Sequence[Entry],
        locations: Sequence[Location],
        slots: Sequence[SlotRef],
        arrived: set[SlotRef],
    ) -> float:
        """Fetch into slots; those that hold a block of the index then are added to `arrived`. Returns the seconds."""
        mappable, peers = tier.backend.mappable, self._extents.peers
        assert mappable is not None
        assert peers is not None
        started_s = self._node.clock()
        for extent in {slot.extent for slot in slots}:
            self._extents.ensure(tier, extent)
        views = [mappable.view(slot)[: context.raw_bytes] for slot in slots]
        wanted = [
            Wanted(BlockKey(e.scope, e.digest), e.layout_id, location, view, self._node.epoch, slot.stamp)
            for e, location, view, slot in zip(entries, locations, views, slots, strict=False)
        ]
        try:
            parents = await peers.fetch(wanted, FETCH_S)
            if self._node.has(tier):
                came = [
                    (entry, Residence(tier, slot, self._record(entry, parent, want)))
                    for entry, parent, slot, want in zip(entries, parents, slots, wanted, strict=False)
                    if parent is not None and entry.parent in (b"", parent) and entry.level != GONE
                ]
                self._enter(tier, came)
                arrived.update(copy.slot for _, copy in came)
        finally:
            for view in views:
                view.release()
        took_s = self._node.clock() - started_s
        self._count(tier, entries, context.raw_bytes, took_s)
        return took_s

    def _note_replicas(self, came: Sequence[Entry], took_s: float, compute_s: float) -> None:
        if came and compute_s > 0.0:
            self._node.returns.replicated(came, took_s / len(came), compute_s)
            self._node.counters.add("kvstrata_replicas_total", len(came), event="fetched")

    def _enter(self, tier: Tier, came: Sequence[tuple[Entry, Residence]]) -> None:
        """Publish blocks that came from a peer, under the checksums that sealed them."""
        for entry, copy in came:
            if entry.parent != copy.record.parent:
                self._node.index.adopt(entry, copy.record.parent)
        self._node.publish(tier, came)

    def _record(self, entry: Entry, parent: bytes, want: Wanted) -> Record:
        raw_bytes = len(want.into)
        form, epoch = self._node.arriving_form, self._node.epoch
        return Record(want.key, parent, entry.layout_id, form, raw_bytes, raw_bytes, want.checksum, epoch)

    def _close_fetch(self, entries: Sequence[Entry]) -> None:
        """Forget the blocks that did not arrive, and wake those who wait."""
        for entry in entries:
            if not entry.residences and entry.level != GONE:
                self._node.index.forget(entry)
        self._mover.end(entries, {e for e in entries if e.residences})
        self._node.changed.fire()

    def _count(self, tier: Tier, entries: Sequence[Entry], raw_bytes: int, took_s: float) -> None:
        arrived = sum(1 for e in entries if e.residences)
        if arrived:
            self._mover.scheduler.count_moved(REMOTE, tier.name, arrived, arrived * raw_bytes, took_s)
