"""The paths between the tiers of a node: the queue of each, and how fast it is now. No clock, no I/O.

The gate of one path between two tiers: so many bytes at a time, KV and weights of models by weight. No I/O.

Two classes of traffic share a path by weight, so that neither starves the other. Within a class the most urgent move
goes first, and tenants by weight (`turns.TurnQueue`). Law: of two classes that always wait, neither is ahead of the
other by more than one move of each, for their weights; a class that was idle has saved nothing up.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from kvstrata_agent.movement.fair_queue import KV_WEIGHT, Priority, TrafficClass, Turn, TurnQueue
from kvstrata_api.errors import RetryableError

MOVES_AT_ONCE: Final = 32
"""Moves of one path under way. NIXL's POSIX backend reaches the disk's limit at batches of 16 and more."""
BYTES_AT_ONCE: Final = 64 << 20
"""Bytes of one path under way, so that blocks of 16 MiB do not take half a GiB of buffers; two moves always may."""
WAITING_MAX: Final = 16_384
"""Moves of one class that may wait on one path; more are refused, so that a burst costs memory of a known size."""
_ALWAYS: Final = 2


class Gate:
    """Lets moves of one path through: up to a number and a sum of bytes at a time."""

    def __init__(self, width: int = MOVES_AT_ONCE, waiting_max: int = WAITING_MAX) -> None:
        self._width = width
        self._waiting_max = waiting_max
        self._queues = {traffic: TurnQueue() for traffic in TrafficClass}
        self._now = 0.0
        """Virtual time of the path: where the class started that went last."""
        self._running = 0
        self.waiting = 0
        """Moves that wait."""
        self.waiting_bytes = 0
        self.running_bytes = 0

    @asynccontextmanager
    async def enter(self, turn: Turn) -> AsyncIterator[None]:
        """Wait for a turn; a cancelled wait leaves nothing.

        Raises `RetryableError` when too many wait already, or when the turn has not come in its time.
        """
        queue = self._queues[turn.traffic]
        if self.waiting == 0 and self._has_room(turn):
            queue.starts_at = max(self._now, queue.starts_at)
            queue.pass_by(turn)
            self._admit(turn, queue)
        else:
            await self._wait(turn, queue)
        try:
            yield
        finally:
            self._end(turn, queue)

    def queue(self, traffic: TrafficClass) -> TurnQueue:
        """What of one class waits and runs; to be looked at."""
        return self._queues[traffic]

    def is_full(self, traffic: TrafficClass = TrafficClass.KV) -> bool:
        """True while another move of the class would be refused."""
        return self._queues[traffic].waiting >= self._waiting_max

    def ahead_bytes(self, size_bytes: int) -> int:
        """Bytes that move before a new KV move of `size_bytes` is done, at most: other KV, and the weights' share."""
        kv, weights = self._queues[TrafficClass.KV], self._queues[TrafficClass.WEIGHTS]
        head = weights.head()
        share = head.class_weight / KV_WEIGHT if head is not None else 0.0
        of_weights = min(weights.waiting_bytes, int((kv.waiting_bytes + size_bytes) * share))
        return self.running_bytes + kv.waiting_bytes + of_weights

    def hasten(self, turn: Turn, priority: Priority, account: str, weight: int) -> None:
        """Give a waiting move another priority, on the account of whoever wants it so."""
        if turn.given is None or turn.given.done() or (turn.priority, turn.account) == (priority, account):
            return
        self._queues[turn.traffic].hasten(turn, priority, account, weight)

    async def _wait(self, turn: Turn, queue: TurnQueue) -> None:
        if queue.waiting >= self._waiting_max:
            raise RetryableError(f"{queue.waiting} moves wait on this path, which is the limit", delay_s=1.0)
        given = turn.given = asyncio.get_running_loop().create_future()
        self._join(turn, queue)
        try:
            async with asyncio.timeout(turn.within_s):
                await given
        except BaseException as e:
            self._give_up(turn, queue, is_given=given.done() and not given.cancelled())
            if isinstance(e, TimeoutError):
                raise RetryableError(f"a move waited {turn.within_s:.0f} s in vain", delay_s=1.0) from e
            raise
        finally:
            turn.given = None

    def _join(self, turn: Turn, queue: TurnQueue) -> None:
        if not queue.waiting:
            queue.starts_at = max(self._now, queue.starts_at)
        self.waiting += 1
        self.waiting_bytes += turn.size_bytes
        queue.join(turn)

    def _leave(self, turn: Turn, queue: TurnQueue) -> None:
        self.waiting -= 1
        self.waiting_bytes -= turn.size_bytes
        queue.leave(turn)

    def _give_up(self, turn: Turn, queue: TurnQueue, *, is_given: bool) -> None:
        """Take a move out that waits no longer; one whose turn came at the same moment passes it on."""
        if is_given:
            self._end(turn, queue)
        else:
            self._leave(turn, queue)
            self._advance()

    def _end(self, turn: Turn, queue: TurnQueue) -> None:
        self._running -= 1
        self.running_bytes -= turn.size_bytes
        queue.running_bytes -= turn.size_bytes
        self._advance()

    def _advance(self) -> None:
        """Let through what has room now."""
        while self.waiting:
            queue = self._next()
            turn = queue.head()
            if turn is None or not self._has_room(turn):
                return
            assert turn.given is not None
            self._leave(turn, queue)
            self._admit(turn, queue)
            turn.given.set_result(None)
        if self._running == 0:
            self._now = 0.0
            for queue in self._queues.values():
                queue.reset()

    def _next(self) -> TurnQueue:
        """The class, of those with moves that wait, that is furthest behind; there must be one."""
        kv, weights = self._queues.values()
        if not weights.waiting or not kv.waiting:
            return kv if kv.waiting else weights
        return kv if kv.starts_at <= weights.starts_at else weights

    def _has_room(self, turn: Turn) -> bool:
        fits = self._running < _ALWAYS or self.running_bytes + turn.size_bytes <= BYTES_AT_ONCE
        return self._running < self._width and fits

    def _admit(self, turn: Turn, queue: TurnQueue) -> None:
        self._running += 1
        self.running_bytes += turn.size_bytes
        self._now = max(self._now, queue.starts_at)
        queue.serve(turn)


HALF_LIFE_S: Final = 10.0
"""Busy time after which a path's past speed counts half."""


@dataclass(slots=True)
class Speed:
    """Bytes for each second in which at least one move of the path was under way; idle time does not count."""

    _bytes: float = 0.0
    _busy_s: float = 0.0
    _under_way: int = 0
    _since_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Speed of late; 0.0 before the first move has ended."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def begin(self, now_s: float) -> None:
        """A move begins."""
        self._pass(now_s)
        self._under_way += 1

    def end(self, now_s: float, moved_bytes: int) -> None:
        """A move has ended, after so many bytes; 0 when it failed."""
        self._pass(now_s)
        self._under_way -= 1
        self._bytes += moved_bytes

    def _pass(self, now_s: float) -> None:
        if self._under_way:
            passed_s = now_s - self._since_s
            faded = 0.5 ** (passed_s / HALF_LIFE_S)
            self._bytes, self._busy_s = self._bytes * faded, self._busy_s * faded + passed_s
        self._since_s = now_s


@dataclass(slots=True)
class Path:
    """One direction between two tiers."""

    source: str
    target: str
    gate: Gate = field(default_factory=Gate)
    speed: Speed = field(default_factory=Speed)


class Paths:
    """All paths that were used since the start. A path that hangs holds up no other one."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str], Path] = {}

    def __iter__(self) -> Iterator[Path]:
        return iter(tuple(self._paths.values()))

    def between(self, source: str, target: str) -> Path:
        """Return a path; made when it is used for the first time."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = Path(source, target)
        return path

    def ahead_bytes(self, source: str, target: str, size_bytes: int) -> int:
        """Bytes that move on one path before a new KV move of `size_bytes` is done, at most."""
        path = self._paths.get((source, target))
        return path.gate.ahead_bytes(size_bytes) if path is not None else 0

    def bytes_per_s(self, source: str, target: str) -> float:
        """How fast one path was of late; 0.0 for one that has not moved anything."""
        path = self._paths.get((source, target))
        return path.speed.bytes_per_s if path is not None else 0.0

    def is_full(self, source: str, target: str) -> bool:
        """True while one path would refuse another KV move."""
        path = self._paths.get((source, target))
        return path is not None and path.gate.is_full()

    def is_waited_for(self, source: str, target: str) -> bool:
        """True while KV moves wait for one path."""
        path = self._paths.get((source, target))
        return path is not None and path.gate.queue(TrafficClass.KV).waiting > 0
