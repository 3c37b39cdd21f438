"""What a shard answers while Redis has no memory left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.directory import registry, shards
from kvstrata_metadata.directory.shards import Batch, Mode
from kvstrata_metadata.server.embedded import EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import AgentRecord, Announcement, Verdict
from kvstrata_metadata.store.store import Store
from support.metadata.running_redis import redis_cli, running_redis

pytestmark = pytest.mark.system

SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    yield from running_redis(tmp_path)


async def test_a_full_redis_keeps_what_quiet_agents_told(redis: EmbeddedRedis) -> None:
    """Their checks were answered by `full`, for which an agent withdraws and reports all that it has."""
    store = Store(redis.access(Role.METADATA))
    shard = Shard(SECRET.tag(), 0)
    try:
        agent = (await registry.register_agent(store, AgentRecord("p.a", 1, "h:1"))).incarnation
        await registry.open_shards(store, agent, [shard])

        async def told(sequence: int, mode: Mode) -> Verdict:
            change = () if mode is Mode.CHECK else (Announcement(bytes(20), "NVMe", sequence, 1),)
            (verdict,) = await shards.announce(store, [Batch(shard, agent, sequence, mode, change)])
            return verdict

        assert await told(1, Mode.RESET) is Verdict.OK
        redis_cli(redis, "CONFIG", "SET", "maxmemory", "1mb")

        assert await told(2, Mode.CONTINUE) is Verdict.FULL
        assert await told(1, Mode.CHECK) is Verdict.OK
        assert await told(2, Mode.CHECK) is Verdict.GAP
    finally:
        redis_cli(redis, "CONFIG", "SET", "maxmemory", "100mb")
        await store.close()
