"""Whose move goes next: every move waits for its turn on its path, and readers hasten what they wait for."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfleet_agent.gate import Gate, Priority, Turn
from kvfleet_agent.paths import Paths
from kvfleet_api.errors import RetryableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvfleet_agent.index import Entry
    from kvfleet_agent.node import Node


@dataclass(slots=True)
class _Wish:
    """Who waits for a block."""

    tenant: str
    """The one that came last."""
    readers: int = 0


class Traffic:
    """The moves that wait, by path; tenants go by the weights that they were declared with."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.paths = Paths()
        self._waiting: dict[Entry, tuple[Gate, Turn, Priority]] = {}
        self._wishes: dict[Entry, _Wish] = {}

    @asynccontextmanager
    async def turn(
        self,
        entries: Sequence[Entry],
        source: str,
        target: str,
        priority: Priority,
        size_bytes: int,
        within_s: float | None,
    ) -> AsyncIterator[None]:
        """Wait until a group of blocks may move: it goes as the most urgent of them.

        Raises `RetryableError` when that takes too long or too many wait.
        """
        path = self.paths.between(source, target)
        turn = Turn(*min(self._rank(e, priority) for e in entries), size_bytes, within_s)
        async with AsyncExitStack() as stack:
            self._waiting.update((e, (path.gate, turn, priority)) for e in entries)
            try:
                await stack.enter_async_context(path.gate.enter(turn))
            except RetryableError:
                self._node.counters.add("kvfleet_moves_refused_total", source=source, target=target)
                raise
            finally:
                for entry in entries:
                    del self._waiting[entry]
            path.speed.begin(self._node.clock())
            moved_bytes = 0
            try:
                yield
                moved_bytes = size_bytes
            finally:
                path.speed.end(self._node.clock(), moved_bytes)

    def wait_for(self, entry: Entry, tenant: str) -> None:
        """A reader waits for a block from now on: its move goes as a load of this tenant, whoever began it."""
        wish = self._wishes.setdefault(entry, _Wish(tenant))
        wish.tenant = tenant
        wish.readers += 1
        self._rerank(entry)

    def leave(self, entry: Entry) -> None:
        """A reader has its block or has given up; after the last one the move goes as it was begun, behind its like."""
        wish = self._wishes[entry]
        wish.readers -= 1
        if not wish.readers:
            del self._wishes[entry]
            self._rerank(entry)

    def _rerank(self, entry: Entry) -> None:
        if entry in self._waiting:
            gate, turn, priority = self._waiting[entry]
            gate.hasten(turn, *self._rank(entry, priority))

    def _rank(self, entry: Entry, priority: Priority) -> tuple[Priority, str, int]:
        """Priority, account and weight of a move: those of its readers where there are any."""
        wish = self._wishes.get(entry)
        tenant = wish.tenant if wish is not None else entry.tenant
        urgency = Priority.ONBOARD if wish is not None else priority
        return urgency, tenant, self._node.tenants.of(tenant).weight
