"""Which extents are known to the transport between agents: registered on first use, let go of before they vanish."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.ports import Peers


class Exports:
    """Registers extents with the peers' transport, each once."""

    def __init__(self, peers: Peers | None) -> None:
        self.peers = peers
        self._registered: set[int] = set()
        self._heard: set[Tier] = set()

    def ensure(self, tier: Tier, extent: int) -> None:
        """Make an extent of a mappable tier a source and target of transfers. Idempotent."""
        number = tier.extent_number(extent)
        mappable = tier.backend.mappable
        if self.peers is None or mappable is None or number in self._registered:
            return
        if tier not in self._heard:
            self._heard.add(tier)
            mappable.on_release(lambda gone: self._let_go(tier.extent_number(gone)))
        self.peers.register_extent(number, mappable.extent_view(extent))
        self._registered.add(number)

    def _let_go(self, number: int) -> None:
        if number in self._registered and self.peers is not None:
            self._registered.discard(number)
            self.peers.unregister_extent(number)
