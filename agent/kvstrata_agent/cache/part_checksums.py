"""Checksums of parts of blocks, so that a reader can take a few layers or heads of a block and still verify them.

A record has one checksum of the whole block. Those of its parts are made when somebody first asks for them, in the
pass over the block that proves the whole, each byte read once; they are kept for whoever asks next.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final

import xxhash

from kvstrata_agent.backends.threads import here_or_in_thread
from kvstrata_api.checksum import CHECKSUM_BYTES, bind, bind_part
from kvstrata_api.errors import BlockCorruptError, InvalidInputError
from kvstrata_api.units import MIB
from kvstrata_api.wire import KEYS_MAX, PART_SUMS_BYTES_MAX, PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.leases import Lease
    from kvstrata_agent.blocks.node import Node

KEPT_BYTES_MAX: Final = 8 * MIB
"""Memory for what is kept: 9,000 blocks of 32 layers, 18 GiB where a block has 2 MiB. Of blocks that have gone it is
kept too, until others take its place."""
ENTRY_BYTES: Final = 400
"""Beside the joined checksums: the block's checksum, the key and its place in the table (CPython 3.11)."""


class PartSums:
    """Makes and keeps them. For one event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._kept: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        """By a block's checksum, which is bound to key and use of slot, and the size of the parts; oldest first."""
        self._kept_bytes = 0

    async def of(self, leases: Sequence[Lease], part_bytes: int) -> list[bytes]:
        """Joined checksums of the parts of each leased block; empty for one whose bytes are not those of its record.

        A block that turns out corrupt is dropped. Cancelled, it lasts as long as the pass under way.
        """
        found = {i: self._find(lease, part_bytes) for i, lease in enumerate(leases)}
        missing = {i: leases[i] for i, joined in found.items() if not joined}
        if missing:
            size_bytes = sum(lease.residence.record.raw_bytes for lease in missing.values())
            made = await here_or_in_thread(None, size_bytes, partial(_sums_of, missing, part_bytes))
            for i, joined in made.items():
                found[i] = joined
                self._keep(leases[i], part_bytes, joined)
        return [found[i] for i in range(len(leases))]

    def _find(self, lease: Lease, part_bytes: int) -> bytes:
        key = (lease.residence.record.checksum, part_bytes)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key, b"")

    def _keep(self, lease: Lease, part_bytes: int, joined: bytes) -> None:
        key = (lease.residence.record.checksum, part_bytes)
        if not joined:
            self._node.copy_failed(lease.entry, lease.residence, is_corrupt=True)
        elif key not in self._kept:
            self._kept[key] = joined
            self._kept_bytes += ENTRY_BYTES + len(joined)
        while self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= ENTRY_BYTES + len(self._kept.popitem(last=False)[1])


def blocks_max(part_bytes: int, block_bytes: int) -> int:
    """Blocks whose checksums of parts fit one answer. Raises `InvalidInputError` for parts that fit no block."""
    if part_bytes == 0:
        return KEYS_MAX
    if part_bytes < 0 or block_bytes % part_bytes or block_bytes // part_bytes > PARTS_MAX:
        raise InvalidInputError(
            f"part_bytes {part_bytes}: a divisor of blocks of {block_bytes} B wanted, {PARTS_MAX} parts at most"
        )
    return PART_SUMS_BYTES_MAX // (block_bytes // part_bytes * CHECKSUM_BYTES)


def _sums_of(leases: dict[int, Lease], part_bytes: int) -> dict[int, bytes]:
    scratch = memoryview(bytearray(part_bytes))
    return {i: _sums(lease, scratch) for i, lease in leases.items()}


def _sums(lease: Lease, scratch: memoryview) -> bytes:
    """One pass over a block: the parts are copied out and hashed, and the whole is hashed from the copies.

    So checksums of parts are of the very bytes that prove the whole, whoever writes to the slot meanwhile.
    """
    tier, slot, record = lease.residence
    mappable = tier.backend.mappable
    assert mappable is not None, "leases are given on mapped copies only"
    bound = bind(record.key.digest, record.epoch, slot.stamp)
    whole = xxhash.xxh3_128(seed=bound)
    parts = []
    try:
        with mappable.view(slot) as view:
            for index in range(record.raw_bytes // len(scratch)):
                # Not `copy_digest`, whose large copies go past the caches: both digests are taken from the copy.
                scratch[:] = view[index * len(scratch) : (index + 1) * len(scratch)]
                parts.append(xxhash.xxh3_128_digest(scratch, bind_part(bound, index)))
                whole.update(scratch)
    except BlockCorruptError:
        return b""  # The slot has gone, and the lease with it.
    return b"".join(parts) if whole.digest() == record.checksum else b""
