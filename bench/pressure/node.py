"""The agent under pressure: HostDRAM above NVMe as the provisioner makes and resizes them, with its unix socket.

It notes how long requests for blocks take, and how late its own loop comes round. The only stand-in is the
authenticator, which knows one identity. Verbs come as lines on stdin (`resize`, `facts`); the process ends with stdin.
"""

import argparse
import asyncio
import ctypes
import json
import math
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.harness.agent_process import OneIdentity, make_node
from bench.harness.common import own_bytes
from bench.harness.identity import POOL
from kvstrata_agent.app.main import tame_collector
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.registry import Place, make_backend
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_agent.serve.authorization import Attaching
from kvstrata_agent.serve.server import Server
from kvstrata_agent.serve.session_verbs import SessionVerbs
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_api import wire
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.units import MIB
from kvstrata_node.discovery import discover

NODE = "bench"
BEAT_S = 0.02
STEP = 1.05
LEAST_S = 1e-6


class Durations:
    """How often durations came, by twentieths more each: a quantile is at most that much too high. No memory grows."""

    def __init__(self) -> None:
        self._counts = [0] * 400
        self.count = 0

    def note(self, duration_s: float) -> None:
        """Count one; what takes longer than 300 s counts as that."""
        at = int(math.log(max(duration_s, LEAST_S) / LEAST_S, STEP))
        self._counts[min(at, len(self._counts) - 1)] += 1
        self.count += 1

    def quantile_s(self, part: float) -> float:
        """Upper bound of the duration that such a part does not exceed; 0.0 before the first."""
        passed = accumulate(self._counts)
        at = next((i for i, seen in enumerate(passed) if seen and seen >= part * self.count), -1)
        return LEAST_S * STEP ** (at + 1) if at >= 0 else 0.0


class TimedVerbs(Verbs):
    """Notes how long blocks were asked for."""

    acquires: Durations

    def took(self, request: wire.AnyRequest, duration_s: float) -> None:
        """See `Verbs`."""
        super().took(request, duration_s)
        if isinstance(request, wire.Acquire):
            self.acquires.note(duration_s)


class Mallinfo2(ctypes.Structure):
    """What glibc's `mallinfo2` tells, mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


def malloc_bytes() -> tuple[int, int]:
    """Bytes that glibc has given out and not got back, and those that it keeps though they are free; 0 without it."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0, 0
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def tiers_of(directory: Path, dram_bytes: int, nvme_bytes: int) -> list[NodeTier]:
    """Declare both tiers."""
    dram = HostDramTier.model_validate({"pageSize": "4Ki"})
    nvme = NvmeTier(path=str(directory / "nvme"))
    return [
        NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=dram_bytes, host_dram=dram),
        NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=nvme_bytes, nvme=nvme),
    ]


class PressureNode:
    """Everything of the node."""

    def __init__(self, directory: Path) -> None:
        """Make the parts; no tier is there yet."""
        self._directory = directory
        self.node = make_node(4 * MIB, "4Ki", NODE)
        self.node.tiers.clear()
        place = Place(POOL, NODE, discover())

        async def make(tier: NodeTier) -> TierBackend:
            return await make_backend(tier, place)

        self._provisioner = Provisioner(self.node, make, 1 << 50)
        self._core = AgentParts(self.node, CodecRegistry())
        self._authenticator = OneIdentity()
        attaching = Attaching(self.node, self._authenticator)
        verbs = TimedVerbs(self._core.cache, attaching, SessionVerbs(self._core.cache, attaching))
        self._acquires = verbs.acquires = Durations()
        self._held_s = 0.0
        """Longest time for which nobody else had a turn of the loop."""
        self._server = Server(directory / "agent.sock", verbs)

    async def run(self, dram_bytes: int, nvme_bytes: int) -> None:
        """Serve until stdin ends."""
        await self._resize(dram_bytes, nvme_bytes)
        self._server.start()
        sweeping = asyncio.create_task(Sweeper(self._core.cache, self._authenticator).run())
        beating = asyncio.create_task(self._beat())
        print(json.dumps({"versions": {}, **self.facts()}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            if asked["verb"] == "resize":
                await self._resize(asked["dram_bytes"], asked["nvme_bytes"])
            print(json.dumps(self.facts()), flush=True)
        sweeping.cancel()
        beating.cancel()
        await asyncio.wait([sweeping, beating])
        await self._server.close()
        await self._core.close()
        await self._provisioner.close()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(BEAT_S)
            self._held_s = max(self._held_s, loop.time() - before_s - BEAT_S)

    async def _resize(self, dram_bytes: int, nvme_bytes: int) -> None:
        await self._provisioner.apply(tiers_of(self._directory, dram_bytes, nvme_bytes))
        missing = {name: s.error for name, s in self._provisioner.states.items() if s.tier is None}
        assert not missing, missing

    def facts(self) -> dict[str, Any]:
        """What a leak would show in."""
        node = self.node
        malloc_used_bytes, malloc_free_bytes = malloc_bytes()
        return {
            "own_bytes": own_bytes(),
            "malloc_used_bytes": malloc_used_bytes,
            "malloc_free_bytes": malloc_free_bytes,
            "python_blocks": sys.getallocatedblocks(),
            "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "entries": len(node.index),
            "leases": len(node.leases),
            "reservations": len(node.reservations),
            "acquires": self._acquires.count,
            "acquire_s": {f"p{100 * part:g}": self._acquires.quantile_s(part) for part in (0.5, 0.9, 0.99, 0.999)},
            "loop_held_s": self._held_s,
            "used_bytes": {t.name: t.backend.used_bytes for t in node.tiers},
            "capacity_bytes": {t.name: t.backend.capacity_bytes for t in node.tiers},
            "errors": {t.name: t.backend.last_error for t in node.tiers if t.backend.last_error},
        }


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="for the socket and the NVMe tier")
    parser.add_argument("--dram-bytes", type=int, required=True, help="capacity of the memory tier")
    parser.add_argument("--nvme-bytes", type=int, required=True, help="capacity of the NVMe tier")
    chosen = parser.parse_args()
    tame_collector()
    asyncio.run(PressureNode(chosen.directory).run(chosen.dram_bytes, chosen.nvme_bytes))


if __name__ == "__main__":
    main()
