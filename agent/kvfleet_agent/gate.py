"""A bounded number of moves at a time, the most urgent first. No I/O."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


WAITING_MAX: Final = 65_536
"""Moves that may wait in all; more are refused, so that a burst costs memory of a known size."""


class Gate:
    """Lets `width` moves through at a time, by priority and then by arrival."""

    def __init__(self, width: int, waiting_max: int = WAITING_MAX) -> None:
        self._free = width
        self._waiting_max = waiting_max
        self._queue: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Moves that wait."""
        return len(self._queue)

    @asynccontextmanager
    async def enter(self, priority: Priority) -> AsyncIterator[None]:
        """Wait for a turn. Raises `RetryableError` when too many wait already; a cancelled wait leaves nothing."""
        if self._free == 0:
            await self._wait(priority)
        else:
            self._free -= 1
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, priority: Priority) -> None:
        if len(self._queue) >= self._waiting_max:
            raise RetryableError(f"{len(self._queue)} moves wait, which is the limit", delay_s=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._queue, (priority, self._arrivals, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # The turn came at the same moment; pass it on.
            raise

    def _leave(self) -> None:
        while self._queue:
            turn = heapq.heappop(self._queue)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
