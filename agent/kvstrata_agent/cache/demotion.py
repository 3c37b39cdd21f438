"""Copies blocks down: from one tier to the next slower ones that take them. What becomes of the source is the caller's.

A slower tier that is full makes room for what comes down, by sending its own blocks further down. That recursion goes
through one callable, `make_room`, and ends at the lowest tier.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.placement import CopyPath, grouped
from kvstrata_agent.policy.recompute import REFUSED_S
from kvstrata_api.errors import BackendFailedError, RetryableError, TierFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.move import Move
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_agent.policy.placement import Placement
    from kvstrata_api.blocks import ScopeId

    MakeRoom = Callable[[SlotRequest, int], Awaitable[bool]]

ROUNDS_MAX: Final = 4
"""Plans made for one slot before the tier counts as full: own blocks, whole extents, and each once more."""
ROUNDS_IN_VAIN: Final = 2
"""Of these one after the other that free nothing, one of either kind: then the tier is full."""


class Rooms:
    """What blocks that go down together have found out about room below: what is full is asked once, not by each."""

    def __init__(self, make_room: MakeRoom) -> None:
        self._make_room = make_room
        self._asking = asyncio.Lock()
        self._in_vain: Counter[tuple[Tier, ScopeId, str]] = Counter()
        """By tier, scope and tenant the last plans that freed nothing."""

    async def make(self, request: SlotRequest, attempt: int) -> bool:
        """Let blocks leave by one plan; False once nothing can leave for such a slot."""
        key = request.tier, request.scope, request.tenant
        async with self._asking:
            if self.is_full(*key):
                return False
            has_freed = await self._make_room(request, attempt)
            self._in_vain[key] = 0 if has_freed else self._in_vain[key] + 1
        return not self.is_full(*key)

    def is_full(self, tier: Tier, scope: ScopeId, tenant: str) -> bool:
        """True once nothing could leave a tier for such blocks."""
        return self._in_vain[tier, scope, tenant] >= ROUNDS_IN_VAIN


class Demoter:
    """Makes the copies, in groups where the media take several blocks at a time."""

    def __init__(self, node: Node, mover: Mover, make_room: MakeRoom) -> None:
        """`make_room` frees a slot of a tier as far as one plan can; its second argument counts the plans from 0.

        It returns whether anything was freed, or is free.
        """
        self._node = node
        self._mover = mover
        self._make_room = make_room

    async def demote(
        self, entries: Sequence[Entry], tier: Tier, urgency: Priority, *, may_decline: bool = False
    ) -> dict[Entry, Placement | None]:
        """Copy blocks to slower tiers; returns those for which no slower tier exists or takes any.

        With `may_decline` those too that are not worth a write, with the placement that says so; but what continues
        to a block that is written is written with it. Children stand before their parents.
        """
        if not entries or self._node.is_lowest(tier):
            return dict.fromkeys(entries)
        by_target: dict[str | None, list[Entry]] = {}
        declined: dict[Entry, Placement | None] = {}
        parents: set[tuple[ScopeId, bytes]] = set()
        """What blocks that are written continue: they would be of no use without it, and hold it here."""
        places = self._node.places_below(tier.level)
        for entry in entries:
            may_spare = may_decline and (entry.scope, entry.digest) not in parents
            placement = self._node.placement_of(entry, places, may_decline=may_spare)
            if may_decline and (placement.is_declined or self._node.takes_for_good(placement.target)):
                self._node.returns.offered(entry)
            if placement.is_declined:
                declined[entry] = placement
            else:
                by_target.setdefault(placement.target, []).append(entry)
                parents.add((entry.scope, entry.parent))
        self._count(declined, tier)
        rooms = self.rooms()
        lost = await asyncio.gather(
            *(
                self._demote_group(group, tier, self._node.tier(name), urgency, rooms)
                for name, chosen in by_target.items()
                if name is not None
                for group in grouped(chosen, partial(_bytes_in, tier), lambda e: e.tenant)
            )
        )
        return declined | {entry: None for group in (*lost, by_target.get(None, ())) for entry in group}

    def _count(self, declined: Collection[Entry], tier: Tier) -> None:
        if declined:
            size_bytes = sum(_bytes_in(tier, entry) for entry in declined)
            self._node.counters.add("kvstrata_declined_writes_total", len(declined), tier=tier.name)
            self._node.counters.add("kvstrata_declined_bytes_total", size_bytes, tier=tier.name)

    async def _demote_group(
        self, entries: Sequence[Entry], tier: Tier, target: Tier | None, urgency: Priority, rooms: Rooms
    ) -> list[Entry]:
        """Copy blocks down, together where they can; returns those that no tier as slow as `target` takes."""
        if target is None:
            return list(entries)
        left = await self._demote_together(entries, tier, target, urgency, rooms) if len(entries) > 1 else entries
        if not left:
            return []
        results = await asyncio.gather(*(self._demote_one(e, tier, target, urgency, rooms) for e in left))
        return [e for e, is_demoted in zip(left, results, strict=True) if not is_demoted]

    async def _demote_together(
        self, entries: Sequence[Entry], tier: Tier, target: Tier, urgency: Priority, rooms: Rooms
    ) -> Sequence[Entry]:
        """Copy what can go to the target with others as one transfer a path; returns what is left to do.

        Where there is no room for all, it is made for all that are left, as long as each transfer has some.
        """
        for attempt in range(ROUNDS_MAX):
            sources = {e: source for e in entries if e.move is None and (source := e.residence(tier)) is not None}
            moves = self._mover.plan_all(((e, s) for e, s in sources.items() if e.residence(target) is None), target)
            is_short = False
            for path in (CopyPath.RAW_GROUP, CopyPath.CODED_GROUP):
                alike = [m for m in moves if m.path is path and m.entry.move is None]
                if alike:
                    made, is_path_short = await self._moved(alike, target, urgency)
                    is_short = is_short or is_path_short or 0 < made < len(alike)
            left = [e for e in entries if e.residence(target) is None]
            if not left or not is_short:
                break
            first, size_bytes = left[0], max(_bytes_in(tier, e) for e in left)
            request = SlotRequest(target, first.scope, first.tenant, size_bytes, slots=len(left))
            if not await rooms.make(request, attempt):
                break
        return left

    async def _moved(self, moves: Sequence[Move], target: Tier, urgency: Priority) -> tuple[int, bool]:
        """Copy blocks as one transfer; returns how many were copied, and whether there was no room for the first."""
        try:
            return sum(await self._mover.move(moves, target, urgency)), False
        except TierFullError:
            return 0, True
        except RetryableError:  # Too many wait: each tries by itself what can be done.
            return 0, False

    async def _demote_one(self, entry: Entry, tier: Tier, target: Tier | None, urgency: Priority, rooms: Rooms) -> bool:
        """Copy one block to the target, or to the first tier slower than that which takes it."""
        while target is not None:
            if entry.residence(target) is not None or await self.demote_to(entry, tier, target, urgency, rooms):
                return True
            target = self._node.tier_below(target.level, must_survive=self._node.is_draining)
        return False

    def rooms(self) -> Rooms:
        """For blocks that go down together one by one."""
        return Rooms(self._make_room)

    async def demote_to(
        self, entry: Entry, tier: Tier, target: Tier, urgency: Priority, rooms: Rooms | None = None
    ) -> bool:
        """Copy one block from `tier` to `target`, making room there; False when that did not succeed."""
        rooms = rooms if rooms is not None else self.rooms()
        if rooms.is_full(target, entry.scope, entry.tenant):
            return False
        for attempt in range(ROUNDS_MAX):
            source = entry.residence(tier)
            if source is None or entry.move is not None:
                return False
            try:
                return all(await self._mover.move([self._mover.plan(entry, source, target)], target, urgency))
            except TierFullError:
                request = SlotRequest(target, entry.scope, entry.tenant, source.record.raw_bytes)
                if not await rooms.make(request, attempt):
                    return False
            except RetryableError:
                return False
        return False

    async def relocate(self, entry: Entry, tier: Tier) -> bool:
        """Copy a block to another slot of its tier, where that has room; False when it has none."""
        source = entry.residence(tier)
        if source is None or entry.leases or entry.move is not None:
            return True
        try:
            request = SlotRequest(tier, entry.scope, entry.tenant, source.record.stored_bytes)
            slot = self._node.allocate(request) if tier.backend.mappable else None
            move = self._mover.plan(entry, source, tier, slot)
            return all(await self._mover.move([move], tier, Priority.DEMOTE))
        except (TierFullError, BackendFailedError):
            return False

    def congestion_s(self, tier: Tier | None) -> float:
        """Seconds until the way down from a tier is expected to be free; 0.0 while nothing waits for it."""
        if tier is None:
            return 0.0
        target = self._node.tier_below(tier.level, must_survive=self._node.is_draining)
        paths = self._mover.scheduler.paths
        if target is None or not paths.is_waited_for(tier.name, target.name):
            return 0.0
        probed = float(target.probe.write_bytes_per_second) if target.probe is not None else 0.0
        rate = paths.bytes_per_s(tier.name, target.name) or probed
        return max(REFUSED_S, paths.ahead_bytes(tier.name, target.name, 0) / rate) if rate > 0 else REFUSED_S


def _bytes_in(tier: Tier, entry: Entry) -> int:
    source = entry.residence(tier)
    return 0 if source is None else source.record.raw_bytes
