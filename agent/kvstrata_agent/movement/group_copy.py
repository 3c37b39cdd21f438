"""Groups of blocks that lie on a medium as they lie in mapped memory.

An engine that was given a slot before and is late may write to it at any time. On the way down that leaves a record
which its own checksum refuses; on the way up our checksum is of bytes that nobody else could reach.

Groups of blocks between mapped memory and a medium that takes several at a time, through the pool's codec.

An engine that was given a slot before and is late may write to it at any time. So a block is coded from a private copy
that was verified, and decoded into one whose checksum is that of the bytes which go into the slot.

What became of a block that was read into mapped memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstrata_agent.backends.base import ExpectedChecksum, MediumIntactError, Reading
from kvstrata_agent.backends.threads import here_or_in_thread
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.codec.base import LOSSY, RAW, RAW_AFTER_LOSS, room_bytes
from kvstrata_agent.movement.group_write import Outgoing, record_of
from kvstrata_api.checksum import bind
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError, UnsupportedError
from kvstrata_native import copy_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata_agent.backends.scratch import ScratchPool
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.codec.base import Encoded
    from kvstrata_agent.movement.encoding import Coding
    from kvstrata_agent.movement.group_write import GroupWriter
    from kvstrata_agent.movement.move import Move


def risen(node: Node, move: Move, target: Tier, end: bytes | KvStrataError) -> Residence | None:
    """Copy in the slot that the move names, with its checksum `end`; None where that is an error, which is noted."""
    entry, source = move.entry, move.source
    if isinstance(end, bytes):
        assert move.slot is not None
        record, form = source.record, RAW_AFTER_LOSS if source.record.codec in LOSSY else RAW
        made = record_of(node, entry, form, record.raw_bytes, record.raw_bytes, end)
        return Residence(target, move.slot, made)
    if isinstance(end, BlockCorruptError):
        node.copy_failed(entry, source, is_corrupt=True)
    elif isinstance(end, BackendFailedError | UnsupportedError) and not isinstance(end, MediumIntactError):
        source.tier.last_error = str(end)
        node.copy_failed(entry, source, is_corrupt=False)
    return None


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
        mappable = source.tier.backend.mappable
        assert mappable is not None
        whole = views.enter_context(mappable.view(source.slot))
        view = views.enter_context(whole[: source.record.raw_bytes])
        record, form = source.record, RAW_AFTER_LOSS if source.record.codec in LOSSY else RAW
        return Outgoing(move, form, view, ExpectedChecksum(record.checksum, (record.epoch, source.slot.stamp)))

    async def up(self, moves: Sequence[Move], target: Tier) -> list[Residence | None]:
        """Read blocks into the slots of mapped memory that their moves name."""
        group = moves[0].source.tier.backend.group
        assert group is not None
        with ExitStack() as views:
            try:
                readings = [self._reading(move, target, views) for move in moves]
            except BlockCorruptError:  # The memory has been taken away under one of them.
                return [None] * len(moves)
            ends = await group.read_group(readings)
        return [risen(self._node, move, target, end) for move, end in zip(moves, ends, strict=True)]

    def _reading(self, move: Move, target: Tier, views: ExitStack) -> Reading:
        assert target.backend.mappable is not None
        assert move.slot is not None
        record = move.source.record
        whole = views.enter_context(target.backend.mappable.view(move.slot))
        into = views.enter_context(whole[: record.raw_bytes])
        return Reading(move.source.slot, record, into, (self._node.epoch, move.slot.stamp))


class CodedMoves:
    """Makes the copies of a group; the mover has its turn and enters them."""

    def __init__(self, node: Node, coding: Coding, buffers: ScratchPool, writer: GroupWriter) -> None:
        self._node = node
        self._coding = coding
        self._buffers = buffers
        self._writer = writer

    async def down(self, moves: Sequence[Move], target: Tier) -> list[Residence | None]:
        """Code blocks of mapped memory in one thread, and write them. See `GroupWriter.write`."""
        made: list[Residence | None] = [None] * len(moves)
        with ExitStack() as loans:
            try:
                works = [self._encoding(move, target, loans) for move in moves]
            except BlockCorruptError:  # The slot of one of them has gone, and its block with it: the others come again.
                return made
            coded = await here_or_in_thread(None, _raw_bytes(moves), lambda: [work() for work in works])
            group = {i: one for i, one in enumerate(coded) if one is not None}
            for i, move in enumerate(moves):
                if i not in group:
                    self._node.copy_failed(move.entry, move.source, is_corrupt=True)
            for _, encoded in group.values():
                self._coding.count(encoded)
            if group:
                ends = await self._writer.write([one for one, _ in group.values()], target)
                for i, end in zip(group, ends, strict=True):
                    made[i] = end
        return made

    def _encoding(self, move: Move, target: Tier, loans: ExitStack) -> Callable[[], tuple[Outgoing, Encoded] | None]:
        """What makes the stored form of one block; None from it where memory holds other bytes than the block's.

        What does not become shorter is stored as it is.
        """
        source, record = move.source, move.source.record
        codec = self._coding.codec_for(record, target)
        assert source.tier.backend.mappable is not None
        assert codec is not None
        whole = loans.enter_context(source.tier.backend.mappable.view(source.slot))
        view = loans.enter_context(whole[: record.raw_bytes])
        raw = loans.enter_context(self._buffers.lend(record.raw_bytes))
        room = loans.enter_context(self._buffers.lend(room_bytes(record.raw_bytes)))
        shape = self._coding.shape(move.entry, record.raw_bytes)
        bound = bind(record.key.digest, record.epoch, source.slot.stamp)

        def work() -> tuple[Outgoing, Encoded] | None:
            if copy_digest(raw, view, bound) != record.checksum:
                return None
            made = codec.encode(raw, shape, room)
            if made.stored_bytes >= len(raw):
                return Outgoing(move, RAW_AFTER_LOSS if record.codec in LOSSY else RAW, raw), made
            return Outgoing(move, made.codec, room[: made.stored_bytes]), made

        return work

    async def up(self, moves: Sequence[Move], target: Tier) -> list[Residence | None]:
        """Read the stored forms of blocks, and decode them in one thread into the slots that their moves name."""
        group = moves[0].source.tier.backend.group
        assert group is not None
        with ExitStack() as loans:
            readings = [Reading(m.source.slot, m.source.record, self._lend_stored(m, loans)) for m in moves]
            ends: list[bytes | KvStrataError] = list(await group.read_group(readings))
            try:
                works = {
                    i: self._decoding(move, reading, target, loans)
                    for i, (move, reading) in enumerate(zip(moves, readings, strict=True))
                    if isinstance(ends[i], bytes)
                }
            except BlockCorruptError:  # The memory has been taken away under one of them.
                return [None] * len(moves)
            made = await here_or_in_thread(None, _raw_bytes(moves), lambda: {i: work() for i, work in works.items()})
            for i, end in made.items():
                ends[i] = end
        return [risen(self._node, move, target, end) for move, end in zip(moves, ends, strict=True)]

    def _lend_stored(self, move: Move, loans: ExitStack) -> memoryview:
        record = move.source.record
        most_bytes = max(room_bytes(record.raw_bytes), record.stored_bytes)  # One size, however much it shrank.
        return loans.enter_context(self._buffers.lend(most_bytes))[: record.stored_bytes]

    def _decoding(
        self, move: Move, reading: Reading, target: Tier, loans: ExitStack
    ) -> Callable[[], bytes | KvStrataError]:
        """What fills a slot from the stored form, and returns the checksum of what is there then."""
        record, slot = move.source.record, move.slot
        assert target.backend.mappable is not None
        assert slot is not None
        whole = loans.enter_context(target.backend.mappable.view(slot))
        view = loans.enter_context(whole[: record.raw_bytes])
        raw = loans.enter_context(self._buffers.lend(record.raw_bytes))
        bound = bind(move.entry.digest, self._node.epoch, slot.stamp)

        def work() -> bytes | KvStrataError:
            try:
                self._coding.named(record.codec).decode(reading.into, raw)
            except (BlockCorruptError, UnsupportedError) as e:
                return e
            return copy_digest(view, raw, bound)

        return work


def _raw_bytes(moves: Sequence[Move]) -> int:
    return sum(m.source.record.raw_bytes for m in moves)
