"""An agent's start over what its last run left: from the start of the process until all blocks are entered.

Blocks are small (4 KiB), because the start depends on their number, not on their bytes: none are read. Every start is a
new process that enters them, reads and verifies one of them, tells its figures and is killed with SIGKILL. The limit is
a process that imports the same and stops. Lasting memory is left as by a kill, NVMe with an index of all records.
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

from prometheus_client import CollectorRegistry

from bench.harness import common, demo_start
from bench.harness.agent_process import make_node
from bench.harness.common import REPEATS_MIN, Result, Sample, publish, table, time_ratio
from bench.harness.identity import POOL, SECRET
from kvstrata_agent.app.main import tame_collector
from kvstrata_agent.backends.base import Record, TierBackend, Writing
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.file.record_store import RecordStore
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts
from kvstrata_agent.backends.record.layout import HEADER_BYTES
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_api import __version__
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.units import MIB
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

BLOCKS: Final = 1_000_000
BLOCKS_QUICK: Final = 50_000
BLOCK_BYTES: Final = 4096
CHAIN_BLOCKS: Final = 512
"""Blocks of one prompt of 8,192 tokens."""
WRITE_BLOCKS: Final = 256
"""Written at a time."""
DRAM_MEDIUM: Final = "dram"
NVME: Final = "nvme"
MEDIA: Final = (DRAM_MEDIUM, NVME)
MEMORY: Final = Path("/dev/shm")  # noqa: S108  A directory of our own is made below it.
DRAM: Final = HostDramTier.model_validate({"pageSize": "4Ki", "persistence": "AgentRestart"})


async def open_at(medium: str, directory: Path, capacity_bytes: int) -> TierBackend:
    """The tier in its directory."""
    if medium == NVME:
        return await open_nvme(NvmeTier(path=str(directory)), POOL, "bench", capacity_bytes)
    return open_host_dram(DRAM, capacity_bytes, (), PersistenceRoot(directory, "bench", "bench", read_mounts(), "dram"))


def capacity_of(medium: str, blocks: int) -> int:
    """Room for that many blocks, with some to spare."""
    slot_bytes = BLOCK_BYTES + (HEADER_BYTES if medium == NVME else 0)
    return blocks * slot_bytes * 5 // 4 + 64 * MIB


async def write(medium: str, directory: Path, blocks: int) -> None:
    """Leave blocks behind, as an agent does that is killed."""
    backend = await open_at(medium, directory, capacity_of(medium, blocks))
    for start in range(0, blocks, WRITE_BLOCKS):
        writings = [_writing(backend, number) for number in range(start, min(blocks, start + WRITE_BLOCKS))]
        if isinstance(backend, RecordStore):
            ends = await backend.write_group(writings)
            assert all(isinstance(end, Record) for end in ends), ends
        else:
            for one in writings:
                await backend.write(one.slot, one.record, one.stored)
    if isinstance(backend, RecordStore):
        await backend.write_index()


def _writing(backend: TierBackend, number: int) -> Writing:
    digest = (number + 1).to_bytes(KEY_BYTES, "big")
    parent = number.to_bytes(KEY_BYTES, "big") if number % CHAIN_BLOCKS else b""
    slot = backend.reserve(SECRET.scope, BLOCK_BYTES)
    content = number.to_bytes(8, "little") * (BLOCK_BYTES // 8)
    key, layout = BlockKey(SECRET.scope, digest), LayoutId(bytes(LAYOUT_ID_BYTES))
    bound = checksum(content, digest, 1, slot.stamp)
    return Writing(slot, memoryview(content), Record(key, parent, layout, "raw", BLOCK_BYTES, BLOCK_BYTES, bound, 1))


async def start(directory: Path, blocks: int, medium: str = DRAM_MEDIUM) -> dict[str, float]:
    """Enter what is there, read one block, and tell what it cost."""
    tame_collector()
    node = make_node(4 * MIB, "4Ki")
    node.tiers.clear()
    node.announcer = Announcer(node.index, _directory(node), {SECRET.scope: SECRET}.get)

    async def make(tier: NodeTier) -> TierBackend:
        return await open_at(medium, directory, tier.capacity_bytes)

    before = resource.getrusage(resource.RUSAGE_SELF)
    await Provisioner(node, make, 1 << 50).apply([_spec(medium, directory, capacity_of(medium, blocks))])
    node.announcer.flush()
    after = resource.getrusage(resource.RUSAGE_SELF)
    entry = node.index.find(SECRET.scope, blocks.to_bytes(KEY_BYTES, "big"))
    assert entry is not None
    entered = len(node.index.blocks(SECRET.scope))  # A start that was killed may have left blocks of its probe.
    assert entered == blocks, f"{entered} of {blocks} entered"
    copy = entry.residences[0]
    await copy.tier.backend.read(copy.slot, copy.record, memoryview(bytearray(BLOCK_BYTES)))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "anonymous_bytes": float(common.own_bytes())}


def _directory(node: Node) -> RedisDirectory:
    """The directory of an agent that has not begun to talk to Redis, as at every start."""

    async def away() -> RedisAccess:
        raise DirectoryAwayError("it is not started")

    record = AgentRecord(f"{node.pool}.{node.name}", node.epoch, "127.0.0.1:1")
    return RedisDirectory(record, away, node.announcer.holdings, Instruments(AGENT, CollectorRegistry()))


def _spec(medium: str, directory: Path, capacity_bytes: int) -> NodeTier:
    if medium == NVME:
        nvme = NvmeTier(path=str(directory))
        return NodeTier(name=medium, type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=nvme)
    return NodeTier(name=medium, type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=DRAM)


def timed(what: str, medium: str, directory: Path, blocks: int) -> tuple[float, dict[str, float]]:
    """Run one process until it tells its figures, then kill it; returns the seconds and the figures."""
    command = [sys.executable, "-m", "bench.startup", "--work", what, "--media", medium, "--directory", str(directory)]
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
        asyncio.run(_write_and_stay(chosen.media[0], chosen.directory, chosen.blocks))
    elif chosen.work == "start":
        told = asyncio.run(start(chosen.directory, chosen.blocks, chosen.media[0]))
    _tell(told)


async def _write_and_stay(medium: str, directory: Path, blocks: int) -> None:
    await write(medium, directory, blocks)
    _tell({})  # Within the loop, whose end would close the tier.


def _tell(told: Any) -> None:
    print(json.dumps(told), flush=True)
    time.sleep(60)  # Killed long before.


def measure(medium: str, directory: Path, blocks: int) -> tuple[Sample, Sample, dict[str, float]]:
    """Seconds of processes that only import and of starts, which take turns, and the figures of a medium."""
    timed("write", medium, directory, blocks)
    bare, ours, cpu_s, told = [], [], [], dict[str, float]()
    for _ in range(REPEATS_MIN):
        bare.append(timed("nothing", medium, directory, blocks)[0])
        took_s, told = timed("start", medium, directory, blocks)
        ours.append(took_s)
        cpu_s.append(told["cpu_s"])
    imports, starts, million = Sample(tuple(bare)), Sample(tuple(ours)), BLOCKS / blocks
    prefix = "" if medium == DRAM_MEDIUM else f"{medium}_"
    values = {
        f"{prefix}agent_restart_s_per_million": (starts.spread[1] - imports.spread[1]) * million + imports.spread[1],
        f"{prefix}restart_cpu_s_per_million": min(cpu_s) * million,
        f"{prefix}agent_bytes_per_block": told["anonymous_bytes"] / blocks,
    }
    return imports, starts, values


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--blocks", type=int, help=f"default: {BLOCKS}, or {BLOCKS_QUICK} when quick")
    parser.add_argument("--media", nargs="+", choices=MEDIA, default=MEDIA, help="what holds the blocks; default: all")
    parser.add_argument("--directory", type=Path, help="of the NVMe tier; default: one for temporary files")
    parser.add_argument("--work", choices=("write", "start", "nothing"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    if chosen.work:
        work(chosen)
        return
    blocks = chosen.blocks or (BLOCKS_QUICK if chosen.quick else BLOCKS)
    rows, ratios, values = [], dict[str, float | None](), {"blocks": float(blocks)}
    for medium in chosen.media:
        below = chosen.directory if medium == NVME else MEMORY
        with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=below) as name:
            imports, starts, found = measure(medium, Path(name), blocks)
        values |= found
        ratios["start_vs_imports" if medium == DRAM_MEDIUM else f"{medium}_start_vs_imports"] = time_ratio(
            starts, imports
        )
        for who, sample in ((f"imports only, beside {medium}", imports), (f"{blocks} blocks in {medium}", starts)):
            rows.append((who, *(f"{v:.2f}" for v in sample.spread)))
    versions = {"kvstrata": __version__, "demo": "absent: not in a quick run"}
    if not chosen.quick:
        found, versions["demo"] = demo_start.measure()
        values |= found
        rows += [(name.removesuffix("_s").replace("_", " "), "", f"{v:.2f}", "") for name, v in found.items()]
    print(table(("start, s", "min", "median", "max"), rows))
    publish(Result("startup", bool(chosen.quick), versions, ratios, values), chosen.json)


if __name__ == "__main__":
    main()
