"""How many requests an object store gets at once and which failed ones are tried again. Pure.

Requests to one object store: bounded at once by its pace, tried again within a budget.
"""

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

REQUESTS_MAX: Final = 32
"""Under way at once: 2 MiB at 100 ms of latency are 640 MB/s."""
CUT_EVERY_S: Final = 1.0
"""One refusal halves the requests; those that were sent before it are refused as well and add nothing new."""
CALM_S: Final = 10.0
"""Without a refusal for so long the store keeps up again."""

ATTEMPTS_MAX: Final = 5
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
TOKENS_MAX: Final = 50.0
"""Retries that can be made in a row, of all requests together: an absent store is not asked five times for each."""
TOKENS_PER_SUCCESS: Final = 0.2

_STATUS: Final = re.compile(r"status code: (\d{3})")
_REFUSALS: Final = frozenset({429, 503})
_TIMED_OUT: Final = 408
_OF_OBJECTS: Final = frozenset({404, 410, 416})
"""What says that an object is not there, or shorter."""


class Verdict(Enum):
    """What a failed request means."""

    REFUSED = auto()
    """The store wants fewer requests."""
    BROKEN = auto()
    """The next attempt may do better."""
    FINAL = auto()


def judge(message: str) -> Verdict:
    """Judge a failure by the words of obstore, which has no other place for the status."""
    status = _STATUS.search(message)
    if status is None:
        return Verdict.BROKEN if "HTTP error" in message else Verdict.FINAL
    code = int(status[1])
    if code in _REFUSALS:
        return Verdict.REFUSED
    return Verdict.BROKEN if code >= 500 or code == _TIMED_OUT else Verdict.FINAL


def is_unanswered(message: str) -> bool:
    """True for a failure that says nothing of the object: the store was not reached, or gave nobody's objects out.

    With wrong credentials too: these can be put right.
    """
    status = _STATUS.search(message)
    return "HTTP error" in message if status is None else int(status[1]) not in _OF_OBJECTS


def backoff_s(attempt: int, chance: float) -> float:
    """Pause after the attempt of that number, from 0; `chance` in [0, 1) spreads callers over all of it."""
    return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * float(1 << attempt)) * chance


@dataclass(slots=True)
class Pace:
    """Requests at once: halved when the store refuses some, one more for each round of them that succeeded."""

    limit: float = REQUESTS_MAX
    refused: int = 0
    """Requests that were refused, in all."""
    _tokens: float = TOKENS_MAX
    _cut_at_s: float = float("-inf")
    _refused_since_s: float = 0.0
    _refused_at_s: float = float("-inf")

    def succeeded(self) -> None:
        """Note an answer."""
        self.limit = min(float(REQUESTS_MAX), self.limit + 1.0 / self.limit)
        self._tokens = min(TOKENS_MAX, self._tokens + TOKENS_PER_SUCCESS)

    def was_refused(self, now_s: float) -> None:
        """Note a refusal."""
        self.refused += 1
        if now_s - self._refused_at_s >= CALM_S:
            self._refused_since_s = now_s
        self._refused_at_s = now_s
        if now_s - self._cut_at_s >= CUT_EVERY_S:
            self._cut_at_s = now_s
            self.limit = max(1.0, self.limit / 2)

    def may_retry(self) -> bool:
        """Take one of the retries that are left; False when there is none."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def refusing_s(self, now_s: float) -> float:
        """For how long the store has been refusing requests; 0.0 when it keeps up."""
        return now_s - self._refused_since_s if now_s - self._refused_at_s < CALM_S else 0.0


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
