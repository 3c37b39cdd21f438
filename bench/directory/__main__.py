"""The directory: publish, lookup, sessions, erase of a scope, memory and rebuild, on a real redis-server.

The limit is redis-benchmark (C, 8 connections, 16 calls in a pipeline) that runs EVALSHA of a script which does least
for one location a call: one HSET of digest and location into a bucket, one HGET, one HDEL, one SET of a session record.
Ours is one process that runs the product's own transitions, `shards.announce` and its like, packing and unpacking
included, with what the least script leaves out: sequence numbers, the reverse index, fencing, copies of other agents.
Payloads are the same: 20 bytes of digest, 18 of location. Peer: the layout that llm-d-kv-cache documents for its Redis
index (a hash for each block key, a field for each pod and tier), also driven by redis-benchmark, one command a block.
Ours and the limit take turns in every repeat. Server time is CPU of the redis-server process.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import redis as redis_py

from bench.directory.limit import Bare, Work, redis_version
from bench.directory.rebuild import rebuild
from bench.harness import common
from bench.harness.common import REPEATS_MIN, Result, Sample, publish, rate_ratio, table
from kvstrata_agent.fleet.directory.client import FLUSH_MAX
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.directory import registry, sessions, shards
from kvstrata_metadata.directory.shards import CHUNK, Batch, Mode
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import SHARDS, Shard
from kvstrata_metadata.store.records import AgentRecord, Announcement, Incarnation, SessionRecord, Verdict
from kvstrata_metadata.store.store import Store

LOCATIONS: Final = 1_000_000
LOCATIONS_QUICK: Final = 100_000
SMALL_SCOPES: Final = (10_000, 100_000)
"""Scopes whose memory for each location is measured as well."""
LOCATE_BLOCKS: Final = 4_000
SESSIONS: Final = 20_000
STREAMS: Final = 2
"""Rounds under way at once: one is packed while another is applied."""
ADMIN: Final = "user admin on >admin allkeys allchannels +@all"
_STARTED_S: Final = time.perf_counter()


@dataclass(slots=True)
class Turns:
    """Rates and server times of one kind of work, repeat by repeat."""

    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    ours_server_us: list[float] = field(default_factory=list)
    bare_server_us: list[float] = field(default_factory=list)


class Directory:
    """One scope after the other in a server of our own, through the product's store."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server
        self.store = Store(server.access(Role.AGENT), timeout_s=60.0)
        self.care = Store(server.access(Role.METADATA), timeout_s=60.0)
        self.secret = ScopeSecret(ScopeId("tenant/bench/uid/v1"), os.urandom(32))
        self.incarnation = Incarnation(b"")
        self._lanes: list[list[Announcement]] = []
        self.digests: list[bytes] = []

    async def begin(self, locations: int) -> None:
        """A new scope and what is to be told of it."""
        self.secret = ScopeSecret(ScopeId("tenant/bench/uid/v1"), os.urandom(32))
        answer = await registry.register_agent(self.store, AgentRecord("p.bench", time.time_ns(), "127.0.0.1:1"))
        self.incarnation = answer.incarnation
        every = [Shard(self.secret.tag(), i) for i in range(SHARDS)]
        assert await registry.open_shards(self.store, answer.incarnation, every) is Verdict.OK
        self.digests = [os.urandom(20) for _ in range(locations)]
        self._lanes = [[] for _ in range(SHARDS)]
        for stamp, digest in enumerate(self.digests):
            self._lanes[digest[0] >> 4].append(Announcement(digest, "NVMe", stamp, 4096))

    async def publish(self) -> None:
        """Announce everything, in messages as the outbox makes them."""
        await asyncio.gather(*(self._publish(range(i, SHARDS, STREAMS)) for i in range(STREAMS)))

    async def _publish(self, indexes: range) -> None:
        tag = self.secret.tag()
        for start in range(0, max(len(self._lanes[i]) for i in indexes), CHUNK):
            mode = Mode.CONTINUE if start else Mode.RESET
            cut = ((i, tuple(self._lanes[i][start : start + CHUNK])) for i in indexes)
            batches = [
                Batch(Shard(tag, i), self.incarnation, start // CHUNK + 1, mode, part) for i, part in cut if part
            ]
            for at in range(0, len(batches), 4):
                verdicts = await shards.announce(self.store, batches[at : at + 4])
                assert all(verdict is Verdict.OK for verdict in verdicts), verdicts

    async def locate(self) -> None:
        """Look everything up."""

        async def stream(first: int) -> None:
            for at in range(first * LOCATE_BLOCKS, len(self.digests), STREAMS * LOCATE_BLOCKS):
                found = await shards.locate(self.store, self.secret.tag(), self.digests[at : at + LOCATE_BLOCKS])
                assert all(found)

        await asyncio.gather(*(stream(i) for i in range(STREAMS)))

    async def write_sessions(self) -> None:
        """Write sessions, as many in one round trip as an agent's flush does."""
        record = SessionRecord("bench", "", "open", head=b"h" * 20, agent="p.bench")
        for start in range(0, SESSIONS, FLUSH_MAX):
            names = (f"session-{n}" for n in range(start, min(SESSIONS, start + FLUSH_MAX)))
            assert all(await sessions.write_sessions(self.store, [(self.secret, name, record) for name in names]))

    async def erase(self) -> None:
        """Erase the scope."""
        assert await shards.erase_scope(self.care, self.secret.tag()) == len(self.digests)

    async def used_bytes(self) -> int:
        """Memory of the server beyond its start."""
        used_bytes, startup_bytes = await self.care.memory_bytes()
        return used_bytes - startup_bytes

    def server_s(self) -> float:
        """CPU seconds that the server has used."""
        words = Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    async def close(self) -> None:
        """Close the connections."""
        await self.store.close()
        await self.care.close()


async def measure(locations: int) -> tuple[dict[str, Turns], dict[str, float]]:
    """Run every repeat; rates by work, and other values."""
    works = {"publish": Turns(), "lookup": Turns(), "session": Turns(), "erase": Turns()}
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        server = await embedded.start(EmbeddedConfig(Path(folder), memory_bytes=8 << 30, other_users=(ADMIN,)))
        ours, bare = Directory(server), Bare(server)
        try:
            for repeat in range(REPEATS_MIN):
                say(f"repeat {repeat + 1} of {REPEATS_MIN}")
                await _repeat(ours, bare, works, values, locations)
            for count in (c for c in SMALL_SCOPES if c < locations):
                values[f"bytes_per_location_at_{count}"] = await _memory_of(ours, count)
            values["bytes_per_location_llmd_layout"] = await asyncio.to_thread(
                bare.memory_per_location, SMALL_SCOPES[-1]
            )
            say("rebuild after FLUSHALL")
            values |= await rebuild(server, locations)
        finally:
            await ours.close()
            await server.stop()
    return works, values


async def _repeat(ours: Directory, bare: Bare, works: dict[str, Turns], values: dict[str, float], count: int) -> None:
    await asyncio.to_thread(bare.empty)
    await ours.begin(count)
    before_bytes = await ours.used_bytes()
    await _turn(ours, bare, works["publish"], ours.publish, count, Work.PUBLISH)
    values["bytes_per_location"] = (await ours.used_bytes() - before_bytes - bare.used_bytes) / count
    await _turn(ours, bare, works["lookup"], ours.locate, count, Work.LOOKUP)
    await _turn(ours, bare, works["session"], ours.write_sessions, SESSIONS, Work.SESSION)
    await _turn(ours, bare, works["erase"], ours.erase, count, Work.ERASE)


async def _turn(
    ours: Directory, bare: Bare, turns: Turns, act: Callable[[], Awaitable[None]], count: int, work: Work
) -> None:  # fmt: skip
    """Ours, then the limit, then the peer."""
    started_s, server_s = time.perf_counter(), ours.server_s()
    await act()
    turns.ours.append(count / (time.perf_counter() - started_s))
    turns.ours_server_us.append((ours.server_s() - server_s) / count * 1e6)
    server_s = ours.server_s()
    done, rate = await asyncio.to_thread(bare.run, work, min(count, 200_000))
    turns.bare.append(rate)
    turns.bare_server_us.append((ours.server_s() - server_s) / done * 1e6)
    if work in bare.PEER:
        turns.peer.append(await asyncio.to_thread(bare.run_peer, work, min(count, 200_000)))


async def _memory_of(ours: Directory, count: int) -> float:
    await ours.begin(count)
    before_bytes = await ours.used_bytes()
    await ours.publish()
    used_bytes = await ours.used_bytes() - before_bytes
    await ours.erase()
    return used_bytes / count


def report(works: dict[str, Turns], values: dict[str, float]) -> tuple[list[tuple[str, ...]], dict[str, float | None]]:
    """Rows of the table and the ratios; server times go into `values`."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    for work, turns in works.items():
        limit = Sample(tuple(turns.bare))
        peer = Sample(tuple(turns.peer)) if turns.peer else None
        ours = Sample(tuple(turns.ours))
        ratios[f"{work}_vs_evalsha"] = rate_ratio(ours, limit)
        if peer:
            ratios[f"{work}_vs_llmd"] = rate_ratio(ours, peer)
        for who, sample in (("ours", ours), ("EVALSHA", limit), ("llm-d layout", peer)):
            if sample is not None:
                share = rate_ratio(sample, limit)
                rows.append((work, who, *(f"{v / 1e3:.0f}" for v in sample.spread), f"{share or 0:.2f}"))
        ours_us, bare_us = Sample(tuple(turns.ours_server_us)), Sample(tuple(turns.bare_server_us))
        values[f"{work}_server_us"], values[f"{work}_evalsha_server_us"] = ours_us.spread[1], bare_us.spread[1]
        ratios[f"{work}_server_time_vs_evalsha"] = common.time_ratio(ours_us, bare_us)
    return rows, ratios


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.directory {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--locations", type=int, help=f"default: {LOCATIONS}, or {LOCATIONS_QUICK} when quick")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    locations = chosen.locations or (LOCATIONS_QUICK if chosen.quick else LOCATIONS)
    works, values = asyncio.run(measure(locations))
    rows, ratios = report(works, values)
    print(table(("what, 1000/s", "who", "min", "median", "max", "of limit"), rows))
    for name, value in values.items():
        print(f"{name}: {value:.4g}")
    versions = {"redis-server": redis_version(), "redis-py": redis_py.__version__}
    publish(Result("directory", bool(chosen.quick), versions, ratios, {"locations": locations, **values}), chosen.json)


if __name__ == "__main__":
    main()
