"""Blocks that earlier runs left in a tier, entered into the tables: when the tier comes up, and when their key comes.

A scope whose Secret is absent for `LOST_AFTER_S` was erased, and its blocks are removed. One whose Secret is there, and
its data key or KEK is not, may have it tomorrow: its blocks are neither served nor removed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.restore import Restoring
from kvstrata_agent.blocks.tenants import LOST_AFTER_S
from kvstrata_api.errors import BackendFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from kvstrata_agent.backends.base import Columns, Record, SealingBackend, SlotRef
    from kvstrata_agent.backends.record.encryption import DataKeys
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_api.blocks import ScopeId

FREEZE_OBJECTS: Final = 100_000
"""From so many new objects on, collections leave out what there is by then: they would visit it again and again."""
RECOVER_YIELD_BLOCKS: Final = 256
"""Recovered blocks between two turns of the loop, which has engines to serve meanwhile."""
KEY_POLL_INTERVAL_S: Final = 1.0
"""Polling interval of missing keys; a poll without anything that waits costs nothing."""

_log = logging.getLogger(__name__)


async def enter(node: Node, tier: Tier, found: AsyncIterator[tuple[SlotRef, Record]]) -> int:
    """Enter the blocks that an earlier run left in a tier; a second copy of a block in the same tier goes.

    What was found before a failure is entered: its medium has its slots. Nothing is once the tier was taken out.
    """
    count = 0
    copies: list[Residence] = []
    try:
        async for slot, record in found:
            copies.append(Residence(tier, slot, record))
            if len(copies) == RECOVER_YIELD_BLOCKS:
                if not node.has(tier):
                    break
                count += node.restore(copies)
                copies.clear()
                await asyncio.sleep(0)
    finally:
        if node.has(tier):
            count += node.restore(copies)
    return count


async def enter_extents(node: Node, tier: Tier, found: AsyncIterator[Columns]) -> int:
    """The same where the medium returns an extent at a time: beyond what entries are kept of anyway, as rows."""
    scopes: dict[ScopeId, deque[Columns]] = {}
    async for columns in found:
        scopes.setdefault(columns.scope, deque()).append(columns)
        await asyncio.sleep(0)
    count, has_rows = 0, False
    for extents in scopes.values():
        if sum(map(len, extents)) <= node.index.room:
            count += await enter(node, tier, _each(extents))
            continue
        has_rows = True
        restoring = Restoring(node.index, tier, extents, node.born_at_s)
        await in_thread(None, restoring.plan)
        if not node.has(tier):
            return count
        restoring.prepare()
        while not restoring.is_done:
            count += node.restore_extent(restoring)
            await asyncio.sleep(0)
            if not node.has(tier):
                return count
    if has_rows:  # Once for all scopes: it visits everything.
        node.index.unpack_leaves(tier)
    return count


def return_free_memory() -> None:
    """Let the machine have what columns took; other C libraries than glibc do that by themselves, or never."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def _each(extents: Iterable[Columns]) -> AsyncIterator[tuple[SlotRef, Record]]:
    for columns in extents:
        for slot, record in columns.pairs():
            yield slot, record


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make many objects that stay: visiting them meanwhile takes a garbage collector as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] >= FREEZE_OBJECTS:
            gc.freeze()
        if was_enabled:
            gc.enable()


class AwaitedKeys:
    """Blocks of one node's tiers that wait for their key: entered or removed by polls."""

    def __init__(self, node: Node, keys: DataKeys) -> None:
        self._node = node
        self._keys = keys
        self._unknown_since_s: dict[tuple[Tier, bytes], float] = {}
        self._reported: set[tuple[Tier, bytes]] = set()
        self._failed: set[tuple[Tier, bytes]] = set()

    async def poll(self) -> None:
        """Enter or remove what is decided by now."""
        for tier in tuple(self._node.tiers):
            sealing = tier.backend.sealing
            if sealing is not None:
                for tag in sealing.waiting:
                    await self._try_tag(tier, sealing, tag)

    async def _try_tag(self, tier: Tier, backend: SealingBackend, tag: bytes) -> None:
        """A medium that fails keeps the keys of others from nobody; the next poll tries again."""
        try:
            await self._poll_tag(tier, backend, tag)
        except BackendFailedError as e:
            if (tier, tag) not in self._failed:
                self._failed.add((tier, tag))
                cause = {"tier": tier.name, "tag": tag.hex(), "cause": str(e)}
                _log.warning("sealed blocks that waited for their key not entered", extra=cause)
        else:
            self._failed.discard((tier, tag))

    async def _poll_tag(self, tier: Tier, backend: SealingBackend, tag: bytes) -> None:
        scope, now_s = self._keys.scope(tag), self._node.clock()
        if (tier, tag) not in self._reported:
            self._reported.add((tier, tag))
            cause = "no scope has this tag" if scope is None else "its data key or KEK is not there"
            _log.warning(
                "sealed blocks wait for their key", extra={"tier": tier.name, "tag": tag.hex(), "cause": cause}
            )
        if scope is None:
            if now_s - self._unknown_since_s.setdefault((tier, tag), now_s) >= LOST_AFTER_S:
                await backend.forget_waiting(tag)
                del self._unknown_since_s[tier, tag]
                self._reported.discard((tier, tag))
                _log.info("sealed blocks of an erased scope removed", extra={"tier": tier.name})
            return
        self._unknown_since_s.pop((tier, tag), None)
        if self._keys.data_key(scope) is not None:
            count = await enter(self._node, tier, backend.recover_waiting(tag))
            tier.recovered_blocks += count
            if tag not in backend.waiting:
                self._reported.discard((tier, tag))
                _log.info("sealed blocks found their key", extra={"tier": tier.name, "blocks": count})
