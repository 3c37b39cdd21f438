"""Failovers to a replica that lacks the last acknowledged writes, alone and in a Redis Cluster."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata_metadata.directory import shards
from kvstrata_metadata.directory.registry import fleet
from kvstrata_metadata.duties.sweeper import Sweeper
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_metadata.store.keys import REGISTRY_KEY, SHARDS, Shard
from kvstrata_metadata.store.records import Incarnation
from support.metadata.directory_fleet import SECRET, DirectoryFleet, until
from support.metadata.redis_cluster import ADMIN, RedisCluster
from support.metadata.running_redis import redis_cli

pytestmark = pytest.mark.system

_REPLICATION = ("masteruser admin", "masterauth admin", "repl-diskless-sync-delay 0", "hz 100")


async def change(agents: DirectoryFleet, count: int) -> None:
    """Publish, replace and evict, and let the directory acknowledge all of it."""
    for name in ("p.a", "p.b"):
        old = list(agents.held[name])[: count // 4]
        for digest in old[: len(old) // 2]:
            agents.evict(name, digest)
        for digest in old[len(old) // 2 :]:
            agents.publish(name, digest)
        for _ in range(count):
            agents.publish(name)
    await agents.settled()


async def is_right_and_clean(agents: DirectoryFleet, access: RedisAccess) -> None:
    """Each finds what the other holds, and no shard counts a location more than that."""
    await agents.becomes_known("p.b", "p.a")
    await agents.becomes_known("p.a", "p.b")
    store = open_store(access)
    try:
        await Sweeper(store, None).sweep()
        members = [m for m in (await fleet(store)).members if m.registration and not m.registration.is_fenced]
        ids = [Incarnation(m.incarnation) for m in members]
        counts = [await shards.count(store, Shard(SECRET.tag(), i), ids) for i in range(SHARDS)]
    finally:
        await store.close()
    assert sum(map(sum, counts)) == sum(len(held) for held in agents.held.values())


class TestAlone:
    @pytest.fixture
    async def servers(self, tmp_path: Path) -> AsyncIterator[list[EmbeddedRedis]]:
        config = EmbeddedConfig(
            tmp_path / "a", agent_password="agents", metadata_password="service",
            other_users=(ADMIN,), other_settings=_REPLICATION,
        )  # fmt: skip
        made = [await embedded.start(config), await embedded.start(replace(config, state_dir=tmp_path / "b"))]
        yield made
        for server in made:
            await server.stop()

    @pytest.mark.parametrize("lost", [1, 40, 400])
    async def test_lost_writes_are_told_again(self, servers: list[EmbeddedRedis], lost: int) -> None:
        primary, replica = servers
        redis_cli(replica, "REPLICAOF", "127.0.0.1", str(primary.port))
        await until(lambda: "master_link_status:up" in redis_cli(replica, "INFO", "replication"), "never in step")
        now = primary
        agents = DirectoryFleet(lambda: now.access(Role.AGENT))
        try:
            agents.add("p.a", 300)
            agents.add("p.b", 300)
            await agents.settled()
            redis_cli(replica, "CONFIG", "SET", "masterauth", "wrong")
            redis_cli(primary, "CLIENT", "KILL", "TYPE", "replica")
            await change(agents, lost)
            os.kill(primary.pid, signal.SIGKILL)
            redis_cli(replica, "REPLICAOF", "NO", "ONE")
            now = replica

            await is_right_and_clean(agents, replica.access(Role.METADATA))
        finally:
            await agents.close()

    async def test_a_failover_before_the_registration_begins_anew(self, servers: list[EmbeddedRedis]) -> None:
        primary, replica = servers
        now = primary
        agents = DirectoryFleet(lambda: now.access(Role.AGENT))
        try:
            agents.add("p.a", 500)
            agents.add("p.b", 500)
            await agents.settled()
            await primary.stop()
            now = replica

            await is_right_and_clean(agents, replica.access(Role.METADATA))
        finally:
            await agents.close()


class TestCluster:
    @pytest.fixture
    async def cluster(self, tmp_path: Path) -> AsyncIterator[RedisCluster]:
        made = RedisCluster(tmp_path)
        try:
            await made.start(has_replicas=True)
            yield made
        finally:
            await made.stop()

    @pytest.mark.parametrize("is_registrys", [False, True])
    async def test_lost_writes_of_one_primary_are_told_again(
        self, cluster: RedisCluster, *, is_registrys: bool
    ) -> None:
        agents = DirectoryFleet(lambda: cluster.access(Role.AGENT))
        try:
            a = agents.add("p.a", 500)
            agents.add("p.b", 500)
            await agents.settled()
            reports = a.reports_total
            primary = (cluster.owner(REGISTRY_KEY) + (0 if is_registrys else 1)) % 3
            await cluster.cut_off(primary, primary + 3)
            await change(agents, 300)
            await cluster.kill(primary)
            await cluster.take_over(primary + 3)

            await is_right_and_clean(agents, cluster.access(Role.METADATA))
            assert a.reports_total > reports
        finally:
            await agents.close()
