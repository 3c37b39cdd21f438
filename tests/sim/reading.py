"""How a simulated engine reads and writes blocks: the client's real copy and check, and a verdict on what came."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from kvstrata_api.blocks import BlockKey
from kvstrata_client.verbs import copying
from kvstrata_client.verbs.results import Lease, Reservation
from sim.prompts import content
from support.agent.doubles import BLOCK_BYTES

FALSE_SUM: Final = bytes(16)
"""What a writer that lies calls the checksum of its block. The agent may believe it; nobody gets such a block."""


def place_of(view: memoryview) -> int:
    """Address of a slot: the same for all its uses."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Reading:
    """Copies leased blocks and checks them, at once or slowly, and tells the world what an engine would have seen."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    def read(self, shadow: Any, keys: Sequence[BlockKey], leases: Sequence[Lease]) -> int:
        """Copy and verify at once; returns how many were good."""
        return sum(self._judge(shadow, key, lease, lease) for key, lease in zip(keys, leases, strict=False))

    async def read_slowly(self, shadow: Any, keys: Sequence[BlockKey], leases: Sequence[Lease], pause_s: float) -> int:
        """Copy the first half of each block, then the second, then verify: anything may happen in between."""
        half = BLOCK_BYTES // 2
        firsts = [bytes(lease.view[:half]) for lease in leases]
        await asyncio.sleep(pause_s)
        good = 0
        for key, lease, first in zip(keys, leases, firsts, strict=False):
            torn = memoryview(first + bytes(lease.view[half:]))
            good += self._judge(shadow, key, lease, replace(lease, view=torn))
        return good

    def _judge(self, shadow: Any, key: BlockKey, lease: Lease, seen: Lease) -> bool:
        world = self._world
        world.tally.reads += 1
        if copying.copy_verified(seen, self._buffer):
            world.tally.hits += 1
            if self._buffer != content(key.digest):
                world.violate("I1", f"lease {lease.lease} of block {key} of {key.scope} gave other bytes as data")
            return True
        world.tally.corrupt += 1
        if (
            lease.checksum != FALSE_SUM
            and shadow is not None
            and shadow.is_leased(lease.lease, lease.epoch)
            and place_of(lease.view) not in world.dirty
        ):
            world.violate("I2", f"block {key} changed under lease {lease.lease} of {shadow._name}")
        return False

    def peek(self, keys: Sequence[BlockKey], leases: Sequence[Lease]) -> list[tuple[BlockKey, bool]]:
        """Read in place, without any check; whether each block was right."""
        dirty = self._world.dirty
        pairs = zip(keys, leases, strict=False)
        return [(k, lease.view == content(k.digest)) for k, lease in pairs if place_of(lease.view) not in dirty]

    def confirmed(self, seen: Sequence[tuple[BlockKey, bool]]) -> None:
        """The agent says that the leases lived all the time: so everything that was seen in place was right."""
        for key, is_right in seen:
            self._world.tally.reads += 1
            if not is_right:
                self._world.violate("I3", f"block {key} was confirmed and was wrong in place")

    def judge_loaded(self, wanted: Any, rows: Any) -> None:
        """Bytes that the high-level interface gave as data."""
        self._world.tally.reads += len(rows)
        self._world.tally.hits += len(rows)
        for i, row in enumerate(rows):
            if row.tobytes() != wanted[i].tobytes():
                self._world.violate("I1", f"load gave other bytes as block {i}")

    def write(self, shadow: Any, reservation: Reservation) -> bytes:
        """Fill a slot; one that is filled after its time may be somebody else's by now."""
        view = reservation.view
        assert view is not None
        if shadow is None or not shadow.is_reserved(reservation.reservation, reservation.epoch):
            self._world.dirty.add(place_of(view))
            self._world.tally.late_writes += 1
        return copying.fill(reservation, memoryview(content(reservation.digest)))
