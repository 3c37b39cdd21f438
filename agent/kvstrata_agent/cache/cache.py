"""The parts that answer for the blocks of one node, put together once, and verbs too small for a part of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata_agent.cache.archive import Archiver
from kvstrata_agent.cache.eviction import Evictor
from kvstrata_agent.cache.explain import Explainer
from kvstrata_agent.cache.handover import Follower, followed
from kvstrata_agent.cache.load import Reader, findings
from kvstrata_agent.cache.part_checksums import PartSums
from kvstrata_agent.cache.promotion import Promoter
from kvstrata_agent.cache.remote_fetch import RegisteredExtents, RemoteFetcher
from kvstrata_agent.cache.reuse import Demand
from kvstrata_agent.cache.session_journal import SessionJournal
from kvstrata_agent.cache.session_lifecycle import SessionLife
from kvstrata_agent.cache.store import Writer
from kvstrata_agent.cache.tenant_lifecycle import Tenancy
from kvstrata_agent.movement.mover import Mover
from kvstrata_agent.movement.path import Priority
from kvstrata_api.tiers import Lookup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.cache.ports import Directory, Peers
    from kvstrata_agent.movement.move import Codecs


class Cache:
    """Everything that serves verbs, periodic duties and peers; made in the event loop. No part of it knows it."""

    def __init__(
        self,
        node: Node,
        codecs: Codecs,
        directory: Directory | None = None,
        peers: Peers | None = None,
        journal: SessionJournal | None = None,
    ) -> None:
        """Put the parts together; sessions are remembered in `journal`."""
        self.node = node
        self.directory = directory
        self.mover = Mover(node, codecs)
        self.evictor = Evictor(node, self.mover)
        self.demoter = self.evictor.demoter
        self.archiver = Archiver(node, self.demoter)
        self.promoter = Promoter(node, self.evictor, self.mover)
        self.extents = RegisteredExtents(peers)
        self.remote = RemoteFetcher(node, self.evictor, self.mover, self.extents)
        self.reader = Reader(node, self.promoter, self.remote, self.mover, directory)
        self.parts = PartSums(node)
        self.demand = Demand(node)
        self.writer = Writer(node, self.evictor, self.archiver)
        self.follower = Follower(node, self.evictor, followed(peers))
        self.explainer = Explainer(node, self.reader, self.archiver)
        journal = SessionJournal() if journal is None else journal
        self.life = SessionLife(node, self.archiver, self.reader, self.remote, directory, journal)
        self.tenancy = Tenancy(node, self.mover, self.writer, self.life)

    async def close(self) -> None:
        """Cancel background work. Tiers are closed by whoever opened them."""
        await self.life.close()
        await self.follower.close()
        await self.remote.close()
        await self.promoter.close()
        await self.evictor.close()

    def release(self, owner: int, leases: Iterable[int]) -> int:
        """End leases; returns how many lived until now."""
        return self.node.release(owner, leases)

    def unlease(self, owner: int, leases: Iterable[int]) -> int:
        """Take back leases that were not handed out after all; returns how many there were."""
        return self.node.end_leases(self.node.leases.end(owner, leases))

    def abandon(self, owner: int, reservations: Iterable[int]) -> int:
        """Give reservations back unfilled; returns how many there were."""
        return self.node.abandon(r for r in self.node.reservations.take(owner, reservations) if r is not None)

    def demote(self, place: RequestContext, digests: Sequence[bytes]) -> tuple[int, int]:
        """Have blocks copied to a slower tier, and leave memory first; returns how many, and how many are here."""
        here = [e for e in self.reader.lookup_now(place, digests) if e is not None and e.residences]
        has_lower = self.node.entry_tier is not None and not self.node.is_lowest(self.node.entry_tier)
        going = self.archiver.demotable(here) if has_lower else []
        self.archiver.demote_soon(going, Priority.DEMOTE)
        return len(going), len(here)

    def pin(self, place: RequestContext, digests: Sequence[bytes], expires_s: float) -> int:
        """Keep blocks that are in memory there for `expires_s` seconds; a second pin renews the first."""
        self.unpin(place, digests)
        count = 0
        for entry in self.reader.lookup_now(place, digests):
            copy = self.node.entry_copy(entry) if entry is not None else None
            if entry is not None and copy is not None:
                self.node.pins.grant(place.owner, entry, copy, self.node.clock() + expires_s)
                count += 1
        return count

    def unpin(self, place: RequestContext, digests: Sequence[bytes]) -> int:
        """Take pins of this connection back; returns how many there were."""
        wanted = {(place.scope, digest) for digest in digests}
        held = self.node.pins.owned(place.owner)
        ids = [pin.id for pin in held if (pin.entry.scope, pin.entry.digest) in wanted]
        return len(self.node.pins.end(place.owner, ids))

    def touch(self, place: RequestContext, digests: Sequence[bytes]) -> int:
        """Note that blocks were used, wherever their copies lie; returns how many are here.

        The session of the request follows those, which are in chain order.
        """
        here = [e for e in self.reader.lookup_now(place, digests) if e is not None and e.residences]
        now_s = self.node.clock()
        self.node.used_by(place.session, here)
        self.node.returns.asked(place.scope, place.session, digests)
        for entry in here:
            self.node.signs.used(entry, now_s)
        if place.session is not None:
            self.archiver.follow(place.session, here)
        return len(here)

    def drop(self, place: RequestContext, digests: Sequence[bytes]) -> bytes:
        """Drop blocks that nobody holds, those behind first; returns the `tiers.Lookup` code of each afterwards.

        A block stays while one that continues it is here or on its way: a chain never loses its head first, so nothing
        that a session decodes from is touched.
        """
        index = self.node.index
        for entry in reversed(self.reader.lookup_now(place, digests)):
            if entry is not None and entry.residences and not entry.is_held and not index.is_continued(entry):
                self.node.drop_block(entry, "dropped")
        return findings(self.reader.lookup_now(place, digests), {}, Lookup.MISS).states
