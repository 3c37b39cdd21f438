"""Two served agents that are peers of each other's: blocks grow with the first and are followed by the second."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.ports import FollowedPeers, Peers
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.serve.server import Server
from kvstrata_api.trust import Identity
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import FakeAuthenticator, TestCodecs, caller, dram_tier, make_node
from support.agent.thread import AgentThread, make_verbs

EPOCH = 7
WRITER = "pool.node"


async def _anybody(_token: str, _agent: str) -> Identity:
    return Identity("ns", "agent")


async def _token() -> str:
    return "token"


class PeerThread(AgentThread):
    """An agent that listens to peers, and asks the one at `writer` where that is given."""

    def __init__(
        self, socket: Path, tiers: Callable[[], list[Tier]], authenticator: FakeAuthenticator, writer: str = ""
    ) -> None:
        super().__init__(socket, tiers, authenticator)
        self._writer = writer
        self.peers: Peers | None = None

    async def _start(self) -> None:
        if self._writer:
            other = AgentRecord(WRITER, EPOCH, self._writer)
            self.peers = RemotePeers(
                "pool.reader",
                lambda agent, epoch: other if (agent, epoch) == (WRITER, EPOCH) else None,
                _token,
                None,
                Instruments(AGENT, CollectorRegistry()),
                tls=None,
            )
            assert isinstance(self.peers, FollowedPeers)
        self.core = AgentParts(make_node(self._tiers()), TestCodecs(), None, self.peers)
        self.core.node.clock = time.monotonic
        self._archiver = asyncio.create_task(self.core.cache.archiver.run())
        self.listener = PeerListener("127.0.0.1")
        me = AgentRecord(WRITER, EPOCH, self.listener.address)
        await self.listener.serve(me, self.core.lender, _anybody, None, tls=None, handovers=self.core.handovers)
        self.server = Server(self.socket, make_verbs(self.core, self.authenticator))
        self.server.start()

    async def _stop(self) -> None:
        await self.listener.close()
        if isinstance(self.peers, RemotePeers):
            await self.peers.close()
        await super()._stop()


@contextmanager
def two_nodes(
    directory: Path, capacity_bytes: int = 1 << 22, reader_bytes: int | None = None
) -> Iterator[tuple[PeerThread, PeerThread]]:
    """The writer's agent and the reader's, which is as large unless `reader_bytes` says otherwise.

    Tenants `a` and `b` may use both.
    """
    parties = FakeAuthenticator(a=caller("a"), b=caller("b"))

    def tiers(size_bytes: int) -> list[Tier]:
        return [dram_tier(size_bytes)]

    ours, theirs = partial(tiers, capacity_bytes), partial(tiers, reader_bytes or capacity_bytes)
    with (
        PeerThread(directory / "writer.sock", ours, parties) as writer,
        PeerThread(directory / "reader.sock", theirs, parties, writer.listener.address) as reader,
    ):
        yield writer, reader
