"""The parts of one agent without its process: the cache of its node, what it lends to peers, and operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata_agent.cache.cache import Cache
from kvstrata_agent.fleet.peers.chain_lookup import Chains
from kvstrata_agent.fleet.peers.lender import HandoverSource, PeerLender
from kvstrata_agent.fleet.peers.peers import FlashReader
from kvstrata_agent.operations.migrate import Adopter, Migrator
from kvstrata_agent.operations.runner import Orders
from kvstrata_agent.operations.warm import Warmer

if TYPE_CHECKING:
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Directory, Peers
    from kvstrata_agent.cache.session_journal import SessionJournal
    from kvstrata_agent.movement.move import Codecs
    from kvstrata_agent.weights.runner import Models


class AgentParts:
    """One agent; made in the event loop. Its process, tests and benchmarks hold it, none of its parts does."""

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
        self.cache = Cache(node, codecs, directory, peers, journal)
        self.flash = FlashReader(node, codecs)
        self.lender = PeerLender(node, self.cache.promoter, self.cache.extents)
        self.handovers = HandoverSource(node)
        self.chains = Chains(node, directory, peers)
        self.migrator = Migrator(node, peers)
        self.warmer = Warmer(self.cache, self.chains)
        self.adopter = Adopter(node, self.warmer, self.cache.tenancy)
        self.models: Models | None = None
        """Weights of models; set by whoever provisions tiers, before peers are answered."""
        self.orders = Orders(node, self.cache.evictor, self.warmer, self.migrator)

    async def close(self) -> None:
        """Cancel background work. Tiers are closed by whoever opened them."""
        await self.orders.close()
        if self.models is not None:
            await self.models.close()
        await self.cache.close()
