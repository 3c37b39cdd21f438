"""A served core in a thread of its own, for tests that speak to it through its socket as engines do."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.serve.authorization import Attaching, Authenticator
from kvstrata_agent.serve.server import Server
from kvstrata_agent.serve.session_verbs import SessionVerbs
from kvstrata_agent.serve.verbs import Verbs
from support.agent.doubles import FakeAuthenticator, make_core

T = TypeVar("T")


def make_verbs(core: AgentParts, authenticator: Authenticator) -> Verbs:
    attaching = Attaching(core.node, authenticator)
    return Verbs(core.cache, attaching, SessionVerbs(core.cache, attaching))


class AgentThread:
    """Serves tiers on a unix socket. `call` and `wait` run in its event loop."""

    def __init__(
        self, socket: Path, tiers: Callable[[], list[Tier]], authenticator: FakeAuthenticator, **policy: object
    ) -> None:
        self.socket = socket
        self.authenticator = authenticator
        self.loop = asyncio.new_event_loop()
        self._tiers = tiers
        self._policy = policy
        self._thread = threading.Thread(target=self.loop.run_forever, name="agent")
        self.core: AgentParts

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def call(self, do: Callable[[], T]) -> T:
        async def run() -> T:
            return do()

        return self.wait(run())

    async def _start(self) -> None:
        self.core = make_core(self._tiers(), policy=self._policy)
        self.core.node.clock = time.monotonic
        self._archiver = asyncio.create_task(self.core.cache.archiver.run())
        self.server = Server(self.socket, make_verbs(self.core, self.authenticator))
        self.server.start()

    async def _stop(self) -> None:
        await self.server.close()
        self._archiver.cancel()
        await asyncio.gather(self._archiver, return_exceptions=True)
        await self.core.close()
        for tier in self.core.node.tiers:
            await tier.backend.close()
