"""Blocks at rest whose key was not there when their tier came up: entered when it comes, removed when it never will.

A scope whose Secret is absent for `LOST_AFTER_S` was erased. One whose Secret is there, and its data key or KEK is not,
may have it tomorrow: its blocks are neither served nor removed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import SealingBackend
from kvstrata_agent.blocks.tenants import LOST_AFTER_S
from kvstrata_agent.provision.provisioner import enter

if TYPE_CHECKING:
    from kvstrata_agent.backends.record.encryption import DataKeys
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier

LOOK_S: Final = 1.0
"""Between two looks; a look without anything that waits costs nothing."""

_log = logging.getLogger(__name__)


class Latecomers:
    """Looks after what waits for a key in the tiers of one node."""

    def __init__(self, node: Node, keys: DataKeys) -> None:
        self._node = node
        self._keys = keys
        self._unknown_since_s: dict[tuple[Tier, bytes], float] = {}
        self._told: set[tuple[Tier, bytes]] = set()

    async def look(self) -> None:
        """Enter or remove what can be told of by now."""
        for tier in tuple(self._node.tiers):
            backend = tier.backend
            if isinstance(backend, SealingBackend):
                for tag in backend.waiting:
                    await self._look_at(tier, backend, tag)

    async def _look_at(self, tier: Tier, backend: SealingBackend, tag: bytes) -> None:
        scope, now_s = self._keys.scope(tag), self._node.clock()
        if (tier, tag) not in self._told:
            self._told.add((tier, tag))
            cause = "no scope has this tag" if scope is None else "its data key or KEK is not there"
            _log.warning(
                "sealed blocks wait for their key", extra={"tier": tier.name, "tag": tag.hex(), "cause": cause}
            )
        if scope is None:
            if now_s - self._unknown_since_s.setdefault((tier, tag), now_s) >= LOST_AFTER_S:
                del self._unknown_since_s[tier, tag]
                self._told.discard((tier, tag))
                await backend.forget_waiting(tag)
                _log.info("sealed blocks of an erased scope removed", extra={"tier": tier.name})
            return
        self._unknown_since_s.pop((tier, tag), None)
        if self._keys.data_key(scope) is not None:
            self._told.discard((tier, tag))
            count = await enter(self._node, tier, backend.recover_waiting(tag))
            tier.recovered_blocks += count
            _log.info("sealed blocks found their key", extra={"tier": tier.name, "blocks": count})
