"""An agent's start over warm memory: from the start of the process until all blocks of its last run are entered.

Blocks are small (4 KiB), because the start depends on their number, not on their bytes: none are read. Every start is a
new process that enters them, reads and verifies one of them, tells its figures and is killed with SIGKILL. The limit is
a process that imports the same and stops.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench import common
from bench.agent_process import make_node
from bench.common import REPEATS_MIN, Result, Sample, publish, table, time_ratio
from bench.identity import SECRET
from kvfleet_agent.app import tame_collector
from kvfleet_agent.backends.arena import Arena
from kvfleet_agent.backends.base import Record, TierBackend
from kvfleet_agent.backends.home import Home
from kvfleet_agent.backends.host_dram import open_host_dram
from kvfleet_agent.backends.mounts import read_mounts
from kvfleet_agent.provision import Provisioner
from kvfleet_api import __version__
from kvfleet_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId
from kvfleet_api.checksum import checksum
from kvfleet_api.models.pool import HostDramTier
from kvfleet_api.models.poolnode import NodeTier
from kvfleet_api.tiers import TierType
from kvfleet_api.units import MIB

BLOCKS: Final = 1_000_000
BLOCKS_QUICK: Final = 50_000
BLOCK_BYTES: Final = 4096
CHAIN_BLOCKS: Final = 512
"""Blocks of one prompt of 8,192 tokens."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108  A directory of our own is made below it.
DRAM: Final = HostDramTier.model_validate({"pageSize": "4Ki", "persistence": "AgentRestart"})


def open_at(directory: Path, capacity_bytes: int) -> Arena:
    """The tier in its directory."""
    return open_host_dram(DRAM, capacity_bytes, (), Home(directory, "bench", "bench", read_mounts(), "dram"))


def capacity_of(blocks: int) -> int:
    """Room for that many blocks, with some to spare."""
    return blocks * BLOCK_BYTES * 5 // 4 + 64 * MIB


def write(directory: Path, blocks: int) -> None:
    """Leave blocks behind, as an agent does that is killed."""
    arena = open_at(directory, capacity_of(blocks))
    parent = b""
    for i in range(blocks):
        digest = (i + 1).to_bytes(KEY_BYTES, "big")
        slot = arena.reserve(SECRET.scope, BLOCK_BYTES)
        content = i.to_bytes(8, "little") * (BLOCK_BYTES // 8)
        arena.view(slot)[:] = content
        bound = checksum(content, digest, 1, slot.stamp)
        key = BlockKey(SECRET.scope, digest)
        layout = LayoutId(bytes(LAYOUT_ID_BYTES))
        arena.commit(slot, Record(key, parent, layout, "raw", BLOCK_BYTES, BLOCK_BYTES, bound, 1))
        parent = digest if (i + 1) % CHAIN_BLOCKS else b""


async def start(directory: Path, blocks: int) -> dict[str, float]:
    """Enter what is there, read one block, and tell what it cost."""
    tame_collector()
    node = make_node(4 * MIB, "4Ki")
    node.tiers.clear()

    async def make(tier: NodeTier) -> TierBackend:
        return open_at(directory, tier.capacity_bytes)

    spec = NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=capacity_of(blocks), host_dram=DRAM)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await Provisioner(node, make, 1 << 50).apply([spec])
    after = resource.getrusage(resource.RUSAGE_SELF)
    entry = node.index.find(SECRET.scope, blocks.to_bytes(KEY_BYTES, "big"))
    assert entry is not None
    assert len(node.index) == blocks
    copy = entry.residences[0]
    await copy.tier.backend.read(copy.slot, copy.record, memoryview(bytearray(BLOCK_BYTES)))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "anonymous_bytes": float(common.own_bytes())}


def timed(what: str, directory: Path, blocks: int) -> tuple[float, dict[str, float]]:
    """Run one process until it tells its figures, then kill it; returns the seconds and the figures."""
    command = [sys.executable, "-m", "bench.startup", "--work", what, "--directory", str(directory)]
    started_s = time.perf_counter()
    with subprocess.Popen([*command, "--blocks", str(blocks)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told: dict[str, float] = json.loads(process.stdout.readline())
        took_s = time.perf_counter() - started_s
        process.kill()
    return took_s, told


def work(chosen: argparse.Namespace) -> None:
    """Be the process that is measured."""
    told: Any = {}
    if chosen.work == "write":
        write(chosen.directory, chosen.blocks)
    elif chosen.work == "start":
        told = asyncio.run(start(chosen.directory, chosen.blocks))
    print(json.dumps(told), flush=True)
    time.sleep(60)  # Killed long before.


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--blocks", type=int, help=f"default: {BLOCKS}, or {BLOCKS_QUICK} when quick")
    parser.add_argument("--work", choices=("write", "start", "nothing"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    if chosen.work:
        work(chosen)
        return
    blocks = chosen.blocks or (BLOCKS_QUICK if chosen.quick else BLOCKS)
    with tempfile.TemporaryDirectory(prefix="kvfleet-bench-", dir=MEMORY) as name:
        directory = Path(name)
        timed("write", directory, blocks)
        empty = [timed("nothing", directory, blocks)[0] for _ in range(REPEATS_MIN)]
        starts = [timed("start", directory, blocks) for _ in range(REPEATS_MIN)]
    bare, ours = Sample(tuple(empty)), Sample(tuple(took_s for took_s, _ in starts))
    rows = [(who, *(f"{v:.2f}" for v in s.spread)) for who, s in (("imports only", bare), (f"{blocks} blocks", ours))]
    print(table(("start, s", "min", "median", "max"), rows))
    million = BLOCKS / blocks
    values = {
        "agent_restart_s_per_million": (ours.spread[1] - bare.spread[1]) * million + bare.spread[1],
        "restart_cpu_s_per_million": min(told["cpu_s"] for _, told in starts) * million,
        "agent_bytes_per_block": starts[0][1]["anonymous_bytes"] / blocks,
        "blocks": float(blocks),
    }
    ratios = {"start_vs_imports": time_ratio(ours, bare)}
    publish(Result("startup", bool(chosen.quick), {"kvfleet": __version__}, ratios, values), chosen.json)


if __name__ == "__main__":
    main()
