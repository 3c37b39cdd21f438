"""A tenant is deleted: its blocks leave the agent and its ids leave Redis, and nobody else's do."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_api.blocks import ScopeSecret
from kvstrata_metadata.store.access import Role, format_access
from support.kube.agent import MIB, SYSTEM, Agent, dram, make_tenant, nvme, put
from support.metadata.replicas import SECRET, Redis, Replica, agent, blocks, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BOUND_S = 60.0
"""From the end of a tenant to the last of its ids in Redis."""


@pytest.fixture
def agents(plane: ControlPlane, kubeconfig: Path, redis: Redis, tmp_path: Path) -> Iterator[Agent]:
    """Tells agents where Redis is, as the service does for one of its own."""
    content = format_access(redis.access(Role.AGENT))
    metadata = {"name": names.REDIS_SECRET_AGENT}
    plane.kubectl("delete", "secret", names.REDIS_SECRET_AGENT, "-n", SYSTEM, "--ignore-not-found")
    plane.api.post(f"/api/v1/namespaces/{SYSTEM}/secrets", {"metadata": metadata, "stringData": content})
    with Agent(plane, kubeconfig, tmp_path) as made:
        made.declare([dram(32 * MIB), nvme(tmp_path / "nvme", 64 * MIB)])
        yield made


def tag_of(made: Agent, tenant: str) -> str:
    with made.client(tenant) as client:
        assert client.grants is not None
        own = client.grants.own
        assert own is not None
        return own.secret.tag()


def delete_tenant(plane: ControlPlane, name: str) -> None:
    """The operator deletes the Secret with its owner."""
    plane.kubectl("delete", "kvtenant", name)
    plane.kubectl("delete", "secret", "-n", SYSTEM, names.scope_secret_name("tenant", name))


async def test_a_deleted_tenant_leaves_no_key_in_redis_and_no_block_with_its_agent(
    plane: ControlPlane, redis: Redis, service: Replica, agents: Agent
) -> None:
    for tenant in ("leaving", "staying"):
        make_tenant(plane, tenant)
    await asyncio.to_thread(agents.start)
    await until(agents.says("MetadataAvailable", "True"), "the agent does not find Redis")
    tags = {tenant: await asyncio.to_thread(tag_of, agents, tenant) for tenant in ("leaving", "staying")}
    for tenant in tags:
        with agents.client(tenant) as client:
            client.open_session("conversation")
            assert put(client, 1) == 16
    for tag in tags.values():
        await until(lambda t=tag: any("}b" in k for k in redis.keys(t)), "nothing was announced")  # type: ignore[misc]
        await until(lambda t=tag: any("}n" in k for k in redis.keys(t)), "no session was told")  # type: ignore[misc]
    kept = redis.keys(tags["staying"])

    delete_tenant(plane, "leaving")
    began_s = time.monotonic()
    await until(lambda: not redis.keys(tags["leaving"]), "ids are still in Redis", lambda: redis.keys(tags["leaving"]))
    assert time.monotonic() - began_s < BOUND_S
    await until(lambda: service.fleet()["erased_scopes_total"] == 1, "the erasure was not counted")
    assert set(redis.keys(tags["staying"])) >= {key for key in kept if "}s" not in key}
    assert 'kvstrata_evicted_blocks_total{node="node-a",pool="' in agents.metrics()
    await until(lambda: redis.cli("HLEN", "kf:{agents}e") == "0", "the claim is still there")
    await asyncio.sleep(3.0)
    assert redis.keys(tags["leaving"]) == []


async def test_a_claim_that_the_api_server_contradicts_erases_nothing(
    plane: ControlPlane, redis: Redis, service: Replica
) -> None:
    """An agent that lost sight of a Secret says so; the tenant is still there."""
    make_tenant(plane, "alive")
    uid = plane.api.get(f"/apis/{names.API_VERSION}/kvtenants/alive")["metadata"]["uid"]
    living = ScopeSecret(SECRET.scope.replace("uid", uid), b"l" * 32)  # type: ignore[arg-type]
    async with agent(redis, "n1", blocks(30), secret=living) as directory:
        assert await directory.claim_erased(living)
        await until(lambda: service.fleet()["erase_claims_waiting"] == 1, "the claim was not seen")
        await asyncio.sleep(3.0)

        assert service.fleet()["erased_scopes_total"] == 0
        assert len(redis.keys(living.tag())) > 30
        plane.kubectl("delete", "kvtenant", "alive")
        await until(lambda: not redis.keys(living.tag()), "ids are still in Redis")
