"""The directory on a Redis Cluster of three real primaries: what one of them loses concerns its own shards alone."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_metadata.directory import registry
from kvstrata_metadata.duties.sweeper import Sweeper
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_metadata.store.keys import REGISTRY_KEY, Shard, shard_index
from kvstrata_metadata.store.servers import slot_of
from support.metadata.directory_fleet import SECRET, DirectoryFleet, until
from support.metadata.redis_cluster import RedisCluster

pytestmark = pytest.mark.system

SHARD_KEYS = [Shard(SECRET.tag(), i).key for i in range(16)]
NOTICED_S = 90.0
"""Until a dead primary is told apart from a busy one; a second or two on idle cores."""


async def sweep(cluster: RedisCluster) -> Sweeper:
    store = open_store(cluster.access(Role.METADATA))
    sweeper = Sweeper(store, None)
    try:
        await sweeper.sweep()
    finally:
        await store.close()
    return sweeper


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def agents(cluster: RedisCluster) -> AsyncIterator[DirectoryFleet]:
    made = DirectoryFleet(lambda: cluster.access(Role.AGENT))
    try:
        yield made
    finally:
        await made.close()


def other_than_registrys(cluster: RedisCluster) -> int:
    return (cluster.owner(REGISTRY_KEY) + 1) % 3


def shards_of(cluster: RedisCluster, server: int) -> set[int]:
    return {i for i, key in enumerate(SHARD_KEYS) if cluster.owner(key) == server}


async def test_shards_are_spread_and_everything_is_found(cluster: RedisCluster, agents: DirectoryFleet) -> None:
    agents.add("p.a", 2_000)
    agents.add("p.b", 100)
    await agents.settled()

    assert len({cluster.owner(key) for key in SHARD_KEYS}) == 3
    await agents.becomes_known("p.b", "p.a")
    await agents.becomes_known("p.a", "p.b")


async def test_a_killed_primary_takes_its_own_shards_and_no_others(
    cluster: RedisCluster, agents: DirectoryFleet
) -> None:
    a, b = agents.add("p.a", 2_000), agents.add("p.b")
    await agents.settled()
    await agents.becomes_known("p.b", "p.a")
    dead = other_than_registrys(cluster)
    lost = shards_of(cluster, dead)
    assert 0 < len(lost) < 16
    reports = a.reports_total
    await cluster.kill(dead)

    await lacks_only(agents, lost)
    await until(lambda: b.state is DirectoryState.PARTLY_AWAY, "the asker did not tell that a part is away")
    fresh = [agents.publish("p.a") for _ in range(200)]
    await until(lambda: a.state is DirectoryState.PARTLY_AWAY, "the agent did not tell that a part is away")
    deadline_s = time.monotonic() + NOTICED_S
    while True:
        known = await agents.known("p.b", "p.a")
        if {d for d in fresh if known[d]} == {d for d in fresh if shard_index(d) not in lost}:
            break
        assert time.monotonic() < deadline_s, "announcements to living primaries were held up"
        await asyncio.sleep(0.05)

    await cluster.start_again(dead)
    await agents.becomes_known("p.b", "p.a")
    await agents.settled()
    await until(lambda: a.state is b.state is DirectoryState.ANSWERS, "the part is still told as away")
    assert a.reports_total == reports + 1, "one report of the lost shards alone was wanted"
    streams = {i: cluster_streams(cluster, i) for i in range(16)}
    assert {i for i, sequence in streams.items() if sequence > 1 << 20} == lost, "only lost shards were begun anew"


async def lacks_only(agents: DirectoryFleet, lost: set[int]) -> None:
    """Wait until blocks of the lost shards, and no others, are not found; busy machines miss deadlines."""
    deadline_s = time.monotonic() + NOTICED_S
    while True:
        known = await agents.known("p.b", "p.a")
        absent = {shard_index(d) for d, is_known in known.items() if not is_known}
        present = {shard_index(d) for d, is_known in known.items() if is_known}
        if absent == lost and present == set(range(16)) - lost:
            return
        assert time.monotonic() < deadline_s, f"shards {absent} are lacking, lost are {lost}"
        await asyncio.sleep(0.05)


def cluster_streams(cluster: RedisCluster, index: int) -> int:
    """Greatest sequence number of a shard."""
    with cluster._admin(cluster.owner(SHARD_KEYS[index])) as admin:
        values = admin.execute_command("HVALS", SHARD_KEYS[index] + b"s")
    return max(int(value.split()[0]) for value in values)


async def test_a_killed_registry_leaves_the_shards_at_work(cluster: RedisCluster, agents: DirectoryFleet) -> None:
    a = agents.add("p.a", 500)
    agents.add("p.b")
    await agents.settled()
    await agents.becomes_known("p.b", "p.a")
    dead = cluster.owner(REGISTRY_KEY)
    lost = shards_of(cluster, dead)
    await cluster.kill(dead)

    for _ in range(3):
        await asyncio.sleep(2)
        await lacks_only(agents, lost)
    await until(lambda: a.state is DirectoryState.PARTLY_AWAY, "the agent did not tell that a part is away")
    await cluster.start_again(dead)
    await agents.becomes_known("p.b", "p.a")


async def test_slots_may_move_under_announcements_and_lookups(cluster: RedisCluster, agents: DirectoryFleet) -> None:
    a = agents.add("p.a", 1_000)
    agents.add("p.b")
    await agents.settled()
    await agents.becomes_known("p.b", "p.a")
    reports, slots = a.reports_total, sorted({slot_of(key) for key in SHARD_KEYS[:6]})
    is_moving = True

    async def talk() -> None:
        while is_moving:
            agents.publish("p.a")
            agents.evict("p.a", next(iter(agents.held["p.a"])))
            await agents.known("p.b", "p.a")
            await asyncio.sleep(0.005)

    talking = asyncio.create_task(talk())
    try:
        for slot in slots:
            source = next(cluster.owner(key) for key in SHARD_KEYS if slot_of(key) == slot)
            await cluster.move_slot(slot, source, (source + 1) % 3, pause_s=0.2)
    finally:
        is_moving = False
        await talking

    await agents.settled()
    await agents.becomes_known("p.b", "p.a")
    assert a.reports_total == reports, "a slot that moves loses nothing"


async def test_a_slot_that_moved_while_nobody_asked_for_it_is_told_of(cluster: RedisCluster) -> None:
    store = open_store(cluster.access(Role.METADATA))
    try:
        await registry.fleet(store)
        breaks = store.breaks
        source = other_than_registrys(cluster)
        slot = next(slot_of(key) for key in SHARD_KEYS if cluster.owner(key) == source)
        await cluster.move_slot(slot, source, (source + 1) % 3)
        ends_s = time.monotonic() + NOTICED_S
        while store.breaks == breaks:
            assert time.monotonic() < ends_s, "the slot's new server was not told of"
            await registry.fleet(store)
            await asyncio.sleep(0.1)
    finally:
        await store.close()


async def test_transitions_are_loaded_into_every_primary_again(cluster: RedisCluster, agents: DirectoryFleet) -> None:
    agents.add("p.a", 300)
    agents.add("p.b")
    await agents.settled()
    for i in range(3):
        cluster.cli(i, "SCRIPT", "FLUSH")
    agents.publish("p.a")
    await asyncio.sleep(0.5)
    await sweep(cluster)

    await agents.becomes_known("p.b", "p.a")


async def test_the_service_cleans_a_dead_agent_on_all_primaries(cluster: RedisCluster, agents: DirectoryFleet) -> None:
    a, b = agents.add("p.a", 700), agents.add("p.b")
    await agents.settled()
    await agents.becomes_known("p.b", "p.a")
    await a.close()
    agents.made.pop("p.a")

    assert (await sweep(cluster)).swept.removed_locations == 700
    assert await b.locate(SECRET, list(agents.held["p.a"])) == [()] * 700
