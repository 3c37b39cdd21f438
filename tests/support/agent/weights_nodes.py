"""Nodes with real tiers and the weights of models, joined by the agents' real connections, in one process."""

# ruff: noqa: ARG002  The lender keeps the signatures of what it stands for.

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvstrata_agent.backends import registry
from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.movement.scheduler import MoveScheduler
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_agent.weights.runner import Folders, Models
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeSecret
from kvstrata_api.models.model_cache import ModelSource
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import ModelOrder, ModelReport, NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.trust import Identity
from kvstrata_metadata.store.records import AgentRecord, Announcement
from kvstrata_node.discovery import discover
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import make_node
from support.agent.peer_certificates import Fleet, peer_tls

POOL = "p"
EPOCH = 7
HOST = Path("/mnt/host-memory")
"""What the host calls the memory directory of every node."""


class NoBlocks:
    """A lender without any block."""

    async def lend(
        self, keys: list[BlockKey], layout_id: LayoutId, lease_s: float, tiers: tuple[str, ...] = ()
    ) -> list[None]:
        return [None] * len(keys)

    def trace(self, key: BlockKey, most: int) -> None:
        return None

    def end(self, leases: list[int]) -> None:
        return

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        yield from ()


async def verify(token: str, agent: str) -> Identity:
    assert token == "t"
    return Identity(names.SYSTEM_NAMESPACE, "kvstrata-agent", agent)


@dataclass
class WeightsNode:
    """One node of the pool."""

    name: str
    tier: NodeTier
    root: Path
    """Directory of the tier."""
    models: Models
    provisioner: Provisioner
    peers: RemotePeers
    listener: PeerListener

    async def order(self, source: Path, peers: tuple[str, ...] = (), **more: Any) -> None:
        fields = {"name": "m", "uid": "u", "generation": 1, "tier": self.tier.name, "revision": "r1", "weight": 100}
        made = {"source": ModelSource(url=f"file://{source}"), "idle_seconds": 86_400, "peers": peers, **fields, **more}
        await self.models.follow([ModelOrder.model_validate(made)])

    def report(self, revision: str = "r1") -> ModelReport:
        return next(r for r in self.models.reports() if r.revision == revision)

    async def until(self, fact: Callable[[], bool], within_s: float = 60.0) -> None:
        ends_s = time.monotonic() + within_s
        while not fact():
            assert time.monotonic() < ends_s, self.models.reports()
            await asyncio.sleep(0.02)

    async def staged(self) -> ModelReport:
        await self.until(lambda: self.report().state == "Staged")
        return self.report()

    @property
    def folder(self) -> Path:
        return self.root / names.MODELS_FOLDER / "m" / "r1"


class WeightsFleet:
    """Nodes that find each other by name."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.fleet = Fleet()
        self.nodes: dict[str, WeightsNode] = {}

    async def find(self, agent: str) -> AgentRecord | None:
        node = self.nodes.get(agent.partition(".")[2])
        return AgentRecord(agent, EPOCH, node.listener.address) if node is not None else None

    async def add(
        self, name: str, capacity_bytes: int = 256 << 20, *, root: Path | None = None, memory: Path | None = None
    ) -> WeightsNode:
        """A node with an NVMe tier below `root`; with `memory` that is a folder for a tier of host memory."""
        agent = names.pool_node_name(POOL, name)
        node = make_node([])
        place = registry.Place(POOL, name, await asyncio.to_thread(discover))
        if memory is not None:
            place = replace(place, persistence=PersistenceRoot(memory, POOL, name, read_mounts(), host_directory=HOST))
            tier = NodeTier(
                name="dram",
                type=TierType.HOST_DRAM,
                capacity_bytes=capacity_bytes,
                host_dram=HostDramTier(page_size="4Ki"),
            )
            folder = memory / POOL / "dram"
        else:
            folder = root or self.home / name
            folder.mkdir(exist_ok=True)
            nvme = NvmeTier(path=str(folder))
            tier = NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=nvme)
        provisioner = Provisioner(node, partial(registry.make_backend, place=place), 1 << 30)
        await provisioner.apply([tier])
        tls = peer_tls(self.fleet.agent(agent))

        async def token() -> str:
            return "t"

        peers = RemotePeers(agent, lambda _a, _e: None, token, None, Instruments(AGENT, CollectorRegistry()), tls=tls)
        peers.find = self.find
        models = Models(node, MoveScheduler(node), provisioner, None, peers, Folders(place.persistence))
        listener = PeerListener("127.0.0.1")
        listener.weights = models
        await listener.serve(AgentRecord(agent, EPOCH, listener.address), NoBlocks(), verify, None, tls=tls)  # type: ignore[arg-type]
        made = self.nodes[name] = WeightsNode(name, tier, folder, models, provisioner, peers, listener)
        return made

    async def remove(self, name: str) -> None:
        node = self.nodes.pop(name)
        await node.models.close()
        await node.peers.close()
        await node.listener.close()
        await node.provisioner.close()


@asynccontextmanager
async def weights_fleet(home: Path) -> AsyncIterator[WeightsFleet]:
    made = WeightsFleet(home)
    try:
        yield made
    finally:
        for name in list(made.nodes):
            await made.remove(name)
