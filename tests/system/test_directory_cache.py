"""The memory of hot prefixes on a real Redis: faster when nothing changes, and gone when something may have."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstrata_agent.fleet.directory.cached_client import CachingDirectory
from kvstrata_agent.fleet.directory.client import AccessProvider, Holdings, RedisDirectory
from kvstrata_metadata.directory import shards
from kvstrata_metadata.server.embedded import EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.metrics import Instruments
from support.metadata.directory_fleet import SECRET, DirectoryFleet, until
from support.metadata.running_redis import redis_cli, running_redis

pytestmark = pytest.mark.system


class CachingFleet(DirectoryFleet):
    def make(
        self, record: AgentRecord, access: AccessProvider, holdings: Holdings, instruments: Instruments
    ) -> RedisDirectory:
        return CachingDirectory(record, access, holdings, instruments)

    def reader(self) -> CachingDirectory:
        made = self.made["p.b"]
        assert isinstance(made, CachingDirectory)
        return made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    yield from running_redis(tmp_path / "redis")


@pytest.fixture
async def fleet(redis: EmbeddedRedis) -> AsyncIterator[CachingFleet]:
    made = CachingFleet(lambda: redis.access(Role.AGENT))
    try:
        made.add("p.a", 600)
        made.add("p.b")
        await made.settled()
        await until(lambda: made.reader().is_caching, "nothing was ever tracked")
        yield made
    finally:
        await made.close()


async def warm(fleet: CachingFleet) -> list[bytes]:
    digests = list(fleet.held["p.a"])
    for _ in range(3):
        assert all(await fleet.locate("p.b", digests))
    assert fleet.reader().cached_blocks == len(digests)
    return digests


def commands(redis: EmbeddedRedis) -> int:
    """Transitions that the server has run."""
    lines = redis_cli(redis, "INFO", "commandstats").splitlines()
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines if line.startswith("cmdstat_hget:"))


async def test_what_is_hot_is_not_asked_again(redis: EmbeddedRedis, fleet: CachingFleet) -> None:
    digests = await warm(fleet)
    before = commands(redis)
    for _ in range(5):
        assert all(await fleet.locate("p.b", digests))

    assert commands(redis) - before < len(digests), "the server was asked for every block again"


async def test_every_change_is_seen(fleet: CachingFleet) -> None:
    digests = await warm(fleet)
    fleet.evict("p.a", digests[0])
    fleet.publish("p.a", digests[1])
    absent = os.urandom(20)
    for _ in range(3):
        assert await fleet.locate("p.b", [absent]) == [()]
    fleet.publish("p.a", absent)
    await fleet.settled()

    await fleet.becomes_known("p.b", "p.a")
    for _ in range(3):
        (gone,) = await fleet.locate("p.b", [digests[0]])
        assert gone == ()


async def test_changes_under_lookups_never_leave_an_old_value(fleet: CachingFleet) -> None:
    digests = await warm(fleet)
    for _ in range(40):
        looking = asyncio.gather(*(fleet.locate("p.b", digests[:100]) for _ in range(4)))
        for digest in digests[:20]:
            fleet.publish("p.a", digest)
        await looking
        await fleet.settled()
        await fleet.becomes_known("p.b", "p.a")


async def test_everything_is_forgotten_with_the_connection(redis: EmbeddedRedis, fleet: CachingFleet) -> None:
    await warm(fleet)
    redis_cli(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    await until(lambda: fleet.reader().cached_blocks == 0, "a lost connection left something to believe in")
    await until(lambda: fleet.reader().is_caching, "tracking never came back")
    await fleet.becomes_known("p.b", "p.a")


async def test_everything_is_forgotten_when_redis_falls_silent(redis: EmbeddedRedis, fleet: CachingFleet) -> None:
    await warm(fleet)
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        await until(lambda: fleet.reader().cached_blocks == 0, "silence left something to believe in")
    finally:
        os.kill(redis.pid, signal.SIGCONT)


async def test_flushed_is_forgotten(redis: EmbeddedRedis, fleet: CachingFleet) -> None:
    await warm(fleet)
    redis_cli(redis, "FLUSHALL")

    await until(lambda: fleet.reader().cached_blocks == 0, "what was flushed is still believed")
    await fleet.becomes_known("p.b", "p.a")


async def test_an_erased_scope_is_forgotten(redis: EmbeddedRedis, fleet: CachingFleet) -> None:
    digests = await warm(fleet)
    store = Store(redis.access(Role.METADATA))
    await shards.erase_scope(store, SECRET.tag())
    await store.close()

    await until(lambda: fleet.reader().cached_blocks == 0, "what was erased is still believed")
    assert await fleet.locate("p.b", digests) == [()] * len(digests)
