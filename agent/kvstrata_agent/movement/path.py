"""The paths between the tiers of a node: the moves that wait on each, its limits and its speed. No clock, no I/O.

Two classes of traffic, KV and weights of models, share a path by weight, so that neither starves the other. Within a
class the most urgent move goes first. Among moves of one priority the order is start-time fair queueing (Goyal, Vin and
Cheng, SIGCOMM 1996): each account has a virtual clock that runs by the bytes it moved over its weight, and who is
furthest behind goes next. Within an account the priority classes of its blocks are served by their factors, first
what is done first at that pace (self-clocked fair queueing: Golestani, INFOCOM 1994). Laws: of two accounts, or classes
of traffic, that always wait, neither is ahead of the other by more than one move of each, for their weights, whatever
priority classes they name; who was idle has saved nothing up; no priority class waits for more than the factors give
the others meanwhile.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

from kvstrata_agent.policy.priority import PriorityClass
from kvstrata_api.errors import RetryableError

KV_WEIGHT: Final = 100
"""Of all KV moves together against the weights of models: that of a tenant which declares none (KVTenant)."""
_ACCOUNTS_KEPT: Final = 256
_STALE_KEPT: Final = 64
MOVES_AT_ONCE: Final = 32
"""Moves of one path under way. NIXL's POSIX backend reaches the disk's limit at batches of 16 and more."""
BYTES_AT_ONCE: Final = 64 << 20
"""Bytes of one path under way, so that blocks of 16 MiB do not take half a GiB of buffers; two moves always may."""
WAITING_MAX: Final = 16_384
"""Moves of one class that may wait on one path; more are refused, so that a burst costs memory of a known size."""
_ALWAYS: Final = 2
HALF_LIFE_S: Final = 10.0
"""Busy time after which a path's past speed counts half."""


MEASURED_PART: Final = 0.125
"""Of what is to be moved that has to have moved of late for a speed to count: small moves are mostly latency."""
REMEASURED_S: Final = 30.0
"""After so long without a move a path's speed is unknown again."""


class Priority(IntEnum):
    """Urgency of a move; lower goes first (design: agent.md, Mover)."""

    ONBOARD = 0
    """An engine waits for the block."""
    ROOM = 1
    """A writer waits for the slot."""
    PREFETCH = 2
    DEMOTE = 3
    ARCHIVE = 4


class TrafficClass(StrEnum):
    """What shares a path by weight, whatever the priorities within."""

    KV = "kv"
    WEIGHTS = "weights"
    """Of models (KVModelCache)."""


@dataclass(slots=True, eq=False)
class QueuedMove:
    """One move, or group of moves, in the queue of its path."""

    priority: Priority
    account: str
    weight: int
    size_bytes: int
    within_s: float | None = None
    """How long it may wait; None: no limit."""
    traffic: TrafficClass = TrafficClass.KV
    priority_class: PriorityClass = PriorityClass.STANDARD
    """Of its blocks."""
    arrival: int = 0
    given: asyncio.Future[None] | None = None
    """Done once the move may run; None while it does not wait."""

    @property
    def class_weight(self) -> int:
        """Weight that its class pays for it with."""
        return KV_WEIGHT if self.traffic is TrafficClass.KV else self.weight


class FairQueue:
    """Moves of one class: those that wait, the most urgent first and accounts by weight, and sums of those that run."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Priority, str], _Line] = {}
        self._heap: list[tuple[Priority, float, int, _Line]] = []
        """All lines, by where their next move starts in the time of their account."""
        self._clocks = {priority: _FairClock() for priority in Priority}
        self._arrivals = 0
        self._items = 0
        """Moves in lines, those included that do not wait there any more."""
        self.waiting = 0
        """Moves that wait."""
        self.waiting_bytes = 0
        self.running_bytes = 0
        self.starts_at = 0.0
        """Virtual time of the class among those of its path, which runs by the bytes it moved over its weight."""

    def join(self, move: QueuedMove) -> None:
        """A move waits from now on."""
        self.waiting += 1
        self.waiting_bytes += move.size_bytes
        self._push(move)

    def leave(self, move: QueuedMove) -> None:
        """A move waits no longer: it runs, or it gave up."""
        self.waiting -= 1
        self.waiting_bytes -= move.size_bytes

    def boost(
        self, move: QueuedMove, priority: Priority, account: str, weight: int, priority_class: PriorityClass
    ) -> None:
        """Give a waiting move another priority, on the account of whoever wants it so."""
        move.priority, move.account, move.weight, move.priority_class = priority, account, weight, priority_class
        self._push(move)

    def head(self) -> QueuedMove | None:
        """The move that goes next."""
        while self._heap:
            line = self._heap[0][3]
            before = len(line)
            move = line.head()
            self._items -= before - len(line)
            if move is not None:
                return move
            heapq.heappop(self._heap)
            del self._lines[line.key]
        return None

    def serve(self, move: QueuedMove) -> None:
        """A move runs now, the one that goes next or one that never waited: its class and its account pay for it."""
        self.running_bytes += move.size_bytes
        self.starts_at += move.size_bytes / move.class_weight
        clock = self._clocks[move.priority]
        if move.given is None:
            clock.charge(move)
            return
        line = heapq.heappop(self._heap)[3]
        line.take(move)
        self._items -= 1
        clock.charge(move)
        if line:
            self._enter(line)
        else:
            del self._lines[line.key]

    def reset(self) -> None:
        """Nothing waits or runs: nobody is ahead of anybody, and what stands in lines is left over."""
        if not self._arrivals and not self.starts_at:
            return  # As it was made.
        self._arrivals, self._items, self.starts_at = 0, 0, 0.0
        self._heap.clear()
        self._lines.clear()
        for clock in self._clocks.values():
            clock.reset()

    def _push(self, move: QueuedMove) -> None:
        self._arrivals += 1
        move.arrival = self._arrivals
        key = move.priority, move.account
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key)
            self._enter(line)
        line.push(move)
        self._items += 1
        if self._items > 2 * self.waiting + _STALE_KEPT:
            self._items = sum(kept.weed() for kept in self._lines.values())

    def _enter(self, line: "_Line") -> None:
        """Put a line where its next move starts."""
        self._arrivals += 1
        priority, account = line.key
        heapq.heappush(self._heap, (priority, self._clocks[priority].start_of(account), self._arrivals, line))


class _Line:
    """Moves of one priority and account that wait, each priority class in the order in which they came."""

    def __init__(self, key: tuple[Priority, str]) -> None:
        self.key = key
        self._queues: dict[PriorityClass, deque[tuple[int, QueuedMove]]] = {}
        self._since: dict[PriorityClass, float] = {}
        """Virtual time since which the first move of each class is the first."""
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, move: QueuedMove) -> None:
        """A move waits here from now on."""
        queue = self._queues.setdefault(move.priority_class, deque())
        if not queue:
            self._since[move.priority_class] = self._now
        queue.append((move.arrival, move))

    def head(self) -> QueuedMove | None:
        """The move that is done first at the pace of its class; those before it that wait here no more are dropped."""
        found: tuple[float, PriorityClass, QueuedMove] | None = None
        for name, queue in self._queues.items():
            while queue and not _is_current(*queue[0]):
                queue.popleft()
            if queue:
                due = self._since[name] + queue[0][1].size_bytes / name.factor
                found = min(found, (due, name, queue[0][1])) if found is not None else (due, name, queue[0][1])
        return found[2] if found is not None else None

    def take(self, move: QueuedMove) -> None:
        """Take out the one that goes next."""
        name = move.priority_class
        _, first = self._queues[name].popleft()
        assert first is move, "the head alone is served"
        self._since[name] += move.size_bytes / name.factor
        self._now = max(self._now, self._since[name])

    def weed(self) -> int:
        """Drop what waits here no more; returns how many are left."""
        for name, queue in self._queues.items():
            self._queues[name] = deque(item for item in queue if _is_current(*item))
        return len(self)


class _FairClock:
    """Virtual time of the moves of one priority."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next_at: dict[str, float] = {}
        """Where the next move of each account starts."""

    def start_of(self, account: str) -> float:
        """Where the next move of an account starts, in bytes by weight."""
        return max(self._now, self._next_at.get(account, 0.0))

    def charge(self, move: QueuedMove) -> None:
        """A move runs now: its account's time runs on by it, and nobody starts before it any more."""
        self._now = self.start_of(move.account)
        self._next_at[move.account] = self._now + move.size_bytes / move.weight
        if len(self._next_at) > _ACCOUNTS_KEPT:
            self._next_at = {account: at for account, at in self._next_at.items() if at > self._now}

    def reset(self) -> None:
        """Nothing waits or runs: nobody is ahead of anybody."""
        self._now = 0.0
        self._next_at.clear()


def _is_current(arrival: int, move: QueuedMove) -> bool:
    """False for what was boosted, cancelled or admitted since it came into a line."""
    return move.arrival == arrival and move.given is not None and not move.given.done()


class PathLimiter:
    """Concurrency and byte limit of one path."""

    def __init__(self, width: int = MOVES_AT_ONCE, waiting_max: int = WAITING_MAX) -> None:
        self._width = width
        self._waiting_max = waiting_max
        self._queues = {traffic: FairQueue() for traffic in TrafficClass}
        self._now = 0.0
        """Virtual time of the path: where the class started that went last."""
        self._running = 0
        self.waiting = 0
        """Moves that wait."""
        self.waiting_bytes = 0
        self.running_bytes = 0

    @asynccontextmanager
    async def enter(self, move: QueuedMove) -> AsyncIterator[None]:
        """Wait until a move may run; a cancelled wait leaves nothing.

        Raises `RetryableError` when too many wait already, or when it may not run in its time.
        """
        queue = self._queues[move.traffic]
        if self.waiting == 0 and self._has_room(move):
            queue.starts_at = max(self._now, queue.starts_at)
            self._admit(move, queue)
        else:
            await self._wait(move, queue)
        try:
            yield
        finally:
            self._end(move, queue)

    def queue(self, traffic: TrafficClass) -> FairQueue:
        """What of one class waits and runs; to be read only."""
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

    def boost(
        self, move: QueuedMove, priority: Priority, account: str, weight: int, priority_class: PriorityClass
    ) -> None:
        """Give a waiting move another priority, on the account of whoever wants it so."""
        has_place = (move.priority, move.account, move.priority_class) == (priority, account, priority_class)
        if has_place or move.given is None or move.given.done():
            return
        self._queues[move.traffic].boost(move, priority, account, weight, priority_class)

    async def _wait(self, move: QueuedMove, queue: FairQueue) -> None:
        if queue.waiting >= self._waiting_max:
            raise RetryableError(f"{queue.waiting} moves wait on this path, which is the limit", delay_s=1.0)
        given = move.given = asyncio.get_running_loop().create_future()
        self._join(move, queue)
        try:
            async with asyncio.timeout(move.within_s):
                await given
        except BaseException as e:
            self._give_up(move, queue, is_given=given.done() and not given.cancelled())
            if isinstance(e, TimeoutError):
                raise RetryableError(f"a move waited {move.within_s:.0f} s without success", delay_s=1.0) from e
            raise
        finally:
            move.given = None

    def _join(self, move: QueuedMove, queue: FairQueue) -> None:
        if not queue.waiting:
            queue.starts_at = max(self._now, queue.starts_at)
        self.waiting += 1
        self.waiting_bytes += move.size_bytes
        queue.join(move)

    def _leave(self, move: QueuedMove, queue: FairQueue) -> None:
        self.waiting -= 1
        self.waiting_bytes -= move.size_bytes
        queue.leave(move)

    def _give_up(self, move: QueuedMove, queue: FairQueue, *, is_given: bool) -> None:
        """Take a move out that waits no longer; one that was admitted at the same moment lets others through."""
        if is_given:
            self._end(move, queue)
        else:
            self._leave(move, queue)
            self._advance()

    def _end(self, move: QueuedMove, queue: FairQueue) -> None:
        self._running -= 1
        self.running_bytes -= move.size_bytes
        queue.running_bytes -= move.size_bytes
        self._advance()

    def _advance(self) -> None:
        """Let through what has room now."""
        while self.waiting:
            queue = self._next()
            move = queue.head()
            if move is None or not self._has_room(move):
                return
            assert move.given is not None
            self._leave(move, queue)
            self._admit(move, queue)
            move.given.set_result(None)
        if self._running == 0:
            self._now = 0.0
            for queue in self._queues.values():
                queue.reset()

    def _next(self) -> FairQueue:
        """The class, of those with moves that wait, that is furthest behind; there must be one."""
        kv, weights = self._queues.values()
        if not weights.waiting or not kv.waiting:
            return kv if kv.waiting else weights
        return kv if kv.starts_at <= weights.starts_at else weights

    def _has_room(self, move: QueuedMove) -> bool:
        fits = self._running < _ALWAYS or self.running_bytes + move.size_bytes <= BYTES_AT_ONCE
        return self._running < self._width and fits

    def _admit(self, move: QueuedMove, queue: FairQueue) -> None:
        self._running += 1
        self.running_bytes += move.size_bytes
        self._now = max(self._now, queue.starts_at)
        queue.serve(move)


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

    def tells(self, least_bytes: float, since_s: float) -> bool:
        """True where so many bytes of late stand behind it, and the last of them came after that second."""
        return self._bytes >= least_bytes and self._since_s >= since_s

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
    limiter: PathLimiter = field(default_factory=PathLimiter)
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
        return path.limiter.ahead_bytes(size_bytes) if path is not None else 0

    def bytes_per_s(self, source: str, target: str) -> float:
        """How fast one path was of late; 0.0 for one that has not moved anything."""
        path = self._paths.get((source, target))
        return path.speed.bytes_per_s if path is not None else 0.0

    def measured_bytes_per_s(self, source: str, target: str, size_bytes: int, now_s: float) -> float:
        """How fast one path was of late; 0.0 where that says nothing of so many bytes now.

        So it is where less than `MEASURED_PART` of them was moved, or nothing for `REMEASURED_S`: what was slow once,
        or slow because it was little, would never be tried again.
        """
        path = self._paths.get((source, target))
        if path is None or not path.speed.tells(MEASURED_PART * size_bytes, now_s - REMEASURED_S):
            return 0.0
        return path.speed.bytes_per_s

    def is_full(self, source: str, target: str) -> bool:
        """True while one path would refuse another KV move."""
        path = self._paths.get((source, target))
        return path is not None and path.limiter.is_full()

    def is_waited_for(self, source: str, target: str) -> bool:
        """True while KV moves wait for one path."""
        path = self._paths.get((source, target))
        return path is not None and path.limiter.queue(TrafficClass.KV).waiting > 0
