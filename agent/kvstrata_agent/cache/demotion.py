"""Brings blocks of a tier that goes up to faster ones, as far as those have room: nothing there gives way for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.slot_request import Want
from kvstrata_agent.movement.fair_queue import Priority
from kvstrata_agent.movement.move import Move
from kvstrata_agent.policy.eviction import excess_bytes
from kvstrata_api.errors import RetryableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier

    Moved = Callable[[Sequence[Move], Tier, Priority], Awaitable[Sequence[bool]]]

BATCH_BLOCKS: Final = 256
"""Blocks that one pass begins with; what stands before them in their chains comes along."""


class Lifting:
    """Makes the copies; whoever called drops those below."""

    def __init__(self, node: Node, moved: Moved) -> None:
        """`moved` makes copies while their blocks are marked as moving."""
        self._node = node
        self._moved = moved

    async def lift(self, tier: Tier) -> None:
        """Copy one batch up, the last used first and none before its parent."""
        now_s = self._node.clock()
        faster = [t for t in self._node.tiers if t.level < tier.level and t.facts(now_s).takes_writes]
        if not any(self._has_room(t, 1) for t in faster):
            return  # Before entries are made of all that lies here.
        here = [
            e for residents in tuple(self._node.contents(tier).extents.values()) for e in residents if self._may_rise(e)
        ]
        for entry in sorted(here, key=lambda e: -e.used_at_s)[:BATCH_BLOCKS]:
            for link in self._chain(entry, tier):
                await self._lift_one(link, tier, faster[::-1])

    def _chain(self, entry: Entry, tier: Tier) -> list[Entry]:
        """A block and those before it that lie here as well, the first one first."""
        chain: list[Entry] = []
        link: Entry | None = entry
        while link is not None and link.residence(tier) is not None:
            chain.append(link)
            link = self._node.index.parent(link)
        return chain[::-1]

    @staticmethod
    def _may_rise(entry: Entry) -> bool:
        return not entry.is_held and len(entry.residences) == 1

    async def _lift_one(self, entry: Entry, tier: Tier, targets: Sequence[Tier]) -> None:
        for target in targets:
            source, parent = entry.residence(tier), self._node.index.parent(entry)
            if source is None or not self._may_rise(entry):
                return
            raw_bytes = source.record.raw_bytes
            if not self._has_room(target, raw_bytes) or (parent is not None and parent.level > target.level):
                continue
            try:
                want = Want(target, entry.scope, entry.tenant, raw_bytes)
                slot = self._node.take(want) if target.backend.mappable is not None else None
                await self._moved([Move(entry, source, slot)], target, Priority.DEMOTE)
            except RetryableError:
                continue

    def _has_room(self, tier: Tier, more_bytes: int) -> bool:
        """True when a tier could take so much more and would stay below its watermark."""
        policy, backend = self._node.spec.policy.eviction, tier.backend
        low, high = policy.low_watermark_percent, policy.high_watermark_percent
        return excess_bytes(backend.used_bytes + more_bytes, backend.capacity_bytes, high, low) <= 0
