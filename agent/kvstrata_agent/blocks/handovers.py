"""Blocks that are handed over while they are written: how far each has grown, and who waits for more. No clock.

A growing block is a reservation whose writer reports the parts it has filled, with a checksum for each. It is seen by
those who name its hand-over and by nobody else, until its publication makes an ordinary block of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import GONE
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import BlockCorruptError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.reservations import Reservation

KEPT_S: Final = 30.0
"""How long a finished block is found by its hand-over: its reader has the last parts in well under a second."""
BLOCKS_MAX: Final = 4_096
"""Blocks that grow on a node at once: a prompt of 65,536 tokens in blocks of 16. Of finished ones as many are kept."""


class Stage(Enum):
    """What became of a growing block."""

    OPEN = auto()
    WHOLE = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class Growing:
    """One block of a hand-over."""

    reservation: Reservation
    name: str
    part_bytes: int
    sums: bytearray = field(default_factory=bytearray)
    """Joined checksums of the parts that are filled."""
    stage: Stage = Stage.OPEN
    checksum: bytes = b""
    """Of the whole block, once it is published."""
    ends_s: float = 0.0
    """When it is forgotten; means something once it is whole or lost."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.reservation.entry.tenant

    @property
    def parts(self) -> int:
        """Leading parts that are filled."""
        return len(self.sums) // CHECKSUM_BYTES

    def part(self, index: int) -> memoryview | None:
        """View of one filled part, for use before anything else runs; None when the bytes are somebody else's now."""
        entry, tier, slot = self.reservation.entry, self.reservation.tier, self.reservation.slot
        held = entry.residence(tier)
        if self.stage is Stage.LOST or tier.backend.mappable is None or tier.is_gone:
            return None
        if self.stage is Stage.WHOLE and (entry.level == GONE or held is None or held.slot is not slot):
            return None
        try:
            return tier.backend.mappable.view(slot)[index * self.part_bytes : (index + 1) * self.part_bytes]
        except BlockCorruptError:
            return None


class GrowthTable:
    """All growing blocks of this node, by reservation."""

    def __init__(self) -> None:
        self._growing: dict[int, Growing] = {}
        self._changed: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._growing)

    @property
    def growing(self) -> int:
        """Blocks that grow now."""
        return sum(g.stage is Stage.OPEN for g in self._growing.values())

    def begin(self, reservations: Sequence[Reservation], name: str, part_bytes: int, now_s: float) -> bool:
        """Hand new reservations of one tenant over under a name; false when too many blocks grow already.

        Over `BLOCKS_MAX` the tenant that has most loses its oldest hand-over, if it has more than this one would.
        """
        self._forget(now_s)
        tenant = reservations[0].entry.tenant
        counts = Counter(g.tenant for g in self._growing.values() if g.stage is Stage.OPEN)
        counts[tenant] += len(reservations)
        while counts.total() > BLOCKS_MAX:
            most = max(counts, key=lambda t: counts[t])
            if counts[most] <= counts[tenant]:
                return False
            counts[most] -= self._give_up_oldest(most, now_s)
        self._growing.update((r.id, Growing(r, name, part_bytes)) for r in reservations)
        return True

    def _forget(self, now_s: float) -> None:
        """Forget finished blocks whose time is over, and the oldest of more than `BLOCKS_MAX`."""
        finished = [i for i, g in self._growing.items() if g.stage is not Stage.OPEN]
        finished.sort(key=lambda i: self._growing[i].ends_s)
        for at, number in enumerate(finished):
            if self._growing[number].ends_s <= now_s or len(finished) - at > BLOCKS_MAX:
                del self._growing[number]

    def _give_up_oldest(self, tenant: str, now_s: float) -> int:
        """End the oldest hand-over of a tenant, as if it were lost; returns how many blocks grew in it."""
        own = [(i, g) for i, g in self._growing.items() if g.stage is Stage.OPEN and g.tenant == tenant]
        gone = [i for i, g in own if g.name == own[0][1].name]
        for number in gone:
            self.lost(number, now_s)
        return len(gone)

    def advance(self, owner: int, reservation_id: int, first: int, sums: bytes) -> bool:
        """Note filled parts of one block from part `first` on; false when it does not grow (any more).

        Raises `InvalidInputError` for parts that leave a gap or that the block has not.
        """
        growing = self._growing.get(reservation_id)
        if growing is None or growing.reservation.owner != owner or growing.stage is not Stage.OPEN:
            return False
        whole = growing.reservation.raw_bytes // growing.part_bytes
        count = len(sums) // CHECKSUM_BYTES
        if len(sums) % CHECKSUM_BYTES or first != growing.parts or first + count > whole:
            raise InvalidInputError(
                f"sums of {len(sums)} B from part {first} on: {growing.parts} of {whole} parts are there"
            )
        growing.sums += sums
        self._wake()
        return True

    def whole(self, reservation_id: int, checksum: bytes, now_s: float) -> None:
        """A block was published."""
        self._end(reservation_id, Stage.WHOLE, checksum, now_s)

    def lost(self, reservation_id: int, now_s: float) -> None:
        """A reservation ended without a publication; its slot is somebody else's from now on."""
        self._end(reservation_id, Stage.LOST, b"", now_s)

    def find(self, name: str, scope: str, layout_id: bytes, digests: Sequence[bytes], part_bytes: int) -> list[Growing]:
        """Leading blocks that are handed over under a name in a scope, in parts of this size."""
        named = {
            g.reservation.entry.digest: g
            for g in self._growing.values()
            if g.name == name and g.part_bytes == part_bytes and g.stage is not Stage.LOST
            if (g.reservation.entry.scope, g.reservation.entry.layout_id) == (scope, layout_id)
        }
        absent = next((i for i, digest in enumerate(digests) if digest not in named), len(digests))
        return [named[digest] for digest in digests[:absent]]

    async def changed(self, wait_s: float) -> None:
        """Return when any block has grown or ended, or after `wait_s`."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=max(0.0, wait_s))

    def _end(self, reservation_id: int, stage: Stage, checksum: bytes, now_s: float) -> None:
        growing = self._growing.get(reservation_id)
        if growing is not None and growing.stage is Stage.OPEN:
            growing.stage, growing.checksum, growing.ends_s = stage, checksum, now_s + KEPT_S
            self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None
