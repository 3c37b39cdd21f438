"""Brings blocks into memory: up from slower tiers, or from other agents. One transfer for a block at a time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.block import GONE, Entry, Residence
from kvstrata_agent.blocks.slot_request import Want
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.codec.base import LOSSY
from kvstrata_agent.movement.fair_queue import Priority, TrafficClass
from kvstrata_agent.movement.move import Move, Way, grouped
from kvstrata_agent.movement.path import BYTES_AT_ONCE
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import BackendFailedError, RetryableError, TierFullError
from kvstrata_telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import Place
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.eviction import Room
    from kvstrata_agent.cache.registered_extents import Exports
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_metadata.store.records import Location

ATTEMPTS_MAX: Final = 3
"""Times that one block is brought up for one reader: it may be evicted again before the reader gets to it."""
FETCH_BLOCKS: Final = 64
"""Blocks asked of a peer at a time, so that the first ones arrive while the rest is under way."""
REMOTE: Final = "remote"
"""Source of a path, of a copy and of a lease: another agent."""
FETCH_S: Final = 30.0
"""Bound on one batch from a peer and on a block's wait for its path, whatever a reader's own deadline: others may want
the same blocks."""


class Fetcher:
    """Starts transfers into the entry tier. They go on when the reader gives up: the next one will want them."""

    def __init__(self, node: Node, room: Room, mover: Mover, exports: Exports) -> None:
        self._node = node
        self._room = room
        self._mover = mover
        self._exports = exports
        self._tasks: set[asyncio.Task[None]] = set()
        self._rising: dict[tuple[Priority, bool], list[Entry]] = {}
        """Blocks that are to be brought up from the next step of the loop on, by whether it is for a reader."""
        self._grouped: list[list[Entry]] = []
        """Those of them whose groups are made, as prefetches."""

    async def close(self) -> None:
        """Cancel what is under way."""
        for entries in (*self._rising.values(), *self._grouped):
            self._end(entries, ())
        self._rising.clear()
        self._grouped.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def raise_up(self, entry: Entry, tenant: str) -> Residence | None:
        """Return a copy in mappable memory, bringing one up when there is none; None when it cannot be had.

        While somebody waits, the transfer goes before others, on that tenant's account. Cancelled, one that was
        started goes on as a prefetch.
        """
        for _ in range(ATTEMPTS_MAX):
            best = self.mapped(entry)
            if best is not None and best.tier is self._node.entry_tier:
                return best
            if entry.level == GONE:
                return None
            if entry.move is None and not self._start_up(entry, for_reader=True):
                return best
            if entry.move is not None:
                self._mover.traffic.wait_for(entry, tenant)
                try:
                    await asyncio.wait([entry.move])
                finally:
                    self._mover.traffic.leave(entry)
        return self.mapped(entry)

    def start_all(self, entries: Sequence[Entry]) -> None:
        """Start to bring up what is neither up nor on its way, in groups that share a move.

        They go once this step's waiters have said whose they are.
        """
        if self._node.entry_tier is None:
            return
        away = [e for e in dict.fromkeys(entries) if e.move is None and e.residences and self.up_already(e) is None]
        for group in grouped(away, _stored_bytes, lambda e: e.tenant):
            self._begin(group)
            self._ask_to_rise()
            self._grouped.append(group)

    async def wait_together(self, entries: Sequence[Entry], tenant: str) -> None:
        """Wait for the move that all of these blocks share; its readers' wish is theirs while they wait."""
        moves = {e.move for e in entries if e.move is not None}
        for entry in entries:
            self._mover.traffic.wait_for(entry, tenant)
        try:
            if moves:
                await asyncio.wait(moves)
        finally:
            for entry in entries:
                self._mover.traffic.leave(entry)

    def up_already(self, entry: Entry) -> Residence | None:
        """Return the copy in the entry tier, or None."""
        first = entry.residences[0] if entry.residences else None
        return first if first is not None and first.tier is self._node.entry_tier else None

    def start_prefetch(self, entry: Entry) -> bool:
        """Start to bring a block up before anybody asks for it; False when it is up or on its way."""
        if entry.move is not None or self.mapped(entry) is not None:
            return False
        return self._start_up(entry)

    def start_warming(self, entry: Entry) -> bool:
        """Start to copy a block into the entry tier itself, after all that engines want; False as above."""
        if entry.move is not None or self.up_already(entry) is not None:
            return False
        return self._start_up(entry, Priority.ARCHIVE)

    @staticmethod
    def mapped(entry: Entry) -> Residence | None:
        """Return the fastest copy that engines can map, or None."""
        return next((r for r in entry.residences if r.tier.mappable is not None), None)

    def _start_up(self, entry: Entry, urgency: Priority = Priority.PREFETCH, *, for_reader: bool = False) -> bool:
        """Start to copy a block up; False when there is nothing to copy from or to."""
        tier = self._node.entry_tier
        if tier is None or not entry.residences:
            return False
        self._begin([entry])
        self._ask_to_rise()
        self._rising.setdefault((urgency, for_reader), []).append(entry)
        return True

    def _rise(self) -> None:
        """Start what was asked for in one step of the loop, in groups: a prefix is asked for as a whole."""
        rising, self._rising = self._rising, {}
        groups, self._grouped = self._grouped, []
        for group in groups:
            self._spawn(self._copy_up(group, Priority.PREFETCH, for_reader=True))
        for (urgency, for_reader), entries in rising.items():
            for group in grouped(entries, _stored_bytes, lambda e: e.tenant):
                self._spawn(self._copy_up(group, urgency, for_reader=for_reader))

    def _ask_to_rise(self) -> None:
        if not self._rising and not self._grouped:
            asyncio.get_running_loop().call_soon(self._rise)

    async def _copy_up(self, entries: Sequence[Entry], urgency: Priority, *, for_reader: bool) -> None:
        """Bring blocks of one tenant up; those behind the first one that has to wait for room come after it.

        Where it was `for_reader`, no others leave for them once nobody waits for any of them.
        """
        tier, moves, made, count = self._node.entry_tier, list[Move](), set[Entry](), 1
        try:
            if tier is not None:
                is_wanted = partial(self._is_wanted, entries) if for_reader else lambda: True
                count = await self._place(entries, tier, moves, is_wanted)
                made = await self._copied(moves, tier, urgency)
        except RetryableError:
            made = set()  # No room, or too much under way: the reader takes what it has.
        except BaseException:
            count = len(entries)
            raise
        finally:
            self._end(entries[:count], made)
        if entries[count:]:
            self._begin([e for e in entries[count:] if e.move is None or e.move.done()])
            self._spawn(self._copy_up(entries[count:], urgency, for_reader=for_reader))

    def _is_wanted(self, entries: Sequence[Entry]) -> bool:
        return any(self._mover.traffic.is_waited_for(entry) for entry in entries)

    async def _place(
        self, entries: Sequence[Entry], tier: Tier, moves: list[Move], is_wanted: Callable[[], bool]
    ) -> int:
        """Take slots, waiting for room for the first one alone; returns how many blocks that settles."""
        for count, entry in enumerate(entries):
            if not entry.residences:
                continue  # Dropped before this began.
            source = next((r for r in entry.residences if r.record.codec not in LOSSY), entry.residences[0])
            want = Want(tier, entry.scope, entry.tenant, source.record.raw_bytes)
            try:
                slot = self._node.take(want)
            except RetryableError:
                if moves:
                    return count
                if not is_wanted():
                    return len(entries)
                slot = await self._room.reserve(want, self._node.clock() + FETCH_S, is_wanted=is_wanted)
            moves.append(Move(entry, source, slot))
        return len(entries)

    async def _copied(self, moves: Sequence[Move], tier: Tier, urgency: Priority) -> set[Entry]:
        """Carry moves out, what goes the same way from one tier together; returns the blocks that are up."""
        batches: dict[object, list[Move]] = {}
        for move in moves:
            way = self._mover.way(move, tier)
            batches.setdefault(move.entry if way is Way.ALONE else (way, move.source.tier), []).append(move)
        copies = [self._mover.copy_all(batch, tier, urgency, FETCH_S) for batch in batches.values()]
        ends = await asyncio.gather(*copies, return_exceptions=True) if len(copies) > 1 else [await c for c in copies]
        made: set[Entry] = set()
        for batch, end in zip(batches.values(), ends, strict=True):
            if isinstance(end, BaseException):
                if not isinstance(end, RetryableError):
                    raise end
                continue
            made.update(move.entry for move, is_made in zip(batch, end, strict=True) if is_made)
        return made

    def start_fetch(
        self,
        place: Place,
        links: Sequence[tuple[bytes, bytes]],
        locations: Sequence[Location],
        urgency: Priority = Priority.PREFETCH,
    ) -> None:
        """Start to fetch blocks from peers; `links` gives (digest, parent or empty when unknown) for each location."""
        step = min(FETCH_BLOCKS, max(1, BYTES_AT_ONCE // place.raw_bytes))
        for i in range(0, len(links), step):
            entries = []
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            for digest, parent in links[i : i + step]:
                assert digest not in self._node.index.blocks(place.scope)
                entry = self._node.index.begin(
                    place.scope, digest, parent, place.layout_id, self._node.clock(), place.tenant
                )
                entry.move = done
                entries.append(entry)
            self._spawn(self._fetch(place, entries, locations[i : i + step], done, urgency))

    async def _fetch(
        self,
        place: Place,
        entries: Sequence[Entry],
        locations: Sequence[Location],
        done: asyncio.Future[bool],
        urgency: Priority,
    ) -> None:
        slots: list[SlotRef] = []
        arrived: set[SlotRef] = set()
        tier = self._node.entry_tier
        try:
            if tier is not None and self._exports.peers is not None:
                await self._take(tier, place, len(entries), slots)
            if tier is not None and slots:
                async with self._turn(tier, entries, len(slots), len(slots) * place.raw_bytes, urgency):
                    await self._transfer(tier, place, entries, locations, slots, arrived)
        except RetryableError:
            return  # Too much under way from peers: the reader takes what it has.
        finally:
            for slot in slots:
                if tier is not None and slot not in arrived:
                    self._node.give_back(tier, slot, place.tenant)
            self._close_fetch(entries, done)

    @asynccontextmanager
    async def _turn(
        self, tier: Tier, entries: Sequence[Entry], blocks: int, size_bytes: int, urgency: Priority
    ) -> AsyncIterator[None]:
        """Wait until the path from peers lets this batch through, as a load once somebody waits for it."""
        turn = self._mover.traffic.turn(entries, REMOTE, tier.name, urgency, size_bytes, FETCH_S)
        async with turn:
            with span("kvstrata.fetch", source=REMOTE, blocks=blocks, bytes=size_bytes):
                yield

    async def _take(self, tier: Tier, place: Place, count: int, slots: list[SlotRef]) -> None:
        """Take up to `count` slots; those that were taken are in `slots` also when this is cancelled or fails."""
        deadline_s = self._node.clock() + FETCH_S
        want = Want(tier, place.scope, place.tenant, place.raw_bytes)
        slots += self._node.take_run(want, count)
        try:
            while len(slots) < count:  # The rest has to be made room for.
                slots.append(await self._room.reserve(want, deadline_s))
        except (TierFullError, BackendFailedError):
            return  # As many as there was room for.

    async def _transfer(
        self,
        tier: Tier,
        place: Place,
        entries: Sequence[Entry],
        locations: Sequence[Location],
        slots: Sequence[SlotRef],
        arrived: set[SlotRef],
    ) -> None:
        """Fetch into slots; those that hold a block of the index then are added to `arrived`."""
        mappable, peers = tier.mappable, self._exports.peers
        assert mappable is not None
        assert peers is not None
        started_s = self._node.clock()
        for extent in {slot.extent for slot in slots}:
            self._exports.ensure(tier, extent)
        views = [mappable.view(slot)[: place.raw_bytes] for slot in slots]
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
        self._count(tier, entries, place.raw_bytes, self._node.clock() - started_s)

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

    def _close_fetch(self, entries: Sequence[Entry], done: asyncio.Future[bool]) -> None:
        """Forget the blocks that did not arrive, and wake those who wait."""
        for entry in entries:
            if not entry.residences and entry.level != GONE:
                self._node.index.forget(entry)
            entry.move = None
        done.set_result(any(e.residences for e in entries))
        self._node.changed.fire()

    def _count(self, tier: Tier, entries: Sequence[Entry], raw_bytes: int, took_s: float) -> None:
        arrived = sum(1 for e in entries if e.residences)
        path = {"source": REMOTE, "target": tier.name}
        if arrived:
            self._node.counters.add("kvstrata_moved_blocks_total", arrived, **path)
            moved_bytes = arrived * raw_bytes
            self._node.counters.add("kvstrata_moved_bytes_total", moved_bytes, **path, traffic=TrafficClass.KV)
            self._node.counters.observe("kvstrata_move_duration_seconds", took_s, **path)

    @staticmethod
    def _begin(entries: Sequence[Entry]) -> None:
        """Give blocks a move that they share."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for entry in entries:
            assert entry.move is None or entry.move.done()
            entry.move = done

    def _end(self, entries: Sequence[Entry], made: Collection[Entry]) -> None:
        """End the moves of blocks, shared ones with the first block that ends."""
        for entry in entries:
            done, entry.move = entry.move, None
            assert done is not None
            if not done.done():
                done.set_result(entry in made)
        if made:
            self._node.changed.fire()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _stored_bytes(entry: Entry) -> int:
    return entry.residences[0].record.stored_bytes if entry.residences else 0
