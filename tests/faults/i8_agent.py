"""One incarnation of an agent for I8, in a process of its own: real tiers of memory and NVMe, socket, peer listener.

It lives in a directory that outlives it, does what its maker says, and ends as its maker wants: closed or killed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.process import next_epoch
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.memory import ledger
from kvstrata_agent.backends.memory import persistent_extents as lasting
from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts
from kvstrata_agent.backends.registry import Place, make_backend
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_agent.serve.server import Server
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import NodeTier, TierProbe
from kvstrata_api.tiers import TierType
from kvstrata_api.trust import Identity
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_node.discovery import discover
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, TestCodecs, caller, make_node
from support.agent.thread import make_verbs
from support.nursery import Channel

DRAM_BYTES: Final = 1024 * BLOCK_BYTES
NVME_BYTES: Final = 4096 * BLOCK_BYTES
FACTS: Final = discover()

DEFECTS: Final[Mapping[str, Callable[[], Any]]] = {
    "": nullcontext,
    "epoch stays": lambda: mock.patch(f"{__name__}.next_epoch", return_value=7),
    "writers overlooked": lambda: mock.patch.object(lasting, "has_writers", return_value=False),
    "drops forgotten": lambda: mock.patch.object(ledger.Ledger, "drop", return_value=None),
}
"""Seeded ones by name; the empty name is none."""


def live(channel: Channel, *, root: str, defect: str) -> None:
    """Serve until a message ends it, or it is killed."""
    logging.disable(logging.WARNING)  # Void leases are asked for on purpose.
    with DEFECTS[defect](), mock.patch("kvstrata_agent.provision.provisioner.probe", _unmeasured):
        asyncio.run(_serve(channel, Path(root)))


async def _unmeasured(backend: TierBackend, block_bytes: int) -> TierProbe:
    """Measuring the tiers would take most of the time of a thousand lives."""
    return TierProbe()


def _tiers(root: Path) -> list[NodeTier]:
    dram = HostDramTier(page_size="4Ki", persistence="AgentRestart")
    nvme = NvmeTier(path=str(root / "nvme"), io="Posix")
    return [
        NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=DRAM_BYTES, host_dram=dram),
        NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=NVME_BYTES, nvme=nvme),
    ]


async def _serve(channel: Channel, root: Path) -> None:
    epoch = next_epoch(root / "state", time.time())
    node = make_node([], policy={"admission": {"type": "Always"}})
    node.epoch, node.clock = epoch, time.monotonic
    core = AgentParts(node, TestCodecs())
    place = Place("pool", "node", FACTS, persistence=PersistenceRoot(root / "memory", "pool", "node", read_mounts()))
    provisioner = Provisioner(node, partial(make_backend, place=place), 1 << 40)
    await provisioner.apply(_tiers(root))
    callers = FakeAuthenticator(a=caller("a", expires_s=1e9))
    server = Server(root / "agent.sock", make_verbs(core, callers))
    server.start()
    listener = PeerListener("127.0.0.1")
    await listener.serve(AgentRecord("pool.node", epoch, listener.address), core.lender, _anybody, None, tls=None)
    sweeping = asyncio.create_task(Sweeper(core.cache, callers).run())
    recovered = {tier.name: tier.recovered_blocks for tier in node.tiers}
    channel.say({"epoch": epoch, "recovered": recovered, "address": listener.address})
    await _obey(channel, core)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    await server.close()
    await listener.close()
    await core.close()
    await provisioner.close()


async def _anybody(token: str, agent: str) -> Identity:
    return Identity("kvstrata-system", "kvstrata-agent")


async def _obey(channel: Channel, core: AgentParts) -> None:
    """Do what is asked until the end is."""
    while True:
        verb, digests = await asyncio.to_thread(channel.hear, 600.0)
        if verb == "stop":
            return
        for digest in map(bytes.fromhex, digests):
            entries = [e for e in core.node.index if e.digest == digest]
            for entry in entries:
                await _do(verb, core, entry)
        channel.say("done")


async def _do(verb: str, core: AgentParts, entry: Any) -> None:
    dram, nvme = core.node.tier("dram"), core.node.tier("nvme")
    assert dram is not None
    assert nvme is not None
    if verb == "sink":
        if entry.residence(nvme) is None:
            await core.cache.demoter.demote_to(entry, dram, nvme, Priority.DEMOTE)
        if entry.residence(nvme) is not None and entry.residence(dram) is not None:
            core.node.evict([entry], dram, "test")
    elif verb == "drop":
        core.node.drop_block(entry, "test")
