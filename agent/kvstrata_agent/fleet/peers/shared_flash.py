"""Reads blocks that other agents keep on flash that we mount too: implements `ports.SharedReader`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.scratch import ScratchPool
from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.codec.base import UNENCODED
from kvstrata_api.errors import KvStrataError

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import SharedBackend
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Placed, Wanted
    from kvstrata_agent.movement.encoding import Codecs

READS_MAX: Final = 16
"""Records that are read at once: twice the threads of a tier, so that one is decoded while the next is read."""


class FlashReader:
    """Reads for `RemotePeers` what an owner has told the place of."""

    def __init__(self, node: Node, codecs: Codecs) -> None:
        self._node = node
        self._codecs = codecs
        self._buffers = ScratchPool()
        self._turns = asyncio.Semaphore(READS_MAX)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the shared tiers that are up here."""
        return tuple(t.name for t in self._node.tiers if t.backend.shared is not None)

    async def read(self, wanted: Wanted, placed: Placed) -> bool:
        """Fill a block's slot from its owner's file; see `ports.SharedReader`."""
        tier = self._node.tier(placed.tier)
        shared = None if tier is None else tier.backend.shared
        if tier is None or shared is None or placed.record.raw_bytes != len(wanted.into):
            return False
        async with self._turns:
            try:
                await self._read(shared, wanted, placed)
            except KvStrataError as e:
                tier.last_error = str(e)
                return False
        return True

    async def _read(self, backend: SharedBackend, wanted: Wanted, placed: Placed) -> None:
        """Verified bytes go into the slot, and our own checksum is of what went there."""
        record, node = placed.record, wanted.location.agent.partition(".")[2]
        with self._buffers.lend(max(record.raw_bytes, record.stored_bytes)) as stored:
            await backend.read_other(node, placed.file, placed.slot, record, stored)
            if record.codec in UNENCODED:
                await in_thread(None, partial(wanted.take, stored[: record.raw_bytes]))
                return
            codec = self._codecs.named(record.codec)
            with self._buffers.lend(record.raw_bytes) as raw:
                await in_thread(None, partial(codec.decode, stored[: record.stored_bytes], raw))
                await in_thread(None, partial(wanted.take, raw))
