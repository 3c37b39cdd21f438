"""Groups of blocks on their way to a medium that takes several at a time: slots, one transfer, what became of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata_agent.backends.base import ExpectedChecksum, MediumIntactError, Record, Writing
from kvstrata_agent.backends.threads import here_or_in_thread
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.slot_request import Want
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError, TierFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.move import Move


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One block in the form in which it is stored."""

    move: Move
    codec: str
    stored: memoryview
    sound: ExpectedChecksum | None = None
    """What the bytes are known by, where somebody else may write to them; None where nobody can reach them."""


class GroupWriter:
    """Writes groups; the mover has its turn and enters them."""

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
                    self._node.give_back(target, slot, one.move.entry.tenant)
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
                slots.append(self._node.take(Want(target, entry.scope, entry.tenant, len(one.stored))))
        except TierFullError:
            if not slots:
                raise
        except BaseException:
            for one, slot in zip(group, slots, strict=False):
                self._node.give_back(target, slot, one.move.entry.tenant)
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
        told = next((f for f in failures if not isinstance(f, MediumIntactError)), None)
        if told is not None:  # Once for the group: it was one transfer.
            self._node.write_failed(target, str(told))
        return made


def record_of(node: Node, entry: Entry, codec: str, raw_bytes: int, stored_bytes: int, digest: bytes) -> Record:
    """Record of a copy that this node makes now."""
    key = BlockKey(entry.scope, entry.digest)
    return Record(key, entry.parent, entry.layout_id, codec, raw_bytes, stored_bytes, digest, node.epoch)
