"""Reports to the directory where the blocks of this node are: what changed last counts, one entry for each block.

The directory may be late and may be lost; it never frees anything. Changes are gathered and sent as the state is
when they are sent, so a block that moved five times costs one announcement.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstrata_metadata.store.records import STAMP_MAX, Announcement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.scope_table import Copy
    from kvstrata_agent.cache.ports import Directory
    from kvstrata_api.blocks import ScopeId, ScopeSecret

FLUSH_BLOCKS: Final = 4096
"""Announcements of one scope handed over at a time."""


HOLDINGS_BLOCKS: Final = 1024
"""Blocks of one part of a report: about 2 ms of the loop."""


class Announcer:
    """Gathers changed blocks and announces their fastest copy."""

    def __init__(
        self, index: Index, directory: Directory | None, secret_of: Callable[[ScopeId], ScopeSecret | None]
    ) -> None:
        self._index = index
        self._directory = directory
        self._secret_of = secret_of
        self._changed: dict[ScopeId, dict[bytes, None]] = {}
        self._has_changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Blocks that wait to be announced; at most the blocks that this node holds or held since the last flush."""
        return sum(len(digests) for digests in self._changed.values())

    def mark(self, scope: ScopeId, *digests: bytes) -> None:
        """Note that the fastest copies of blocks are other ones, or gone."""
        if self._directory is None or self._is_reported(self._directory, scope):
            return
        changed = self._changed.get(scope)
        if changed is None:
            changed = self._changed[scope] = {}
        changed.update(dict.fromkeys(digests))
        self._has_changed.set()

    def _is_reported(self, directory: Directory, scope: ScopeId) -> bool:
        """True while a report of everything is still to begin, which leaves out scopes without a known secret.

        So a million blocks of an earlier run are announced as the report is sent, not gathered and sent at once before.
        """
        return directory.owes_all and self._secret_of(scope) is not None

    async def changed(self) -> None:
        """Return when something waits to be announced."""
        await self._has_changed.wait()

    def flush(self) -> None:
        """Hand what changed to the directory. Scopes whose secret is not known yet wait."""
        self._has_changed.clear()
        if self._directory is None:
            return
        for scope in tuple(self._changed):
            secret = self._secret_of(scope)
            if secret is None:
                if not self._index.blocks(scope):
                    del self._changed[scope]  # Erased and forgotten: the directory clears such scopes by itself.
                continue  # Sent with the next change, or with the next full report.
            digests = tuple(self._changed.pop(scope))
            for i in range(0, len(digests), FLUSH_BLOCKS):
                self._directory.announce(secret, self._changes(scope, digests[i : i + FLUSH_BLOCKS]))

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        """Everything that this node holds, in parts of one scope that are read when they are asked for.

        A block that comes after its scope was begun is announced by its own change; scopes without a known secret are
        left out.
        """
        for scope in tuple(self._index.scopes()):
            secret = self._secret_of(scope)
            if secret is None:
                continue
            digests = self._index.blocks(scope).digests()
            while part := tuple(islice(digests, HOLDINGS_BLOCKS)):
                yield secret, [a for a in self._changes(scope, part) if not a.is_gone]

    def _changes(self, scope: ScopeId, digests: Iterable[bytes]) -> list[Announcement]:
        blocks = self._index.blocks(scope)
        return [_announcement(digest, blocks.copy(digest)) for digest in digests]


def _announcement(digest: bytes, best: Copy | None) -> Announcement:
    if best is None:
        return Announcement(digest, "", 0, 0, is_gone=True)
    # The directory keeps 48 bits, which stores pass in their 4,096th run; the owner goes by its own books alone.
    return Announcement(digest, best.tier.spec.type, best.stamp & STAMP_MAX, best.stored_bytes)
