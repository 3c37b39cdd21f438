"""Which blocks stand before one in its chain: here, or with the agents that hold them. No bytes move.

What other agents answer is believed as far as it fits together. Whether it is true shows when the blocks come: each
brings the parent that its owner lends it with.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from kvstrata_agent.policy.operations import Chain
from kvstrata_api.blocks import BlockKey

if TYPE_CHECKING:
    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Directory, Peers
    from kvstrata_api.blocks import LayoutId, ScopeSecret
    from kvstrata_metadata.store.records import Location

CHAIN_MAX: Final = 262_144
"""Blocks of one chain: four million tokens of 16 to a block. A longer one, or a ring, counts as one without a root."""
SEGMENT_BLOCKS_MAX: Final = 1024
"""Blocks returned in one step: each may have to be made an entry of, 15 us."""
OWNERS_MAX: Final = 3
"""Agents that are asked for the same segment: a location may be stale."""


@dataclass(frozen=True, slots=True)
class ChainSegment:
    """Consecutive blocks of one chain, from its end towards its root. Holds no bytes."""

    layout_id: LayoutId
    raw_bytes: int
    """Of each block."""
    digests: tuple[bytes, ...]
    before: bytes
    """What the last of them continues; empty at the root."""


@runtime_checkable
class TracedPeers(Protocol):
    """Chains of other agents (`kvstrata_agent.fleet.peers`)."""

    async def trace(self, key: BlockKey, at: Location, most: int) -> ChainSegment | None:
        """What a block's owner answers (`Lender.trace`); None also when it does not answer. Never raises."""


def segment_of(index: Index, key: BlockKey, most: int) -> ChainSegment | None:
    """A block that can be read here and up to `most` in all with those before it; None when it is not here."""
    head = index.find(key.scope, key.digest)
    if head is None or not head.residences:
        return None
    lineage = itertools.chain((head,), index.ancestors(head))
    alike = itertools.takewhile(lambda e: e.residences and e.layout_id == head.layout_id, lineage)
    stretch = list(itertools.islice(alike, min(most, SEGMENT_BLOCKS_MAX)))
    before = stretch[-1].parent if stretch else key.digest
    return ChainSegment(head.layout_id, head.residences[0].record.raw_bytes, tuple(e.digest for e in stretch), before)


class Chains:
    """Follows chains from their end to their root, across nodes."""

    def __init__(self, node: Node, directory: Directory | None, peers: Peers | None) -> None:
        self._node = node
        self._directory = directory
        self._peers = _traced(peers)

    async def here(self, secret: ScopeSecret, digest: bytes) -> Chain | None:
        """A block with all those before it, where every one is on this node; None when one is not."""
        return await self._followed(secret, digest, is_local=True)

    async def anywhere(self, secret: ScopeSecret, digest: bytes) -> Chain | None:
        """A block with all those before it, wherever they are; None when one is nowhere, as far as is known now."""
        return await self._followed(secret, digest, is_local=False)

    async def _followed(self, secret: ScopeSecret, digest: bytes, *, is_local: bool) -> Chain | None:
        found: dict[bytes, None] = {}
        kinds: set[tuple[LayoutId, int]] = set()
        at = digest
        while at:
            segment = segment_of(self._node.index, BlockKey(secret.scope, at), SEGMENT_BLOCKS_MAX)
            if segment is None and not is_local:
                segment = await self._elsewhere(secret, at)
            if segment is None or not found.keys().isdisjoint(segment.digests):
                return None
            found |= dict.fromkeys(segment.digests)
            kinds.add((segment.layout_id, segment.raw_bytes))
            if len(kinds) > 1 or len(found) > CHAIN_MAX:
                return None
            at = segment.before
            await asyncio.sleep(0)
        ((layout_id, raw_bytes),) = kinds
        return Chain(secret, layout_id, raw_bytes, tuple(reversed(found)))

    async def _elsewhere(self, secret: ScopeSecret, digest: bytes) -> ChainSegment | None:
        if self._directory is None or self._peers is None or not self._directory.is_up:
            return None
        (copies,) = await self._directory.locate(secret, [digest])
        for location in copies[:OWNERS_MAX]:
            segment = await self._peers.trace(BlockKey(secret.scope, digest), location, SEGMENT_BLOCKS_MAX)
            if (
                segment is not None
                and segment.digests[0] == digest
                and len(set(segment.digests)) == len(segment.digests)
            ):
                return segment
        return None


def _traced(peers: object) -> TracedPeers | None:
    """The peers, where they can be asked for chains."""
    return peers if isinstance(peers, TracedPeers) else None
