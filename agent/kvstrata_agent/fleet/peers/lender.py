"""Leases of our blocks for other agents: implements `server.Lender`.

Also the writer's side of a hand-over: answers agents that follow blocks while they are being written.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstrata_agent.blocks.handovers import Stage
from kvstrata_agent.blocks.node import PEER_OWNER
from kvstrata_agent.fleet.peers.chain_lookup import segment_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata_agent.backends.base import Record, SlotRef
    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.blocks.handovers import Growing
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Follow
    from kvstrata_agent.cache.promotion import Promoter
    from kvstrata_agent.cache.remote_fetch import RegisteredExtents
    from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
    from kvstrata_api.blocks import BlockKey, LayoutId, ScopeSecret
    from kvstrata_metadata.store.records import Announcement


LEND_S: Final = 10.0
"""What bringing blocks up for a peer may take; it computes them itself when we are slower."""
LEASE_S_MAX: Final = 60.0
"""Longest lease of a peer: a transfer of a batch takes well under a second."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a record lies on a shared tier, below its owner's directory."""

    tier: str
    """Name of the tier in the pool."""
    file: str
    slot: SlotRef
    record: Record


@dataclass(frozen=True, slots=True)
class Lent:
    """One of our blocks leased to another agent."""

    lease: int
    slot: SlotRef
    view: memoryview
    """Empty where the other agent reads the bytes at their place."""
    parent: bytes
    checksum: bytes
    epoch: int
    placed: Placed | None = None
    """Where the other agent finds them on a shared tier."""


class PeerLender:
    """Lends blocks to peers that the listener has authenticated."""

    def __init__(self, node: Node, promoter: Promoter, extents: RegisteredExtents) -> None:
        self._node = node
        self._promoter = promoter
        self._extents = extents

    async def lend(
        self, keys: Sequence[BlockKey], layout_id: LayoutId, lease_s: float, tiers: Sequence[str] = ()
    ) -> list[Lent | None]:
        """Lease blocks in memory, bringing them up first; None for absent ones and for another layout.

        What lies on one of the shared `tiers`, and not in memory, is leased where it is.

        Cancelled, it leaves no lease: whoever asked has gone and would never end it.
        """
        found = [self._node.index.find(k.scope, k.digest) for k in keys]
        usable = [e if e is not None and e.residences and e.layout_id == layout_id else None for e in found]
        lent: list[Lent | None] = [None] * len(keys)

        async def one(i: int, entry: Entry) -> None:
            lent[i] = self._placed(entry, tiers, min(lease_s, LEASE_S_MAX))
            if lent[i] is not None:
                return
            residence = await self._promoter.promote(entry, entry.tenant)
            if residence is not None:
                lent[i] = self._lent(entry, residence, min(lease_s, LEASE_S_MAX))

        for i, entry in enumerate(usable):
            up = self._promoter.promoted(entry) if entry is not None else None
            if entry is not None and up is not None:
                lent[i] = self._lent(entry, up, min(lease_s, LEASE_S_MAX))
        slow = [(i, e) for i, e in enumerate(usable) if e is not None and lent[i] is None]
        tasks = [asyncio.ensure_future(one(i, e)) for i, e in slow]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=LEND_S)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()  # From here on it leases nothing more: a lease is its last step.
            self.end([loan.lease for loan in lent if loan is not None])
            raise
        return lent

    def _placed(self, entry: Entry, tiers: Sequence[str], lease_s: float) -> Lent | None:
        """Lease a copy on a tier that the other agent can read; None when there is none, or one in memory."""
        if not tiers or self._promoter.mapped(entry) is not None or self._node.index.is_erased(entry.scope):
            return None
        for residence in entry.residences:
            tier, slot, record = residence
            shared = tier.backend.shared
            if tier.name in tiers and shared is not None:
                self._node.signs.used(entry, self._node.clock())
                lease = self._node.leases.grant(PEER_OWNER, entry, residence, self._node.clock() + lease_s)
                placed = Placed(tier.name, shared.file_of(slot), slot, record)
                return Lent(lease.id, slot, memoryview(b""), record.parent, record.checksum, record.epoch, placed)
        return None

    def _lent(self, entry: Entry, residence: Residence, lease_s: float) -> Lent | None:
        """Lease a copy in memory; None where its scope was erased while it was waited for."""
        if self._node.index.is_erased(entry.scope):
            return None
        tier, slot, record = residence
        mappable = tier.backend.mappable
        assert mappable is not None
        self._extents.ensure(tier, slot.extent)
        self._node.signs.used(entry, self._node.clock())
        lease = self._node.leases.grant(PEER_OWNER, entry, residence, self._node.clock() + lease_s)
        outside = replace(slot, extent=tier.extent_number(slot.extent))
        view = mappable.view(slot)[: record.raw_bytes]
        return Lent(lease.id, outside, view, entry.parent, record.checksum, record.epoch)

    def trace(self, key: BlockKey, most: int) -> ChainSegment | None:
        """A block that can be read here and up to `most` in all with those before it; None when it is not here."""
        return segment_of(self._node.index, key, most)

    def end(self, leases: Sequence[int]) -> None:
        """End leases; unknown ones are ignored."""
        self._node.end_leases(self._node.leases.end(PEER_OWNER, leases))

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        """Everything that this agent holds, in parts, for a full report to a new or emptied directory."""
        return self._node.announcer.holdings()


class HandoverSource:
    """Hands blocks over while they are being written: waits for parts that another agent does not have yet."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def wait_for_parts(self, wanted: Follow, have: int, wait_s: float) -> list[Growing]:
        """Leading blocks of a hand-over, when all have more than `have` parts or are whole, or the time is up.

        None where one of them was published without its parts: there is nothing to prove them by.
        """
        ends_s = self._node.clock() + wait_s
        while True:
            blocks = self._node.growth.find(
                wanted.handover.name, wanted.scope, wanted.layout_id, wanted.digests, wanted.part_bytes
            )
            if any(b.stage is Stage.WHOLE and b.parts * b.part_bytes < b.reservation.raw_bytes for b in blocks):
                return []
            left_s = ends_s - self._node.clock()
            if left_s <= 0 or not blocks or all(b.parts > have or b.stage is Stage.WHOLE for b in blocks):
                return blocks
            await self._node.growth.changed(left_s)
