"""Requests to one object store: bounded at once by its pace, tried again within a budget."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvstrata_agent.backends.object.pacing import ATTEMPTS_MAX, Pace, Verdict, backoff_s, judge

T = TypeVar("T")


class Turns:
    """Gives turns to requests, first come first served. For one event loop."""

    def __init__(self, failures: tuple[type[Exception], ...], final: tuple[type[Exception], ...]) -> None:
        """Take `failures` as those of requests; `final` ones among them are answers and are never tried again."""
        self.pace = Pace()
        self._failures = failures
        self._final = final
        self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def attempts(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request, again when it failed of what may pass. Raises what its last attempt raised."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                async with self._turn():
                    answer = await request()
            except self._final:
                self.pace.succeeded()
                raise
            except self._failures as e:
                if not self._is_tried_again(attempt, str(e)):
                    raise
            else:
                self.pace.succeeded()
                return answer
            await asyncio.sleep(backoff_s(attempt, random.random()))
        raise AssertionError("the last attempt returns or raises")

    def _is_tried_again(self, attempt: int, message: str) -> bool:
        verdict = judge(message)
        if verdict is Verdict.REFUSED:
            self.pace.was_refused(time.monotonic())
        return verdict is not Verdict.FINAL and attempt + 1 < ATTEMPTS_MAX and self.pace.may_retry()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        while self._under_way >= int(self.pace.limit):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._wake()  # It was our turn: somebody else's now.
                raise
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._wake()

    def _wake(self) -> None:
        room = int(self.pace.limit) - self._under_way
        while self._waiting and room > 0:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                room -= 1
