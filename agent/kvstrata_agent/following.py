"""One run of blocks that grows here as it grows with its writer's agent. What arrives is proven part by part."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Record
from kvstrata_api.checksum import CHECKSUM_BYTES, bind, bind_part, checksum
from kvstrata_api.units import MIB
from kvstrata_native import copy_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.cache.ports import Follow, Followed

STAGING_BYTES: Final = 8 * MIB
"""Of one run, for what is on its way: with 32 blocks of 2 MiB four layers at a time."""


class Fault(StrEnum):
    """Why a hand-over broke before its blocks were whole."""

    AWAY = "away"
    """The writer's agent cannot be reached any more."""
    GIVEN_UP = "given_up"
    """By the writer, or its reservations ended."""
    DAMAGED = "damaged"
    """A part, or the whole, is not what its owner promised."""
    STALLED = "stalled"


@dataclass(slots=True, eq=False)
class Following:
    """Blocks of one hand-over, of one reader's question."""

    wanted: Follow
    epoch: int
    """Ours, that our own checksums are bound to."""
    entries: list[Entry]
    copies: list[Residence]
    """Where each block grows; without a checksum until it is whole."""
    views: list[memoryview]
    parts: int = 0
    """Leading parts of every block that were proven."""
    sums: list[bytearray] = field(default_factory=list)
    """For each block, joined checksums of them under our epoch and stamp."""
    is_over: bool = False
    """True once the blocks are whole or lost."""
    is_lost: bool = False
    fault: Fault | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def parts_whole(self) -> int:
        """Parts of a whole block."""
        return len(self.views[0]) // self.wanted.part_bytes

    def cut(self, count: int) -> tuple[list[Entry], list[Residence]]:
        """Keep the leading blocks; returns the others."""
        rest = self.entries[count:], self.copies[count:]
        for view in self.views[count:]:
            view.release()
        del self.entries[count:], self.copies[count:], self.views[count:]
        self.sums = [bytearray() for _ in self.entries]
        return rest

    def staging(self) -> list[memoryview]:
        """Memory of ours for the next parts, each of all blocks: as many as `STAGING_BYTES` take, one at least."""
        size = len(self.entries) * self.wanted.part_bytes
        count = min(self.parts_whole - self.parts, max(1, STAGING_BYTES // size))
        whole = memoryview(bytearray(count * size))
        return [whole[i * size : (i + 1) * size] for i in range(count)]

    def prove(self, told: Followed, staged: Sequence[memoryview]) -> bool:
        """Copy the parts that came into the slots; false when one is not what its owner promised.

        Each byte is read once, from memory that nobody else can reach: our checksum is of what the owner's proved.
        """
        new = range(self.parts, told.parts)
        if len(told.sums) != len(self.entries) or len(new) > len(staged):
            return False
        made = [self._taken(i, new, told, staged) for i in range(len(self.entries))]
        if not all(len(sums) == len(new) * CHECKSUM_BYTES for sums in made):
            return False
        for held, sums in zip(self.sums, made, strict=True):
            held.extend(sums)
        self.parts += len(new)
        return True

    def _taken(self, i: int, new: range, told: Followed, staged: Sequence[memoryview]) -> bytes:
        """Our checksums of a block's new parts, up to the first that differs from the owner's."""
        digest, size = self.entries[i].digest, self.wanted.part_bytes
        ours = bind(digest, self.epoch, self.copies[i].slot.stamp)
        theirs = bind(digest, self.wanted.handover.epoch, told.stamps[i])
        made = b""
        for at, part in enumerate(new):
            with self.views[i][part * size : (part + 1) * size] as view, staged[at][i * size : (i + 1) * size] as came:
                own, seen = copy_digests(view, came, bind_part(ours, part), bind_part(theirs, part))
            if seen != told.sums[i][at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]:
                break
            made += own
        return made

    def whole(self, told: Followed) -> list[Record] | None:
        """Records of the whole blocks, sealed before the owner's checksums are compared; None if one differs."""
        records = []
        for i, (entry, copy) in enumerate(zip(self.entries, self.copies, strict=True)):
            own = checksum(self.views[i], entry.digest, self.epoch, copy.slot.stamp)
            if checksum(self.views[i], entry.digest, self.wanted.handover.epoch, told.stamps[i]) != told.checksums[i]:
                return None
            old = copy.record
            size = old.raw_bytes
            records.append(Record(old.key, told.parents[i], old.layout_id, old.codec, size, size, own, self.epoch))
        return records

    def release(self) -> None:
        """Let go of the memory and wake those who wait."""
        self.is_over = True
        for view in self.views:
            view.release()
        self.changed.set()
