"""Schedules moves on each path; a move that a reader waits for inherits the reader's priority."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata_agent.movement.path import Path, Paths, Priority, QueuedMove, TrafficClass
from kvstrata_api.errors import InvalidInputError, RetryableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.movement.path import PathLimiter
    from kvstrata_agent.policy.priority import PriorityClass

PIECE_BYTES_MAX: Final = 16 << 20
"""Of a model's weights in one move: a block's time at most is what an engine's load waits longer for it."""
WEIGHT_MAX: Final = 10_000
"""That of KVTenant."""


@dataclass(slots=True)
class _Readers:
    """Readers that wait for a block."""

    tenant: str
    """Of the one that came last."""
    count: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    """Blocks that wait for their turn to move together."""

    limiter: PathLimiter
    entries: Sequence[Entry]
    priority: Priority
    """As it was begun."""
    move: QueuedMove


class MoveScheduler:
    """The moves that wait, by path; tenants go by the weights that they were declared with."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.paths = Paths()
        self._waiting: dict[Entry, _Group] = {}
        self._readers: dict[Entry, _Readers] = {}

    @asynccontextmanager
    async def enter(
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
        urgency, tenant, weight, priority_class = self._rank(entries, priority)
        move = QueuedMove(urgency, tenant, weight, size_bytes, within_s, priority_class=priority_class)
        waiting = list(entries)
        self._waiting.update(dict.fromkeys(waiting, _Group(path.limiter, entries, priority, move)))
        try:
            async with self._entered(path, move):
                self._end_waiting(waiting)
                yield
        finally:
            self._end_waiting(waiting)

    def _end_waiting(self, waiting: list[Entry]) -> None:
        """Forget, once, that blocks wait to be moved."""
        while waiting:
            del self._waiting[waiting.pop()]

    @asynccontextmanager
    async def weights(
        self, source: str, target: str, load: str, weight: int, size_bytes: int, within_s: float | None = None
    ) -> AsyncIterator[None]:
        """Wait until a piece of a model's weights may move on a path, beside KV; move it inside.

        All loads together have `weight` of the path against 100 of all KV moves (`path.KV_WEIGHT`), as long as both
        wait; several loads divide that by their weights. A cancelled wait leaves nothing. Raises `RetryableError` when
        that takes too long or too many pieces wait, and `InvalidInputError` for a piece above `PIECE_BYTES_MAX`, and
        for a weight that no tenant could have.
        """
        if not 0 < size_bytes <= PIECE_BYTES_MAX or not 1 <= weight <= WEIGHT_MAX:
            raise InvalidInputError(
                f"piece of {size_bytes} B with weight {weight}: 1 to {PIECE_BYTES_MAX} B and 1 to {WEIGHT_MAX} wanted"
            )
        move = QueuedMove(Priority.ARCHIVE, load, weight, size_bytes, within_s, TrafficClass.WEIGHTS)
        async with self._entered(self.paths.between(source, target), move):
            yield
        names = {"source": source, "target": target}
        self._node.counters.add("kvstrata_moved_bytes_total", size_bytes, **names, traffic=move.traffic)

    @asynccontextmanager
    async def _entered(self, path: Path, move: QueuedMove) -> AsyncIterator[None]:
        """Wait until a move may run, and measure the path meanwhile."""
        moved_bytes, is_refused = 0, True
        try:
            async with path.limiter.enter(move):
                is_refused = False
                path.speed.begin(self._node.clock())
                try:
                    yield
                    moved_bytes = move.size_bytes
                finally:
                    path.speed.end(self._node.clock(), moved_bytes)
        except RetryableError:
            if is_refused:
                names = {"source": path.source, "target": path.target}
                self._node.counters.add("kvstrata_moves_refused_total", 1, **names, traffic=move.traffic)
            raise

    def count_moved(self, source: str, target: str, blocks: int, size_bytes: int, took_s: float) -> None:
        """Count blocks that have moved on a path as one transfer: their raw bytes, and how long they took."""
        counters, path = self._node.counters, {"source": source, "target": target}
        counters.add("kvstrata_moved_blocks_total", blocks, **path)
        counters.add("kvstrata_moved_bytes_total", size_bytes, **path, traffic=TrafficClass.KV)
        counters.observe("kvstrata_move_duration_seconds", took_s, **path)

    def wait_for(self, entry: Entry, tenant: str) -> None:
        """A reader waits for a block from now on: its move goes as a load of this tenant, whoever began it.

        A group that several wait for goes as the most urgent of those loads.
        """
        self.wait_for_all((entry,), tenant)

    def wait_for_all(self, entries: Iterable[Entry], tenant: str) -> None:
        """The same for several blocks; a group of them is ranked once."""
        others = []
        for entry in entries:
            readers = self._readers.setdefault(entry, _Readers(tenant))
            if not readers.count or readers.tenant != tenant:
                others.append(entry)
            readers.tenant = tenant
            readers.count += 1
        self._rerank(others)

    def is_waited_for(self, entry: Entry) -> bool:
        """True while a reader waits for a block."""
        return entry in self._readers

    def end_wait(self, entry: Entry) -> None:
        """A reader has its block or has given up; after the last one the move goes as it was begun, behind its like."""
        self.end_wait_all((entry,))

    def end_wait_all(self, entries: Iterable[Entry]) -> None:
        """The same for several blocks."""
        left = []
        for entry in entries:
            readers = self._readers[entry]
            readers.count -= 1
            if not readers.count:
                del self._readers[entry]
                left.append(entry)
        self._rerank(left)

    def _rerank(self, entries: Iterable[Entry]) -> None:
        for group in dict.fromkeys(self._waiting[entry] for entry in entries if entry in self._waiting):
            group.limiter.boost(group.move, *self._rank(group.entries, group.priority, group.move.account))

    def _rank(
        self, entries: Sequence[Entry], priority: Priority, payer: str = ""
    ) -> tuple[Priority, str, int, PriorityClass]:
        """Priority, account, weight and class of a move: the most urgent of its readers' where there are any.

        Of equals `payer`, who has it on the account by now, keeps it.
        """
        waited_for = [e for e in entries if e in self._readers]
        ranks = [self._rank_alone(e, priority) for e in waited_for or entries]
        return min(ranks, key=lambda r: (r[0], r[3], r[1] != payer))

    def _rank_alone(self, entry: Entry, priority: Priority) -> tuple[Priority, str, int, PriorityClass]:
        readers = self._readers.get(entry)
        tenant = readers.tenant if readers is not None else entry.tenant
        urgency = Priority.ONBOARD if readers is not None else priority
        return urgency, tenant, self._node.tenants.of(tenant).weight, entry.priority
