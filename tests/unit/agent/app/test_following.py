"""Law of an agent's reports: a revision is told of once it was carried out, not once it was read."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata_agent.app import config
from kvstrata_agent.app.offload_engine import OffloadEngine
from kvstrata_agent.app.peering import in_cluster
from kvstrata_agent.app.process import AgentProcess
from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.policy.removal import Presence
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.conditions import find
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import KVPoolNode, KVPoolNodeSpec, KVPoolNodeStatus, NodeDrain, NodeTier
from kvstrata_native.offload import KERNELS
from kvstrata_node.discovery import discover
from support.agent.doubles import DictBackend, dict_tier, make_core

if TYPE_CHECKING:
    from kvstrata_agent.app.peering import FleetWorld, PeerNetwork
    from kvstrata_agent.serve.server import Server

pytestmark = pytest.mark.unit

MIB = 1 << 20


def pool_node(generation: int, *tiers: NodeTier, drains: bool = False, uid: str = "uid") -> KVPoolNode:
    meta = ObjectMeta(name="p.n", generation=generation, uid=uid)
    drain = NodeDrain(requested=drains)
    spec = KVPoolNodeSpec(pool_ref="p", node_name="n", tiers=tiers, revision=f"r{generation}", drain=drain)
    return KVPoolNode(metadata=meta, spec=spec)


class Running:
    """The loops of a process that follow and report, over a tier whose opening is held up."""

    def __init__(self, folder: Path) -> None:
        self.opens = asyncio.Event()
        self.core = make_core([])
        self.provisioner = Provisioner(self.core.node, self._open, 64 * MIB)
        self.told: list[KVPoolNodeStatus] = []
        pool = KVPool(metadata=ObjectMeta(name="p"), spec=self.core.node.spec)
        self.desired = SimpleNamespace(
            pool=pool,
            is_withdrawn=False,
            answers=(),
            refused=(),
            report=None,
            pool_node=pool_node(1),
            pool_presence=Presence.PRESENT,
            deletion_policy="Retain",
        )
        status = SimpleNamespace(report=self.told.append)
        self.world = cast(
            "FleetWorld", SimpleNamespace(desired=self.desired, status=status, keyring=None, read_secret=None)
        )
        named = ["--pool", "p", "--node", "n", "--socket", str(folder / "s"), "--state-dir", str(folder)]
        self.process = AgentProcess(config.parse(named), in_cluster)
        self.process._facts = discover()
        self.process._offload = OffloadEngine(KERNELS, self.process._counters)

    async def _open(self, spec: NodeTier) -> TierBackend:
        await self.opens.wait()
        return DictBackend(spec.capacity_bytes)

    async def follow(self) -> None:
        await self.process._follow(self.world, self.core, self.provisioner)

    async def report(self) -> KVPoolNodeStatus | None:
        """What the next look makes of it."""
        self.told.clear()
        network = cast("PeerNetwork", SimpleNamespace(state=DirectoryState.ANSWERS, backlog=0, address="127.0.0.1:1"))
        server: Any = SimpleNamespace(refresh=lambda: None, connections=0)
        looking = asyncio.create_task(
            self.process._keep_reporting(self.world, self.core, self.provisioner, network, cast("Server", server))
        )
        await asyncio.sleep(0)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        return self.told[0] if self.told else None


async def test_a_revision_is_told_of_once_its_tiers_were_opened(tmp_path: Path) -> None:
    running = Running(tmp_path)
    await running.follow()
    tier = dict_tier("nvme", 4 * MIB, 0, 1).spec
    running.desired.pool_node = pool_node(2, tier)
    following = asyncio.create_task(running.follow())
    await asyncio.sleep(0)

    told = await running.report()
    assert told is not None
    assert (told.observed_generation, told.observed_revision) == (1, "r1")

    running.opens.set()
    await following
    told = await running.report()
    assert told is not None
    assert (told.observed_generation, told.observed_revision) == (2, "r2")
    assert [t.name for t in told.tiers] == ["nvme"]


@pytest.mark.parametrize("drains", [True, False])
async def test_nothing_is_said_of_a_drain_that_was_not_followed(tmp_path: Path, *, drains: bool) -> None:
    """Neither that it is over while blocks are still taken, nor that blocks are taken while it goes on."""
    running = Running(tmp_path)
    running.desired.pool_node = pool_node(1, drains=not drains)
    await running.follow()
    running.desired.pool_node = pool_node(2, drains=drains)

    for generation in (1, 2):
        told = await running.report()
        assert told is not None
        said = find(told.conditions, "Draining")
        assert said is not None
        assert (said.reason == "Drained") == running.core.node.is_draining
        assert told.observed_generation == generation
        await running.follow()


async def test_memory_of_a_removed_tier_that_stays_is_logged_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(tmp_path)
    place = tmp_path / "memory" / "p" / "gone" / "n" / "memory-place"
    place.mkdir(parents=True)  # Not the file that it should be: nobody can read where that memory is.

    await running.follow()

    (line,) = (r.__dict__ for r in caplog.records if r.msg == "memory stays")
    assert (line["path"], line["cause"]) == (str(place), "Is a directory")
    status = await running.report()
    assert status is not None
    assert status.observed_generation == 1


async def test_of_an_object_that_is_new_under_its_name_nothing_is_said_before_it_was_followed(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.desired.pool_node = pool_node(5)
    await running.follow()
    running.desired.pool_node = pool_node(1, uid="another")

    assert await running.report() is None
    await running.follow()
    told = await running.report()
    assert told is not None
    assert told.observed_generation == 1
