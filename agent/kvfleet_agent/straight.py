"""Groups of blocks between mapped memory and a medium that takes several at a time.

An engine that was given a slot before and is late may write to it at any time. On the way down that leaves a record
which its own checksum refuses; on the way up our checksum is of bytes that nobody else could reach.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from kvfleet_agent.backends.base import BlamelessError, Reading, Record, Sound, Writing
from kvfleet_agent.codec.base import LOSSY, RAW, WORN
from kvfleet_agent.entry import Residence
from kvfleet_agent.want import Want
from kvfleet_api.blocks import BlockKey
from kvfleet_api.errors import BackendFailedError, BlockCorruptError, KvFleetError, TierFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfleet_agent.backends.base import SlotRef
    from kvfleet_agent.entry import Entry
    from kvfleet_agent.node import Node
    from kvfleet_agent.tiers import Tier


class Move(NamedTuple):
    """One block that is to be copied."""

    entry: Entry
    source: Residence
    slot: SlotRef | None = None
    """Where it goes; None lets the target give a slot of the stored size."""


class StraightMoves:
    """Makes the copies of a group; the mover has its turn and enters them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def down(self, moves: Sequence[Move], target: Tier) -> list[Residence | None]:
        """Write blocks of mapped memory as they lie; their slots are given back on failure and cancellation.

        Raises `TierFullError` when there is no room for the first of them.
        """
        assert target.group is not None
        slots = self._take(moves, target)
        made: list[Residence | None] = [None] * len(moves)
        try:
            with ExitStack() as views:
                writings = [self._writing(move, slot, views) for move, slot in zip(moves, slots, strict=False)]
                ends = await target.group.write_group(writings)
            made[: len(slots)] = self._written(moves, slots, ends, target)
        except BlockCorruptError:  # The slot of one of them has gone, and its block with it: the others come again.
            return made
        finally:
            for move, slot, copy in zip(moves, slots, made, strict=False):
                if copy is None:
                    self._node.give_back(target, slot, move.entry.tenant)
        for copy in filter(None, made):
            target.raw_bytes_written += copy.record.raw_bytes
            target.stored_bytes_written += copy.record.stored_bytes
        return made

    def _take(self, moves: Sequence[Move], target: Tier) -> list[SlotRef]:
        """Take slots for the leading moves while there is room, for one at least."""
        slots: list[SlotRef] = []
        try:
            for move in moves:
                entry = move.entry
                slots.append(self._node.take(Want(target, entry.scope, entry.tenant, move.source.record.raw_bytes)))
        except TierFullError:
            if not slots:
                raise
        except BaseException:
            for move, slot in zip(moves, slots, strict=False):
                self._node.give_back(target, slot, move.entry.tenant)
            raise
        return slots

    def _writing(self, move: Move, slot: SlotRef, views: ExitStack) -> Writing:
        source = move.source
        mappable = source.tier.mappable
        assert mappable is not None
        whole = views.enter_context(mappable.view(source.slot))
        view = views.enter_context(whole[: source.record.raw_bytes])
        record, form = source.record, WORN if source.record.codec in LOSSY else RAW
        wanted = record_of(self._node, move.entry, form, len(view), len(view), b"")
        return Writing(slot, view, wanted, Sound(record.checksum, (record.epoch, source.slot.stamp)))

    def _written(
        self, moves: Sequence[Move], slots: Sequence[SlotRef], ends: Sequence[Record | KvFleetError], target: Tier
    ) -> list[Residence | None]:
        made: list[Residence | None] = []
        failures: list[BackendFailedError] = []
        for move, slot, end in zip(moves, slots, ends, strict=False):
            entry, source = move.entry, move.source
            is_there = entry.residence(source.tier) is source  # Else its slot may have been used again meanwhile.
            made.append(Residence(target, slot, end) if isinstance(end, Record) and is_there else None)
            if isinstance(end, BlockCorruptError):
                self._node.copy_failed(entry, source, is_corrupt=True)
            elif isinstance(end, BackendFailedError):
                failures.append(end)
            elif isinstance(end, KvFleetError):
                raise end
        told = next((f for f in failures if not isinstance(f, BlamelessError)), None)
        if told is not None:  # Once for the group: it was one transfer.
            self._node.write_failed(target, str(told))
        return made

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
        return [self._arrived(move, target, end) for move, end in zip(moves, ends, strict=True)]

    def _reading(self, move: Move, target: Tier, views: ExitStack) -> Reading:
        assert target.mappable is not None
        assert move.slot is not None
        record = move.source.record
        whole = views.enter_context(target.mappable.view(move.slot))
        into = views.enter_context(whole[: record.raw_bytes])
        return Reading(move.source.slot, record, into, (self._node.epoch, move.slot.stamp))

    def _arrived(self, move: Move, target: Tier, end: bytes | KvFleetError) -> Residence | None:
        entry, source = move.entry, move.source
        record = source.record
        if isinstance(end, bytes):
            assert move.slot is not None
            form = WORN if record.codec in LOSSY else RAW
            made = record_of(self._node, entry, form, record.raw_bytes, record.raw_bytes, end)
            return Residence(target, move.slot, made)
        if isinstance(end, BlockCorruptError):
            self._node.copy_failed(entry, source, is_corrupt=True)
        elif isinstance(end, BackendFailedError) and not isinstance(end, BlamelessError):
            source.tier.last_error = str(end)
            self._node.copy_failed(entry, source, is_corrupt=False)
        return None


def record_of(node: Node, entry: Entry, codec: str, raw_bytes: int, stored_bytes: int, digest: bytes) -> Record:
    """Record of a copy that this node makes now."""
    key = BlockKey(entry.scope, entry.digest)
    return Record(key, entry.parent, entry.layout_id, codec, raw_bytes, stored_bytes, digest, node.epoch)
