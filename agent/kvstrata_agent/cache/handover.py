"""The reader's side of a hand-over: takes slots for blocks that grow on another node, and fills them as they grow.

One run of blocks that grows here as it grows with its writer's agent. What arrives is proven part by part.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.blocks.block import GONE, Residence
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.cache.load import Read
from kvstrata_agent.cache.ports import QUESTION_BLOCKS_MAX, FollowedPeers
from kvstrata_agent.cache.remote_fetch import REMOTE
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import CHECKSUM_BYTES, bind, bind_part, checksum
from kvstrata_api.errors import AgentAwayError, BackendFailedError, BlockCorruptError, LeaseLostError, TierFullError
from kvstrata_api.units import MIB
from kvstrata_kube.tasks import TaskSet
from kvstrata_native import copy_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.cache.eviction import Evictor
    from kvstrata_agent.cache.ports import Follow, Followed


STAGING_BYTES: Final = 8 * MIB
"""Of one run, for what is on its way: with 32 blocks of 2 MiB four layers at a time."""

_log = logging.getLogger(__name__)
ROOM_S: Final = 1.0
"""What one reader's blocks may wait for room; an engine that decodes computes the prompt itself sooner."""
WAIT_S: Final = 5.0
"""Of one question to the writer's agent, which answers sooner when there is more."""
STALLED_S: Final = 60.0
"""After so long without a part the writer is taken for gone, and the slots are given back."""
WAIT_S_MAX: Final = 10.0
"""Longest wait of one `Arrive`."""


class Fault(StrEnum):
    """Why a hand-over broke before its blocks were whole."""

    AWAY = "away"
    """The writer's agent cannot be reached any more."""
    GIVEN_UP = "given_up"
    """By the writer, or its reservations ended."""
    DAMAGED = "damaged"
    """A part, or the whole, is not what its owner promised."""
    STALLED = "stalled"


@dataclass(slots=True, eq=False)
class Following:
    """Blocks of one hand-over, of one reader's question."""

    wanted: Follow
    epoch: int
    """Ours, that our own checksums are bound to."""
    entries: list[Entry]
    copies: list[Residence]
    """Where each block grows; without a checksum until it is whole."""
    views: list[memoryview]
    parts: int = 0
    """Leading parts of every block that were proven."""
    sums: list[bytearray] = field(default_factory=list)
    """For each block, joined checksums of them under our epoch and stamp."""
    is_over: bool = False
    """True once the blocks are whole or lost."""
    is_lost: bool = False
    fault: Fault | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def parts_whole(self) -> int:
        """Parts of a whole block."""
        return len(self.views[0]) // self.wanted.part_bytes

    def cut(self, count: int) -> tuple[list[Entry], list[Residence]]:
        """Keep the leading blocks; returns the others."""
        rest = self.entries[count:], self.copies[count:]
        for view in self.views[count:]:
            view.release()
        del self.entries[count:], self.copies[count:], self.views[count:]
        # The owner sends parts of all blocks that we ask for, into memory that is as large as those that we keep.
        self.wanted = replace(self.wanted, digests=self.wanted.digests[: len(self.entries)])
        self.sums = [bytearray() for _ in self.entries]
        return rest

    def staging(self) -> list[memoryview]:
        """Memory of ours for the next parts, each of all blocks: as many as `STAGING_BYTES` take, one at least."""
        size = len(self.entries) * self.wanted.part_bytes
        count = min(self.parts_whole - self.parts, max(1, STAGING_BYTES // size))
        whole = memoryview(bytearray(count * size))
        return [whole[i * size : (i + 1) * size] for i in range(count)]

    def prove(self, answer: Followed, staged: Sequence[memoryview]) -> bool:
        """Copy the parts that came into the slots; false when one is not what its owner promised.

        Each byte is read once, from memory that nobody else can reach: our checksum is of what the owner's proved.
        """
        new = range(self.parts, answer.parts)
        if len(answer.sums) != len(self.entries) or len(new) > len(staged):
            return False
        made = [self._taken(i, new, answer, staged) for i in range(len(self.entries))]
        if not all(len(sums) == len(new) * CHECKSUM_BYTES for sums in made):
            return False
        for held, sums in zip(self.sums, made, strict=True):
            held.extend(sums)
        self.parts += len(new)
        return True

    def _taken(self, i: int, new: range, answer: Followed, staged: Sequence[memoryview]) -> bytes:
        """Our checksums of a block's new parts, up to the first that differs from the owner's."""
        digest, size = self.entries[i].digest, self.wanted.part_bytes
        ours = bind(digest, self.epoch, self.copies[i].slot.stamp)
        theirs = bind(digest, self.wanted.handover.epoch, answer.stamps[i])
        made = b""
        for at, part in enumerate(new):
            with self.views[i][part * size : (part + 1) * size] as view, staged[at][i * size : (i + 1) * size] as came:
                own, seen = copy_digests(view, came, bind_part(ours, part), bind_part(theirs, part))
            if seen != answer.sums[i][at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]:
                break
            made += own
        return made

    def whole(self, answer: Followed) -> list[Record] | None:
        """Records of the whole blocks, sealed before the owner's checksums are compared; None if one differs."""
        records = []
        for i, (entry, copy) in enumerate(zip(self.entries, self.copies, strict=True)):
            own = checksum(self.views[i], entry.digest, self.epoch, copy.slot.stamp)
            if (
                checksum(self.views[i], entry.digest, self.wanted.handover.epoch, answer.stamps[i])
                != answer.checksums[i]
            ):
                return None
            old = copy.record
            size = old.raw_bytes
            records.append(Record(old.key, answer.parents[i], old.layout_id, old.codec, size, size, own, self.epoch))
        return records

    def release(self) -> None:
        """Let go of the memory and wake those who wait."""
        self.is_over = True
        for view in self.views:
            view.release()
        self.changed.set()


def followed(peers: object) -> FollowedPeers | None:
    """The peers, where they can follow growing blocks."""
    return peers if isinstance(peers, FollowedPeers) else None


class Follower:
    """Follows hand-overs. A run goes on when its reader leaves: it becomes ordinary blocks."""

    def __init__(self, node: Node, evictor: Evictor, peers: FollowedPeers | None) -> None:
        self._node = node
        self._evictor = evictor
        self._peers = peers
        self._by_entry: dict[Entry, Following] = {}
        self._tasks: TaskSet[None] = TaskSet()

    @property
    def growing(self) -> int:
        """Blocks that grow here now."""
        return sum(not run.is_over for run in self._by_entry.values())

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._tasks.close()

    async def follow(self, place: RequestContext, wanted: Follow, lease_s: float) -> list[Read]:
        """Lease leading blocks that grow elsewhere, and begin to bring their parts; none when they cannot be had."""
        self._by_entry = {e: f for e, f in self._by_entry.items() if not f.is_over or e.leases}
        run = await self._begin(place, wanted) if self._peers is not None else None
        if run is None:
            return []
        try:
            answer = await self._ask(run, 0.0, [])
            count = len(answer.sums) if answer is not None else 0
            self._drop(*run.cut(count))
            if answer is None or not count or self._node.index.is_erased(place.scope):
                self._lose(run)
                return []
        except BaseException:
            self._lose(run)
            raise
        expires_s = self._node.clock() + lease_s
        leases = self._node.leases.grant_all(place.owner, list(zip(run.entries, run.copies, strict=True)), expires_s)
        self._by_entry.update((entry, run) for entry in run.entries)
        self._tasks.spawn(self._grow(run))
        return [Read(lease, REMOTE) for lease in leases]

    async def arrived(
        self, owner: int, leases: Sequence[int], have: int, wait_s: float
    ) -> tuple[int, tuple[bytes, ...]]:
        """Wait for parts behind the first `have`; how many there are, and for each lease the checksums of the new ones.

        Raises `LeaseLostError` when the writer has gone, a part was damaged, or a lease is over.
        """
        ends_s, wait = self._node.clock() + min(max(wait_s, 0.0), WAIT_S_MAX), "none"
        while True:
            places = [self._place(owner, lease) for lease in leases]
            parts = min((run.parts for run, _ in places), default=have)
            left_s = ends_s - self._node.clock()
            growing = {id(run): run for run, _ in places if not run.is_over}
            if parts > have or left_s <= 0 or not growing:
                break  # Nothing comes any more to what is whole.
            wait = "waited"
            waits = [asyncio.ensure_future(run.changed.wait()) for run in growing.values()]
            await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
        parts = max(parts, have)
        if parts > have:
            self._node.counters.add("kvstrata_handover_layers_total", parts - have, wait=wait)
        return parts, tuple(bytes(run.sums[i][have * CHECKSUM_BYTES : parts * CHECKSUM_BYTES]) for run, i in places)

    def _place(self, owner: int, lease_id: int) -> tuple[Following, int]:
        """The run of a leased block and its position there."""
        lease = self._node.leases.find(owner, lease_id)
        run = self._by_entry.get(lease.entry) if lease is not None else None
        if lease is None or run is None or run.is_lost:
            raise LeaseLostError(f"lease {lease_id} is of no block that grows here any more")
        return run, run.entries.index(lease.entry)

    async def _begin(self, place: RequestContext, wanted: Follow) -> Following | None:
        """Take slots for leading blocks that are absent here; None when there is none, or no room.

        At most as many as one question may name: behind them the reader computes or loads.
        """
        tier, blocks = self._node.entry_tier, self._node.index.blocks(place.scope)
        leading = wanted.digests[:QUESTION_BLOCKS_MAX]
        absent = next((i for i, digest in enumerate(leading) if digest in blocks), len(leading))
        if tier is None or tier.backend.mappable is None or not absent or self._node.is_draining:
            return None
        if self._node.index.is_erased(place.scope):
            return None
        begun = self._node.index.begin_chain(
            place.scope, leading[:absent], b"", place.layout_id, self._node.clock(), place.tenant
        )
        entries = [entry for entry in begun if entry is not None]
        run = Following(wanted, self._node.epoch, entries, [], [])
        try:
            want = SlotRequest(tier, place.scope, place.tenant, place.raw_bytes)
            deadline_s = self._node.clock() + ROOM_S
            while len(run.copies) < len(entries):
                entry, slot = entries[len(run.copies)], await self._evictor.reserve(want, deadline_s)
                key, size = BlockKey(entry.scope, entry.digest), place.raw_bytes
                form = self._node.arriving_form
                run.copies.append(
                    Residence(tier, slot, Record(key, b"", entry.layout_id, form, size, size, b"", self._node.epoch))
                )
                run.views.append(tier.backend.mappable.view(slot)[:size])
        except (TierFullError, BackendFailedError, BlockCorruptError):
            pass  # As many as there is room for.
        except BaseException:
            self._lose(run)
            raise
        self._drop(*run.cut(len(run.copies)))
        return run if run.entries else None

    async def _ask(self, run: Following, wait_s: float, into: Sequence[memoryview]) -> Followed | None:
        """Have what is new brought; None when the writer's agent has nothing of it any more."""
        assert self._peers is not None, "else nothing is followed"
        try:
            answer = await self._peers.follow(run.wanted, run.parts, wait_s, into)
        except AgentAwayError as e:
            _log.info("hand-over ended", extra={"peer": run.wanted.handover.agent, "error": str(e)})
            run.fault = Fault.AWAY
            return None
        if answer.parts < run.parts:
            run.fault = Fault.GIVEN_UP
            return None
        return answer

    async def _grow(self, run: Following) -> None:
        """Bring parts until the blocks are whole; a damaged part or a writer that has gone ends all of them."""
        try:
            since_s = self._node.clock()
            while self._node.clock() - since_s < STALLED_S:
                staged, before = run.staging(), run.parts
                answer = await self._ask(run, WAIT_S, staged)
                if answer is None:
                    return
                if not await in_thread(None, partial(run.prove, answer, staged)):
                    run.fault = Fault.DAMAGED
                    return
                if run.parts > before:
                    since_s = self._node.clock()
                    run.changed.set()
                    run.changed = asyncio.Event()
                if run.parts == run.parts_whole and answer.checksums and all(answer.checksums):
                    records = await in_thread(None, partial(run.whole, answer))
                    self._enter(run, records)
                    return
            run.fault = Fault.STALLED
        finally:
            if not run.is_over:
                if run.fault is not None:
                    self._node.counters.add("kvstrata_handovers_broken_total", reason=run.fault)
                self._lose(run)

    def _enter(self, run: Following, records: Sequence[Record] | None) -> None:
        """Make ordinary blocks of what is whole and right."""
        if records is None:
            run.fault = Fault.DAMAGED
            return
        for entry, grown, record in zip(run.entries, run.copies, records, strict=True):
            if entry.level == GONE or not self._node.has(grown.tier):
                self._node.free_copy(entry, grown)
                continue
            self._node.index.adopt(entry, record.parent)
            whole = Residence(grown.tier, grown.slot, record)
            self._node.leases.settle(entry, grown, whole)
            self._node.add_copy(entry, whole)
        run.release()

    def _lose(self, run: Following) -> None:
        """Nothing more comes: readers are notified, and slots are free when they have ended their leases."""
        run.is_lost = True
        run.release()
        self._drop(run.entries, run.copies)

    def _drop(self, entries: Sequence[Entry], copies: Sequence[Residence]) -> None:
        for entry in entries:
            if entry.level != GONE and not entry.residences:
                self._node.index.forget(entry)
        for entry, copy in zip(entries, copies, strict=False):
            self._node.free_copy(entry, copy)
