"""Prefixes that an administrator brings to a node: real operator, agents, Redis, and kills on the way."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane
from support.kube.agent import Agent, got, keys_of, make_tenant, put
from support.metadata.replicas import Redis, until
from support.operator.operated_fleet import Fleet, Json, join_redis, serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


@pytest.fixture(scope="module", autouse=True)
def tenants(plane: ControlPlane) -> None:
    for name in ("team-a", "team-b"):
        make_tenant(plane, name)


@pytest.fixture
async def fleet(
    plane: ControlPlane, kubeconfig: Path, operator_config: Path, redis: Redis, tmp_path: Path
) -> AsyncIterator[Fleet]:
    """Two agents that find each other's blocks."""
    join_redis(plane, redis)
    with serving(plane, kubeconfig, operator_config, tmp_path) as made:
        for agent in made.agents:
            await until(agent.says("MetadataAvailable", "True"), "an agent does not find Redis", agent.status)
        yield made


async def fill(agent: Agent, seed: int, tenant: str = "team-a") -> str:
    """Store a prefix of 16 blocks; returns the key of its last one, in hex."""
    with agent.client(tenant) as client:
        assert put(client, seed) == 16
        return keys_of(client, seed)[-1].digest.hex()


def warm(fleet: Fleet, name: str, agent: Agent, **block: Any) -> str:
    return fleet.operate(name, "Warm", nodes={"names": [agent.node]}, **({"tenant": "team-a"} | block))


def answers(agent: Agent) -> list[str]:
    return [answer["phase"] for answer in agent.status().get("orders", [])]


def has_fetched(agent: Agent) -> bool:
    """True once a block has come from another agent."""
    moved = (line for line in agent.metrics().splitlines() if line.startswith("kvstrata_moved_blocks_total{"))
    return any('source="remote"' in line for line in moved)


async def ended(fleet: Fleet, name: str, state: str) -> Json:
    await until(lambda: fleet.status(name).get("state") == state, f"not {state}", lambda: fleet.status(name))
    return fleet.status(name)


async def known(agent: Agent, seed: int) -> None:
    """Wait until an agent finds a prefix of another one in the directory."""
    with agent.client() as client:
        keys = keys_of(client, seed)
        await until(lambda: client.lookup(keys).blocks == 16, "not announced", lambda: client.lookup(keys))


async def test_a_prefix_is_read_from_memory_by_its_tenant_and_by_nobody_else(fleet: Fleet) -> None:
    first, second = fleet.agents
    last = await fill(first, 1)
    await known(second, 1)
    stolen = await ended(fleet, warm(fleet, "stolen", second, prefixes=[last], tenant="team-b"), "Failed")
    assert [f["reason"] for f in stolen["failures"]] == ["NotFound"]
    assert "1 blocks missing" in stolen["summary"]
    assert not has_fetched(second)

    status = await ended(fleet, warm(fleet, "own", second, prefixes=[last]), "Complete")
    assert status["progress"]["blocksDone"] == status["progress"]["blocksTotal"] == 16
    assert status["progress"].get("blocksMissing", 0) == 0
    assert has_fetched(second)
    with second.client() as client:
        keys = keys_of(client, 1)
        assert got(client, 1) == (16, {"dram"})
    with second.client("team-b") as stranger:
        assert stranger.lookup(keys).blocks == 0
        with stranger.acquire(keys) as leases:
            assert not leases
    await until(lambda: fleet.orders(second) == [], "the order stays")
    assert 'result="done"' in second.metrics()


async def test_a_warming_survives_kills_of_operator_and_agent(fleet: Fleet, redis: Redis) -> None:
    first, second = fleet.agents
    last = await fill(first, 3)
    await known(second, 3)
    os.kill(redis.server.pid, signal.SIGSTOP)
    try:
        await until(second.says("MetadataAvailable", "False"), "Redis is not missed")
        name = warm(fleet, "killed", second, prefixes=[last])
        await until(lambda: answers(second) == ["Running"], "not begun", second.status)
        await asyncio.to_thread(second.stop, signal.SIGKILL)
        await asyncio.to_thread(fleet.restart_operator)
    finally:
        os.kill(redis.server.pid, signal.SIGCONT)
    await asyncio.to_thread(second.start)
    status = await ended(fleet, name, "Complete")

    assert status["progress"]["blocksDone"] == 16
    with second.client() as client:
        assert got(client, 3) == (16, {"dram"})


async def test_a_cancelled_warming_asks_for_nothing_more_and_another_one_goes_on(fleet: Fleet, redis: Redis) -> None:
    first, second = fleet.agents
    last = await fill(first, 4)
    await known(second, 4)
    os.kill(redis.server.pid, signal.SIGSTOP)
    try:
        await until(second.says("MetadataAvailable", "False"), "Redis is not missed")
        name = warm(fleet, "cancelled", second, prefixes=[last])
        await until(lambda: answers(second) == ["Running"], "not begun", second.status)
        fleet.cancel(name)
        await ended(fleet, name, "Cancelled")
        await until(lambda: fleet.orders(second) == [] and answers(second) == [], "the order stays", second.status)
    finally:
        os.kill(redis.server.pid, signal.SIGCONT)
    assert not has_fetched(second)
    again = warm(fleet, "again", second, prefixes=[last])
    await ended(fleet, again, "Complete")
    with first.client() as one, second.client() as other:
        assert got(one, 4) == got(other, 4) == (16, {"dram"})


async def test_archived_sessions_come_up_after_a_restart(fleet: Fleet) -> None:
    first, _ = fleet.agents
    with first.client() as client:
        client.open_session("conversation")
        assert put(client, 5, session="conversation") == 16
        assert (await asyncio.to_thread(client.complete_session, "conversation", wait_s=30.0)).is_archived
    await asyncio.to_thread(first.stop, signal.SIGTERM)
    await asyncio.to_thread(first.start)
    name = warm(fleet, "archive", first, archivedSessions=True, maxBytes="8Mi")
    status = await ended(fleet, name, "Complete")

    assert status["progress"]["blocksDone"] == 16
    with first.client() as client:
        assert got(client, 5) == (16, {"dram"})
