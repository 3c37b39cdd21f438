"""Makes room in tiers: carries eviction plans out, by demotion to the next slower tier where one takes the block.

From whom blocks are evicted is `policy.quota`'s decision; what a block's tenant loses by it is this module's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.history import Choice, Decision, Event, What
from kvstrata_agent.cache.demotion import ROUNDS_MAX, Demoter
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, Fate, TierCandidates
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.eviction import BATCH_PARTS, plan_eviction
from kvstrata_agent.policy.quota import OverQuota, accounts_over_share, over_hard_bytes, surplus_to_evict
from kvstrata_api.errors import QuotaExceededError, RetryableError, TierFullError
from kvstrata_kube.tasks import TaskSet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import SlotRequest, Tier
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_agent.policy.placement import Placement
    from kvstrata_agent.policy.quota import AccountUsage

REPLAN_S: Final = 0.005
"""Least time between two plans for one slot, so that a busy node's many changes cost no more than that."""
TURN_BYTES: Final = 32 << 20
"""Bytes of one plan for what has time: whoever waits for room in the tier comes between two of them."""
TRIM_BYTES_MAX: Final = 256 << 20
"""Bytes of one pass over the watermark, so that the sweep comes round to its other duties."""


class ArrivalDeclinedError(RetryableError):
    """What would have to leave a tier is worth more than the block that comes: no other room is looked for."""


FOR_ROOM: Final = ("room", "watermark")
"""Why blocks leave that others are worth more than."""


class Evictor:
    """Frees slots. One plan at a time for each tier; what cannot be demoted is dropped from the lowest one."""

    def __init__(self, node: Node, mover: Mover) -> None:
        self._node = node
        self._mover = mover
        self._locks: dict[Tier, asyncio.Lock] = {}
        self._tasks: TaskSet[SlotRef] = TaskSet()
        self.demoter = Demoter(node, mover, self.make_room)

    async def reserve(
        self,
        request: SlotRequest,
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
        own quota stands against it, `ArrivalDeclinedError` when what is there is worth more, and `BackendFailedError`
        when the medium failed.
        """
        loop, changed = asyncio.get_running_loop(), self._node.changed
        ends_s = loop.time() + deadline_s - self._node.clock()
        while True:
            seen = changed.count
            try:
                return await self._reserved(request, ends_s - loop.time())
            except TierFullError as e:
                left_s = ends_s - loop.time()
                is_final = isinstance(e, QuotaExceededError) and self._action(request) is OverQuota.REJECT
                if is_final or left_s <= 0 or not (is_wanted() and self._may_come(request.tier, awaits_holders)):
                    raise
                if changed.count == seen:
                    await changed.wait(left_s)
                await asyncio.sleep(min(left_s, REPLAN_S))

    def _may_come(self, tier: Tier, awaits_holders: bool) -> bool:  # noqa: FBT001  Of `reserve`.
        """True while something is under way that may leave room in a tier when it ends."""
        if any(target is tier for target in self._mover.under_way.values()):
            return True
        return awaits_holders and self._node.holds(tier)

    async def _reserved(self, request: SlotRequest, left_s: float) -> SlotRef:
        """Take a slot; where there is none, what can leave now leaves."""
        try:
            return self._node.allocate(request)
        except TierFullError as e:
            if left_s <= 0 or (isinstance(e, QuotaExceededError) and self._action(request) is OverQuota.REJECT):
                raise
        if self._node.is_lowest(request.tier) and not self._lock(request.tier).locked():
            return await self._make_and_take(request)  # Nothing is copied, so nothing is waited for.
        making = self._tasks.spawn(self._make_and_take(request))
        is_late = True
        try:
            await asyncio.wait([making], timeout=left_s)
            is_late = not making.done()
        finally:
            if is_late:  # Not cancelled: the room will be there for the next one.
                making.add_done_callback(partial(self._free_late, request))
        if is_late:
            raise TierFullError(f"tier {request.tier.name}: blocks did not leave within {left_s:.1f} s", delay_s=1.0)
        return making.result()

    async def _make_and_take(self, request: SlotRequest) -> SlotRef:
        """Make room and take a slot of it, before anybody else can."""
        async with self._lock(request.tier):
            for attempt in range(ROUNDS_MAX):
                try:
                    return self._node.allocate(request)
                except TierFullError:
                    await self._make_room(request, attempt)
            return self._node.allocate(request)

    def _free_late(self, request: SlotRequest, making: asyncio.Task[SlotRef]) -> None:
        """Give a slot back that came too late for whoever wanted it."""
        if not making.cancelled() and making.exception() is None:
            self._node.free(request.tier, making.result(), request.tenant)

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._tasks.close()

    def _action(self, request: SlotRequest) -> OverQuota:
        """What the tenant's quota asks for; only new blocks are refused, others make room by demotion."""
        action = self._node.tenants.of(request.tenant).over_quota
        return OverQuota.DEMOTE if action is OverQuota.REJECT and not request.is_new else action

    async def make_room(self, request: SlotRequest, attempt: int) -> bool:
        """Let blocks leave by one plan: for what comes down from a faster tier. False where none could."""
        async with self._lock(request.tier):
            return await self._make_room(request, attempt)

    async def _make_room(self, request: SlotRequest, attempt: int) -> bool:
        """Let blocks leave by one plan, for whoever has the tier's lock; False where none could."""
        tier, book = request.tier, self._node.tenants
        if not book.are_rules_known or tier.is_recovering:
            return False  # Somebody's guarantee may not be known yet, or what is there.
        used_bytes = tier.tenant_bytes.get(request.tenant, 0)
        over_bytes = over_hard_bytes(used_bytes, request.slot_bytes, book.hard_bytes(tier, request.tenant))
        if over_bytes:
            return await self._evict_own(request, over_bytes) > 0
        extents = tier.extents_to_free(request.scope, request.size_bytes, request.writer)
        if not extents:
            return True  # Somebody else made room while this one waited.
        for account in accounts_over_share(book.usages(tier), request.tenant, request.slot_bytes):
            if await self._evict_from(request, account, len(extents), attempt):
                return True
        return False

    def _lock(self, tier: Tier) -> asyncio.Lock:
        return self._locks.setdefault(tier, asyncio.Lock())

    async def _evict_own(self, request: SlotRequest, over_bytes: int) -> int:
        """Evict from a tenant's own blocks what it needs below its hard quota; returns the bytes freed."""
        hard_bytes = self._node.tenants.hard_bytes(request.tier, request.tenant) or 0
        batch_bytes = min(request.batch_bytes, hard_bytes // BATCH_PARTS)
        fate = Fate.DROP if self._action(request) is OverQuota.EVICT else Fate.DEMOTE_OR_KEEP
        eviction = EvictionRequest(max(over_bytes, batch_bytes), "quota", tenant=request.tenant, fate=fate)
        return await self._evict(request.tier, eviction)

    async def _evict_from(self, request: SlotRequest, account: AccountUsage, extents: int, attempt: int) -> bool:
        """Evict from one account for a slot: from the writer's own blocks in the same scope, or by whole extents."""
        tier, is_own = request.tier, account.tenant == request.tenant
        queues = self._node.contents(tier).queues
        if is_own and attempt % 2 == 0 and any(key[:2] == (request.scope, request.tenant) for key in queues):
            need_bytes = min(request.batch_bytes, tier.backend.capacity_bytes // BATCH_PARTS)
            need_bytes = max(request.slot_bytes, need_bytes)
            eviction = EvictionRequest(
                need_bytes, "room", tenant=request.tenant, scope=request.scope, arriving=request.arriving
            )
            return await self._evict(tier, eviction) > 0
        freed_bytes = 0
        for extent in self._extents_of(tier, account, is_own=is_own, count=extents):
            freed_bytes += await self._clear_extent(tier, extent, account, is_own=is_own)
            await asyncio.sleep(0)  # After a tier was made smaller there are many of them.
        return freed_bytes > 0

    def _extents_of(self, tier: Tier, account: AccountUsage, *, is_own: bool, count: int) -> list[int]:
        """Up to `count` extents that an account can give up, those with the fewest blocks first."""
        busy = {r.slot.extent for r in self._node.reservations if r.tier is tier}
        extents = self._node.contents(tier).extents
        ranked = sorted(
            (extent in busy, len(residents), extent)
            for extent, residents in extents.items()
            if residents.may_hold(account.tenant)
        )
        surplus = {u.tenant: u.surplus_bytes for u in self._node.tenants.usages(tier)}
        if is_own:
            surplus[account.tenant] = account.used_bytes
        found: list[int] = []
        for _, _, extent in ranked:
            if len(found) == count:
                break
            held = extents[extent].bytes_by_tenant()
            if account.tenant in held and all(size_bytes <= surplus.get(t, 0) for t, size_bytes in held.items()):
                found.append(extent)
                for tenant, size_bytes in held.items():
                    surplus[tenant] -= size_bytes
        return found

    async def _clear_extent(self, tier: Tier, extent: int, account: AccountUsage, *, is_own: bool) -> int:
        """Empty a whole extent: its own blocks where the tree allows, then older ones of the same account.

        Where neither frees anything, its own blocks go down whatever continues them here: they are not lost.
        """
        residents = self._node.contents(tier).extents.get(extent)
        if not residents:
            return 0
        scope = residents.scope
        eviction = EvictionRequest(None, "room", scope=scope, extents=frozenset({extent}))
        freed_bytes = await self._evict(tier, eviction)
        left = self._node.contents(tier).extents.get(extent)
        if left:
            left_bytes = sum(left.bytes_by_tenant().values())
            most_bytes = None if is_own else max(0, account.surplus_bytes - freed_bytes)
            eviction = EvictionRequest(left_bytes, "room", tenant=account.tenant, scope=scope, most_bytes=most_bytes)
            freed_bytes += await self._evict_in_turns(tier, eviction, nullcontext())
        return freed_bytes or await self._demote_extent(tier, extent)

    async def _demote_extent(self, tier: Tier, extent: int) -> int:
        """Leave what lies in an extent to slower tiers, out of order; returns the bytes freed."""
        decoded = (
            self._node.decoded([residents.scope])
            if (residents := self._node.contents(tier).extents.get(extent))
            else None
        )
        if residents is None or decoded is None:
            return 0
        free = [entry for entry in residents if not entry.is_held and entry not in decoded]
        await self.demoter.demote([e for e in free if len(e.residences) == 1], tier, Priority.ROOM)
        leaving = _Leaving(self._node, tier, Decision(What.EVICTED, self._node.clock(), "room", tier.name))
        return self._drop_copies([e for e in free if len(e.residences) > 1], tier, leaving, {})

    async def trim(self, tier: Tier) -> int:
        """Bring a tier that is over the high watermark down to the low one; returns the bytes freed."""
        need_bytes = self._node.excess_bytes(tier)
        return await self._evict_by_share(tier, min(need_bytes, TRIM_BYTES_MAX), "watermark") if need_bytes > 0 else 0

    async def enforce(self, tier: Tier) -> int:
        """Bring tenants down to hard quotas that were lowered under them; returns the bytes freed."""
        freed_bytes = 0
        for tenant, over_bytes in self._node.tenants.over_hard(tier).items():
            is_dropped = self._node.tenants.of(tenant).over_quota is OverQuota.EVICT
            fate = Fate.DROP if is_dropped else Fate.DEMOTE_OR_DROP
            eviction = EvictionRequest(min(over_bytes, TRIM_BYTES_MAX), "quota", Priority.DEMOTE, tenant, fate=fate)
            freed_bytes += await self.evict(tier, eviction)
        return freed_bytes

    async def _evict_by_share(self, tier: Tier, need_bytes: int, reason: str) -> int:
        """Evict where most is held beyond guarantee and share, in turns; returns the bytes freed."""

        async def evict(due_bytes: int, _: int) -> int:
            return await self._evict_shares(tier, due_bytes, reason)

        return await _in_turns(need_bytes, self._lock(tier), evict)

    async def _evict_shares(self, tier: Tier, need_bytes: int, reason: str) -> int:
        """One turn of it, by what is held now, for whoever has the tier's lock."""
        if not self._node.tenants.are_rules_known:
            return 0
        freed_bytes = 0
        usages = {u.tenant: u for u in self._node.tenants.usages(tier)}
        for tenant, due_bytes in surplus_to_evict(tuple(usages.values()), need_bytes).items():
            most_bytes = usages[tenant].surplus_bytes
            eviction = EvictionRequest(due_bytes, reason, Priority.DEMOTE, tenant, most_bytes=most_bytes)
            freed_bytes += await self._evict(tier, eviction)
        return freed_bytes

    async def drain(self, tier: Tier) -> int:
        """Send one batch of a memory tier's blocks to media that survive; returns how many blocks are left.

        What none of those takes is dropped, unless they only take nothing just now.
        """
        before = self._node.contents(tier).blocks
        eviction = EvictionRequest(TRIM_BYTES_MAX, "drain", Priority.DEMOTE, fate=Fate.DEMOTE_OR_KEEP)
        await self.evict(tier, eviction)
        if self._node.contents(tier).blocks == before and not self._node.is_pausing_below(tier):
            await self.evict(tier, replace(eviction, fate=Fate.DEMOTE_OR_DROP))
        return self._node.contents(tier).blocks

    async def evict(self, tier: Tier, request: EvictionRequest) -> int:
        """Take blocks that nobody holds out of a tier, in turns; returns the bytes freed."""
        return await self._evict_in_turns(tier, request, self._lock(tier))

    async def _evict_in_turns(
        self, tier: Tier, request: EvictionRequest, turn: AbstractAsyncContextManager[None]
    ) -> int:
        need_bytes, most_bytes = request.need_bytes, request.most_bytes
        assert need_bytes is not None, "what is emptied takes one plan"

        async def evict(due_bytes: int, freed_bytes: int) -> int:
            left_bytes = None if most_bytes is None else most_bytes - freed_bytes
            return await self._evict(tier, replace(request, need_bytes=due_bytes, most_bytes=left_bytes))

        return await _in_turns(need_bytes, turn, evict)

    async def evacuate(self, tier: Tier, batch: int = 256) -> int:
        """Move blocks off closing extents, within the tier where it has room; returns how many stay behind."""
        contents = self._node.contents(tier)
        leaving = (e for x in tier.closing for e in contents.extents.get(x, ()))
        free = list(islice((e for e in leaving if not e.leases and e.move is None), batch))
        moved = await asyncio.gather(*(self.demoter.relocate(e, tier) for e in free))
        if not all(moved):
            need_bytes = sum(r.slot.size_bytes for e in free if (r := e.residence(tier)) is not None)
            await self.evict(tier, EvictionRequest(need_bytes, "shrink", Priority.DEMOTE, extents=tier.closing))
            await self._evict_by_share(tier, need_bytes, "shrink")
        return contents.count(tier.closing)

    async def empty(self, tier: Tier, promote: Callable[[Tier], Awaitable[None]]) -> bool:
        """Send one batch of a closed tier's blocks to other tiers; False when nothing that is left can go.

        Down first. What no slower tier takes goes up by `promote`, as far as there is room: nothing there gives way
        for it.
        """
        before, reason = self._node.contents(tier).blocks, "removed" if tier.is_leaving else "drain"
        eviction = EvictionRequest(TRIM_BYTES_MAX, reason, Priority.DEMOTE, fate=Fate.DEMOTE_OR_KEEP)
        await self.evict(tier, eviction)
        if self._node.contents(tier).blocks == before and self._node.is_lowest(tier):
            async with self._lock(tier):
                await promote(tier)
            await self.evict(tier, eviction)
        return self._node.contents(tier).blocks < before or self._node.is_leased(tier)

    async def _evict(self, tier: Tier, request: EvictionRequest) -> int:
        """Plan and carry out: copies first, all at once; then the sources go, children before parents.

        Where slower tiers take nothing, as everything there is continued by blocks here, ends of chains are lost here:
        what they continued down there can leave then.
        """
        freed_bytes = await self._evict_once(tier, request)
        if freed_bytes or request.reason != "room" or request.fate is not Fate.DEMOTE_OR_DROP:
            return freed_bytes
        return await self._evict_once(tier, replace(request, fate=Fate.DROP))

    async def _evict_once(self, tier: Tier, request: EvictionRequest) -> int:
        returns = self._node.returns if self._node.returns.are_followed and request.need_bytes is not None else None
        candidates = TierCandidates(self._node.index, tier, request, self._node.clock(), returns)
        need_bytes = tier.backend.capacity_bytes if request.need_bytes is None else request.need_bytes
        plan = plan_eviction(candidates, need_bytes, request.most_bytes, candidates.scan_max)
        if candidates.is_declined and not plan.victims:
            raise ArrivalDeclinedError(f"tier {tier.name}: what is there is expected to be of more use than what comes")
        if plan.victims and request.reason in FOR_ROOM:
            tier.price.paid(self._node.returns.worth(plan.victims[-1])[0])
        try:
            leaving = self._leaving(candidates, tier, request.reason)
            lost = await self._demote_victims([e for e in plan.victims if len(e.residences) == 1], tier, request)
            return self._drop_copies(plan.victims, tier, leaving, lost)
        finally:
            for entry in plan.victims:
                candidates.push(entry)

    async def _demote_victims(
        self, entries: Sequence[Entry], tier: Tier, request: EvictionRequest
    ) -> Mapping[Entry, Placement | None]:
        """Copy blocks down as their fate asks; returns those that go for good, and which were not worth a write."""
        if request.fate is Fate.DROP:
            return dict.fromkeys(entries)
        may_drop = request.fate is Fate.DEMOTE_OR_DROP
        may_decline = may_drop and request.reason in FOR_ROOM
        lost = await self.demoter.demote(entries, tier, request.urgency, may_decline=may_decline)
        return lost if may_drop else {}

    def _leaving(self, candidates: TierCandidates, tier: Tier, reason: str) -> _Leaving:
        """What is to be remembered of the victims of a plan that was just made."""
        node, spared, kept = self._node, candidates.spared(), None
        now_s = node.clock()
        if spared is not None:
            entry, uses_per_s = spared
            kept = Choice(entry.scope, entry.tenant, uses_per_s, max(0.0, now_s - entry.used_at_s))
        policy, inputs = node.spec.policy.eviction.type, {"fill_percent": round(100 * tier.fill_ratio)}
        decision = Decision(What.EVICTED, now_s, reason, tier.name, policy=policy, inputs=inputs, kept=kept)
        return _Leaving(node, tier, decision, candidates.worths)

    def _drop_copies(
        self, victims: Sequence[Entry], tier: Tier, leaving: _Leaving, lost: Mapping[Entry, Placement | None]
    ) -> int:
        """Drop the copies in `tier` that nothing speaks against any more; returns the bytes freed.

        A parent may go before a child that lies between its two copies: that child may be what fills the tier which
        the parent would have to pass through. But a decoding session's blocks stay as fast as those behind them.
        """
        gone, index = Counter[str](), self._node.index
        early = {e for e in victims if len(e.residences) > 1 and not index.leaves_in_order(e, tier)}
        decoded = self._node.decoded({e.scope for e in early})
        stays = early if decoded is None else early & decoded

        def going() -> Iterator[Entry]:
            for entry in victims:
                if entry not in stays and self._may_go(entry, tier, is_lost=entry in lost):
                    gone[entry.tenant] += 1
                    leaving.note(entry, lost.get(entry))
                    yield entry

        reason = leaving.decision.reason
        freed_bytes = self._node.evict(going(), tier, reason)
        for tenant, count in gone.items() if reason == "quota" else ():
            self._node.counters.add("kvstrata_quota_evicted_total", count, tenant=tenant, tier=tier.name)
        return freed_bytes

    def _may_go(self, entry: Entry, tier: Tier, *, is_lost: bool) -> bool:
        if entry.residence(tier) is None or entry.is_held or not (is_lost or len(entry.residences) > 1):
            return False
        return self._node.index.may_leave(entry)


async def _in_turns(
    need_bytes: int, turn: AbstractAsyncContextManager[None], evict: Callable[[int, int], Awaitable[int]]
) -> int:
    """Evict until the need is met or a turn frees nothing; returns the bytes freed.

    `evict` gets the bytes that are due in a turn, and those that the turns before it have freed.
    """
    freed_bytes, part_bytes = 0, 1
    while part_bytes and freed_bytes < need_bytes:
        async with turn:
            part_bytes = await evict(min(need_bytes - freed_bytes, TURN_BYTES), freed_bytes)
        freed_bytes += part_bytes
        await asyncio.sleep(0)
    return freed_bytes


class _Leaving:
    """Notes blocks that leave a tier by one decision."""

    def __init__(self, node: Node, tier: Tier, decision: Decision, worths: Mapping[Entry, float] | None = None) -> None:
        self._history = node.history
        self._signs = node.signs
        self._returns = node.returns
        self._counters = node.counters
        self._tier = tier
        self.decision = decision
        self._worths = worths or {}
        self._demotions: dict[str, Decision] = {}
        """By the tier that still has the block, or by why none was to have it."""

    def note(self, entry: Entry, declined: Placement | None) -> None:
        """Note a block, before its copy in the tier goes. One that stays where it is read from has nothing to note."""
        copies, decision = entry.residences, self.decision
        if copies[0].tier is not self._tier:
            return
        self._signs.left(entry, had_its_chance=len(copies) == 1 and declined is None)
        if len(copies) == 1 and self._returns.replica_of(entry) is not None:
            self._counters.add("kvstrata_replicas_total", event="left")
        if len(copies) > 1:
            target = copies[1].tier.name
            demotion = self._demotions.get(target)
            if demotion is None:
                demotion = self._demotions[target] = replace(decision, what=What.DEMOTED, target=target)
            decision = demotion
        elif declined is not None:
            decision = self._of_declined(declined.reason)
        kept, idle_s = decision.kept, max(0.0, decision.at_s - entry.used_at_s)
        is_told = kept is not None and (kept.scope, kept.tenant) == (entry.scope, entry.tenant)
        self._history.note(entry.scope, Event(entry.digest, decision, idle_s, self._worths.get(entry), is_told))

    def _of_declined(self, reason: str) -> Decision:
        """The decision for what was not worth a write; one for all that have the same reason."""
        known = self._demotions.get(reason)
        if known is None:
            inputs = {**self.decision.inputs, "declined": reason}
            known = self._demotions[reason] = replace(self.decision, inputs=inputs)
        return known
