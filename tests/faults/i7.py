"""I7: a failover that loses acknowledged writes: nothing wrong is found, and the directory tells the truth again.

A real redis-server logs the effects of each transition in order (AOF), which is what a replica is sent. It is killed
and started again from that log without its last n transitions, as a replica would be promoted that did not get them;
the real agents' directories reconnect to it and go on. Each n continues from where the last one ended, so what is lost
is now announcements and withdrawals, now reports, registrations and heartbeats.

A location that was never true is a violation at any time; so is, after `SETTLE_S`, a missing one, one that is no longer
true, and an entry of any index that belongs to no living block.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

from kvstrata_agent.fleet.directory import client as directory
from kvstrata_metadata.client.outbox import Outbox
from kvstrata_metadata.directory import registry, shards
from kvstrata_metadata.directory.shards import Batch
from kvstrata_metadata.duties.sweeper import Sweeper
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import SHARDS, Shard
from kvstrata_metadata.store.records import Verdict
from kvstrata_metadata.store.store import Store
from support.metadata.directory_fleet import SECRET, DirectoryFleet
from support.runner.outcome import Outcome, Scale

AGENTS: Final = ("p.a", "p.b", "p.c")
BLOCKS_FIRST: Final = 200
SETTLE_S: Final = 10.0
SHORT_SETTLE_S: Final = 60.0
"""Of the shortened run, on a machine as busy as it may be."""
CONTROL_SETTLE_S: Final = 1.5
LOG_BYTES_MAX: Final = 12 << 20
"""Beyond it the server begins anew, empty: the log is read at every start."""
_SHORT: Final = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 500, 610, 777, 987, 1000)
_ADMIN: Final = "user admin on >admin allkeys allchannels +@all"
_LOGGED: Final = ("appendonly yes", "appendfsync no", "aof-use-rdb-preamble no", "auto-aof-rewrite-percentage 0")


def run(scale: Scale) -> Outcome:
    """Lose the last n acknowledged writes for each n."""
    losses = scale.of(tuple(range(1, 1001)), _SHORT)
    broken, slowest_s = asyncio.run(_try(losses, scale.first_seed, scale.of(SETTLE_S, SHORT_SETTLE_S)))
    with mock.patch.object(Outbox, "_settle", _settle_without_gaps):
        control, _ = asyncio.run(_try((60,), scale.first_seed, CONTROL_SETTLE_S))
    return Outcome(len(losses), "failovers", tuple(broken), bool(control), {"slowest_s": slowest_s})


_settle_rightly = Outbox._settle


def _settle_without_gaps(outbox: Outbox, batch: Batch, verdict: Verdict) -> None:
    """The seeded defect: a gap is taken for an answer like any other."""
    _settle_rightly(outbox, batch, Verdict.OK if verdict is Verdict.GAP else verdict)


async def _try(losses: tuple[int, ...], seed: int, settle_s: float) -> tuple[list[str], float]:
    """One failover after the other; what broke, and the longest time until everything was right again."""
    broken: list[str] = []
    slowest_s, chance = 0.0, random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvstrata-i7-") as folder, _eager():
        server = await LoggedRedis.start(Path(folder))
        fleet = DirectoryFleet(lambda: server.redis.access(Role.AGENT), jitter_s=0.0)
        try:
            for name in AGENTS:
                fleet.add(name, BLOCKS_FIRST)
            await fleet.settled()
            for n in losses:
                if server.logged_bytes > LOG_BYTES_MAX:
                    await server.begin_anew()
                await _change(fleet, server, chance, n)
                await server.fail_over(n)
                try:
                    slowest_s = max(slowest_s, await _heal(fleet, server, settle_s))
                except AssertionError as e:
                    broken.append(f"seed {seed}, last {n} writes lost: {e}")
                    break  # The next failover would begin from a directory that is wrong already.
                if n % 50 == 0:
                    sys.stderr.write(f"I7: {n} writes lost, right again\n")
        finally:
            await fleet.close()
            await server.redis.stop()
    return broken, slowest_s


@contextmanager
def _eager() -> Iterator[None]:
    """Reconnect without the pauses that spare a server in need."""
    with mock.patch.multiple(directory, RECONNECT_FIRST_S=0.005, RECONNECT_LONGEST_S=0.05, PAUSE_S=0.02):
        yield


async def _change(fleet: DirectoryFleet, server: "LoggedRedis", chance: random.Random, n: int) -> None:
    """Publish, replace and evict in many small messages that are all acknowledged, until more than n are logged."""
    for _ in range(3):
        await _change_once(fleet, chance)
    while server.transitions() <= n:
        await _change_once(fleet, chance)


async def _change_once(fleet: DirectoryFleet, chance: random.Random) -> None:
    for name in AGENTS:
        for digest in chance.sample(list(fleet.held[name]), 8):
            fleet.evict(name, digest) if chance.random() < 0.5 else fleet.publish(name, digest)
        for _ in range(max(1, BLOCKS_FIRST - len(fleet.held[name]))):
            fleet.publish(name)
    await fleet.settled()


async def _heal(fleet: DirectoryFleet, server: "LoggedRedis", settle_s: float) -> float:
    """Let the agents go on meanwhile, and wait until everything is right. Raises `AssertionError` when it is not."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    for name in AGENTS:
        fleet.publish(name)
    for asker, owner in zip(AGENTS, (*AGENTS[1:], AGENTS[0]), strict=True):
        await fleet.becomes_known(asker, owner, settle_s)
    took_s = loop.time() - started_s
    await fleet.settled(settle_s)
    await _is_clean(fleet, server, settle_s)
    return took_s


async def _is_clean(fleet: DirectoryFleet, server: "LoggedRedis", settle_s: float) -> None:
    """Nothing is left of what was lost, neither where readers look nor in the reverse index."""
    held = sum(len(blocks) for blocks in fleet.held.values())
    store = Store(server.redis.access(Role.METADATA))
    try:
        async with asyncio.timeout(settle_s):
            await Sweeper(store, None).sweep()
            members = (await registry.fleet(store)).members
            counted = [
                sum(await shards.count(store, Shard(SECRET.tag(), i), [m.incarnation for m in members]))
                for i in range(SHARDS)
            ]
    finally:
        await store.close()
    assert sum(counted) == held, f"{sum(counted)} entries in the reverse indexes for {held} blocks"
    copies = await server.copies()
    assert copies == held, f"{copies} locations for {held} blocks"


class LoggedRedis:
    """A server that logs every write, and can be had back without the last ones."""

    def __init__(self, redis: EmbeddedRedis, config: EmbeddedConfig) -> None:
        self.redis = redis
        self._config = config
        self._ends: list[int] = []
        """Where transitions end in the log, as far as it was read."""
        self._loaded = 0
        """How many of them the server began with."""

    @classmethod
    async def start(cls, folder: Path) -> "LoggedRedis":
        """Start with an empty log."""
        config = EmbeddedConfig(
            folder, agent_password="agents", metadata_password="service",
            other_users=(_ADMIN,), other_settings=_LOGGED,
        )  # fmt: skip
        redis = await embedded.start(config)
        return cls(redis, replace(config, port=redis.port))

    @property
    def _log(self) -> Path:
        return next((self._config.state_dir / "appendonlydir").glob("*.incr.aof"))

    @property
    def logged_bytes(self) -> int:
        return self._log.stat().st_size

    def transitions(self) -> int:
        """How many have been logged."""
        read_bytes = self._ends[-1] if self._ends else 0
        with self._log.open("rb") as log:
            log.seek(read_bytes)
            self._ends += [read_bytes + end for end in transition_ends(log.read())]
        return len(self._ends)

    async def begin_anew(self) -> None:
        """Kill the server and start it empty."""
        await self.fail_over(self.transitions())

    async def fail_over(self, n: int) -> None:
        """Kill the server and start it without the last n transitions that wrote something."""
        os.kill(self.redis.pid, signal.SIGKILL)
        await self.redis.stop()
        del self._ends[self.transitions() - n :]
        self._write_kept()
        self.redis = await embedded.start(self._config)

    def _write_kept(self) -> None:
        """Write the log that is left, each transition without its MULTI and EXEC.

        Redis 7.0 reads its log as the user `default`, whom we have switched off, and refuses EXEC to him.
        """
        content = self._log.read_bytes()
        first = min(self._loaded, len(self._ends))
        parts = [content[: self._ends[first - 1] if first else 0]]
        for i in range(first, len(self._ends)):
            start = self._ends[i - 1] if i else 0
            parts.append(_unwrapped(content[start : self._ends[i]]))
        self._ends[first:] = list(itertools.accumulate(map(len, parts)))[1:]
        self._log.write_bytes(b"".join(parts))
        self._loaded = len(self._ends)

    async def copies(self) -> int:
        """Locations that readers could find, by counting them all as an administrator."""
        store = Store(replace(self.redis.access(Role.METADATA), username="admin", password="admin"))
        try:
            (count,) = await store.ask([("EVAL", _COUNT_COPIES, 0)])
        finally:
            await store.close()
        assert isinstance(count, int), count
        return count


_COUNT_COPIES: Final = """
local bytes = 0
for _, key in ipairs(redis.call('KEYS', 'kf:{*.?}b??')) do
  for _, value in ipairs(redis.call('HVALS', key)) do
    bytes = bytes + #value
  end
end
return bytes / 18
"""


def transition_ends(content: bytes) -> list[int]:
    """Offsets in an append-only file at which transitions end: a script's effects stand between MULTI and EXEC."""
    ends, at, is_open = [], 0, False
    while at < len(content):
        words, at = _command(content, at)
        is_open = (is_open or words == b"MULTI") and words != b"EXEC"
        if not is_open and words != b"SELECT":
            ends.append(at)
    return ends


def _unwrapped(transition: bytes) -> bytes:
    """Its commands without MULTI and EXEC."""
    kept, at = [], 0
    while at < len(transition):
        name, end = _command(transition, at)
        if name not in {b"MULTI", b"EXEC"}:
            kept.append(transition[at:end])
        at = end
    return b"".join(kept)


def _command(content: bytes, at: int) -> tuple[bytes, int]:
    """Name of the command at an offset, and the offset behind it."""
    if content[at : at + 1] == b"#":  # A timestamp.
        return b"SELECT", content.index(b"\r\n", at) + 2
    line_end = content.index(b"\r\n", at)
    count, at, name = int(content[at + 1 : line_end]), line_end + 2, b""
    for i in range(count):
        line_end = content.index(b"\r\n", at)
        size = int(content[at + 1 : line_end])
        name = content[line_end + 2 : line_end + 2 + size].upper() if i == 0 else name
        at = line_end + 2 + size + 2
    return name, at
