"""The product's `Store` over a simulated Redis: calls are lost, late, repeated and overtaken by others."""

import contextvars
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.store.store import Call, Store
from sim.loop import SimLoop
from sim.network import Network
from sim.process import PROCESS
from sim.redis_server import RefusedError, SimRedis

if TYPE_CHECKING:
    import asyncio

TIMEOUT_S: Final = 5.0


@dataclass(slots=True)
class RedisFaults:
    """Chances for each round trip."""

    lose_request: float = 0.0
    lose_reply: float = 0.0
    """Applied, but the caller never hears of it."""
    repeat: float = 0.0
    """Applied a second time, later."""
    slow: float = 0.0
    cut: float = 0.0
    """Only the first calls of a pipeline are applied."""


@dataclass(slots=True)
class RedisTally:
    """Faults so far."""

    lost_requests: int = 0
    lost_replies: int = 0
    repeats: int = 0
    cuts: int = 0
    refused: int = 0


class RedisLink:
    """The network between everybody and one server."""

    def __init__(self, loop: SimLoop, rng: random.Random, server: SimRedis, net: Network) -> None:
        self.loop = loop
        self.net = net
        self.rng = rng
        self.server = server
        self.faults = RedisFaults()
        self.tally = RedisTally()

    def delay_s(self) -> float:
        """One way through the network; seldom so slow that timers run out meanwhile."""
        if self.faults.slow and self.rng.random() < self.faults.slow:
            return self.rng.random() ** 4 * 8.0
        return 0.0001 + self.rng.random() * 0.0005

    def send(self, calls: Sequence[Call]) -> "asyncio.Future[list[Any]]":
        """Start a round trip. The future may never be done."""
        answer: asyncio.Future[list[Any]] = self.loop.create_future()
        faults, chance = self.faults, self.rng.random
        if not self.server.is_up:
            self.tally.refused += 1
            self.loop.call_later(0.001, self._refuse, answer)
        elif self.net.is_apart(PROCESS.get()) or (faults.lose_request and chance() < faults.lose_request):
            self.tally.lost_requests += 1
        else:
            part = tuple(calls)
            if faults.cut and chance() < faults.cut:
                self.tally.cuts += 1
                part = part[: self.rng.randrange(len(part) + 1)]
            self._later(self._serve, part, len(part) == len(calls), answer)
            if faults.repeat and chance() < faults.repeat:
                self.tally.repeats += 1
                self._later(self._again, part)
        return answer

    def _later(self, what: Any, *args: Any) -> None:
        """Do something at the server, which no process of ours runs."""
        self.loop.call_later(self.delay_s(), what, *args, context=_WORLD.copy())

    def _serve(self, calls: Sequence[Call], is_whole: bool, answer: "asyncio.Future[list[Any]]") -> None:  # noqa: FBT001
        if not self.server.is_up:
            return
        try:
            replies = self.server.run(calls, self.loop.now_s)
        except RefusedError:
            self.loop.call_later(self.delay_s(), self._refuse, answer)
            return
        if self.faults.lose_reply and self.rng.random() < self.faults.lose_reply:
            self.tally.lost_replies += 1
        elif not is_whole:
            self.loop.call_later(self.delay_s(), self._refuse, answer)
        else:
            self.loop.call_later(self.delay_s(), _answer, answer, replies)

    def _again(self, calls: Sequence[Call]) -> None:
        if self.server.is_up and self.server.has_scripts:
            self.server.run(calls, self.loop.now_s)

    @staticmethod
    def _refuse(answer: "asyncio.Future[list[Any]]") -> None:
        if not answer.done():
            answer.set_exception(DirectoryAwayError("redis: refused", delay_s=1.0))


def _answer(answer: "asyncio.Future[list[Any]]", replies: list[Any]) -> None:
    if not answer.done():
        answer.set_result(replies)


_WORLD: Final = contextvars.Context()
"""Of nobody: what the server does, it does whoever died meanwhile."""


class SimStore(Store):
    """What `Store` promises, over a `RedisLink`."""

    def __init__(self, link: RedisLink) -> None:  # Opens no client.
        self._link = link
        self._is_closed = False

    async def install(self) -> None:
        """Load every transition."""
        await self._wait(())
        self._link.server.install()

    async def is_installed(self) -> bool:
        """Tell whether every transition is loaded."""
        await self._wait(())
        return self._link.server.has_scripts

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run transitions in one round trip."""
        return await self._wait(calls) if calls else []

    async def _wait(self, calls: Sequence[Call]) -> list[Any]:
        answer = self._link.send(calls)
        timer = self._link.loop.call_later(TIMEOUT_S, self._late, answer)
        try:
            return await answer
        finally:
            timer.cancel()

    @staticmethod
    def _late(answer: "asyncio.Future[list[Any]]") -> None:
        if not answer.done():
            answer.set_exception(DirectoryAwayError("redis: TimeoutError", delay_s=1.0))

    async def memory_bytes(self) -> tuple[int, int]:
        """A server of no size."""
        return 0, 0

    async def close(self) -> None:
        """Nothing is held."""
        self._is_closed = True
