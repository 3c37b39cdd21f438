"""One simulated node: the real agent, put together as its process does, and what outlives it."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from prometheus_client import CollectorRegistry

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import Capabilities, TierBackend
from kvstrata_agent.backends.memory.arena import ALIGNMENT_BYTES, Arena
from kvstrata_agent.backends.memory.extent_store import VolatileStore
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.tenants import ScopeMemory
from kvstrata_agent.cache.session_journal import SessionJournal
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_agent.fleet.directory.nominations import HINTS_POLL_INTERVAL_S, EvictionHints
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.provision import provisioner as provision
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_agent.provision.recovery import KEY_POLL_INTERVAL_S, AwaitedKeys
from kvstrata_agent.serve.authorization import Attaching
from kvstrata_agent.serve.session_verbs import SessionVerbs
from kvstrata_api.models.pool import HostDramTier, KVPoolSpec, NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_kube.leases import Lease
from kvstrata_kube.tasks import repeat
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from sim.disk import Disk
from sim.door import Door, WatchedLender, WatchedVerbs
from sim.keys import SimKeys
from sim.memory import SimExtent
from sim.nixl import SimNixl
from sim.process import Process
from sim.shadow import Shadow, WatchedNode
from sim.store import SimStore
from sim.tenancy import SimAuthenticator, SimTenants
from support.agent.doubles import LAYOUT, TestCodecs, pool_spec

POOL: Final = "pool"
LEASE_S: Final = 15.0
RENEW_S: Final = 5.0
MEMORY_BYTES: Final = 1 << 40
EPOCH_BITS: Final = 14
IDLE_S: Final = 2
"""Surplus copies that nobody used for so long may go."""


@dataclass(slots=True)
class Sizes:
    """Capacity of a node's tiers, in bytes."""

    dram_bytes: int
    nvme_bytes: int


@dataclass(slots=True)
class Settings:
    """What one seed declares of the pool."""

    sizes: Sizes
    compression: str = "None"
    admission: str = "Always"
    has_nixl: bool = True
    is_sealed: bool = False
    """Whether disks are encrypted; drawn apart, so that runs without are as before."""


@cache
def instruments() -> Instruments:
    """One set for each process: making one takes longer than many operations."""
    return Instruments(AGENT, CollectorRegistry())


class SimDirectory(RedisDirectory):
    """The real directory, over a simulated Redis."""

    world: Any

    def open_store(self, access: RedisAccess) -> Store:  # type: ignore[override]  # noqa: ARG002
        """Open a simulated connection."""
        return SimStore(self.world.redis_link)


@dataclass(slots=True)
class Host:
    """A node: its disk and the agent that runs there, if any."""

    world: Any
    name: str
    disk: Disk
    sizes: Sizes
    is_draining: bool = False
    boots: int = 0
    agent: "SimAgent | None" = None
    renewed: int = 0
    """Moves on with every renewal of the agent's Kubernetes Lease."""
    released: bool = False
    is_abandoned: bool = False
    journal: SessionJournal = field(default_factory=SessionJournal)
    """What the node's agents remember of sessions across restarts."""

    @property
    def path(self) -> str:
        """Socket of the node's agent."""
        return f"/sim/{self.name}.sock"

    def lease(self) -> Lease:
        """The agent's Kubernetes Lease as the API server shows it."""
        holder = "" if self.released else self.name
        return Lease(f"kvstrata-agent.{POOL}.{self.name}", holder, str(self.renewed), LEASE_S)

    def boot(self) -> None:
        """Start an agent under the node's name, with a new epoch."""
        self.boots += 1
        self.agent = SimAgent(self.world, self)


class SimAgent:
    """One incarnation of an agent."""

    def __init__(self, world: Any, host: Host) -> None:
        self.world = world
        self.host = host
        self.process = Process(world.loop, host.name)
        self.epoch = host.boots << EPOCH_BITS | world.rng.getrandbits(EPOCH_BITS)
        self.shadow = Shadow(world, host.name, self.epoch)
        self.is_serving = False
        self.process.call(self._build)
        self.process.root(self._run(), world)

    def _build(self) -> None:
        """Make the parts, as `AgentProcess` does."""
        world, name = self.world, self.host.name
        settings: Settings = world.settings
        self.authenticator = SimAuthenticator(world.tenancy)
        self.keys = SimKeys(world.tenancy) if settings.is_sealed else None
        self.listener = PeerListener("10.0.0.1", 0)
        record = AgentRecord(f"{POOL}.{name}", self.epoch, self.listener.address)
        self.record = record
        index = Index(in_use_max=4)
        self.scopes = ScopeMemory(self.authenticator.secret)
        self.directory = SimDirectory(record, _access, self._holdings, instruments())
        self.directory.world = world
        self.nixl = SimNixl(world.nixl, f"{name}#{self.epoch}", self.process) if settings.has_nixl else None
        nixl: Any = self.nixl
        self.peers = RemotePeers(record.agent, self.directory.peer, _token, nixl, instruments(), tls=None)
        self.node = WatchedNode(
            pool=POOL,
            name=name,
            epoch=self.epoch,
            spec=_spec(settings.compression, settings.admission),
            clock=world.loop.time,
            index=index,
            counters=Counters(instruments(), POOL, name),
            announcer=Announcer(index, self.directory, self.scopes.secret),
        )
        self.advice = EvictionHints(self.node, self.directory, self.scopes)
        self.node.shadow = self.shadow
        self.shadow.node = self.node
        self.host.journal.wall = world.loop.time
        self.core = AgentParts(self.node, TestCodecs(), self.directory, self.peers, self.host.journal)
        self.core.cache.tenancy.follow(SimTenants(world.tenancy))
        self.provisioner = Provisioner(self.node, self._make_tier, MEMORY_BYTES)
        attaching = Attaching(self.node, self.authenticator)
        self.verbs = WatchedVerbs(self.core.cache, attaching, SessionVerbs(self.core.cache, attaching))
        self.verbs.shadow, self.verbs.world = self.shadow, world
        self.lender = WatchedLender(self.core.lender, self.shadow, world)
        self.sweeper = Sweeper(self.core.cache, self.authenticator)
        self.door = Door(world, self.host.path, self.process, self.verbs)

    def _holdings(self) -> Iterable[Any]:
        return self.core.lender.holdings()

    async def _make_tier(self, spec: NodeTier) -> TierBackend:
        backend: TierBackend
        if spec.type is TierType.HOST_DRAM:
            store = VolatileStore(SimExtent)  # type: ignore[arg-type]
            backend = Arena(_MEMORY, spec.capacity_bytes, store, page_bytes=ALIGNMENT_BYTES)
        else:
            backend = await self.host.disk.open(spec.capacity_bytes, self.keys)
        self.shadow.watch(backend)
        return backend

    def tiers(self) -> tuple[NodeTier, ...]:
        """As declared for the node now."""
        return _tiers(self.host.sizes.dram_bytes, self.host.sizes.nvme_bytes)

    async def _run(self) -> None:
        """Serve until killed."""
        await self.provisioner.apply(self.tiers())
        lender: Any = self.lender
        nixl: Any = self.nixl
        await self.listener.serve(self.record, lender, self.authenticator.verify_peer, nixl, tls=None)
        self.directory.start()
        self.door.open()
        self.is_serving = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sweeper.run())
            group.create_task(repeat("advice", HINTS_POLL_INTERVAL_S, self.advice.poll))
            group.create_task(self._renew())
            group.create_task(self._follow())
            if self.keys is not None:
                group.create_task(repeat("latecomers", KEY_POLL_INTERVAL_S, AwaitedKeys(self.node, self.keys).poll))

    async def _renew(self) -> None:
        while True:
            if not self.world.is_api_away:
                self.host.renewed += 1
                self.host.released = False
            await asyncio.sleep(RENEW_S)

    async def _follow(self) -> None:
        while True:
            self.node.is_draining = self.host.is_draining
            await self.provisioner.apply(self.tiers())
            await asyncio.sleep(1.0)

    def kill(self, *, is_power_lost: bool = False) -> None:
        """End as SIGKILL does, or as a node that loses power."""
        self.process.kill()
        if is_power_lost:
            self.host.disk.lose_power()
        else:
            self.host.disk.lose_process()
        self.shadow.die()
        self.is_serving = False


_MEMORY: Final = Capabilities(
    medium="simulated", is_memory=True, survives_restart=False, is_emulated=True, alignment_bytes=ALIGNMENT_BYTES
)


@cache
def _spec(compression: str, admission: str) -> KVPoolSpec:
    retention = {"idle_seconds": IDLE_S}
    return pool_spec(compression={"mode": compression}, admission={"type": admission}, retention=retention)


@cache
def _tiers(dram_bytes: int, nvme_bytes: int) -> tuple[NodeTier, ...]:
    dram, nvme = HostDramTier(page_size="4Ki"), NvmeTier(path="/nowhere")
    return (
        NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=dram_bytes, host_dram=dram),
        NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=nvme_bytes, nvme=nvme),
    )


async def _access() -> RedisAccess:
    return RedisAccess("redis://sim:1")


async def _token() -> str:
    return "peer"


async def _no_probe(*_: object) -> None:
    return None


def install() -> None:
    """Keep provisioning off the machine's disks and clocks."""
    changed: Any = provision
    changed.probe = _no_probe
    changed.disk_bytes = lambda _: {}
    assert LAYOUT.block_bytes == ALIGNMENT_BYTES
