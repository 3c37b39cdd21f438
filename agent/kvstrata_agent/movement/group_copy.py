"""Groups of blocks between mapped memory and a medium that takes several at a time: as they lie, or through a codec.

An engine that was given a slot before and is late may write to it at any time. Of blocks that go as they lie, that
leaves a record on the way down which its own checksum refuses; on the way up our checksum is of bytes that nobody else
could reach. Of others, a block is coded from a private copy that was verified, and decoded into one whose checksum is
that of the bytes which go into the slot.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata_agent.backends.base import ExpectedChecksum, MediumAwayError, MediumIntactError, Reading, Record, Writing
from kvstrata_agent.backends.threads import here_or_in_thread
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.codec.base import LOSSY, RAW, RAW_AFTER_LOSS, room_bytes
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import bind, checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError, TierFullError, UnsupportedError
from kvstrata_native import copy_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.backends.scratch import ScratchPool
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.codec.base import Encoded
    from kvstrata_agent.movement.move import Coding, Move


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One block in the form in which it is stored."""

    move: Move
    codec: str
    stored: memoryview
    sound: ExpectedChecksum | None = None
    """What the bytes are known by, where somebody else may write to them; None where nobody can reach them."""


class GroupWriter:
    """Writes groups; the mover schedules them and enters them in the index."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def write(self, group: Sequence[Outgoing], target: Tier) -> list[Residence | None]:
        """Write blocks into new slots, which are given back on failure and cancellation; None for those that fail.

        Raises `TierFullError` when there is no room for the first of them; others without room are None.
        """
        assert target.backend.group is not None
        slots = self._take(group, target)
        made: list[Residence | None] = [None] * len(group)
        try:
            writings = await self._writings(group[: len(slots)], slots)
            ends = await target.backend.group.write_group(writings)
            made[: len(slots)] = self._written(group, slots, ends, target)
        finally:
            for one, slot, copy in zip(group, slots, made, strict=False):
                if copy is None:
                    self._node.free(target, slot, one.move.entry.tenant)
        for copy in filter(None, made):
            target.raw_bytes_written += copy.record.raw_bytes
            target.stored_bytes_written += copy.record.stored_bytes
        return made

    def _take(self, group: Sequence[Outgoing], target: Tier) -> list[SlotRef]:
        """Take slots for the leading ones while there is room, for one at least."""
        slots: list[SlotRef] = []
        try:
            for one in group:
                entry = one.move.entry
                slots.append(self._node.allocate(SlotRequest(target, entry.scope, entry.tenant, len(one.stored))))
        except TierFullError:
            if not slots:
                raise
        except BaseException:
            for one, slot in zip(group, slots, strict=False):
                self._node.free(target, slot, one.move.entry.tenant)
            raise
        return slots

    async def _writings(self, group: Sequence[Outgoing], slots: Sequence[SlotRef]) -> list[Writing]:
        """What goes to each slot, with the checksums of bytes that nobody else can reach."""
        epoch = self._node.epoch

        def sums() -> list[bytes]:
            return [
                b"" if one.sound else checksum(one.stored, one.move.entry.digest, epoch, slot.stamp)
                for one, slot in zip(group, slots, strict=True)
            ]

        hashed_bytes = sum(len(one.stored) for one in group if one.sound is None)
        made = await here_or_in_thread(None, hashed_bytes, sums)
        return [
            Writing(slot, one.stored, self._record(one, found), one.sound)
            for one, slot, found in zip(group, slots, made, strict=True)
        ]

    def _record(self, one: Outgoing, digest: bytes) -> Record:
        raw_bytes = one.move.source.record.raw_bytes
        return record_of(self._node, one.move.entry, one.codec, raw_bytes, len(one.stored), digest)

    def _written(
        self, group: Sequence[Outgoing], slots: Sequence[SlotRef], ends: Sequence[Record | KvStrataError], target: Tier
    ) -> list[Residence | None]:
        made: list[Residence | None] = []
        failures: list[BackendFailedError] = []
        for one, slot, end in zip(group, slots, ends, strict=False):
            entry, source = one.move.entry, one.move.source
            is_there = entry.residence(source.tier) is source  # Else its slot may have been used again meanwhile.
            made.append(Residence(target, slot, end) if isinstance(end, Record) and is_there else None)
            if isinstance(end, BlockCorruptError):
                self._node.copy_failed(entry, source, is_corrupt=True)
            elif isinstance(end, BackendFailedError):
                failures.append(end)
            elif isinstance(end, KvStrataError):
                raise end
        failure = next((f for f in failures if not isinstance(f, MediumIntactError)), None)
        if failure is not None:  # Once for the group: it was one transfer.
            self._node.write_failed(target, str(failure))
        return made


def record_of(node: Node, entry: Entry, codec: str, raw_bytes: int, stored_bytes: int, digest: bytes) -> Record:
    """Record of a copy that this node makes now."""
    key = BlockKey(entry.scope, entry.digest)
    return Record(key, entry.parent, entry.layout_id, codec, raw_bytes, stored_bytes, digest, node.epoch)


def promoted_copy(node: Node, move: Move, target: Tier, end: bytes | KvStrataError) -> Residence | None:
    """Copy in the slot that the move names, with its checksum `end`; None where that is an error, which is noted."""
    entry, source = move.entry, move.source
    if isinstance(end, bytes):
        assert move.slot is not None
        record, form = source.record, RAW_AFTER_LOSS if source.record.codec in LOSSY else RAW
        made = record_of(node, entry, form, record.raw_bytes, record.raw_bytes, end)
        return Residence(target, move.slot, made)
    if isinstance(end, BlockCorruptError):
        node.copy_failed(entry, source, is_corrupt=True)
    elif isinstance(end, MediumAwayError):
        node.medium_away(source.tier, str(end))
    elif isinstance(end, BackendFailedError | UnsupportedError) and not isinstance(end, MediumIntactError):
        source.tier.last_error = str(end)
        node.copy_failed(entry, source, is_corrupt=False)
    return None


class RawGroups:
    """Makes the copies of a group; the mover schedules them and enters them in the index."""

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
        return [promoted_copy(self._node, move, target, end) for move, end in zip(moves, ends, strict=True)]

    def _reading(self, move: Move, target: Tier, views: ExitStack) -> Reading:
        assert target.backend.mappable is not None
        assert move.slot is not None
        record = move.source.record
        whole = views.enter_context(target.backend.mappable.view(move.slot))
        into = views.enter_context(whole[: record.raw_bytes])
        return Reading(move.source.slot, record, into, (self._node.epoch, move.slot.stamp))


class CodedGroups:
    """Makes the copies of a group; the mover schedules them and enters them in the index."""

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
                if encoded is not None:
                    self._coding.count(encoded)
            if group:
                ends = await self._writer.write([one for one, _ in group.values()], target)
                for i, end in zip(group, ends, strict=True):
                    made[i] = end
        return made

    def _encoding(
        self, move: Move, target: Tier, loans: ExitStack
    ) -> Callable[[], tuple[Outgoing, Encoded | None] | None]:
        """What makes the stored form of one block; None from it where memory holds other bytes than the block's.

        What does not become shorter is stored as it is, and so are blocks that waited until the pool wants no codec.
        """
        source, record = move.source, move.source.record
        codec = self._coding.codec_for(record, target)
        assert source.tier.backend.mappable is not None
        whole = loans.enter_context(source.tier.backend.mappable.view(source.slot))
        view = loans.enter_context(whole[: record.raw_bytes])
        raw = loans.enter_context(self._buffers.lend(record.raw_bytes))
        room = loans.enter_context(self._buffers.lend(room_bytes(record.raw_bytes)))
        shape = self._coding.shape(move.entry, record.raw_bytes)
        bound = bind(record.key.digest, record.epoch, source.slot.stamp)

        def work() -> tuple[Outgoing, Encoded | None] | None:
            if copy_digest(raw, view, bound) != record.checksum:
                return None
            made = codec.encode(raw, shape, room) if codec is not None else None
            if made is None or made.stored_bytes >= len(raw):
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
        return [promoted_copy(self._node, move, target, end) for move, end in zip(moves, ends, strict=True)]

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
