"""Follows what is declared of tenants: rules for their room, the end of their blocks, and their erasure."""

from __future__ import annotations

import asyncio
import logging
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import GONE, account_of
from kvstrata_agent.blocks.node import ERASED
from kvstrata_agent.policy.retention import Due, due, horizon, plan_drops
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Tenants
    from kvstrata_agent.cache.session_lifecycle import SessionLife
    from kvstrata_agent.cache.store import Writer
    from kvstrata_agent.movement.mover import Mover
    from kvstrata_agent.policy.retention import Retention
    from kvstrata_api.blocks import ScopeId, ScopeSecret
    from kvstrata_api.trust import Access

RETENTION_S: Final = 10.0
"""Polling interval of the age of blocks; retention is declared in seconds and meant in hours."""
SCAN_BLOCKS: Final = 4096
"""Blocks scanned between two turns of the loop."""

_log = logging.getLogger(__name__)


class Tenancy:
    """Keeps the node's `TenantBook` current and drops what tenants no longer want kept."""

    def __init__(self, node: Node, mover: Mover, writer: Writer, life: SessionLife) -> None:
        """Begin without anybody to follow: no rules and no erasures, as where nothing is declared."""
        self._node = node
        self._mover = mover
        self._writer = writer
        self._life = life
        self._tenants: Tenants | None = None
        self._version = -1
        self._swept_version = -1
        self._key_versions: Mapping[str, int] = {}

    def follow(self, tenants: Tenants) -> None:
        """Take in what is declared now, and from here on what changes."""
        self._tenants = tenants
        self.refresh()

    def refresh(self) -> None:
        """Take in what changed. One step, no waiting."""
        tenants = self._tenants
        if tenants is None or tenants.version == self._version:
            return
        rules = tenants.rules()
        if rules is None:
            return  # A part of the rules is worse than yesterday's.
        self._version = tenants.version
        self._node.tenants.set_rules(rules)
        before, self._key_versions = self._key_versions, tenants.key_versions()
        for tenant, version in self._key_versions.items():
            if version > before.get(tenant, version):
                self._erase_shared(tenant)

    def sweep(self) -> None:
        """Take in what changed, and erase scopes whose key has moved on. One step, no waiting.

        It drops the first of what is erased, and `drop_rest` the others.
        """
        self.refresh()
        if self._tenants is not None:
            self._erase_superseded(self._tenants)
        self._node.drop_erased()

    async def drop_rest(self) -> None:
        """Drop what scopes had that were erased, a bounded step at a time."""
        while True:
            if not self._node.drop_erased():
                return
            await asyncio.sleep(0)

    def _erase_superseded(self, tenants: Tenants) -> None:
        erasing, is_new = tuple(tenants.erasing()), self._version != self._swept_version
        self._swept_version = self._version
        for scope in self._scopes() if erasing or is_new else self._node.index.scopes():
            if tenants.is_superseded(scope):
                self._erase(scope)
        for tenant, _, _ in erasing:
            self._drop(tenant, self._left_by_earlier_runs(tenant))

    def _scopes(self) -> set[ScopeId]:
        """Scopes of blocks that are here, of sessions, and of what is remembered of both."""
        return {*self._node.index.scopes(), *self._node.history.scopes(), *self._life.scopes()}

    def access(self, tenant: str) -> tuple[tuple[Access, ScopeSecret], ...]:
        """See `ports.Tenants`; nothing where nobody is followed."""
        return self._tenants.access(tenant) if self._tenants is not None else ()

    def erased(self) -> list[tuple[str, int]]:
        """Uids of tenants under erasure, each with the key version before which this node holds nothing any more."""
        node = self._node
        if self._tenants is None or any(t.is_recovering for t in node.tiers):
            return []  # Nobody knows yet what an earlier run has left.
        erasing = tuple(self._tenants.erasing())
        if not erasing or self._life.is_erasing or any(map(_is_shared, node.index.erased)):
            return []  # What is dropped of a shared scope may be anybody's.
        stale = {s.split("/")[1] for s in self._scopes() if self._tenants.is_superseded(s)}
        leaving = [*node.deferred_frees, *(e for e in self._mover.under_way if e.level == GONE)]
        return [
            (uid, version)
            for tenant, uid, version in erasing
            if tenant not in stale and not any(self._may_be_of(e, tenant) for e in leaving)
        ]

    def _erase(self, scope: ScopeId) -> None:
        """Erase a scope whose key is gone for good, and let nobody finish reading or writing there.

        Nobody else gets its slots, so that whoever is still reading reads what was there, or zeros, and learns at the
        end that it read without success.
        """
        node = self._node
        for table in (node.leases, node.pins):
            node.end_leases(table.end_where(lambda lease: lease.entry.scope == scope))
        node.abandon(node.reservations.take_where(lambda r: r.entry.scope == scope))
        self._life.erase(scope)
        if count := node.erase(scope):
            _log.info("scope erased", extra={"scope_kind": scope.split("/")[0], "blocks": count})

    def _erase_shared(self, tenant: str) -> None:
        """Drop what a tenant wrote into scopes that it shares, and what it may have written there in earlier runs.

        Nobody finds it any more; a slot that another tenant reads just now is freed when that lease ends, and what is
        on its way does not arrive.
        """
        node = self._node
        node.abandon(node.reservations.take_where(lambda r: r.entry.tenant == tenant and _is_shared(r.entry.scope)))
        shared = [s for s in node.index.scopes() if _is_shared(s)]
        coming = [e for e in self._writer.publishing if e.tenant == tenant and _is_shared(e.scope)]
        known = (e for s in shared for e in node.index.blocks(s).entries(tenant))
        self._drop(tenant, chain(known, coming, self._left_by_earlier_runs(tenant)))

    def _left_by_earlier_runs(self, tenant: str) -> Iterator[Entry]:
        """Blocks in shared scopes whose writer nobody remembers, where it may have been this tenant."""
        node = self._node
        accounts = {account for tier in node.tiers for account in tier.tenant_bytes}
        for scope in node.index.scopes():
            if account_of(scope) in accounts and self._may_have_written(scope, tenant):
                yield from node.index.blocks(scope).entries(account_of(scope))

    def _may_have_written(self, scope: ScopeId, tenant: str) -> bool:
        assert self._tenants is not None
        return _is_shared(scope) and self._tenants.may_write(tenant, scope)

    def _may_be_of(self, entry: Entry, tenant: str) -> bool:
        """True for a tenant's block, and for one of a shared scope whose writer is not known and may be the tenant."""
        is_anybodys = entry.tenant == account_of(entry.scope)
        return entry.tenant == tenant or (is_anybodys and self._may_have_written(entry.scope, tenant))

    def _drop(self, tenant: str, entries: Iterable[Entry]) -> None:
        dropped = 0
        for entry in entries:
            dropped += 1
            self._node.drop_block(entry, ERASED)
            if entry.level != GONE:
                self._node.index.forget(entry)  # Whoever is about to fill it learns that it did so without success.
        if dropped:
            _log.info("shared blocks erased", extra={"tenant": tenant, "blocks": dropped})

    async def retire(self) -> None:
        """Drop blocks whose tenant keeps none for that long; those that somebody holds go at a later pass."""
        rules = {t: r.retention for t, r in self._node.tenants.rules.items() if r.retention.is_bounded}
        if not rules:
            return
        for scope in self._node.index.scopes():
            kind, name, *_ = scope.split("/")
            if kind != "tenant" or name in rules:
                await self._retire(scope, rules)

    async def _retire(self, scope: ScopeId, rules: Mapping[str, Retention]) -> None:
        wanted: list[bytes] = []
        used_by_s, born_by_s = horizon(rules.values(), self._node.clock() + RETENTION_S)
        digests = self._node.index.blocks(scope).older(used_by_s, born_by_s)
        while part := tuple(islice(digests, SCAN_BLOCKS)):
            wanted += self._due(scope, part, rules)
            await asyncio.sleep(0)
        if not wanted:
            return
        blocks, still = self._node.index.blocks(scope), self._due(scope, wanted, rules)  # What is true in this step.
        children: dict[bytes, list[bytes]] = {}
        takes_along = Due.OLD in still.values()  # Else those that stay are no reason for others to go.
        for digest, parent in blocks.links():
            if takes_along or parent in still:
                children.setdefault(parent, []).append(digest)
        for digest in plan_drops(still, lambda d: children.get(d, ()), blocks.is_held):
            entry = blocks.get(digest)
            assert entry is not None, "it was there in this very step"
            self._node.counters.add(
                "kvstrata_retention_dropped_total", tenant=entry.tenant, reason=still.get(digest, Due.OLD)
            )
            self._node.drop_block(entry, "retention")

    def _due(self, scope: ScopeId, digests: Iterable[bytes], rules: Mapping[str, Retention]) -> dict[bytes, Due]:
        node, now_s = self._node, self._node.clock()
        found = {}
        for seen in node.index.blocks(scope).facts(digests):
            retention = rules.get(seen.tenant)
            if retention is None:
                continue
            # A block that was sent away was last used when it came; one of an earlier run when this one began.
            used_s = max(seen.used_at_s, seen.born_s, node.started_s)
            why = due(retention, idle_s=now_s - used_s, age_s=now_s - seen.born_s)
            if why is not None:
                found[seen.digest] = why
        return found


def _is_shared(scope: ScopeId) -> bool:
    return not scope.startswith(f"{ScopeKind.TENANT}/")
