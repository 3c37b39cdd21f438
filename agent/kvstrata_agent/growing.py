"""The writer's side of a hand-over: answers agents that follow growing blocks. Implements `ports.Grower`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata_agent.blocks.handovers import Stage

if TYPE_CHECKING:
    from kvstrata_agent.blocks.handovers import Growing
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Follow


class PeerGrower:
    """Tells how far blocks have grown, and waits for more."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def grown(self, wanted: Follow, have: int, wait_s: float) -> list[Growing]:
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
