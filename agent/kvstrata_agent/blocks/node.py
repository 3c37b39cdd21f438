"""The state of one node's agent, and the few transitions that touch several of its tables at once. No I/O waits.

Everything here runs in the event loop and finishes without waiting, so each method is one atomic step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.blocks.block import GONE, Entry, Residence
from kvstrata_agent.blocks.handovers import GrowthTable
from kvstrata_agent.blocks.history import Decision, Event, History, What
from kvstrata_agent.blocks.leases import Lease, LeaseTable
from kvstrata_agent.blocks.prefetches import Prefetches
from kvstrata_agent.blocks.reservations import Reservation, ReservationTable
from kvstrata_agent.blocks.returns import Returns
from kvstrata_agent.blocks.sessions import SessionState, SessionTable
from kvstrata_agent.blocks.signs import Signs
from kvstrata_agent.blocks.tenants import TenantBook
from kvstrata_agent.blocks.tier import AWAY_S, WRITE_PAUSE_S, Tier
from kvstrata_agent.codec.base import RAW, RAW_AFTER_LOSS
from kvstrata_agent.policy.eviction import excess_bytes
from kvstrata_agent.policy.placement import Placement, ReuseInterval, next_lower
from kvstrata_agent.policy.prefill_rate import PrefillRates
from kvstrata_agent.policy.priority import class_of
from kvstrata_agent.policy.regret import Regret, Regrets
from kvstrata_kube.signal import Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.restore import Restoring
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_agent.blocks.tier import SlotRequest
    from kvstrata_agent.blocks.tier_contents import TierContents
    from kvstrata_agent.policy.placement import TierFacts
    from kvstrata_agent.policy.recompute import EngineLoad
    from kvstrata_api.blocks import Layout, LayoutId, ScopeId, ScopeSecret
    from kvstrata_api.models.pool import KVPoolSpec
    from kvstrata_metadata.store.records import Announcement
    from kvstrata_telemetry.agent_metrics import Counters

NONCE_BITS: Final = 14
"""Low bits of an epoch, which are random."""
TICKS_PER_S: Final = 100
"""Hundredths of a second need 39 bits until the year 2144; with the nonce the epoch stays below 2^53, which readers of
Lua and JSON keep exactly. No process starts twice within one tick."""

PEER_OWNER: Final = 0
"""Owner of the leases that peers hold; connections count from 1."""

DECODED_MAX: Final = 65_536
"""Blocks of decoding sessions that are walked in one step of the loop, about 30 ms."""

ERASED: Final = "erased"
"""Reason of drops after which nothing is to be known of a block."""
ERASED_AT_ONCE: Final = 256
"""Blocks of erased scopes that are dropped in one step of the loop, about 10 ms."""
LAYOUTS_MAX: Final = 64
"""Layouts remembered: ranks of tensor-parallel engines, and adapters."""

_log = logging.getLogger(__name__)


class Announces(Protocol):
    """Announces to the directory blocks whose fastest copies changed."""

    @property
    def waiting(self) -> int:
        """Blocks that wait to be announced."""

    def mark(self, scope: ScopeId, *digests: bytes) -> None:
        """Note that the fastest copies of blocks are other ones, or gone."""

    async def changed(self) -> None:
        """Return when something waits to be announced."""

    def flush(self) -> None:
        """Hand what changed to the directory."""

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        """Everything that this node holds, in parts of one scope."""


def started_unix_s(epoch: int) -> float:
    """Unix time at which an incarnation started, as its clock was; at most a moment later than that."""
    return (epoch >> NONCE_BITS) / TICKS_PER_S


@dataclass(slots=True, eq=False)
class Node:
    """All tables of one agent."""

    pool: str
    name: str
    """Name of the Kubernetes node."""
    epoch: int
    spec: KVPoolSpec
    """Last seen spec of the pool; policies are read from it at each decision."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    index: Index
    counters: Counters
    announcer: Announces
    tiers: list[Tier] = field(default_factory=list)
    """Provisioned tiers, fastest first."""
    leases: LeaseTable = field(default_factory=LeaseTable)
    pins: LeaseTable = field(default_factory=lambda: LeaseTable("pins"))
    reservations: ReservationTable = field(default_factory=ReservationTable)
    growth: GrowthTable = field(default_factory=GrowthTable)
    sessions: SessionTable = field(default_factory=SessionTable)
    tenants: TenantBook = field(default_factory=TenantBook)
    engines: dict[str, dict[int, EngineLoad]] = field(default_factory=dict)
    """What engines have reported of themselves, by tenant and connection; no tenant without a connection that did."""
    prefill_rates: PrefillRates = field(default_factory=PrefillRates)
    """How fast engines compute that report nothing of themselves."""
    regrets: Regrets = field(default_factory=Regrets)
    """What fetching or computing turned out to cost."""
    wall: Callable[[], float] = time.time
    """Unix seconds, the only time that outlives a process."""
    returns: Returns = field(init=False)
    """What each block is worth."""
    history: History = field(default_factory=History)
    """Why blocks are not here any more."""
    signs: Signs = field(init=False)
    """Whether the cache brings anything."""
    prefetches: Prefetches = field(init=False)
    """What was brought up before anybody asked for it."""
    started_s: float = field(init=False)
    """Monotonic second of the start: nobody knows when blocks of an earlier run were used before it."""
    block_bytes: int = 0
    """Raw size of the blocks of the first layout that an engine attached with; 0 before."""
    layouts: dict[LayoutId, Layout] = field(default_factory=dict)
    """Layouts that engines have attached with, the least lately used first."""
    is_draining: bool = False
    """True while blocks leave for media that survive; no new ones are taken."""
    drained_tiers: frozenset[str] = frozenset()
    """Names of tiers that KVOperations request emptied."""
    changed: Signal = field(default_factory=Signal)
    """Fires when a slot, a lease, a pin, a guard or a move ends, or blocks are published: there may be room now."""
    away_until_s: float = 0.0
    """Monotonic second until which a tier may be away."""
    deferred_frees: dict[Entry, list[Residence]] = field(default_factory=dict)
    """Copies taken out of the index whose slots wait for the end of leases."""

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.returns = Returns(self)
        self.signs = Signs(self.clock, self.history, self.counters)
        self.prefetches = Prefetches(self.counters)

    @property
    def agent(self) -> str:
        """Name of this agent in the directory."""
        return f"{self.pool}.{self.name}"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the pool's KV cache."""
        return {"bf16": 2, "fp16": 2, "fp32": 4}.get(self.spec.compatibility.dtype, 1)

    @property
    def arriving_form(self) -> str:
        """Form of blocks that come from peers, which do not state whether they have lost something already."""
        is_lossy = self.spec.policy.compression.max_relative_error_permille > 0
        return RAW_AFTER_LOSS if is_lossy and self.spec.compatibility.dtype == "bf16" else RAW

    def remember_layout(self, layout_id: LayoutId, layout: Layout) -> None:
        """Note what blocks of a layout look like."""
        self.layouts.pop(layout_id, None)
        self.layouts[layout_id] = layout
        if len(self.layouts) > LAYOUTS_MAX:
            del self.layouts[next(iter(self.layouts))]

    def has(self, tier: Tier) -> bool:
        """True until a tier is taken out; work that was under way must not enter copies in it afterwards."""
        return any(t is tier for t in self.tiers)

    def tier(self, name: str) -> Tier | None:
        """Return a provisioned tier by name, or None."""
        return next((t for t in self.tiers if t.name == name), None)

    @property
    def entry_tier(self) -> Tier | None:
        """The fastest tier that engines can map: new blocks start here and read blocks come up to it."""
        return next((t for t in self.tiers if t.backend.mappable is not None and not t.is_closed), None)

    @property
    def raised_tiers(self) -> list[Tier]:
        """Tiers faster than the entry tier: nothing comes there by itself, what is hot is raised to them."""
        entry = self.entry_tier
        return [t for t in self.tiers if entry is not None and t.level < entry.level and t.backend.mappable is None]

    def entry_copy(self, entry: Entry) -> Residence | None:
        """The copy of a block in the entry tier, or None. It is the first one unless the block was raised."""
        tier = self.entry_tier
        if not entry.residences or tier is None:
            return None
        first = entry.residences[0]
        if first.tier is tier:
            return first
        return entry.residence(tier) if first.tier.level < tier.level else None

    def best_copy(self, entry: Entry) -> Residence | None:
        """The copy that is read: the one in the entry tier, else the fastest; None where there is none."""
        if not entry.residences:
            return None
        first = entry.residences[0]
        return first if len(entry.residences) == 1 else self.entry_copy(entry) or first

    def drain_tiers(self, names: Iterable[str]) -> None:
        """Empty these tiers, those of them that come up later too, and let all others take blocks."""
        self.drained_tiers = frozenset(names)
        for tier in self.tiers:
            tier.drain(is_wanted=tier.name in self.drained_tiers)

    def used_by(self, session: Session | None, entries: Iterable[Entry | None]) -> None:
        """Give blocks the priority class of the session that uses them; a use without one leaves it as it is."""
        if session is None:
            return
        priority = class_of(session.priority)
        for entry in entries:
            if entry is not None and entry.priority is not priority:
                self.index.rank(entry, priority)

    def placement_below(self, level: int, *, must_survive: bool) -> Placement:
        """Where a block goes that leaves a tier of that level; see `policy.placement.next_lower`."""
        return next_lower([t.facts(self.clock()) for t in self.tiers], level, must_survive=must_survive)

    def places_below(self, level: int) -> Placement | ReuseInterval:
        """Where blocks go that leave a tier of that level, as things are now: all to one, or each by its worth."""
        if self.is_draining or self.spec.policy.placement.type == "Cascade":
            return self.placement_below(level, must_survive=self.is_draining)
        return ReuseInterval([self.facts_of(t) for t in self.tiers], level)

    def placement_of(self, entry: Entry, places: Placement | ReuseInterval, *, may_decline: bool = False) -> Placement:
        """Where this block goes, of these places; nowhere if it `may_decline` a write that is not worth it.

        Nowhere from an erased scope: it is about to be dropped wherever it is.
        """
        if self.index.is_erased(entry.scope):
            return Placement(None, "its scope is erased")
        if isinstance(places, Placement):
            return places
        placement = places.placement(self.returns.worth(entry)[0]) if places.has_choice else places.nearest
        if may_decline and self.takes_for_good(placement.target) and (why := self.returns.declined(entry)):
            return Placement(None, f"{placement.target} is spared the write: {why}", is_declined=True)
        return placement

    def takes_for_good(self, name: str | None) -> bool:
        """True for a tier that a write costs something, where the pool leaves it to us what is admitted: no memory."""
        tier = self.tier(name) if name is not None else None
        is_costly = tier is not None and not tier.backend.capabilities.is_memory
        return is_costly and self.spec.policy.admission.type == "Auto"

    def facts_of(self, tier: Tier) -> TierFacts:
        """What a placement may know of a tier: up to the low watermark it has room."""
        return tier.facts(self.clock(), self.spec.policy.eviction.low_watermark_percent / 100)

    def tier_below(self, level: int, *, must_survive: bool) -> Tier | None:
        """The next slower tier that takes blocks now, or None."""
        name = self.placement_below(level, must_survive=must_survive).target
        return None if name is None else self.tier(name)

    def is_pausing_below(self, tier: Tier) -> bool:
        """True while slower tiers that survive take nothing, and will again: a write has failed, or they recover."""
        now_s = self.clock()
        lasting = [
            t for t in self.tiers
            if t.level > tier.level and not t.is_closed
            and t.backend.capabilities.survives_restart and not t.backend.capabilities.is_memory
        ]  # fmt: skip
        return bool(lasting) and not any(t.facts(now_s).takes_writes for t in lasting)

    def is_lowest(self, tier: Tier) -> bool:
        """True when no slower tier takes blocks now."""
        return self.tier_below(tier.level, must_survive=self.is_draining) is None

    def excess_bytes(self, tier: Tier, more_bytes: int = 0) -> int:
        """Bytes to free so that a tier with so much more falls to its low watermark; 0 where it may have it."""
        policy, backend = self.spec.policy.eviction, tier.backend
        low, high = policy.low_watermark_percent, policy.high_watermark_percent
        return excess_bytes(backend.used_bytes + more_bytes, backend.capacity_bytes, high, low)

    def allocate(self, request: SlotRequest) -> SlotRef:
        """Allocate a slot on its tenant's account.

        Raises `TierFullError`, `QuotaExceededError`, `BackendFailedError`.
        """
        hard_bytes = self.tenants.hard_bytes(request.tier, request.tenant)
        return request.tier.allocate(request.scope, request.tenant, request.size_bytes, hard_bytes, request.writer)

    def allocate_run(self, request: SlotRequest, count: int) -> list[SlotRef]:
        """Allocate up to `count` slots in memory that engines map, on their tenant's account; fewer where that ends."""
        hard_bytes = self.tenants.hard_bytes(request.tier, request.tenant)
        return request.tier.allocate_run(
            request.scope, request.tenant, request.size_bytes, count, hard_bytes, request.writer
        )

    def free(self, tier: Tier, slot: SlotRef, tenant: str) -> None:
        """Free a slot, once, that was on this account; overwritten where the tenant wants that."""
        if tier.backend.mappable is not None and not tier.is_gone and self.tenants.of(tenant).retention.is_zeroized:
            with tier.backend.mappable.view(slot) as view:
                view[:] = bytes(len(view))
        tier.free(slot, tenant)
        self.changed.fire()

    def add_copy(self, entry: Entry, residence: Residence) -> None:
        """Note a finished copy. See `add_copies`."""
        self.add_copies(((entry, residence),))

    def add_copies(self, copies: Sequence[tuple[Entry, Residence]]) -> None:
        """Note finished copies; the first one of a block publishes it."""
        for _, residence in copies:
            self._keep(residence)
        self.index.add_all(copies)
        for entry, residence in copies:
            if entry.residences[0] is residence:
                self.announcer.mark(entry.scope, entry.digest)

    def publish(self, tier: Tier, copies: Sequence[tuple[Entry, Residence]]) -> None:
        """Note the first copies, in one tier, of blocks that a writer has finished."""
        if tier.backend.persistent is not None:
            for _, copy in copies:
                self._keep(copy)
        self.index.publish(tier, copies)
        for scope in dict.fromkeys(entry.scope for entry, _ in copies):
            self.announcer.mark(scope, *[entry.digest for entry, _ in copies if entry.scope == scope])
        self.changed.fire()

    def restore(self, copies: Iterable[Residence]) -> int:
        """Note copies that an earlier run has left, and that their media know of; returns how many blocks they are."""
        entered, unwanted = self.index.restore(copies, self.born_at_s)
        for key in entered:
            self.announcer.mark(key.scope, key.digest)
        for copy in unwanted:
            copy.tier.backend.drop(copy.slot)
        return len(entered)

    def restore_extent(self, restoring: Restoring) -> int:
        """The same for all copies of the next extent."""
        digests, unwanted = restoring.enter()
        self.announcer.mark(restoring.scope, *digests)
        for copy in unwanted:
            copy.tier.backend.drop(copy.slot)
        return len(digests)

    def born_at_s(self, epoch: int) -> float:
        """Monotonic second at which the agent started that wrote a record: all that it reveals of the block's age."""
        return self.clock() - max(0.0, self.wall() - started_unix_s(epoch))

    def swap_copy(self, entry: Entry, old: Residence, new: Residence) -> None:
        """Put a copy in place of the old one in the same tier and free the old slot."""
        self._keep(new)
        self.index.swap(entry, old, new)
        self.announcer.mark(entry.scope, entry.digest)
        self.free_copy(entry, old)

    def drop_copy(self, entry: Entry, tier: Tier, *, keep_bytes: bool = False) -> Residence:
        """Take one copy away; the last one ends the block. A slot that is being read is freed when that ends.

        With `keep_bytes` the medium keeps the copy for a later run; only this node's books forget it.
        """
        was_best = entry.residences[0].tier is tier
        parent = self._nearest_resident_ancestor(entry) if entry.followers else None
        gone = self.index.remove(entry, tier)
        if tier is self.entry_tier:
            self.prefetches.left(entry)
        if entry.level == GONE and entry.followers:
            self.sessions.lost(entry, parent)
        if was_best:
            self.announcer.mark(entry.scope, entry.digest)
        if not keep_bytes:
            self.free_copy(entry, gone)
        return gone

    def drop_block(self, entry: Entry, reason: str) -> None:
        """Take all copies away, whatever depends on them. Of what is `ERASED` nothing is remembered."""
        if reason == ERASED:
            self.history.forget_block(entry.scope, entry.digest)
        elif entry.residences:
            tier = entry.residences[0].tier.name
            self.remember(entry, Decision(What.DROPPED, self.clock(), reason, tier))
        if entry.residences:
            self.counters.evicted(entry.residences[-1].tier.name, reason)
        for residence in entry.residences:
            self.drop_copy(entry, residence.tier)

    def evict(self, entries: Iterable[Entry], tier: Tier, reason: str) -> int:
        """Take copies away by policy, each as it comes; returns their bytes. Counts those that were a block's last."""
        freed_bytes = last = 0
        with self.index.leaving_together():
            for entry in entries:
                last += len(entry.residences) == 1
                freed_bytes += self.drop_copy(entry, tier).slot.size_bytes
        if last:
            self.counters.evicted(tier.name, reason, last)
        return freed_bytes

    def remember(self, entry: Entry, decision: Decision) -> None:
        """Note a decision on a block, for `explain`."""
        self.history.note(entry.scope, Event(entry.digest, decision, max(0.0, decision.at_s - entry.used_at_s)))

    def copy_failed(self, entry: Entry, copy: Residence, *, is_corrupt: bool) -> None:
        """A copy turned out to be unreadable: it goes, and with the last copy the block becomes a miss."""
        tier = copy.tier
        if entry.residence(tier) is not copy:
            return  # It went while it was read, which is why it could not be.
        if is_corrupt:
            self.counters.add("kvstrata_corrupt_blocks_total", tier=tier.name)
        else:
            self.counters.add("kvstrata_io_errors_total", tier=tier.name, operation="read")
            tier.failed()
        parent = self._nearest_resident_ancestor(entry)
        self.drop_copy(entry, tier)
        if entry.level == GONE:
            reason = "its bytes did not match their checksum" if is_corrupt else "its medium could not be read"
            self.remember(entry, Decision(What.LOST, self.clock(), reason, tier.name))
        if entry.level == GONE and parent is not None:
            self.sessions.broke(entry, parent, self.index)

    def medium_away(self, tier: Tier, message: str) -> None:
        """A tier did not answer: what lies there stays, and is a miss for a while, and nothing new goes there."""
        self._pause_writes(tier, message, "read")
        self.away_until_s = tier.away_until_s = self.clock() + AWAY_S

    @property
    def is_any_away(self) -> bool:
        """True while a tier may be away."""
        return self.away_until_s > 0.0 and self.clock() < self.away_until_s

    def is_away(self, entry: Entry) -> bool:
        """True for a block that has copies, all of them where nothing is read now."""
        if not self.is_any_away:
            return False
        now_s = self.clock()
        return bool(entry.residences) and all(now_s < r.tier.away_until_s for r in entry.residences)

    def write_failed(self, tier: Tier, message: str) -> None:
        """A tier could not store a block: it gets no new ones for a while and states why."""
        self._pause_writes(tier, message, "write")

    def _pause_writes(self, tier: Tier, message: str, operation: str) -> None:
        self.counters.add("kvstrata_io_errors_total", tier=tier.name, operation=operation)
        tier.last_error = message
        tier.failed(self.clock() + WRITE_PAUSE_S)

    def end_leases(self, ended: Iterable[Lease]) -> int:
        """Free the slots that waited for these leases; returns how many leases there were."""
        count = 0
        for lease in ended:
            count += 1
            if self.deferred_frees and lease.entry in self.deferred_frees:
                for residence in self.deferred_frees.pop(lease.entry):
                    self.free_copy(lease.entry, residence)
        self.changed.fire()
        return count

    def release(self, owner: int, ids: Iterable[int]) -> int:
        """End leases whose reader is done; returns how many of them lived until now.

        What was read under the others is void: their slots may hold something else by now.
        """
        done = self.leases.release(owner, ids, self.clock())
        self.end_leases((*done.valid, *done.late))
        for cause, count in done.strays.items():
            self.counters.add("kvstrata_stray_releases_total", count, cause=cause)
        if done.strays:
            _log.warning(
                "leases were not live when they were released", extra={"owner": owner, "strays": dict(done.strays)}
            )
        return len(done.valid)

    def is_leased(self, tier: Tier) -> bool:
        """True while somebody reads from a tier."""
        return any(lease.residence.tier is tier for lease in self.leases)

    def revoke(self, tier: Tier) -> int:
        """Take back all leases and pins in a tier that is about to go; returns how many readers lose their lease."""
        self.pins.end_tier(tier)
        return self.end_leases(self.leases.end_tier(tier))

    def abandon(self, reservations: Iterable[Reservation], reason: str = "given back unfilled") -> int:
        """Take slots back that were given out for writing; returns how many. `reason` is for `explain`."""
        count = 0
        decision = Decision(What.UNPUBLISHED, self.clock(), reason)
        for reservation in reservations:
            count += 1
            self.growth.lost(reservation.id, self.clock())
            self.free(reservation.tier, reservation.slot, reservation.entry.tenant)
            if not reservation.entry.residences and reservation.entry.level != GONE:
                self.remember(reservation.entry, decision)
                self.index.forget(reservation.entry)
        return count

    def end_owner(self, owner: int) -> None:
        """Release everything that a connection held."""
        leases = self.end_leases(self.leases.end_owner(owner))
        reservations = self.abandon(self.reservations.take_owner(owner), "its writer disconnected")
        self.pins.end_owner(owner)
        for tenant, reported in tuple(self.engines.items()):
            reported.pop(owner, None)
            if not reported:
                del self.engines[tenant]
        self.sessions.end_owner(owner)
        self.changed.fire()
        if leases:
            self.counters.add("kvstrata_expired_total", leases, kind="lease")
        if reservations:
            self.counters.add("kvstrata_expired_total", reservations, kind="reservation")

    def count_regret(self, regret: Regret) -> None:
        """Count the outcome of fetching or computing."""
        self.counters.add("kvstrata_load_choices_total", choice=regret.source)
        if regret.regret_s:
            self.counters.add("kvstrata_load_regret_seconds_total", regret.regret_s, choice=regret.source)

    def erase(self, scope: ScopeId) -> int:
        """Have nobody find a scope's blocks from this step on; `drop_erased` drops them. Returns how many they are."""
        self.history.forget(scope)
        return self.index.erase(scope)

    def drop_erased(self) -> int:
        """Drop some blocks of erased scopes; returns how many went. What is still coming in goes when it is here.

        To be called again and again: a scope is erased until none of its blocks is left.
        """
        count = 0
        for entry in self.index.leaving(ERASED_AT_ONCE):
            count += entry.is_published
            self.drop_block(entry, ERASED)
        for scope in self.index.end_erasures():
            self.history.forget(scope)  # Policies may have dropped some of them meanwhile, and have said why.
        return count

    def drop_scope(self, scope: ScopeId) -> int:
        """Erase a scope and drop the first of its blocks at once; returns how many blocks it had."""
        count = self.erase(scope)
        self.drop_erased()
        return count

    def contents(self, tier: Tier) -> TierContents:
        """Which blocks lie in a tier."""
        return self.index.contents(tier)

    def holds(self, tier: Tier) -> bool:
        """True while somebody keeps blocks in a tier by reading, pinning, writing, moving or decoding."""
        if self.contents(tier).has_held or any(r.tier is tier for r in self.reservations):
            return True
        return any(s.state is SessionState.DECODING for s in self.sessions)  # Its head may be in another tier.

    def decoded(self, scopes: Collection[ScopeId]) -> set[Entry] | None:
        """Blocks of these scopes that chains of decoding sessions run through; None when they are too many to walk."""
        found = set[Entry]()
        heads = [h for s in self.sessions if s.state is SessionState.DECODING for h in s.heads if h.scope in scopes]
        for head in heads:
            for entry in chain((head,), self.index.ancestors(head)):
                if entry in found:
                    break
                found.add(entry)
                if len(found) > DECODED_MAX:
                    return None
        return found

    def _nearest_resident_ancestor(self, entry: Entry) -> Entry | None:
        return next((e for e in self.index.ancestors(entry) if e.residences), None)

    @staticmethod
    def _keep(copy: Residence) -> None:
        """Let a copy outlive the agent, before anybody learns of it."""
        if copy.tier.backend.persistent is not None:
            copy.tier.backend.persistent.commit(copy.slot, copy.record)

    def free_copy(self, entry: Entry, gone: Residence) -> None:
        """Free the slot of a copy, at once or when the last reader of just this copy has ended its lease."""
        if entry.leases and any(lease.residence is gone for lease in self.leases.of(entry)):
            self.deferred_frees.setdefault(entry, []).append(gone)
        else:
            self.free(gone.tier, gone.slot, entry.tenant)
