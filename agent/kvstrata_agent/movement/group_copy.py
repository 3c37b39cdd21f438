"""Groups of blocks that lie on a medium as they lie in mapped memory.

An engine that was given a slot before and is late may write to it at any time. On the way down that leaves a record
which its own checksum refuses; on the way up our checksum is of bytes that nobody else could reach.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstrata_agent.backends.base import Reading, Sound
from kvstrata_agent.codec.base import LOSSY, RAW, WORN
from kvstrata_agent.movement.group_write import Outgoing
from kvstrata_agent.risen import risen
from kvstrata_api.errors import BlockCorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.block import Residence
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.group_write import GroupWriter
    from kvstrata_agent.movement.move import Move


class StraightMoves:
    """Makes the copies of a group; the mover has its turn and enters them."""

    def __init__(self, node: Node, writer: GroupWriter) -> None:
        self._node = node
        self._writer = writer

    async def down(self, moves: Sequence[Move], target: Tier) -> list[Residence | None]:
        """Write blocks of mapped memory as they lie. See `GroupWriter.write`."""
        with ExitStack() as views:
            try:
                group = [self._outgoing(move, views) for move in moves]
            except BlockCorruptError:  # The slot of one of them has gone, and its block with it: the others come again.
                return [None] * len(moves)
            return await self._writer.write(group, target)

    def _outgoing(self, move: Move, views: ExitStack) -> Outgoing:
        source = move.source
        mappable = source.tier.mappable
        assert mappable is not None
        whole = views.enter_context(mappable.view(source.slot))
        view = views.enter_context(whole[: source.record.raw_bytes])
        record, form = source.record, WORN if source.record.codec in LOSSY else RAW
        return Outgoing(move, form, view, Sound(record.checksum, (record.epoch, source.slot.stamp)))

    async def up(self, moves: Sequence[Move], target: Tier) -> list[Residence | None]:
        """Read blocks into the slots of mapped memory that their moves name."""
        group = moves[0].source.tier.group
        assert group is not None
        with ExitStack() as views:
            try:
                readings = [self._reading(move, target, views) for move in moves]
            except BlockCorruptError:  # The memory has been taken away under one of them.
                return [None] * len(moves)
            ends = await group.read_group(readings)
        return [risen(self._node, move, target, end) for move, end in zip(moves, ends, strict=True)]

    def _reading(self, move: Move, target: Tier, views: ExitStack) -> Reading:
        assert target.mappable is not None
        assert move.slot is not None
        record = move.source.record
        whole = views.enter_context(target.mappable.view(move.slot))
        into = views.enter_context(whole[: record.raw_bytes])
        return Reading(move.source.slot, record, into, (self._node.epoch, move.slot.stamp))
