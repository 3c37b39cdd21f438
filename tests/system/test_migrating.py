"""Blocks that go from one pool to another: real operator, agents of both pools, Redis, and kills on the way."""

import asyncio
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from controlplane import ControlPlane
from support.kube.agent import GROUP, MIB, Agent, dram, got, keys_of, make_tenant, nvme, put
from support.metadata.replicas import Redis, until
from support.operator.operated_fleet import Fleet, declare, join_redis, make_node, serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


@pytest.fixture(scope="module", autouse=True)
def tenants(plane: ControlPlane) -> None:
    for name in ("team-a", "team-b"):
        make_tenant(plane, name)


@pytest.fixture
async def fleet(
    plane: ControlPlane, kubeconfig: Path, operator_config: Path, redis: Redis, tmp_path: Path
) -> AsyncIterator[tuple[Fleet, Agent]]:
    """A pool on two nodes, and an agent of another pool on a third one."""
    join_redis(plane, redis)
    with serving(plane, kubeconfig, operator_config, tmp_path) as made:
        with Agent(plane, kubeconfig, tmp_path / "other") as other:
            other.node = f"{other.pool}-node"
            other.home.mkdir()
            make_node(other)
            declare(plane, other, [dram(16 * MIB), nvme(tmp_path / "other-nvme", 64 * MIB)])
            await asyncio.to_thread(other.start)
            for agent in (*made.agents, other):
                await until(agent.says("MetadataAvailable", "True"), "an agent does not find Redis", agent.status)
                await until(partial(has_address, agent), "no address", agent.status)
            yield made, other
        plane.api.delete(f"{GROUP}/kvpools/{other.pool}")


def blocks_of(agent: Agent) -> int:
    """Blocks in all tiers, as the process counts them now."""
    lines = (line for line in agent.metrics().splitlines() if line.startswith("kvstrata_tier_blocks{"))
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def has_address(agent: Agent) -> bool:
    return bool(agent.status().get("peerAddress"))


def reasons(fleet: Fleet, name: str) -> list[str]:
    """What keeps nodes from being done."""
    return [failure["reason"] for failure in fleet.status(name).get("failures", [])]


async def test_blocks_of_all_tenants_go_and_are_read_there_by_their_tenants_alone(fleet: tuple[Fleet, Agent]) -> None:
    made, other = fleet
    first, second = made.agents
    with first.client() as one, second.client("team-b") as two:
        assert put(one, 1) == put(two, 2) == 16
        with one.acquire(keys_of(one, 1)) as held:
            name = made.operate("move", "Migrate", to=other.pool)
            await until(
                lambda: reasons(made, name) == ["BlocksHeld"], "what is read does not stay", lambda: made.status(name)
            )
            assert len(held) == 16
        keys = keys_of(one, 1)
    await until(lambda: made.status(name).get("state") == "Complete", "not complete", lambda: made.status(name))
    assert made.status(name)["progress"]["blocksDone"] == made.status(name)["progress"]["blocksTotal"] == 32
    await until(lambda: blocks_of(first) == blocks_of(second) == 0, "blocks stay", first.metrics)
    assert 'reason="migrated"' in first.metrics()
    with other.client() as one, other.client("team-b") as two:
        assert got(one, 1)[0] == got(two, 2)[0] == 16
        assert two.lookup(keys).blocks == 0


async def test_it_survives_kills_of_operator_and_both_agents_and_loses_nothing(fleet: tuple[Fleet, Agent]) -> None:
    made, other = fleet
    first, _ = made.agents
    with first.client() as client:
        assert put(client, 3) == 16
    flush = made.operate("down", "Flush", mode="Demote", tier="dram")
    await until(lambda: made.status(flush).get("state") == "Complete", "not down", lambda: made.status(flush))
    await asyncio.to_thread(other.stop, signal.SIGKILL)
    name = made.operate("killed", "Migrate", to=other.pool, nodes={"names": [first.node]})
    await until(lambda: reasons(made, name) == ["TargetsAway"], "nobody is missed", lambda: made.status(name))
    await asyncio.to_thread(first.stop, signal.SIGKILL)
    await asyncio.to_thread(made.restart_operator)
    await asyncio.to_thread(first.start)
    assert blocks_of(first) == 16
    await asyncio.to_thread(other.start)
    await until(lambda: made.status(name).get("state") == "Complete", "not complete", lambda: made.status(name))
    await until(lambda: blocks_of(first) == 0, "blocks stay", first.metrics)
    await asyncio.to_thread(other.stop, signal.SIGKILL)
    await asyncio.to_thread(other.start)
    with other.client() as client:
        assert got(client, 3)[0] == 16, "what was dropped had to survive a restart there"


async def test_a_cancelled_one_keeps_what_it_has_not_brought(fleet: tuple[Fleet, Agent]) -> None:
    made, other = fleet
    first, _ = made.agents
    with first.client() as client:
        assert put(client, 4) == 16
        await asyncio.to_thread(other.stop, signal.SIGKILL)
        name = made.operate("cancelled", "Migrate", to=other.pool)
        await until(lambda: [a["phase"] for a in first.status().get("orders", [])] == ["Running"], "not begun")
        made.cancel(name)
        await until(lambda: made.status(name).get("state") == "Cancelled", "goes on", lambda: made.status(name))
        await until(lambda: made.orders(first) == [], "the order stays")
        await asyncio.to_thread(other.start)
        assert got(client, 4) == (16, {"dram"})
    assert blocks_of(other) == 0
