"""An agent in this process whose engines are authenticated by a real API server, and engines that show any token."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from faults.raw_engine import RawEngine

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.serve.authorization import Authenticator
from kvstrata_agent.serve.server import Server
from kvstrata_api import wire
from support.agent.doubles import LAYOUT, TestCodecs, dram_tier, make_node
from support.agent.thread import make_verbs

MEMORY_BYTES = 1 << 20


@asynccontextmanager
async def guarded(authenticator: Authenticator, path: Path) -> AsyncIterator[AgentParts]:
    """Serve the real verbs on a real socket."""
    node = make_node([dram_tier(MEMORY_BYTES)], policy={"admission": {"type": "Always"}})
    node.clock = time.monotonic
    core = AgentParts(node, TestCodecs())
    server = Server(path, make_verbs(core, authenticator))
    server.start()
    sweeping = asyncio.create_task(Sweeper(core.cache, authenticator).run())
    try:
        yield core
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        await server.close()
        await core.close()
        for tier in core.node.tiers:
            await tier.backend.close()


class TokenEngine(RawEngine):
    """Shows the token that it was given."""

    def __init__(self, path: Path, seed: int, token: str) -> None:
        super().__init__(str(path), seed)
        self.token = token

    def attach_request(self) -> wire.Attach:
        """Present the token."""
        return wire.Attach(self.next_id(), self.token, "pool", LAYOUT)

    def hold(self) -> None:
        """Attach and take hold of everything that can be held: leases, pins, reservations, a session."""
        self.attach()
        self.store(0, 2)
        self.acquire(2, lease_s=300.0)
        self.ask(wire.Pin(self.next_id(), self.scope, b"".join(k.digest for k in self.keys(2)), 3600.0), wire.Done)
        self.reserve(2, 4)
        self.ask(wire.OpenSession(self.next_id(), f"s{self.seed}"), wire.Done)

    def closed_after_s(self, within_s: float) -> float | None:
        """Stay silent; seconds until the agent closed the connection, None when it did not."""
        began_s = time.monotonic()
        self.socket.settimeout(within_s)
        try:
            while self.socket.recv(65_536):
                pass
        except TimeoutError:
            return None
        except OSError:
            pass
        return time.monotonic() - began_s

    def served_for_s(self, within_s: float) -> float | None:
        """Ask all the time, and present the token again and again; seconds until the last good answer.

        None when there still was one at the end.
        """
        began_s = last_s = time.monotonic()
        try:
            while time.monotonic() - began_s < within_s:
                self.ask(self.attach_request(), wire.Granted)
                keys = b"".join(k.digest for k in self.keys(2))
                self.ask(wire.Lookup(self.next_id(), self.scope, keys), wire.Found)
                last_s = time.monotonic()
                time.sleep(0.5)
        except (AssertionError, OSError):
            return last_s - began_s
        return None
