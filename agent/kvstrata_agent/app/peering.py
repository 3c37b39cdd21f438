"""The other agents of the pool: the directory that knows what they hold, and the transport that fetches it.

Both are optional at any time: without Redis, without a certificate or without a token for peers this node serves what
it holds itself.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, Protocol

from kvstrata_agent.fleet.directory.cached_client import CachingDirectory
from kvstrata_agent.fleet.directory.nominations import HINTS_POLL_INTERVAL_S, EvictionHints
from kvstrata_agent.fleet.peers.connection import Certified, PeerTls
from kvstrata_agent.fleet.peers.nixl import NixlReader
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_agent.kube.peer_identity import OwnToken, find_agent
from kvstrata_api import names
from kvstrata_api.errors import DirectoryAwayError, UnsupportedError
from kvstrata_kube.certified import OwnCertificate
from kvstrata_kube.tasks import cancel, repeat, supervise
from kvstrata_metadata.store.access import RedisAccess, parse_access
from kvstrata_metadata.store.records import AgentRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AsyncExitStack

    from kvstrata_agent.app.config import Config
    from kvstrata_agent.app.wiring import AgentParts
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tenants import ScopeMemory
    from kvstrata_agent.cache.ports import DirectoryState
    from kvstrata_agent.fleet.peers.server import Lender
    from kvstrata_api.blocks import ScopeSecret
    from kvstrata_api.trust import Identity
    from kvstrata_metadata.store.records import Announcement
    from kvstrata_telemetry.metrics import Instruments

_log = logging.getLogger(__name__)


class Certificate(Certified, Protocol):
    """What shows who this agent is (`kvstrata_kube.certified`), renewed while `run` runs."""

    @property
    def expires_at_s(self) -> float:
        """Wall-clock second at which it ends; 0 while there is none."""

    async def run(self) -> NoReturn:
        """Keep it current, for ever."""


class Membership(Protocol):
    """How this agent is one of a fleet: what it shows to others, how it knows them, and where their directory is."""

    @property
    def namespace(self) -> str:
        """In the names of certificates."""

    @property
    def certificate(self) -> Certificate:
        """Our own."""

    async def token(self) -> str:
        """Return what proves us to other agents beside the certificate.

        Raises a `KvStrataError` while there is none.
        """

    async def verify(self, token: str, agent: str) -> Identity:
        """Accept what `agent` shows; see `fleet.peers.server.VerifyPeer`."""

    async def access(self) -> RedisAccess:
        """Read how to reach the directory. Raises `DirectoryAwayError` while that is unknown."""

    async def find(self, agent: str) -> AgentRecord | None:
        """Return where an agent of another pool is; None where nobody knows."""


class KubeMembership:
    """Implements `Membership` from the API server: certificates that the operator signs, tokens that are reviewed."""

    def __init__(self, config: Config, world: KubeWorld) -> None:
        self._world = world
        self.namespace = config.namespace
        uri = names.agent_uri(config.namespace, names.pool_node_name(config.pool, config.node))
        self.certificate = OwnCertificate(world.api, config.namespace, uri)
        self._token = OwnToken(world.api, config.namespace, config.peer_token)

    async def token(self) -> str:
        """See `Membership.token`."""
        return await self._token.get()

    async def verify(self, token: str, agent: str) -> Identity:
        """See `Membership.verify`."""
        return await self._world.authenticator.verify_peer(token, agent)

    async def find(self, agent: str) -> AgentRecord | None:
        """See `Membership.find`."""
        return await find_agent(self._world.api, agent)

    async def access(self) -> RedisAccess:
        """See `Membership.access`: read again each time from the pool's Secret."""
        redis = self._world.desired.pool.spec.metadata.redis
        name = names.REDIS_SECRET_AGENT if redis.external is None else redis.external.secret_ref.name
        values = await self._world.read_secret(name)
        if values is None:
            raise DirectoryAwayError(f"Secret {name} does not exist yet", delay_s=1.0)
        access = parse_access(values)
        if not access.is_fleet:
            return access
        if self.certificate.credential is None:
            raise DirectoryAwayError("no certificate of our own yet, and Redis wants one", delay_s=1.0)
        return replace(access, contexts=self.certificate.connecting_to_host)


class FleetWorld(KubeWorld):
    """The Kubernetes side of an agent, and the other agents that it finds there."""

    def network(self, config: Config, epoch: int, instruments: Instruments) -> PeerNetwork:
        """See `World.network`."""
        return PeerNetwork(config, KubeMembership(config, self), epoch, instruments)


async def in_cluster(config: Config) -> FleetWorld:
    """Connect to the API server. Raises `UnsupportedError` without credentials."""
    agent = AgentIdentity(config.pool, config.node, config.namespace, config.requires_bound_tokens)
    return await FleetWorld.connect(agent, config.kubeconfig, config.kek_file)


class PeerNetwork:
    """Binds the peer address at once, so that it can be announced; talks to nobody before `start`."""

    def __init__(self, config: Config, membership: Membership, epoch: int, instruments: Instruments) -> None:
        """Raises `OSError` when the peer address cannot be had."""
        self._membership = membership
        self._listener = PeerListener(config.peer_host, config.peer_port)
        self._record = AgentRecord(names.pool_node_name(config.pool, config.node), epoch, self._listener.address)
        self._own = own = membership.certificate
        self._tls = PeerTls(membership.namespace, own)
        expiry = instruments.gauge("kvstrata_certificate_expiry_timestamp_seconds", pool=config.pool, node=config.node)
        expiry.set_function(lambda: own.expires_at_s)
        is_encrypted = config.peer_encryption == "required"
        self._nixl = None if is_encrypted else _start_nixl(self._record.agent, config.peer_host)
        self._lender: Lender | None = None
        self.directory = CachingDirectory(self._record, membership.access, self._holdings, instruments)
        self.peers = RemotePeers(
            self._record.agent, self.directory.peer, membership.token, self._nixl, instruments, tls=self._tls
        )
        self.peers.find = membership.find

    @property
    def address(self) -> str:
        """`host:port` where other agents reach this one."""
        return self._listener.address

    @property
    def state(self) -> DirectoryState:
        """What the directory does for this node."""
        return self.directory.state

    @property
    def backlog(self) -> int:
        """Changes that the directory was not told yet."""
        return self.directory.backlog

    async def start(self, stack: AsyncExitStack, parts: AgentParts) -> None:
        """Answer peers and connect to the directory; `stack` ends both."""
        self._lender = lender = parts.lender
        self.peers.shared = parts.flash
        tasks = [supervise("certificate", self._own.run)]
        stack.push_async_callback(cancel, tasks)
        if self._nixl is not None:
            stack.callback(self._nixl.close)
        stack.push_async_callback(self.peers.close)
        stack.push_async_callback(self._listener.close)
        verify = self._membership.verify
        self._listener.adopter, self._listener.weights = parts.adopter, parts.models
        await self._listener.serve(self._record, lender, verify, self._nixl, tls=self._tls, handovers=parts.handovers)
        self.directory.start()
        stack.push_async_callback(self.directory.close)
        _log.info("listening", extra={"what": "peers", "address": self.address, "nixl": self._nixl is not None})

    async def run(self, node: Node, scopes: ScopeMemory) -> None:
        """Follow what the directory advises to evict, until cancelled."""
        await repeat("advice", HINTS_POLL_INTERVAL_S, EvictionHints(node, self.directory, scopes).poll)

    def _holdings(self) -> Iterable[tuple[ScopeSecret, list[Announcement]]]:
        return self._lender.holdings() if self._lender is not None else []


def _start_nixl(name: str, host: str) -> NixlReader | None:
    try:
        return NixlReader(name, host)
    except UnsupportedError as e:
        _log.info("no NIXL; blocks travel over TCP", extra={"cause": str(e)})
        return None
