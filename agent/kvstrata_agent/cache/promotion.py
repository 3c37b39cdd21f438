"""Copies blocks up: to memory that engines map, and out of tiers that are emptied. One copy of a block at a time."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import GONE, Entry
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.codec.base import LOSSY
from kvstrata_agent.movement.move import Move
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.placement import CopyPath, grouped, is_raised
from kvstrata_api.errors import RetryableError
from kvstrata_kube.tasks import TaskSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata_agent.blocks.block import Residence
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.eviction import Evictor
    from kvstrata_agent.movement.mover import Mover

ATTEMPTS_MAX: Final = 3
"""Times that one block is promoted for one reader: it may be evicted again before the reader gets to it."""
WAIT_S: Final = 30.0
"""Bound on a block's wait for room and for its path, whatever a reader's own deadline: others may want the same one."""
BATCH_BLOCKS: Final = 256
"""Blocks that one pass over a tier begins with; what stands before them in their chains comes along."""


class Promoter:
    """Starts copies into the entry tier. They go on when the reader gives up: the next one will want them."""

    def __init__(self, node: Node, evictor: Evictor, mover: Mover) -> None:
        self._node = node
        self._evictor = evictor
        self._mover = mover
        self._tasks: TaskSet[None] = TaskSet()
        self._asked: dict[tuple[Priority, bool], list[Entry]] = {}
        """Blocks whose copies start with the next step of the loop, by urgency and by whether it is for a reader."""
        self._grouped: list[list[Entry]] = []
        """Those of them whose groups are made, as prefetches."""

    async def close(self) -> None:
        """Cancel what is under way."""
        for entries in (*self._asked.values(), *self._grouped):
            self._mover.end(entries, ())
        self._asked.clear()
        self._grouped.clear()
        await self._tasks.close()

    async def promote(self, entry: Entry, tenant: str) -> Residence | None:
        """Return a copy in mappable memory, promoting the block when there is none; None when it cannot be had.

        While somebody waits, the transfer goes before others, on that tenant's account. Cancelled, one that was
        started goes on as a prefetch.
        """
        for _ in range(ATTEMPTS_MAX):
            best = self.promoted(entry) or self.mapped(entry)
            if best is not None and (best.tier is self._node.entry_tier or self._stays()):
                return best
            if entry.level == GONE:
                return None
            if entry.move is None and not self._start(entry, for_reader=True):
                return best
            if entry.move is not None:
                self._mover.scheduler.wait_for(entry, tenant)
                try:
                    await asyncio.wait([entry.move])
                finally:
                    self._mover.scheduler.end_wait(entry)
        return self.mapped(entry)

    def start_promotions(self, entries: Sequence[Entry]) -> None:
        """Start to promote what is neither up nor on its way, in groups that share a move.

        They go once this step's waiters are registered: these decide whose account and urgency count.
        """
        if self._node.entry_tier is None:
            return
        below = [e for e in dict.fromkeys(entries) if e.move is None and e.residences and self.promoted(e) is None]
        if self._node.signs.is_read_in_place:
            below = [e for e in below if self.mapped(e) is None]
        below = [e for e in below if not self._node.is_away(e)]
        for group in grouped(below, _stored_bytes, lambda e: e.tenant):
            self._mover.begin(group)
            self._schedule()
            self._grouped.append(group)

    async def wait_together(self, entries: Sequence[Entry], tenant: str) -> None:
        """Wait for the move that all of these blocks share; its readers' priority is theirs while they wait."""
        moves = {e.move for e in entries if e.move is not None}
        self._mover.scheduler.wait_for_all(entries, tenant)
        try:
            if moves:
                await asyncio.wait(moves)
        finally:
            self._mover.scheduler.end_wait_all(entries)

    def promoted(self, entry: Entry) -> Residence | None:
        """Return the copy in the entry tier, or None."""
        return self._node.entry_copy(entry)

    def start_prefetch(self, entry: Entry) -> bool:
        """Start to bring a block up before anybody asks for it; False when it is up or on its way."""
        if self.is_coming(entry):
            return False
        if self._node.signs.is_prefetch_damped:
            self._node.signs.damped(1, "prefetch")
            return False
        if not self._start(entry):
            return False
        self._node.prefetches.begun(entry)
        return True

    def is_coming(self, entry: Entry) -> bool:
        """True when a block is up, or on its way."""
        return entry.move is not None or self.mapped(entry) is not None

    def _stays(self) -> bool:
        """True while copies of blocks that engines can map where they lie bring nothing; these are not made then."""
        if self._node.signs.is_read_in_place:
            self._node.signs.damped(1, "read")
            return True
        return False

    def start_warming(self, entry: Entry) -> bool:
        """Start to copy a block into the entry tier itself, after all that engines want; False as above."""
        if entry.move is not None or self.promoted(entry) is not None:
            return False
        return self._start(entry, Priority.ARCHIVE)

    @staticmethod
    def mapped(entry: Entry) -> Residence | None:
        """Return the fastest copy that engines can map, or None."""
        return next((r for r in entry.residences if r.tier.backend.mappable is not None), None)

    def _start(self, entry: Entry, urgency: Priority = Priority.PREFETCH, *, for_reader: bool = False) -> bool:
        """Start to copy a block up; False when there is nothing to copy from or to."""
        tier = self._node.entry_tier
        if tier is None or not entry.residences or self._node.is_away(entry):
            return False
        self._mover.begin([entry])
        self._schedule()
        self._asked.setdefault((urgency, for_reader), []).append(entry)
        return True

    def _start_asked(self) -> None:
        """Start what was asked for in one step of the loop, in groups: a prefix is asked for as a whole."""
        asked, self._asked = self._asked, {}
        groups, self._grouped = self._grouped, []
        for group in groups:
            self._tasks.spawn(self._promote_group(group, Priority.PREFETCH, for_reader=True))
        for (urgency, for_reader), entries in asked.items():
            for group in grouped(entries, _stored_bytes, lambda e: e.tenant):
                self._tasks.spawn(self._promote_group(group, urgency, for_reader=for_reader))

    def _schedule(self) -> None:
        if not self._asked and not self._grouped:
            asyncio.get_running_loop().call_soon(self._start_asked)

    async def _promote_group(self, entries: Sequence[Entry], urgency: Priority, *, for_reader: bool) -> None:
        """Promote blocks of one tenant; those behind the first one that has to wait for room come after it.

        Where it was `for_reader`, no others leave for them once nobody waits for any of them.
        """
        tier, moves, made, count = self._node.entry_tier, list[Move](), set[Entry](), 1
        try:
            if tier is not None:
                is_wanted = partial(self._is_wanted, entries) if for_reader else lambda: True
                count = await self._take_slots(entries, tier, moves, is_wanted)
                made = await self._copied(moves, tier, urgency)
                if urgency is not Priority.ARCHIVE:  # What is warmed may wait for long.
                    self._node.signs.raised(made, tier.name, for_reader=for_reader)
        except RetryableError:
            made = set()  # No room, or too much under way: the reader takes what it has.
        except BaseException:
            count = len(entries)
            raise
        finally:
            self._mover.end(entries[:count], made)
            for entry in entries[:count]:
                if entry not in made:
                    self._node.prefetches.left(entry)
        if entries[count:]:
            self._mover.begin([e for e in entries[count:] if e.move is None or e.move.done()])
            self._tasks.spawn(self._promote_group(entries[count:], urgency, for_reader=for_reader))

    def _is_wanted(self, entries: Sequence[Entry]) -> bool:
        return any(self._mover.scheduler.is_waited_for(entry) for entry in entries)

    async def _take_slots(
        self, entries: Sequence[Entry], tier: Tier, moves: list[Move], is_wanted: Callable[[], bool]
    ) -> int:
        """Take slots, waiting for room for the first one alone; returns how many blocks that settles."""
        count = 0
        while count < len(entries):
            alike = _alike(entries[count:])
            if not alike:
                count += 1  # Dropped before this began.
                continue
            entry, source = alike[0]
            request = SlotRequest(tier, entry.scope, entry.tenant, source.record.raw_bytes)
            slots = self._node.allocate_run(request, len(alike))
            if not slots:
                try:
                    slots = [self._node.allocate(request)]
                except RetryableError:
                    if moves:
                        return count
                    if not is_wanted():
                        return len(entries)
                    slots = [await self._evictor.reserve(request, self._node.clock() + WAIT_S, is_wanted=is_wanted)]
            moves += self._mover.plan_all(alike, tier, slots)
            count += len(slots)
        return len(entries)

    async def _copied(self, moves: Sequence[Move], tier: Tier, urgency: Priority) -> set[Entry]:
        """Carry moves out, what takes the same path from one tier together; returns the blocks that are up."""
        batches: dict[object, list[Move]] = {}
        for move in moves:
            is_single = move.path is CopyPath.SINGLE
            batches.setdefault(move.entry if is_single else (move.path, move.source.tier), []).append(move)
        copies = [self._mover.copy_all(batch, tier, urgency, WAIT_S) for batch in batches.values()]
        ends = await asyncio.gather(*copies, return_exceptions=True) if len(copies) > 1 else [await c for c in copies]
        made: set[Entry] = set()
        for batch, end in zip(batches.values(), ends, strict=True):
            if isinstance(end, BaseException):
                if not isinstance(end, RetryableError):
                    raise end
                continue
            made.update(move.entry for move, is_made in zip(batch, end, strict=True) if is_made)
        return made

    async def raise_to(self, tier: Tier) -> int:
        """Copy one batch of what is decoded from, and of what is worth most, to a tier faster than the entry tier.

        Each chain from its root, so that what is raised is a prefix. Others leave for it by their worth. Returns how
        many blocks are there now that were not before.
        """
        node, raised = self._node, 0
        decoded = [h for s in node.sessions if s.state is SessionState.DECODING for h in s.heads if h.residences]
        ends = [*((end, True) for end in decoded), *((end, False) for end in node.returns.hot())]
        for end, is_decoded in ends:
            for link in [end, *node.index.ancestors(end)][::-1]:
                if link.level == GONE or not link.residences:
                    break
                if link.residence(tier) is not None:
                    continue
                if not is_raised(node.facts_of(tier), node.returns.worth(link)[0], is_decoded=is_decoded):
                    break
                if raised >= BATCH_BLOCKS:
                    return raised
                source = link.residences[0].tier
                if not await self._evictor.demoter.demote_to(link, source, tier, Priority.ARCHIVE):
                    break
                raised += 1
        return raised

    async def fill_free_space(self, tier: Tier) -> None:
        """Copy one batch of a tier that is emptied to faster ones, as far as those have room: nothing gives way for it.

        The last used first and none before its parent. Whoever called drops the copies below.
        """
        now_s = self._node.clock()
        faster = [t for t in self._node.tiers if t.level < tier.level and t.facts(now_s).takes_writes]
        if all(self._node.excess_bytes(t, 1) > 0 for t in faster):
            return  # Before entries are made of all that lies here.
        here = [
            e for residents in tuple(self._node.contents(tier).extents.values()) for e in residents if _is_only_copy(e)
        ]
        for entry in sorted(here, key=lambda e: -e.used_at_s)[:BATCH_BLOCKS]:
            lineage = chain((entry,), self._node.index.ancestors(entry))
            for link in [*takewhile(lambda e: e.residence(tier) is not None, lineage)][::-1]:
                await self._fill_with(link, tier, faster[::-1])

    async def _fill_with(self, entry: Entry, tier: Tier, targets: Sequence[Tier]) -> None:
        for target in targets:
            source, parent = entry.residence(tier), self._node.index.parent(entry)
            if source is None or not _is_only_copy(entry):
                return
            raw_bytes = source.record.raw_bytes
            if self._node.excess_bytes(target, raw_bytes) > 0 or (parent is not None and parent.level > target.level):
                continue
            try:
                request = SlotRequest(target, entry.scope, entry.tenant, raw_bytes)
                slot = self._node.allocate(request) if target.backend.mappable is not None else None
                await self._mover.move([self._mover.plan(entry, source, target, slot)], target, Priority.DEMOTE)
            except RetryableError:
                continue


def _alike(entries: Iterable[Entry]) -> list[tuple[Entry, Residence]]:
    """The first blocks that want equal slots of one account and scope, each with the copy that it is made of."""
    found: list[tuple[Entry, Residence]] = []
    for entry in entries:
        if not entry.residences:
            break
        source = next((r for r in entry.residences if r.record.codec not in LOSSY), entry.residences[0])
        wanted = entry.scope, entry.tenant, source.record.raw_bytes
        if found and wanted != (found[0][0].scope, found[0][0].tenant, found[0][1].record.raw_bytes):
            break
        found.append((entry, source))
    return found


def _stored_bytes(entry: Entry) -> int:
    return entry.residences[0].record.stored_bytes if entry.residences else 0


def _is_only_copy(entry: Entry) -> bool:
    """True for a block that nobody holds and that lies nowhere else."""
    return not entry.is_held and len(entry.residences) == 1
