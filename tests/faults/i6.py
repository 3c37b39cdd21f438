"""I6: a Redis that lost everything is rebuilt from the agents, in time; nothing wrong is found or freed meanwhile.

Several agents hold the blocks and report them through real directories, reports cut and spread as in the product. One
more node is a real core with memory of its own: its engines go on reading while the directory is away or empty, and no
block of it may move or go. Twice everything is lost: by FLUSHALL, and by a new server at the old address.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from unittest import mock

from prometheus_client import CollectorRegistry

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api.blocks import ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.units import MIB
from kvstrata_metadata.client.announcer import REPORT_JITTER_S
from kvstrata_metadata.client.outbox import Outbox
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import AgentRecord, Announcement, Incarnation
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import BLOCK_BYTES, LAYOUT_ID, SCOPE, TestCodecs, bytes_of, digest, dram_tier, make_node
from support.agent.doubles import secret as secret_of
from support.metadata.directory_fleet import DirectoryFleet
from support.metadata.running_redis import redis_cli
from support.runner.outcome import Outcome, Scale

AGENTS: Final = ("p.a", "p.b", "p.c", "p.d")
LOCAL_BLOCKS: Final = 256
SAMPLE: Final = 500
REBUILD_S_PER_MILLION: Final = 20.0
SHORT_LIMIT_S: Final = 90.0
"""Of the shortened run, which tells what is rebuilt from what never is, on a machine as busy as it may be."""
CONTROL_LIMIT_S: Final = 7.0
VERIFY_S: Final = 60.0
_ADMIN: Final = "user admin on >admin allkeys allchannels +@all"


def run(scale: Scale) -> Outcome:
    """Lose everything twice; then see that agents which do not report again are noticed."""
    blocks = scale.of(1_000_000, 50_000)
    limit_s = scale.of(REBUILD_S_PER_MILLION * blocks / 1e6, SHORT_LIMIT_S)
    seen = asyncio.run(_try(blocks, limit_s, scale.first_seed))
    with mock.patch.object(Outbox, "restart", _restart_without_report):
        control = asyncio.run(_try(2_000, CONTROL_LIMIT_S, scale.first_seed))
    values = {
        "rebuild_s": max(seen.rebuilds_s, default=0.0),
        "local_reads_meanwhile": seen.local_reads,
        "lookups_meanwhile": seen.lookups,
        "loop_held_s_max": seen.loop_held_s,
    }
    return Outcome(blocks * len(seen.rebuilds_s), "blocks rebuilt", tuple(seen.broken), bool(control.broken), values)


_restart_rightly = Outbox.restart


def _restart_without_report(outbox: Outbox, incarnation: Incarnation) -> set[Shard]:
    """The seeded defect: a new incarnation takes it that the directory still has what the old one told."""
    is_first = outbox._incarnation is None
    spoken = _restart_rightly(outbox, incarnation)
    outbox._is_all_due = is_first
    return spoken


@dataclass(slots=True)
class Seen:
    """What came out."""

    broken: list[str] = field(default_factory=list)
    rebuilds_s: list[float] = field(default_factory=list)
    local_reads: int = 0
    lookups: int = 0
    loop_held_s: float = 0.0
    """Longest time for which nothing else had the event loop."""


class LocalNode:
    """A real core with blocks in real memory, whose engine reads without end."""

    def __init__(self, access: "Server", seen: Seen) -> None:
        self._seen = seen
        node = make_node([dram_tier(4 * MIB)])
        record = AgentRecord("p.local", 7, "127.0.0.1:1")
        instruments = Instruments(AGENT, CollectorRegistry())
        self.directory = RedisDirectory(record, access.access, self._holdings, instruments)
        node.announcer = Announcer(node.index, self.directory, secret_of)
        self.core = AgentParts(node, TestCodecs(), self.directory)
        self._place = RequestContext(1, "a", secret_of(SCOPE), LAYOUT_ID, BLOCK_BYTES)

    def _holdings(self) -> Iterable[tuple[ScopeSecret, list[Announcement]]]:
        return self.core.lender.holdings()

    async def fill(self) -> None:
        """Store the blocks and begin to tell of them."""
        numbers = range(LOCAL_BLOCKS)
        made, *_ = await self.core.cache.writer.reserve(self._place, b"", [digest(n) for n in numbers])
        sums = []
        for n, reservation in zip(numbers, made, strict=True):
            assert reservation is not None
            mappable = reservation.tier.backend.mappable
            assert mappable is not None
            mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(n)
            sums.append(checksum(bytes_of(n), digest(n), self.core.node.epoch, reservation.slot.stamp))
        self.core.cache.writer.publish_now(1, [r.id for r in made if r is not None], sums)
        self.core.node.announcer.flush()
        self.directory.start()

    def slots(self) -> list[tuple[int, object]]:
        """Where every block lies."""
        found = [self.core.node.index.find(SCOPE, digest(n)) for n in range(LOCAL_BLOCKS)]
        return [(n, entry.residences[0].slot if entry and entry.residences else None) for n, entry in enumerate(found)]

    async def read_on(self) -> None:
        """Read sixteen blocks at a time until cancelled; any miss or wrong byte is a violation."""
        while True:
            numbers = random.sample(range(LOCAL_BLOCKS), 16)
            reads = (
                await self.core.cache.reader.acquire(AcquireCall(self._place, [digest(n) for n in numbers], 30.0, 1.0))
            ).reads
            if len(reads) != len(numbers):
                self._seen.broken.append(f"{len(numbers) - len(reads)} local blocks were not read while Redis was lost")
            for n, read in zip(numbers, reads, strict=False):
                tier, slot, _ = read.lease.residence
                mappable = tier.backend.mappable
                if mappable is None or bytes(mappable.view(slot)[:BLOCK_BYTES]) != bytes_of(n):
                    self._seen.broken.append(f"local block {n} has other bytes")
            self.core.node.end_leases(self.core.node.leases.end(1, [read.lease.id for read in reads]))
            self._seen.local_reads += len(reads)
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Release everything."""
        await self.directory.close()
        await self.core.close()
        for tier in self.core.node.tiers:
            await tier.backend.close()


@dataclass(slots=True)
class Server:
    """The Redis of the run, at one address whatever happens."""

    redis: EmbeddedRedis
    config: EmbeddedConfig

    @classmethod
    async def start(cls, folder: Path) -> "Server":
        """Start the first one."""
        config = EmbeddedConfig(folder, agent_password="agents", metadata_password="service", other_users=(_ADMIN,))
        redis = await embedded.start(config)
        return cls(redis, replace(config, port=redis.port))

    async def access(self) -> RedisAccess:
        """How agents reach it."""
        return self.redis.access(Role.AGENT)

    async def flush(self) -> None:
        """Lose everything, and go on at once."""
        redis_cli(self.redis, "FLUSHALL")

    async def replace(self) -> None:
        """End it by SIGKILL and start an empty one in its place."""
        os.kill(self.redis.pid, signal.SIGKILL)
        await self.redis.stop()
        self.redis = await embedded.start(self.config)


async def _try(blocks: int, limit_s: float, seed: int) -> Seen:
    """Lose everything in both ways; each rebuild is timed until every agent has told everything."""
    seen = Seen()
    random.seed(seed)
    with tempfile.TemporaryDirectory(prefix="kvstrata-i6-") as folder:
        server = await Server.start(Path(folder))
        fleet = DirectoryFleet(lambda: server.redis.access(Role.AGENT), jitter_s=REPORT_JITTER_S)
        local = LocalNode(server, seen)
        try:
            await local.fill()
            for name in AGENTS:
                fleet.add(name, blocks // len(AGENTS))
            await fleet.settled(60.0 + limit_s)
            for lose in (server.flush, server.replace):
                if not seen.broken:
                    await _lose(fleet, local, lose.__name__, lose, limit_s, seen)
        finally:
            await fleet.close()
            await local.close()
            await server.redis.stop()
    return seen


async def _lose(fleet: DirectoryFleet, local: LocalNode, what: str, lose: object, limit_s: float, seen: Seen) -> None:
    """Lose everything once and wait until it is back."""
    agents = [*fleet.made.values(), local.directory]
    reports, slots = [a.reports_total for a in agents], local.slots()
    meanwhile = [asyncio.create_task(w) for w in (local.read_on(), _look_on(fleet, seen), _watch_loop(seen))]
    started_s = time.monotonic()
    assert callable(lose)
    await lose()
    try:
        async with asyncio.timeout(limit_s):
            while not _is_told(agents, reports):  # noqa: ASYNC110 - It follows from the states of many loops.
                await asyncio.sleep(0.02)
        seen.rebuilds_s.append(time.monotonic() - started_s)
        sys.stderr.write(f"I6: rebuilt after {what} in {seen.rebuilds_s[-1]:.1f} s\n")
    except TimeoutError:
        seen.broken.append(f"after {what}: not rebuilt within {limit_s:.0f} s")
    for task in meanwhile:
        task.cancel()
    for done in await asyncio.gather(*meanwhile, return_exceptions=True):
        if isinstance(done, AssertionError):
            seen.broken.append(f"after {what}: {done}")
    if local.slots() != slots:
        seen.broken.append(f"after {what}: blocks of the local node moved or went")
    if not seen.broken:
        await _verify(fleet, what, seen)


def _is_told(agents: Sequence[RedisDirectory], reports: Sequence[int]) -> bool:
    """Every agent has reported again and has nothing left to say."""
    return all(a.is_settled and a.reports_total > n for a, n in zip(agents, reports, strict=True))


async def _look_on(fleet: DirectoryFleet, seen: Seen) -> None:
    """Look blocks up while the directory is being rebuilt: absent or true, nothing else."""
    digests = {name: list(held) for name, held in fleet.held.items()}
    while True:
        asker, owner = random.sample(AGENTS, 2)
        sample = random.sample(digests[owner], min(SAMPLE, len(digests[owner])))
        for one, locations in zip(sample, await fleet.locate(asker, sample), strict=True):
            assert all((one, at.stamp) in fleet.ever[at.agent] for at in locations), (
                f"{one.hex()}: a location that never was"
            )
        seen.lookups += len(sample)
        await asyncio.sleep(0.2)


async def _watch_loop(seen: Seen) -> None:
    """Measure how long the loop is held by others."""
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(0.005)
        seen.loop_held_s = max(seen.loop_held_s, time.monotonic() - before_s - 0.005)


async def _verify(fleet: DirectoryFleet, what: str, seen: Seen) -> None:
    """Every block of every agent is found by another one."""
    for asker, owner in zip(AGENTS, (*AGENTS[1:], AGENTS[0]), strict=True):
        missing = await _missing(fleet, asker, owner)
        if missing:
            seen.broken.append(f"after {what}: {missing} blocks of {owner} are not found")
    found = await fleet.made["p.a"].locate(secret_of(SCOPE), [digest(n) for n in range(LOCAL_BLOCKS)])
    if not all(found):
        seen.broken.append(f"after {what}: {sum(not f for f in found)} blocks of the local node are not found")


async def _missing(fleet: DirectoryFleet, asker: str, owner: str) -> int:
    """Blocks that are not found, asked again for a while: a lookup that a busy machine makes late is a miss."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + VERIFY_S
    while True:
        missing = sum(not is_known for is_known in (await fleet.known(asker, owner)).values())
        if not missing or loop.time() > until_s:
            return missing
        await asyncio.sleep(1.0)
