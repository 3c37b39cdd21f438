"""Eviction hints of the metadata service: checks each nominated block, drops or keeps it. Reports scopes that went."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.blocks.block import GONE
from kvstrata_agent.policy.duplicates import OwnCopy, Ruling, rule, rule_alone
from kvstrata_metadata.duties.nominations import ERASED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tenants import ScopeMemory
    from kvstrata_api.blocks import ScopeId, ScopeSecret
    from kvstrata_metadata.store.records import Location, Nomination

HINTS_POLL_INTERVAL_S: Final = 2.0
"""Polling interval of the mailbox and of keys that are gone."""

TAKEN_AT_ONCE: Final = 8
"""Nominations of one poll: 8,000 blocks at most, whose other copies are looked up in eight round trips."""

_log = logging.getLogger(__name__)


class HintSource(Protocol):
    """The directory, as far as it gives hints. Never raises: away is silent."""

    async def take_nominations(self, limit: int) -> Sequence[Nomination]:
        """Take what was nominated to us; nothing while the directory is away."""

    async def claim_erased(self, secret: ScopeSecret) -> bool:
        """Report that a scope's key is gone; false when the directory could not be reached."""

    async def locate(self, secret: ScopeSecret, digests: Sequence[bytes]) -> list[tuple[Location, ...]]:
        """Copies on other living agents."""


class EvictionHints:
    """One agent's part in the fleet's house-keeping."""

    def __init__(self, node: Node, source: HintSource, scopes: ScopeMemory) -> None:
        self._node = node
        self._source = source
        self._scopes = scopes

    async def poll(self) -> None:
        """Poll once."""
        for secret in self._scopes.lost(self._node.index.scopes(), self._node.clock()):
            if secret.scope not in self._node.index.scopes() and await self._source.claim_erased(secret):
                self._scopes.forget(secret.scope)
        for nomination in await self._source.take_nominations(TAKEN_AT_ONCE):
            rulings = await self.consider(nomination)
            for ruling in Ruling:
                if count := rulings.count(ruling):
                    self._node.counters.add("kvstrata_nominations_total", count, result=ruling)

    async def consider(self, nomination: Nomination) -> list[Ruling]:
        """Decide on every block of a nomination and drop what may go."""
        scope = self._scopes.by_tag(nomination.tag)
        secret = self._scopes.secret(scope) if scope else None
        if scope is None or secret is None:
            return [Ruling.ABSENT] * len(nomination.digests)
        if nomination.reason == ERASED:
            return self._erase(scope)
        return await self._surplus(scope, secret, nomination)

    def _erase(self, scope: ScopeId) -> list[Ruling]:
        """Drop a scope that the fleet reports as gone, when we see that, too."""
        if not self._scopes.is_lost(scope):
            return [Ruling.KNOWN_SCOPE] * len(self._node.index.blocks(scope))
        dropped = self._node.drop_scope(scope)
        _log.info("scope erased", extra={"scope_kind": scope.split("/")[0], "blocks": dropped})
        return [Ruling.DROP] * dropped

    async def _surplus(self, scope: ScopeId, secret: ScopeSecret, nomination: Nomination) -> list[Ruling]:
        """Ask where else the blocks are that could go, and drop those that may, children before parents."""
        tag = nomination.tag
        wanted = {d: rule_alone(self._own(scope, tag, d), self._idle_min_s) for d in nomination.digests}
        maybe = [d for d, ruling in wanted.items() if ruling in (Ruling.DROP, Ruling.CONTINUED)]
        others = dict(zip(maybe, await self._source.locate(secret, maybe), strict=True))
        waiting = list(maybe)
        while waiting:
            digest = waiting.pop()
            if digest not in others:
                continue  # It went with one that came after it.
            entry = self._node.index.blocks(scope).get(digest)
            wanted[digest] = self._rule(scope, tag, digest, others[digest])
            if entry is not None and wanted[digest] is Ruling.DROP:
                self._node.drop_block(entry, nomination.reason)
                others.pop(digest)
                if wanted.get(entry.parent) is Ruling.CONTINUED:
                    waiting.append(entry.parent)
        return list(wanted.values())

    def _rule(self, scope: ScopeId, tag: str, digest: bytes, others: Sequence[Location]) -> Ruling:
        """Decide on one block by what is true now: answers take time."""
        ours = [other for other in others if other.agent.partition(".")[0] == self._node.pool]
        return rule(self._own(scope, tag, digest), self._idle_min_s, self._node.agent, ours)

    @property
    def _idle_min_s(self) -> float:
        return float(self._node.spec.policy.retention.idle_seconds)

    def _own(self, scope: ScopeId, tag: str, digest: bytes) -> OwnCopy | None:
        entry = self._node.index.blocks(scope).get(digest)
        if entry is None or not entry.is_published:
            return None
        return OwnCopy(
            tag=tag,
            is_held=entry.is_held,
            children=self._node.index.blockers(entry, GONE - 1),
            idle_s=self._idle_s(entry),
            is_surviving=any(r.tier.backend.capabilities.survives_restart for r in entry.residences),
        )

    def _idle_s(self, entry: Entry) -> float:
        """Seconds since the last use; blocks that were sent away have none."""
        return self._node.clock() - entry.used_at_s if entry.used_at_s else math.inf
