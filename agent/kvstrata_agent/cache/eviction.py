"""Makes room in tiers: carries eviction plans out, by demotion to the next slower tier where one takes the block.

Who pays for room is `policy.quota`'s decision; what a block's tenant loses by it is this module's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.slot_request import Want
from kvstrata_agent.cache.demotion import Lifting
from kvstrata_agent.cache.eviction_candidates import Cut, Fate, TierCandidates
from kvstrata_agent.movement.fair_queue import Priority
from kvstrata_agent.movement.move import Move, Way, grouped
from kvstrata_agent.policy.eviction import excess_bytes, plan_eviction
from kvstrata_agent.policy.placement import next_lower
from kvstrata_agent.policy.quota import OverQuota, over_hard_bytes, payers, payments
from kvstrata_agent.policy.recompute import REFUSED_S
from kvstrata_api.errors import BackendFailedError, QuotaExceededError, RetryableError, TierFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_agent.policy.quota import Standing

ROUNDS_MAX: Final = 4
"""Plans made for one slot before the tier counts as full: own blocks, whole extents, and each once more."""
BATCH_PARTS: Final = 8
"""Room for a batch is no more than this part of the tier or of the quota, 1/8: no small one is emptied for a block."""
REPLAN_S: Final = 0.005
"""Least time between two plans for one slot, so that a busy node's many changes cost no more than that."""
TRIM_BYTES_MAX: Final = 256 << 20
"""Bytes of one pass over the watermark, so that the sweep comes round to its other duties."""


class Room:
    """Frees slots. One plan at a time for each tier; what cannot be moved down is dropped from the last tier."""

    def __init__(self, node: Node, mover: Mover) -> None:
        self._node = node
        self._mover = mover
        self._locks: dict[Tier, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[SlotRef]] = set()
        self._lifting = Lifting(node, self._moved)

    async def reserve(
        self,
        want: Want,
        deadline_s: float,
        *,
        awaits_holders: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> SlotRef:
        """Take a slot, making room when there is none. `deadline_s` is a time of the node's clock.

        Whoever makes room takes its slot in the same step, and others come in the order in which they asked. What is
        on its way into the tier may be what others cannot leave before; where there is no room until then, it is
        waited for, and with `awaits_holders` also what readers, writers and sessions hold: as long as the slot
        `is_wanted`. Raises `TierFullError` when no room could be made in time, `QuotaExceededError` when the tenant's
        own quota stands against it, and `BackendFailedError` when the medium failed.
        """
        loop, changed = asyncio.get_running_loop(), self._node.changed
        ends_s = loop.time() + deadline_s - self._node.clock()
        while True:
            seen = changed.count
            try:
                return await self._reserved(want, ends_s - loop.time())
            except TierFullError as e:
                left_s = ends_s - loop.time()
                is_final = isinstance(e, QuotaExceededError) and self._action(want) is OverQuota.REJECT
                if is_final or left_s <= 0 or not (is_wanted() and self._may_come(want.tier, awaits_holders)):
                    raise
                if changed.count == seen:
                    await changed.wait(left_s)
                await asyncio.sleep(min(left_s, REPLAN_S))

    def _may_come(self, tier: Tier, awaits_holders: bool) -> bool:  # noqa: FBT001  Of `reserve`.
        """True while something is under way that may leave room in a tier when it ends."""
        if any(target is tier for target in self._mover.moving.values()):
            return True
        return awaits_holders and self._node.holds(tier)

    async def _reserved(self, want: Want, left_s: float) -> SlotRef:
        """Take a slot; where there is none, what can leave now leaves."""
        try:
            return self._node.take(want)
        except TierFullError as e:
            if left_s <= 0 or (isinstance(e, QuotaExceededError) and self._action(want) is OverQuota.REJECT):
                raise
        if self.is_lowest(want.tier) and not self._lock(want.tier).locked():
            return await self._made(want)  # Nothing is copied, so nothing is waited for.
        making = self._start(self._made(want))
        is_late = True
        try:
            await asyncio.wait([making], timeout=left_s)
            is_late = not making.done()
        finally:
            if is_late:  # Not cancelled: the room will be there for the next one.
                making.add_done_callback(partial(self._give_back, want))
        if is_late:
            raise TierFullError(f"tier {want.tier.name}: blocks did not leave within {left_s:.1f} s", delay_s=1.0)
        return making.result()

    async def _made(self, want: Want) -> SlotRef:
        """Make room and take a slot of it, before anybody else can."""
        async with self._lock(want.tier):
            for attempt in range(ROUNDS_MAX):
                try:
                    return self._node.take(want)
                except TierFullError:
                    await self._make(want, attempt)
            return self._node.take(want)

    def _give_back(self, want: Want, making: asyncio.Task[SlotRef]) -> None:
        """Give a slot back that came too late for whoever wanted it."""
        if not making.cancelled() and making.exception() is None:
            self._node.give_back(want.tier, making.result(), want.tenant)

    def congestion_s(self, tier: Tier | None) -> float:
        """Seconds until the way down from a tier is expected to be free; 0.0 while nothing waits for it."""
        target, paths = self._next_lower(tier) if tier is not None else None, self._mover.traffic.paths
        if tier is None or target is None or not paths.is_waited_for(tier.name, target.name):
            return 0.0
        probed = float(target.probe.write_bytes_per_second) if target.probe is not None else 0.0
        rate = paths.bytes_per_s(tier.name, target.name) or probed
        return max(REFUSED_S, paths.ahead_bytes(tier.name, target.name, 0) / rate) if rate > 0 else REFUSED_S

    def is_lowest(self, tier: Tier) -> bool:
        """True when no slower tier takes blocks now."""
        return self._next_lower(tier) is None

    def _start(self, making: Coroutine[None, None, SlotRef]) -> asyncio.Task[SlotRef]:
        task = asyncio.create_task(making)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _action(self, want: Want) -> OverQuota:
        """What the tenant's quota asks for; only new blocks are refused, others make room by demotion."""
        action = self._node.tenants.of(want.tenant).over_quota
        return OverQuota.DEMOTE if action is OverQuota.REJECT and not want.is_new else action

    async def _make(self, want: Want, attempt: int) -> None:
        """Let blocks leave by one plan, if any can; for whoever has the tier's lock."""
        tier, book = want.tier, self._node.tenants
        if not book.is_armed or tier.is_recovering:
            return  # Somebody's guarantee may not be known yet, or what is there.
        used_bytes = tier.tenant_bytes.get(want.tenant, 0)
        over_bytes = over_hard_bytes(used_bytes, want.size_bytes, book.hard_bytes(tier, want.tenant))
        if over_bytes:
            await self._pay_own(want, over_bytes)
            return
        extents = tier.relief(want.scope, want.size_bytes, want.writer)
        if not extents:
            return  # Somebody else made room while this one waited.
        for payer in payers(book.standings(tier), want.tenant, want.size_bytes):
            if await self._collect(want, payer, len(extents), attempt):
                return

    def _lock(self, tier: Tier) -> asyncio.Lock:
        return self._locks.setdefault(tier, asyncio.Lock())

    async def _pay_own(self, want: Want, over_bytes: int) -> int:
        """Let a tenant make room below its hard quota with its own blocks; returns the bytes freed."""
        hard_bytes = self._node.tenants.hard_bytes(want.tier, want.tenant) or 0
        batch_bytes = min(want.batch_bytes, hard_bytes // BATCH_PARTS)
        fate = Fate.DROP if self._action(want) is OverQuota.EVICT else Fate.STAY
        cut = Cut(max(over_bytes, batch_bytes), "quota", tenant=want.tenant, fate=fate)
        return await self._evict(want.tier, cut)

    async def _collect(self, want: Want, payer: Standing, extents: int, attempt: int) -> bool:
        """Make one account pay for a slot: from the writer's own blocks in the same scope, or by whole extents."""
        tier, is_own = want.tier, payer.tenant == want.tenant
        if is_own and (want.scope, want.tenant) in self._node.contents(tier).queues and attempt % 2 == 0:
            need_bytes = min(want.batch_bytes, tier.backend.capacity_bytes // BATCH_PARTS)
            cut = Cut(max(want.size_bytes, need_bytes), "room", tenant=want.tenant, scope=want.scope)
            return await self._evict(tier, cut) > 0
        freed_bytes = 0
        for extent in self._extents_of(tier, payer, is_own=is_own, count=extents):
            freed_bytes += await self._clear(tier, extent, payer, is_own=is_own)
        return freed_bytes > 0

    def _extents_of(self, tier: Tier, payer: Standing, *, is_own: bool, count: int) -> list[int]:
        """Up to `count` extents that an account can give up, those with the fewest blocks first."""
        busy = {r.slot.extent for r in self._node.reservations if r.tier is tier}
        extents = self._node.contents(tier).extents
        ranked = sorted(
            (extent in busy, len(residents), extent)
            for extent, residents in extents.items()
            if residents.may_hold(payer.tenant)
        )
        spares = {s.tenant: s.spare_bytes for s in self._node.tenants.standings(tier)}
        if is_own:
            spares[payer.tenant] = payer.used_bytes
        found: list[int] = []
        for _, _, extent in ranked:
            if len(found) == count:
                break
            held = extents[extent].bytes_by_tenant()
            if payer.tenant in held and all(size_bytes <= spares.get(t, 0) for t, size_bytes in held.items()):
                found.append(extent)
                for tenant, size_bytes in held.items():
                    spares[tenant] -= size_bytes
        return found

    async def _clear(self, tier: Tier, extent: int, payer: Standing, *, is_own: bool) -> int:
        """Empty a whole extent: its own blocks where the tree allows, then older ones of the same account.

        Where neither frees anything, its own blocks go down whatever continues them here: they are not lost.
        """
        residents = self._node.contents(tier).extents.get(extent)
        if not residents:
            return 0
        scope = residents.scope
        cut = Cut(tier.backend.capacity_bytes, "room", scope=scope, extents=frozenset({extent}))
        freed_bytes = await self._evict(tier, cut)
        left = self._node.contents(tier).extents.get(extent)
        if left:
            left_bytes = sum(left.bytes_by_tenant().values())
            most_bytes = None if is_own else max(0, payer.spare_bytes - freed_bytes)
            cut = Cut(left_bytes, "room", tenant=payer.tenant, scope=scope, most_bytes=most_bytes)
            freed_bytes += await self._evict(tier, cut)
        return freed_bytes or await self._send_down(tier, extent)

    async def _send_down(self, tier: Tier, extent: int) -> int:
        """Leave what lies in an extent to slower tiers, out of order; returns the bytes freed."""
        decoded = (
            self._node.decoded([residents.scope])
            if (residents := self._node.contents(tier).extents.get(extent))
            else None
        )
        if residents is None or decoded is None:
            return 0
        free = [entry for entry in residents if not entry.is_held and entry not in decoded]
        await self._sink([e for e in free if len(e.residences) == 1], tier, Priority.ROOM)
        return self._let_go([e for e in free if len(e.residences) > 1], tier, "room", ())

    async def trim(self, tier: Tier) -> int:
        """Bring a tier that is over the high watermark down to the low one; returns the bytes freed."""
        policy = self._node.spec.policy.eviction
        backend = tier.backend
        need_bytes = excess_bytes(
            backend.used_bytes, backend.capacity_bytes, policy.high_watermark_percent, policy.low_watermark_percent
        )
        if need_bytes <= 0:
            return 0
        async with self._lock(tier):
            return await self._share_out(tier, min(need_bytes, TRIM_BYTES_MAX), "watermark")

    async def enforce(self, tier: Tier) -> int:
        """Bring tenants down to hard quotas that were lowered under them; returns the bytes freed."""
        freed_bytes = 0
        for tenant, over_bytes in self._node.tenants.over_hard(tier).items():
            is_dropped = self._node.tenants.of(tenant).over_quota is OverQuota.EVICT
            fate = Fate.DROP if is_dropped else Fate.SINK
            cut = Cut(min(over_bytes, TRIM_BYTES_MAX), "quota", Priority.DEMOTE, tenant, fate=fate)
            freed_bytes += await self.cut(tier, cut)
        return freed_bytes

    async def _share_out(self, tier: Tier, need_bytes: int, reason: str) -> int:
        """Evict where most is held beyond guarantee and share; returns the bytes freed."""
        if not self._node.tenants.is_armed:
            return 0
        freed_bytes = 0
        standings = {s.tenant: s for s in self._node.tenants.standings(tier)}
        for tenant, due_bytes in payments(tuple(standings.values()), need_bytes).items():
            most_bytes = standings[tenant].spare_bytes
            cut = Cut(due_bytes, reason, Priority.DEMOTE, tenant, most_bytes=most_bytes)
            freed_bytes += await self._evict(tier, cut)
        return freed_bytes

    async def drain(self, tier: Tier) -> int:
        """Send one batch of a memory tier's blocks to media that survive; returns how many blocks are left."""
        await self.cut(tier, Cut(TRIM_BYTES_MAX, "drain", Priority.DEMOTE))
        return self._node.contents(tier).blocks

    async def cut(self, tier: Tier, cut: Cut) -> int:
        """Take blocks that nobody holds out of a tier; returns the bytes freed."""
        async with self._lock(tier):
            return await self._evict(tier, cut)

    async def evacuate(self, tier: Tier, batch: int = 256) -> int:
        """Move blocks off closing extents, within the tier where it has room; returns how many stay behind."""
        contents = self._node.contents(tier)
        leaving = [e for x in tier.closing for e in contents.extents.get(x, ())]
        free = [e for e in leaving if not e.leases and e.move is None][:batch]
        moved = await asyncio.gather(*(self._relocate(e, tier) for e in free))
        if not all(moved):
            async with self._lock(tier):
                need_bytes = sum(r.slot.size_bytes for e in free if (r := e.residence(tier)) is not None)
                await self._evict(tier, Cut(need_bytes, "shrink", Priority.DEMOTE, extents=tier.closing))
                await self._share_out(tier, need_bytes, "shrink")
        return contents.count(tier.closing)

    async def empty(self, tier: Tier) -> bool:
        """Send one batch of a closed tier's blocks to other tiers; False when nothing that is left can go.

        Down first. What no slower tier takes goes up as far as there is room: nothing there gives way for it.
        """
        before, reason = self._node.contents(tier).blocks, "removed" if tier.is_leaving else "drain"
        cut = Cut(TRIM_BYTES_MAX, reason, Priority.DEMOTE, fate=Fate.STAY)
        async with self._lock(tier):
            await self._evict(tier, cut)
            if self._node.contents(tier).blocks == before and self.is_lowest(tier):
                await self._lifting.lift(tier)
                await self._evict(tier, cut)
        return self._node.contents(tier).blocks < before or self._node.is_leased(tier)

    async def _relocate(self, entry: Entry, tier: Tier) -> bool:
        source = entry.residence(tier)
        if source is None or entry.leases or entry.move is not None:
            return True
        try:
            want = Want(tier, entry.scope, entry.tenant, source.record.stored_bytes)
            slot = self._node.take(want) if tier.backend.mappable else None
            return all(await self._moved([Move(entry, source, slot)], tier, Priority.DEMOTE))
        except (TierFullError, BackendFailedError):
            return False

    async def _evict(self, tier: Tier, cut: Cut) -> int:
        """Plan and carry out: copies first, all at once; then the sources go, children before parents."""
        candidates = TierCandidates(self._node.index, tier, cut.scope, cut.extents, cut.tenant)
        plan = plan_eviction(candidates, cut.need_bytes, cut.most_bytes)
        try:
            lost = await self._spare([e for e in plan.victims if len(e.residences) == 1], tier, cut)
            return self._let_go(plan.victims, tier, cut.reason, lost)
        finally:
            for entry in plan.victims:
                candidates.push(entry)

    async def _spare(self, entries: Sequence[Entry], tier: Tier, cut: Cut) -> Collection[Entry]:
        """Copy blocks down as their fate says; returns those that go for good."""
        if cut.fate is Fate.DROP:
            return set(entries)
        lost = await self._sink(entries, tier, cut.urgency)
        return lost if cut.fate is Fate.SINK else ()

    def _let_go(self, victims: Sequence[Entry], tier: Tier, reason: str, lost: Collection[Entry]) -> int:
        """Drop the copies in `tier` that nothing speaks against any more; returns the bytes freed.

        A parent may go before a child that lies between its two copies: that child may be what fills the tier which
        the parent would have to pass through. But a decoding session's blocks stay as fast as those behind them.
        """
        gone, index = Counter[str](), self._node.index
        early = {e for e in victims if len(e.residences) > 1 and not index.leaves_in_order(e, tier)}
        decoded = self._node.decoded({e.scope for e in early})
        stays = early if decoded is None else early & decoded

        def leaving() -> Iterator[Entry]:
            for entry in victims:
                if entry not in stays and self._may_go(entry, tier, is_lost=entry in lost):
                    gone[entry.tenant] += 1
                    yield entry

        freed_bytes = self._node.evict(leaving(), tier, reason)
        for tenant, count in gone.items() if reason == "quota" else ():
            self._node.counters.add("kvstrata_quota_evicted_total", count, tenant=tenant, tier=tier.name)
        return freed_bytes

    def _may_go(self, entry: Entry, tier: Tier, *, is_lost: bool) -> bool:
        if entry.residence(tier) is None or entry.is_held or not (is_lost or len(entry.residences) > 1):
            return False
        return self._node.index.may_leave(entry)

    async def _sink(self, entries: Sequence[Entry], tier: Tier, urgency: Priority) -> set[Entry]:
        """Copy blocks to slower tiers; returns those for which no slower tier exists or takes any."""
        if not entries or self.is_lowest(tier):
            return set(entries)
        groups = grouped(entries, partial(_bytes_in, tier), lambda e: e.tenant)
        lost = await asyncio.gather(*(self._sunk_group(group, tier, urgency) for group in groups))
        return {entry for group in lost for entry in group}

    async def _sunk_group(self, entries: Sequence[Entry], tier: Tier, urgency: Priority) -> list[Entry]:
        """Copy blocks down, together where they can; returns those that no slower tier takes."""
        left = await self._sunk_together(entries, tier, urgency) if len(entries) > 1 else entries
        if not left:
            return []
        results = await asyncio.gather(*(self._sunk(e, tier, urgency) for e in left))
        return [e for e, is_sunk in zip(left, results, strict=True) if not is_sunk]

    async def _sunk_together(self, entries: Sequence[Entry], tier: Tier, urgency: Priority) -> Sequence[Entry]:
        """Copy what can go to the next slower tier with others as one transfer each way; returns what is left to do."""
        target = self._next_lower(tier)
        if target is None:
            return entries
        sources = {e: source for e in entries if e.move is None and (source := e.residence(tier)) is not None}
        moves = [Move(e, source) for e, source in sources.items() if e.residence(target) is None]
        for way in (Way.STRAIGHT, Way.CODED):
            alike = [m for m in moves if m.entry.move is None and self._mover.way(m, target) is way]
            if alike:
                with suppress(RetryableError):  # No room, or too many wait: each tries by itself what can be done.
                    await self._moved(alike, target, urgency)
        return [e for e in entries if e.residence(target) is None]

    def _next_lower(self, tier: Tier) -> Tier | None:
        facts = [t.facts(self._node.clock()) for t in self._node.tiers]
        name = next_lower(facts, tier.level, must_survive=self._node.is_draining).target
        return None if name is None else self._node.tier(name)

    async def _sunk(self, entry: Entry, tier: Tier, urgency: Priority) -> bool:
        """Copy one block to the first slower tier that takes it."""
        facts = [t.facts(self._node.clock()) for t in self._node.tiers]
        level = tier.level
        must_survive = self._node.is_draining
        while (placement := next_lower(facts, level, must_survive=must_survive)).target is not None:
            target = self._node.tier(placement.target)
            assert target is not None
            if entry.residence(target) is not None or await self.sink_into(entry, tier, target, urgency):
                return True
            level = target.level
        return False

    async def sink_into(self, entry: Entry, tier: Tier, target: Tier, urgency: Priority) -> bool:
        """Copy one block from `tier` to `target`, making room there; False when that did not succeed."""
        for attempt in range(ROUNDS_MAX):
            source = entry.residence(tier)
            if source is None or entry.move is not None:
                return False
            try:
                return all(await self._moved([Move(entry, source)], target, urgency))
            except TierFullError:
                async with self._lock(target):
                    await self._make(Want(target, entry.scope, entry.tenant, source.record.raw_bytes), attempt)
            except RetryableError:
                return False
        return False

    async def _moved(self, moves: Sequence[Move], target: Tier, urgency: Priority) -> list[bool]:
        """Make copies while their blocks are marked as moving."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for move in moves:
            assert move.entry.move is None
            move.entry.move = done
        made = [False]
        try:
            made = await self._mover.copy_all(moves, target, urgency)
        finally:
            for move in moves:
                move.entry.move = None
            done.set_result(all(made))
            if any(made):
                self._node.changed.fire()
        return made


def _bytes_in(tier: Tier, entry: Entry) -> int:
    source = entry.residence(tier)
    return 0 if source is None else source.record.raw_bytes
