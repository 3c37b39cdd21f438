"""Where engines and peers come into a simulated agent, and where everything that leaves it is noted."""

from collections.abc import Coroutine, Sequence
from typing import Any

from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.lender import Lent
from kvstrata_agent.fleet.peers.server import Lender
from kvstrata_agent.serve.authorization import Attachment
from kvstrata_agent.serve.connection import Connection
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey, LayoutId
from sim.process import Process
from sim.shadow import PEER, Shadow
from sim.sockets import SimSocket

PEER_LEASE_S_MAX = 60.0


class WatchedVerbs(Verbs):
    """The real verbs, with what comes in and goes out told to the shadow books."""

    shadow: Shadow
    world: Any

    def start(self, at: Attachment, request: wire.AnyRequest) -> Any:
        """See `Verbs.start`."""
        self.shadow.asked(at.owner, request)
        outcome = super().start(at, request)
        if isinstance(outcome, Coroutine):
            return self._later(at, request, outcome)
        self.shadow.answered(at.owner, request, outcome)
        self.world.served(self.shadow, type(request).__name__)
        return outcome

    async def _later(self, at: Attachment, request: wire.AnyRequest, work: Coroutine[Any, Any, Any]) -> Any:
        reply = await work
        self.shadow.answered(at.owner, request, reply)
        self.world.served(self.shadow, type(request).__name__)
        return reply

    def end(self, at: Attachment) -> None:
        """See `Verbs.end`."""
        self.shadow.ended(at.owner)
        super().end(at)


class WatchedLender:
    """The real lender, with what it lends told to the shadow books."""

    def __init__(self, lender: Lender, shadow: Shadow, world: Any) -> None:
        self._lender = lender
        self._shadow = shadow
        self._world = world

    async def lend(
        self, keys: Sequence[BlockKey], layout_id: LayoutId, lease_s: float, tiers: Sequence[str] = ()
    ) -> list[Lent | None]:
        """See `Lender.lend`."""
        until_s = self._world.loop.now_s + min(lease_s, PEER_LEASE_S_MAX)
        lent = await self._lender.lend(keys, layout_id, lease_s, tiers)
        for key, one in zip(keys, lent, strict=True):
            if one is not None:
                self._world.tally.lent_blocks += 1
                self._shadow.lent(one.lease, one.slot, until_s, key.scope)
        return lent

    def trace(self, key: BlockKey, most: int) -> ChainSegment | None:
        """See `Lender.trace`."""
        return self._lender.trace(key, most)

    def end(self, leases: Sequence[int]) -> None:
        """See `Lender.end`."""
        self._shadow.released(PEER, leases)
        self._lender.end(leases)

    def holdings(self) -> Any:
        """See `Lender.holdings`."""
        return self._lender.holdings()


class Door:
    """The agent's unix socket."""

    def __init__(self, world: Any, path: str, process: Process, verbs: Verbs) -> None:
        self._world = world
        self._path = path
        self._process = process
        self._verbs = verbs
        self._last_owner = 0
        self.connections: dict[int, Connection] = {}

    def open(self) -> None:
        """Accept engines from now on."""
        self._world.local.servers[self._path] = (self._process, self._accept)

    def _accept(self, sock: SimSocket) -> None:
        self._last_owner += 1
        connected: Any = sock
        connection = Connection(self._last_owner, connected, self._verbs, self._attached, self._gone)
        self.connections[self._last_owner] = connection
        connection.start()

    @staticmethod
    def _attached(_connection: Connection, _tenant: str) -> bool:
        return True  # Few engines: there are places for all.

    def _gone(self, connection: Connection) -> None:
        self.connections.pop(connection.attachment.owner, None)
