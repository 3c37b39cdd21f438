"""The queue of one path between two tiers: so many bytes at a time, the most urgent first, tenants by weight. No I/O.

Among moves of one priority the order is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each account
has a virtual clock that runs by the bytes it moved over its weight, and who is furthest behind goes next. An account
that was idle does not save up what it left. Law: of two accounts that always wait, neither is ahead of the other by
more than one move of each, for their weights.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvfleet_api.errors import RetryableError


class Priority(IntEnum):
    """Urgency of a move; lower goes first (design: agent.md, Mover)."""

    ONBOARD = 0
    """An engine waits for the block."""
    ROOM = 1
    """A writer waits for the slot."""
    PREFETCH = 2
    DEMOTE = 3
    ARCHIVE = 4


MOVES_AT_ONCE: Final = 32
"""Moves of one path under way. NIXL's POSIX backend reaches the disk's limit at batches of 16 and more."""
BYTES_AT_ONCE: Final = 64 << 20
"""Bytes of one path under way, so that blocks of 16 MiB do not take half a GiB of buffers; two moves always may."""
WAITING_MAX: Final = 16_384
"""Moves that may wait on one path; more are refused, so that a burst costs memory of a known size."""
_ALWAYS: Final = 2
_ACCOUNTS_KEPT: Final = 256
_STALE_KEPT: Final = 64


@dataclass(slots=True, eq=False)
class Turn:
    """One move's place in the queue of its path."""

    priority: Priority
    account: str
    weight: int
    size_bytes: int
    within_s: float | None = None
    """How long it may wait; None for as long as it takes."""
    starts_at: float = 0.0
    """The account's virtual time, in bytes by weight."""
    arrival: int = 0
    given: asyncio.Future[None] | None = None
    """Done once the move may run; None while it does not wait."""


class Gate:
    """Lets moves of one path through: up to a number and a sum of bytes at a time."""

    def __init__(self, width: int = MOVES_AT_ONCE, waiting_max: int = WAITING_MAX) -> None:
        self._width = width
        self._waiting_max = waiting_max
        self._queue: list[tuple[Priority, float, int, Turn]] = []
        """Heap; what does not stand there as its turn says is left over from before it was hastened or cancelled."""
        self._clocks = {priority: _FairClock() for priority in Priority}
        self._arrivals = 0
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
        if self.waiting == 0 and self._has_room(turn):
            self._clocks[turn.priority].tag(turn)
            self._admit(turn)
        else:
            await self._wait(turn)
        try:
            yield
        finally:
            self._running -= 1
            self.running_bytes -= turn.size_bytes
            self._advance()

    def hasten(self, turn: Turn, priority: Priority, account: str, weight: int) -> None:
        """Give a waiting move another priority, on the account of whoever wants it so."""
        if turn.given is None or turn.given.done() or (turn.priority, turn.account) == (priority, account):
            return
        self._clocks[turn.priority].refund(turn)
        turn.priority, turn.account, turn.weight = priority, account, weight
        self._push(turn)

    async def _wait(self, turn: Turn) -> None:
        if self.waiting >= self._waiting_max:
            raise RetryableError(f"{self.waiting} moves wait on this path, which is the limit", delay_s=1.0)
        given = turn.given = asyncio.get_running_loop().create_future()
        self.waiting += 1
        self.waiting_bytes += turn.size_bytes
        self._push(turn)
        try:
            async with asyncio.timeout(turn.within_s):
                await given
        except BaseException as e:
            self._give_up(turn, is_given=given.done() and not given.cancelled())
            if isinstance(e, TimeoutError):
                raise RetryableError(f"a move waited {turn.within_s:.0f} s in vain", delay_s=1.0) from e
            raise
        finally:
            turn.given = None

    def _give_up(self, turn: Turn, *, is_given: bool) -> None:
        """Take a move out that waits no longer; one whose turn came at the same moment passes it on."""
        if is_given:
            self._running -= 1
            self.running_bytes -= turn.size_bytes
        else:
            self.waiting -= 1
            self.waiting_bytes -= turn.size_bytes
        self._advance()

    def _push(self, turn: Turn) -> None:
        self._arrivals += 1
        turn.arrival = self._arrivals
        self._clocks[turn.priority].tag(turn)
        heapq.heappush(self._queue, (turn.priority, turn.starts_at, turn.arrival, turn))
        if len(self._queue) > 2 * self.waiting + _STALE_KEPT:
            self._queue = [item for item in self._queue if _stands(item)]
            heapq.heapify(self._queue)

    def _advance(self) -> None:
        """Let through what has room now."""
        while self._queue:
            turn = self._queue[0][3]
            if _stands(self._queue[0]):
                if not self._has_room(turn):
                    return
                self._call(turn)
            heapq.heappop(self._queue)
        if self._running == 0:
            for clock in self._clocks.values():
                clock.reset()

    def _call(self, turn: Turn) -> None:
        assert turn.given is not None
        self.waiting -= 1
        self.waiting_bytes -= turn.size_bytes
        self._admit(turn)
        turn.given.set_result(None)

    def _has_room(self, turn: Turn) -> bool:
        fits = self._running < _ALWAYS or self.running_bytes + turn.size_bytes <= BYTES_AT_ONCE
        return self._running < self._width and fits

    def _admit(self, turn: Turn) -> None:
        self._running += 1
        self.running_bytes += turn.size_bytes
        self._clocks[turn.priority].serve(turn)


class _FairClock:
    """Virtual time of the moves of one priority."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next_at: dict[str, float] = {}
        """Where the next move of each account starts."""

    def tag(self, turn: Turn) -> None:
        """Say where a move starts in its account's time, which runs on by it."""
        turn.starts_at = max(self._now, self._next_at.get(turn.account, 0.0))
        self._next_at[turn.account] = turn.starts_at + turn.size_bytes / turn.weight

    def refund(self, turn: Turn) -> None:
        """Take back what a move was charged that goes elsewhere."""
        if turn.account in self._next_at:
            self._next_at[turn.account] -= turn.size_bytes / turn.weight

    def serve(self, turn: Turn) -> None:
        """A move runs now: nobody starts before it any more."""
        self._now = max(self._now, turn.starts_at)
        if len(self._next_at) > _ACCOUNTS_KEPT:
            self._next_at = {account: at for account, at in self._next_at.items() if at > self._now}

    def reset(self) -> None:
        """Nothing waits or runs: nobody is ahead of anybody."""
        self._now = 0.0
        self._next_at.clear()


def _stands(item: tuple[Priority, float, int, Turn]) -> bool:
    """False for what was hastened, cancelled or given its turn since it was put into the heap."""
    turn = item[3]
    return turn.arrival == item[2] and turn.given is not None and not turn.given.done()
