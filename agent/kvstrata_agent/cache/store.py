"""The store side: reserve slots, publish what was written into them, or give them back."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.threads import in_thread, together
from kvstrata_agent.blocks.block import GONE, Residence
from kvstrata_agent.blocks.history import Decision, Event, What
from kvstrata_agent.blocks.reservations import RESERVATION_S
from kvstrata_agent.blocks.session_log import Happened, SessionEvent
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.cache.eviction import ArrivalDeclinedError, Evictor
from kvstrata_agent.codec.base import RAW
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.admission import AdmissionInputs, passing_bytes
from kvstrata_agent.policy.quota import OverQuota
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, QuotaExceededError, TierFullError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.blocks.reservations import Reservation
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.archive import Archiver
    from kvstrata_api.blocks import ScopeId

RESERVE_WAIT_S: Final = 1.0
"""What a writer may wait for room. An engine that stores is not in a hurry, but it holds its own memory meanwhile."""

HASHERS: Final = 2
"""Threads that check one publication. Handing over every block by itself cost as much as hashing 2 MiB (65 us)."""

REFUSED, PUBLISHED, EXISTED = 0, 1, 2
"""Results of a publication, as `wire.Published` carries them."""

_log = logging.getLogger(__name__)


class Reserved(NamedTuple):
    """What came of asking for slots."""

    slots: list[Reservation | None]
    """Of the leading keys; None stands for a block that exists already."""
    refusal: str = ""
    """Why there are fewer than keys, in words; empty when there are not."""
    busy_s: float = 0.0
    """Seconds until the path by which blocks leave memory is expected to be free, where that is why; else 0.0."""


class Writer:
    """Carries out the verbs of writers."""

    def __init__(self, node: Node, room: Evictor, archiver: Archiver) -> None:
        self._node = node
        self._room = room
        self._archiver = archiver
        self.publishing: set[Entry] = set()
        """Written blocks some of which are being checked: nobody's reservation any more, and not there yet."""

    def reserve_now(
        self, context: RequestContext, parent: bytes, digests: Sequence[bytes], tier: Tier | None = None
    ) -> list[Reservation | None]:
        """Reserve slots for the leading keys while there is room; None stands for a block that exists already.

        A key that another writer is at counts as existing: two copies of the same bytes help nobody.
        Shorter than `digests` when the tier, the fastest one unless another is given, is full or has no room for
        this tenant; empty while the scope is erased.
        """
        node, tier = self._node, tier or self._node.entry_tier
        if node.regrets.awaits:
            for regret in node.regrets.computed(digests, node.clock()):
                node.count_regret(regret)
        node.prefill_rates.brought(context.tenant, parent, digests, node.spec.compatibility.block_tokens, node.clock())
        if tier is None or node.is_draining or node.index.is_erased(context.scope):
            return []
        blocks, scope, tenant = node.index.blocks(context.scope), context.scope, context.tenant
        absent = blocks.absent(digests)
        hard_bytes = node.tenants.hard_bytes(tier, tenant)
        slots = tier.allocate_run(scope, tenant, context.raw_bytes, len(absent), hard_bytes, tenant)
        if len(slots) < len(absent):
            digests = digests[: digests.index(absent[len(slots)])]
        if not slots:
            return [None] * len(digests)
        now_s = node.clock()
        entries = node.index.begin_chain(scope, digests, parent, context.layout_id, now_s, tenant)
        fresh = [e for e in entries if e is not None]
        made = iter(node.reservations.grant_all(context, fresh, tier, slots, now_s + RESERVATION_S))
        return [None if e is None else next(made) for e in entries]

    async def reserve(
        self, context: RequestContext, parent: bytes, digests: Sequence[bytes], *, has_some: bool = False
    ) -> Reserved:
        """Like `reserve_now`, but makes room where there is none, within `RESERVE_WAIT_S`; returns why it ends short.

        Raises `QuotaExceededError` when the tenant's quota refuses the very first of them; a writer that already
        `has_some` gets fewer, and the error when it asks for the rest. Cancelled, it leaves reservations that their
        owner's end or expiry takes back.
        """
        deadline_s = self._node.clock() + RESERVE_WAIT_S
        chain = (parent, *digests)
        made = self.reserve_now(context, parent, digests)
        try:
            while left := len(digests) - len(made):
                at = len(made)
                may_wait = not (made or has_some)  # Whoever has some can go on with those.
                tier = await self._find_room(context, chain, left, deadline_s, may_wait=may_wait)
                more = self.reserve_now(context, chain[at], digests[at:], tier) if tier is not None else ()
                if not more:
                    break
                made += more
        except ArrivalDeclinedError as e:
            self._node.counters.add("kvstrata_refused_blocks_total", left, reason="declined")
            refusal = f"{e}; {left} blocks were refused"
            self._remember(context, digests[-left], refusal)
            return Reserved(made, refusal)
        except QuotaExceededError as e:
            self._note_quota(context, left, e)
            self._remember(context, digests[-left], "the quota of its writer leaves no room")
            if not made and not has_some:
                raise
            return Reserved(made, str(e))
        if not left:
            return Reserved(made)
        refusal, busy_s = self._refusal(context.scope, left)
        self._remember(context, digests[-left], refusal)
        return Reserved(made, refusal, busy_s)

    def _remember(self, context: RequestContext, digest: bytes, refusal: str) -> None:
        """Note the first block that was refused: those behind it are of no use without it."""
        decision = Decision(What.REFUSED, self._node.clock(), refusal)
        self._node.history.note(context.scope, Event(digest, decision))
        self._node.returns.refused(digest)

    def _refusal(self, scope: ScopeId, count: int) -> tuple[str, float]:
        """Count blocks that found no room; returns why, and how long the path out of memory stays congested."""
        node, tier = self._node, self._node.entry_tier
        busy_s = self._room.demoter.congestion_s(tier)
        if node.index.is_erased(scope):
            reason, why = "erased", "the scope was erased, and blocks that it had are still being dropped"
        elif node.is_draining or tier is None:
            reason, why = "draining", "the agent is drained or has no open memory tier, and takes no blocks"
        elif tier.is_recovering:
            reason, why = "recovering", f"tier {tier.name}: blocks of an earlier run are still being entered"
        elif busy_s:
            reason, why = "busy", f"tier {tier.name}: blocks wait to leave it, for about {busy_s:.1f} s"
        elif node.holds(tier):
            reason, why = "held", f"tier {tier.name}: what could leave it is being read, written or decoded from"
        else:
            reason, why = "full", f"tier {tier.name} is full, and nothing in it may leave for this tenant"
        node.counters.add("kvstrata_refused_blocks_total", count, reason=reason)
        return f"{why}; {count} blocks were refused", busy_s

    def _note_quota(self, context: RequestContext, count: int, error: QuotaExceededError) -> None:
        tier = self._node.entry_tier
        assert tier is not None, "else nothing was asked of it"
        self._node.counters.add("kvstrata_quota_rejected_total", count, tenant=context.tenant, tier=tier.name)
        self._node.counters.denied(context.tenant, count)
        self._node.counters.add("kvstrata_refused_blocks_total", count, reason="quota")
        _log.debug("blocks refused", extra={"blocks": count, "cause": str(error)})

    async def _find_room(
        self, context: RequestContext, chain: Sequence[bytes], slots: int, deadline_s: float, *, may_wait: bool
    ) -> Tier | None:
        """Make room for one of the last `slots` blocks of a chain, or more at once.

        In the fastest memory tier; where nothing can leave that now, in a slower one; where there is none either and
        the writer `may_wait`, in the fastest one again, when those have ended who hold what is there. Returns where
        it is, None when there is none for anybody. Raises `QuotaExceededError` when the tenant's quota leaves none,
        and `ArrivalDeclinedError` when what is there is worth more.
        """
        if self._node.index.is_erased(context.scope):
            return None
        refusal: QuotaExceededError | None = None
        tiers, before = self._landings(), chain[: len(chain) - slots]
        for i, tier in enumerate((*tiers, *tiers[: int(may_wait)])):
            if refusal is not None and self._node.tenants.of(context.tenant).over_quota is not OverQuota.DEMOTE:
                break  # A slower tier is no way around a quota, unless that is what is declared.
            worth = None
            if self._node.is_lowest(tier):  # Else nothing is lost that leaves.
                worth = self._node.returns.worth_of_next(context.scope, before, chain[-slots], context.session)
            want = SlotRequest(tier, context.scope, context.tenant, context.raw_bytes, context.tenant, slots, worth)
            try:
                slot = await self._slot_behind(before, want, context.owner, deadline_s, awaits_holders=i == len(tiers))
            except QuotaExceededError as e:
                refusal = refusal or e
            except (TierFullError, BackendFailedError):
                continue
            else:
                tier.free(slot, context.tenant)  # Taken again at once by the caller, in the same step of the loop.
                return tier
        if refusal is not None:
            raise refusal
        return None

    async def _slot_behind(
        self, before: Sequence[bytes], want: SlotRequest, owner: int, deadline_s: float, *, awaits_holders: bool
    ) -> SlotRef:
        """Take a slot, never in place of the block that is continued.

        As a leaf it may be the first to leave, and without it nobody finds what follows. Where a slower tier takes
        blocks it is not lost by that.
        """
        pins, index = self._node.pins, self._node.index
        if not self._node.is_lowest(want.tier):
            return await self._room.reserve(want, deadline_s, awaits_holders=awaits_holders)
        awaits_holders = awaits_holders and self._node.holds(want.tier)
        for digest in reversed(before):  # The last ones may be reserved and not there yet.
            entry = index.find(want.scope, digest)
            copy = entry.residence(want.tier) if entry is not None else None
            if entry is not None and copy is not None:
                pin = pins.grant(owner, entry, copy, deadline_s)
                try:
                    return await self._room.reserve(want, deadline_s, awaits_holders=awaits_holders)
                finally:
                    pins.end(owner, [pin.id])
        return await self._room.reserve(want, deadline_s, awaits_holders=awaits_holders)

    def _landings(self) -> list[Tier]:
        """Tiers that may take new blocks, the fastest first: engines map them."""
        if self._node.is_draining:
            return []
        return [t for t in self._node.tiers if t.backend.mappable is not None]

    def publish_now(self, owner: int, ids: Sequence[int], checksums: Sequence[bytes]) -> bytes:
        """Commit written slots of small blocks in one step, checking some of them; returns one result for each.

        Which ones are checked is the decision of `policy.admission`: whoever reads the others verifies them.
        """
        taken, chosen = self._node.reservations.take_written(owner, ids)
        sums = {r.id: self._hashed(r) for r in chosen}
        if sums:
            sums |= {r.id: self._hashed(r) for r in _doubtful(taken, sums, dict(zip(ids, checksums, strict=True)))}
        return self._commit_all(owner, ids, taken, checksums, sums)

    async def publish(self, owner: int, ids: Sequence[int], checksums: Sequence[bytes]) -> bytes:
        """Like `publish_now`, hashing in threads, for blocks that would hold the loop up.

        From the first step on the slots belong to this call: neither expiry nor the end of the connection takes
        them away while they are being hashed. Cancelled, it gives all of them back.
        """
        taken, chosen = self._node.reservations.take_written(owner, ids)
        sums = await self._sums(taken, chosen) if chosen else {}
        doubtful = _doubtful(taken, sums, dict(zip(ids, checksums, strict=True)))
        sums |= await self._sums(taken, doubtful) if doubtful else {}
        return self._commit_all(owner, ids, taken, checksums, sums)

    async def _sums(self, taken: Sequence[Reservation | None], chosen: Sequence[Reservation]) -> dict[int, bytes]:
        """Checksums of the chosen ones by reservation."""
        written = {r.entry for r in taken if r is not None}
        self.publishing |= written
        try:
            return await self._hashed_apart(chosen)
        except BaseException:
            self._node.abandon(r for r in taken if r is not None)
            raise
        finally:
            self.publishing -= written

    async def _hashed_apart(self, written: Sequence[Reservation]) -> dict[int, bytes]:
        """Checksums by reservation, from `HASHERS` threads that take an equal share each."""

        def hash_share(share: Sequence[Reservation]) -> dict[int, bytes]:
            return {r.id: self._hashed(r) for r in share}

        shares = [written[i::HASHERS] for i in range(min(HASHERS, len(written)))]
        parts = await together([in_thread(None, partial(hash_share, share)) for share in shares])
        return {number: found for part in parts for number, found in part.items()}

    def _hashed(self, reservation: Reservation) -> bytes:
        """Checksum of what the slot holds; nothing when its tier was taken away."""
        mappable = reservation.tier.backend.mappable
        assert mappable is not None
        slot = reservation.slot
        try:
            with mappable.view(slot) as whole, whole[: reservation.raw_bytes] as view:
                return checksum(view, reservation.entry.digest, self._node.epoch, slot.stamp)
        except BlockCorruptError:
            return b""

    def _commit_all(
        self,
        owner: int,
        ids: Sequence[int],
        taken: Sequence[Reservation | None],
        checksums: Sequence[bytes],
        sums: Mapping[int, bytes],
    ) -> bytes:
        """Commit what was taken; what was published before is answered as then. `sums`: of those that were checked."""
        table, results = self._node.reservations, dict[int, int]()
        written: list[tuple[Reservation, bytes]] = []
        unused: list[Reservation] = []
        for number, reservation, claimed in zip(ids, taken, checksums, strict=True):
            if reservation is None:
                continue
            is_right = sums.get(number, claimed) == claimed
            if not is_right:
                table.note_error(owner)
            result = results[number] = self._judged(reservation, is_right=is_right)
            if result == PUBLISHED:
                written.append((reservation, claimed))
            else:
                unused.append(reservation)
        self._node.abandon(unused, "what was written was refused")
        self._publish_all(written)
        table.settle(owner, results)
        answer = bytes([results[i] if i in results else table.result(owner, i) or REFUSED for i in ids])
        self._count(answer)
        self._published([r for r in taken if r is not None and results[r.id] != REFUSED])
        return answer

    def _judged(self, reservation: Reservation, *, is_right: bool) -> int:
        """What becomes of a written slot."""
        entry = reservation.entry
        if not is_right or entry.level == GONE:
            return REFUSED
        if entry.residences:
            return EXISTED
        return PUBLISHED if reservation.tier in self._node.tiers else REFUSED

    def _publish_all(self, written: Sequence[tuple[Reservation, bytes]]) -> None:
        """Enter slots with their checksums as the first copies of their blocks."""
        node, epoch = self._node, self._node.epoch
        copies: dict[Tier, list[tuple[Entry, Residence]]] = {}
        for reservation, claimed in written:
            entry, tier, raw_bytes = reservation.entry, reservation.tier, reservation.raw_bytes
            key = BlockKey(entry.scope, entry.digest)
            record = Record(key, entry.parent, entry.layout_id, RAW, raw_bytes, raw_bytes, claimed, epoch)
            copies.setdefault(tier, []).append((entry, Residence(tier, reservation.slot, record)))
        for tier, made in copies.items():
            node.publish(tier, made)
        if node.growth:
            for reservation, claimed in written:
                node.growth.whole(reservation.id, claimed, node.clock())

    def _count(self, results: bytes) -> None:
        for result, name in ((REFUSED, "refused"), (PUBLISHED, "published"), (EXISTED, "existed")):
            count = results.count(result)
            if count:
                self._node.counters.add("kvstrata_published_blocks_total", count, result=name)

    def _published(self, reservations: Sequence[Reservation]) -> None:
        """Let sessions follow their new blocks, and send down what is not admitted to memory."""
        if not reservations:
            return
        now_s = self._node.clock()
        for reservation in reservations:
            reservation.entry.used_at_s = now_s
        session, entries = reservations[0].session, [r.entry for r in reservations]
        self._node.used_by(session, entries)
        self._node.returns.stored(session, entries)
        if session is not None:
            self._archiver.follow(session, entries)
            blocks = Counter({reservations[0].tier.name: len(entries)})
            self._node.sessions.log.note(session.key, SessionEvent(Happened.STORE, now_s, now_s, blocks=blocks))
        self._admit(entries, reservations[0].tier, session.turns if session else 0)

    def _admit(self, entries: Sequence[Entry], tier: Tier, turns: int) -> None:
        policy, backend, has_lower = self._node.spec.policy, tier.backend, not self._node.is_lowest(tier)
        sizes = [sum(copy.slot.size_bytes for copy in entry.residences if copy.tier is tier) for entry in entries]
        high_bytes = backend.capacity_bytes * policy.eviction.high_watermark_percent // 100
        before = self._node.index.parent(entries[0])
        continues = before is not None and before.is_passing(tier)
        facts = AdmissionInputs(
            policy.admission.type, sum(sizes), backend.used_bytes, high_bytes, turns, has_lower, continues
        )
        down_bytes, first = passing_bytes(facts), len(entries)
        while down_bytes > 0 and first:
            first -= 1
            down_bytes -= sizes[first]
        if first < len(entries):
            self._archiver.demote_soon(self._written(entries[first:], tier), Priority.DEMOTE)

    def _written(self, entries: Sequence[Entry], tier: Tier) -> list[Entry]:
        """What is sent down at once: not what would be declined when it leaves memory, which is counted then."""
        node = self._node
        if not node.takes_for_good(node.placement_below(tier.level, must_survive=False).target):
            return list(entries)
        written = [entry for entry in entries if not node.returns.declined(entry)]
        for entry in written:
            node.returns.offered(entry)
        return written


def _doubtful(
    taken: Sequence[Reservation | None], sums: Mapping[int, bytes], claimed: Mapping[int, bytes]
) -> list[Reservation]:
    """What is to be checked besides: the rest of a publication in which a checksum was wrong."""
    if all(found == claimed[number] for number, found in sums.items()):
        return []
    return [r for r in taken if r is not None and r.id not in sums]
