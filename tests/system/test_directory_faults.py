"""The directory of real agents when Redis dies, stops, loses everything, or agents die: absent, never wrong."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.directory import shards
from kvstrata_metadata.directory.sessions import read_session
from kvstrata_metadata.duties.sweeper import Sweeper
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.records import AgentRecord, Announcement, Location, SessionRecord
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.metadata.running_redis import redis_cli, running_redis

pytestmark = pytest.mark.system

LOOKS = 200
"""So many that paying a wait at each of them is far from what a busy machine makes of none."""
SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    yield from running_redis(tmp_path / "redis")


async def until(is_so: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.02)


@dataclass
class Fleet:
    """Agents on one Redis, which may be replaced."""

    server: EmbeddedRedis
    held: dict[str, dict[bytes, int]] = field(default_factory=dict)
    agents: dict[str, RedisDirectory] = field(default_factory=dict)
    registries: dict[str, CollectorRegistry] = field(default_factory=dict)

    async def access(self) -> RedisAccess:
        return self.server.access(Role.AGENT)

    def add(self, name: str, blocks: int = 0, *, epoch: int = 1, queue_max: int = 10_000) -> RedisDirectory:
        held = self.held[name] = {os.urandom(20): n + 1 for n in range(blocks)}

        def holdings() -> list[tuple[ScopeSecret, list[Announcement]]]:
            return [(SECRET, [Announcement(d, "NVMe", stamp, 1) for d, stamp in held.items()])]

        registry = self.registries[name] = CollectorRegistry()
        record = AgentRecord(name, epoch, "127.0.0.1:1")
        made = RedisDirectory(
            record, self.access, holdings, Instruments(AGENT, registry), queue_max=queue_max, jitter_s=0.2
        )
        self.agents[name] = made
        made.start()
        return made

    def publish(self, name: str, stamp: int = 99) -> bytes:
        digest = os.urandom(20)
        self.held[name][digest] = stamp
        self.agents[name].announce(SECRET, [Announcement(digest, "NVMe", stamp, 1)])
        return digest

    async def settled(self) -> None:
        await until(lambda: all(a.is_settled for a in self.agents.values()), "the directory was never told everything")

    async def is_known(self, asker: str, owner: str) -> bool:
        """Whether `asker` finds exactly what `owner` holds."""
        held = self.held[owner]
        found = await self.agents[asker].locate(SECRET, list(held))
        wanted = [(Location(owner, 1, "NVMe", stamp, 1),) for stamp in held.values()]
        return found == wanted

    async def becomes_known(self, asker: str, owner: str, timeout_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not await self.is_known(asker, owner):
            assert time.monotonic() < deadline_s, f"{asker} does not find what {owner} holds"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet(server: EmbeddedRedis) -> AsyncIterator[Fleet]:
    made = Fleet(server)
    try:
        yield made
    finally:
        for agent in made.agents.values():
            await agent.close()
        if made.server is not server:
            await made.server.stop()


async def test_an_agent_finds_what_others_hold_and_never_itself(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        a, b = f.add("p.a", 500), f.add("p.b")
        await f.settled()

        await f.becomes_known("p.b", "p.a")
        assert await a.locate(SECRET, list(f.held["p.a"])) == [()] * 500
        assert b.peer("p.a", 1) == AgentRecord("p.a", 1, "127.0.0.1:1")
        assert b.peer("p.a", 2) is None
        gone = next(iter(f.held["p.a"]))
        del f.held["p.a"][gone]
        a.announce(SECRET, [Announcement(gone, "", 0, 0, is_gone=True)])
        await f.settled()
        assert await b.locate(SECRET, [gone]) == [()]


async def test_a_killed_and_emptied_redis_is_rebuilt_from_the_agents(redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 3_000)
        b = f.add("p.b", 100)
        await f.settled()
        os.kill(redis.pid, signal.SIGKILL)
        await until(lambda: not redis.is_running, "the server survived SIGKILL")

        f.publish("p.a")
        assert await b.locate(SECRET, list(f.held["p.a"])) == [()] * 3_001
        await until(lambda: not b.is_up, "nobody noticed")
        f.server = await embedded.start(EmbeddedConfig(tmp_path / "again"))

        await f.becomes_known("p.b", "p.a")
        await f.becomes_known("p.a", "p.b")


async def test_everything_flushed_is_reported_again(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        a = f.add("p.a", 1_000)
        f.add("p.b")
        await f.settled()
        reports = a.reports_total
        redis_cli(redis, "FLUSHALL")

        await f.becomes_known("p.b", "p.a")
        assert a.reports_total > reports


async def test_restarted_transitions_are_loaded_again_by_the_service(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 10)
        f.add("p.b")
        await f.settled()
        redis_cli(redis, "SCRIPT", "FLUSH")
        digest = f.publish("p.a")
        await until(lambda: not f.agents["p.a"].is_up, "agents went on without transitions")

        store = Store(redis.access(Role.METADATA))
        await Sweeper(store, None).sweep()
        await store.close()
        await f.becomes_known("p.b", "p.a")
        assert digest in f.held["p.a"]


async def test_a_stopped_redis_costs_one_short_wait_and_then_none(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 10)
        b = f.add("p.b")
        await f.settled()
        await f.becomes_known("p.b", "p.a")
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            assert await b.locate(SECRET, list(f.held["p.a"])) == [()] * 10
            first_s = time.monotonic() - started_s
            started_s = time.monotonic()
            for _ in range(LOOKS):
                assert await b.locate(SECRET, list(f.held["p.a"])) == [()] * 10
            rest_s = time.monotonic() - started_s
            f.publish("p.a")
        finally:
            os.kill(redis.pid, signal.SIGCONT)

        assert LOCATE_S_MIN <= first_s < LOCATE_S_MIN + 10.0
        assert rest_s < LOOKS * LOCATE_S_MIN / 2
        await f.becomes_known("p.b", "p.a")


async def test_a_slow_redis_is_waited_for_by_who_has_the_time(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 10)
        b = f.add("p.b")
        await f.settled()
        await f.becomes_known("p.b", "p.a")
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            asking = asyncio.create_task(b.locate(SECRET, list(f.held["p.a"]), within_s=30.0))
            await asyncio.wait([asking], timeout=2 * LOCATE_S_MIN)
            assert not asking.done()
        finally:
            os.kill(redis.pid, signal.SIGCONT)

        assert all(await asking)


async def test_a_queue_that_overflows_is_counted_and_reported(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 50, queue_max=20)
        f.add("p.b")
        await f.settled()
        os.kill(redis.pid, signal.SIGSTOP)
        for _ in range(60):
            f.publish("p.a")
        os.kill(redis.pid, signal.SIGCONT)

        await f.becomes_known("p.b", "p.a")
        labels = {"pool": "p", "node": "a"}
        assert f.registries["p.a"].get_sample_value("kvstrata_directory_dropped_total", labels)
        sample = f.registries["p.a"].get_sample_value
        await until(lambda: sample("kvstrata_directory_up", labels) == 1, "the metric does not say it")


async def test_an_agent_starts_while_redis_is_away_and_joins_later(redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with fleet(redis) as f:
        await redis.stop()
        a = f.add("p.a", 5)
        f.publish("p.a")
        await asyncio.sleep(0.3)
        assert not a.is_up
        f.server = await embedded.start(EmbeddedConfig(tmp_path / "late"))
        f.add("p.b")

        await f.becomes_known("p.b", "p.a")


async def test_a_dead_agents_locations_go_and_its_successor_is_found(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        old = f.add("p.a", 200)
        b = f.add("p.b")
        await f.settled()
        await f.becomes_known("p.b", "p.a")
        lost = f.held["p.a"]
        for task in old._tasks:
            task.cancel()  # As kill -9 would: no farewell.
        old._tasks = []
        f.add("p.a", 0, epoch=2)
        await f.settled()

        store = Store(redis.access(Role.METADATA))
        sweeper = Sweeper(store, None)
        await sweeper.sweep()
        await store.close()

        assert sweeper.swept.removed_locations == 200
        assert await b.locate(SECRET, list(lost)) == [()] * 200


async def test_an_older_epoch_is_kept_out_while_a_newer_lives(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 5, epoch=7)
        await f.settled()
        newer = f.agents.pop("p.a")
        zombie = f.add("p.a", 5, epoch=6)
        await asyncio.sleep(0.5)

        assert newer.is_up
        assert not zombie.is_up
        await newer.close()


async def test_a_full_redis_is_told_as_full_still_answers_and_recovers(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        a = f.add("p.a", 10)
        b = f.add("p.b", 10)
        await f.settled()
        redis_cli(redis, "CONFIG", "SET", "maxmemory", "1mb")
        digest = f.publish("p.a")
        await until(lambda: a.state is DirectoryState.FULL, "a full Redis was not told as full")

        assert b.state is DirectoryState.ANSWERS
        assert await f.is_known("p.a", "p.b"), "a full Redis must still be read"
        gone = next(iter(f.held["p.b"]))
        b.announce(SECRET, [Announcement(gone, "", 0, 0, is_gone=True)])
        await until(lambda: b.state is DirectoryState.FULL, "the withdrawal was never sent")
        assert await a.locate(SECRET, [gone]) == [()], "what frees memory must not need any"
        del f.held["p.b"][gone]
        labels = {"pool": "p", "node": "a"}
        assert f.registries["p.a"].get_sample_value("kvstrata_directory_full", labels) == 1
        redis_cli(redis, "CONFIG", "SET", "maxmemory", "100mb")

        await f.becomes_known("p.b", "p.a")
        await until(lambda: a.state is DirectoryState.ANSWERS, "it is told as full still")
        assert digest in f.held["p.a"]
        await f.becomes_known("p.a", "p.b")


async def test_a_full_redis_can_be_emptied_of_a_dead_agent(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        f.add("p.a", 300)
        b = f.add("p.b", 0)
        await f.settled()
        await f.becomes_known("p.b", "p.a")
        await f.agents.pop("p.a").close()
        redis_cli(redis, "CONFIG", "SET", "maxmemory", "1mb")

        store = Store(redis.access(Role.METADATA))
        sweeper = Sweeper(store, None)
        await sweeper.sweep()
        await store.close()

        assert sweeper.swept.removed_locations == 300
        assert b.state is DirectoryState.ANSWERS


async def test_an_erased_scope_is_gone_and_stays_gone(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        a, b = f.add("p.a", 3_000), f.add("p.b", 500)
        await f.settled()
        a.note_session(SECRET, "chat-9", SessionRecord("alpha", "", "open"))
        await until(lambda: not a.waiting_sessions, "the directory was never told of the session")
        store = Store(redis.access(Role.METADATA))
        try:
            assert await shards.erase_scope(store, SECRET.tag()) == 3_500
            assert await shards.erase_scope(store, SECRET.tag()) == 0
        finally:
            await store.close()

        f.publish("p.a")
        b.note_session(SECRET, "chat-10", SessionRecord("alpha", "", "open"))
        await f.settled()
        await until(lambda: not b.waiting_sessions, "the session was never sent")
        assert await b.locate(SECRET, list(f.held["p.a"])) == [()] * 3_001
        assert [await read_elsewhere(redis, chat) for chat in ("chat-9", "chat-10")] == [None, None]
        left = redis_cli(redis, "KEYS", f"kf:{{{SECRET.tag()}.*").split()
        assert sorted({key[-1] for key in left}) == ["x"], "only the marks that refuse writes may stay"


async def read_elsewhere(server: EmbeddedRedis, session: str) -> SessionRecord | None:
    store = Store(server.access(Role.AGENT))
    try:
        return await read_session(store, SECRET, session)
    finally:
        await store.close()


async def test_other_nodes_learn_where_a_session_stands(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        a = f.add("p.a")
        await f.settled()
        for state in ("open", "decoding", "idle"):
            a.note_session(SECRET, "chat-1", SessionRecord("alpha", "", state, head=b"h" * 20))
        await until(lambda: not a.waiting_sessions, "the directory was never told of the session")

        assert await read_elsewhere(redis, "chat-1") == SessionRecord("alpha", "", "idle", head=b"h" * 20, agent="p.a")
        a.note_session(SECRET, "chat-1", None)
        await until(lambda: not a.waiting_sessions, "the directory was never told of the end")
        assert await read_elsewhere(redis, "chat-1") is None


async def test_a_session_noted_while_redis_is_away_is_told_later(redis: EmbeddedRedis) -> None:
    async with fleet(redis) as f:
        a = f.add("p.a")
        await f.settled()
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            await until(lambda: not a.is_up, "nobody noticed")
            a.note_session(SECRET, "chat-2", SessionRecord("alpha", "", "open"))
            await asyncio.sleep(1.2)
            assert a.waiting_sessions == 1
        finally:
            os.kill(redis.pid, signal.SIGCONT)

        await until(lambda: not a.waiting_sessions, "the directory was never told of the session")
        assert await read_elsewhere(redis, "chat-2") is not None


async def test_nobody_is_sent_to_an_agent_that_has_ended_before_anything_of_it_is_removed(
    redis: EmbeddedRedis,
) -> None:
    async with fleet(redis) as f:
        a, b = f.add("p.a", 20), f.add("p.b")
        await f.settled()
        await a.close()
        f.agents.pop("p.a")

        assert await b.locate(SECRET, list(f.held["p.a"])) == [()] * 20
        store = Store(redis.access(Role.AGENT))
        found = await shards.locate(store, SECRET.tag(), list(f.held["p.a"]))
        await store.close()
        assert all(found), "else the locations were gone, and the fence was not what hid them"
