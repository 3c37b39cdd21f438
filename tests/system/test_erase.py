"""A tenant asks for erasure: operator, metadata service, Redis and an agent carry it out, and a client watches."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey
from kvstrata_client.client import Client
from kvstrata_metadata.store.access import Role, format_access
from support.kube.agent import GROUP, MIB, SYSTEM, Agent, custom, dram, got, keys_of, nvme, put
from support.metadata.replicas import Redis, Replica, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

_seeds = itertools.count(100)
BOUND_S = 60.0
"""From the wish to the last of the tenant's ids in Redis, and to the condition."""


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Iterator[None]:
    path = plane.service_account_kubeconfig(SYSTEM, names.FIELD_MANAGER_OPERATOR, tmp_path / "operator.kubeconfig")
    options = ["--kubeconfig", path, "--metrics-port", "0", "--lease-duration-s", "2", "--heartbeat-s", "1"]
    with (tmp_path / "operator.log").open("wb") as log:
        command = [sys.executable, "-m", "kvstrata_operator.app.main", *map(str, options)]
        process = subprocess.Popen(command, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def agent(plane: ControlPlane, kubeconfig: Path, redis: Redis, operator: None, tmp_path: Path) -> Iterator[Agent]:
    """An agent of a pool that the operator has placed, with two tenants."""
    assert operator is None
    access = {"metadata": {"name": names.REDIS_SECRET_AGENT}, "stringData": format_access(redis.access(Role.AGENT))}
    plane.kubectl("delete", "secret", names.REDIS_SECRET_AGENT, "-n", SYSTEM, "--ignore-not-found")
    plane.api.post(f"/api/v1/namespaces/{SYSTEM}/secrets", access)
    made = Agent(plane, kubeconfig, tmp_path)
    made.node = f"node-of-{made.pool}"
    for team in teams(made):
        plane.api.post("/api/v1/namespaces", {"metadata": {"name": team}})
        plane.api.post(f"/api/v1/namespaces/{team}/serviceaccounts", {"metadata": {"name": "engine"}})
        spec = {"serviceAccounts": [{"namespace": team, "name": "engine"}]}
        plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", team, spec))
    with made:
        place(plane, made, tmp_path)
        made.launch()
        yield made


def teams(agent: Agent) -> tuple[str, str]:
    """One that leaves and one that stays, of this test alone."""
    return f"leaving-{agent.pool}", f"staying-{agent.pool}"


def place(plane: ControlPlane, agent: Agent, folder: Path) -> None:
    plane.api.post("/api/v1/nodes", {"metadata": {"name": agent.node, "labels": {"pool": agent.pool}}})
    tiers = [dram(32 * MIB), nvme(folder / "nvme", 64 * MIB)]
    pool_tiers = [
        {k: v for k, v in t.items() if k != "capacityBytes"} | {"capacityPerNode": str(t["capacityBytes"])}
        for t in tiers
    ]
    spec = {
        "nodeSelector": {"pool": agent.pool},
        "compatibility": {"model": "m", "revision": "r", "dtype": "bf16", "blockTokens": 16},
        "tiers": pool_tiers,
        "policy": {"recompute": {"type": "AlwaysFetch"}},
    }
    plane.api.post(f"{GROUP}/kvpools", custom("KVPool", agent.pool, spec))


def tenant(plane: ControlPlane, name: str) -> dict[str, Any]:
    found: dict[str, Any] = plane.api.get(f"{GROUP}/kvtenants/{name}")
    return found


def condition(plane: ControlPlane, name: str, type_: str) -> dict[str, Any]:
    conditions = tenant(plane, name).get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == type_), {})


def entries(plane: ControlPlane, name: str) -> set[str]:
    secret = plane.api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{names.scope_secret_name('tenant', name)}")
    return set(secret["data"])


def old_keys(agent: Agent) -> tuple[list[BlockKey], str]:
    with agent.client(teams(agent)[0]) as client:
        assert client.grants is not None
        own = client.grants.own
        assert own is not None
        return keys_of(client, 1), own.secret.tag()


async def test_an_erased_tenant_finds_nothing_at_once_and_its_ids_leave_redis(
    plane: ControlPlane, redis: Redis, service: Replica, agent: Agent
) -> None:
    assert service.leads
    leaving, staying = teams(agent)
    await until(agent.ready_file.exists, "the agent does not serve")
    await until(agent.says("MetadataAvailable", "True"), "the agent does not find Redis")
    await until(lambda: all(condition(plane, t, "Ready").get("status") == "True" for t in teams(agent)), "no keys")
    for team in teams(agent):
        with agent.client(team) as client:
            client.open_session("conversation")
            assert put(client, 1, session="conversation") == 16
            assert (await asyncio.to_thread(client.complete_session, "conversation", wait_s=30.0)).is_archived
    keys, tag = await asyncio.to_thread(old_keys, agent)
    await until(lambda: any("}b" in k for k in redis.keys(tag)), "nothing was announced")
    await until(lambda: agent.tier("nvme").get("blocks", 0) == 32, "the archive is not told of")

    with agent.client(leaving) as client:
        ask(plane, leaving, eraseRequested="monday")
        began_s = time.monotonic()
        await until(lambda: tenant(plane, leaving)["status"]["keyVersion"] == 2, "the key has not moved on")
        await until(lambda: client.refresh_grants() is not None and scope_version(client) == "v2", "old grants")
        assert client.lookup(keys).blocks == 0, "the old key finds nothing once the agent has seen the change"
        with client.acquire(keys) as leases:
            assert not leases
        assert put(client, 2) == 16, "the tenant goes on under its new key"
        assert got(client, 2)[0] == 16
    await until(lambda: not redis.keys(tag), "ids are still in Redis", lambda: redis.keys(tag))
    await until(lambda: condition(plane, leaving, "EraseCompleted").get("status") == "True", "never completed")
    assert time.monotonic() - began_s < BOUND_S

    await until(lambda: tenant(plane, leaving)["status"].get("lastErase") == "monday", "the wish is not told of")
    await until(lambda: not {e for e in entries(plane, leaving) if e.startswith("v1")}, "the old key is there")
    assert "v2" in entries(plane, leaving)
    await until(lambda: agent.tier("nvme").get("blocks") == 16, "blocks at rest are still counted")
    with agent.client(staying) as client:
        assert got(client, 1)[0] == 16


def ask(plane: ControlPlane, team: str, **spec: Any) -> None:
    plane.kubectl("patch", "kvtenant", team, "--type=merge", "-p", json.dumps({"spec": spec}))


def scope_version(client: Client) -> str:
    assert client.grants is not None
    assert client.grants.own is not None
    return str(client.grants.own.secret.scope).rpartition("/")[2]


async def test_usage_and_quotas_are_told_and_a_refusal_names_them(plane: ControlPlane, agent: Agent) -> None:
    await until(agent.ready_file.exists, "the agent does not serve")
    leaving, _ = teams(agent)
    quota = {"poolRef": agent.pool, "tier": "dram", "hard": "1Mi", "guaranteed": "512Ki"}
    ask(plane, leaving, quotas=[quota], overQuota="Reject")
    await until(lambda: condition(plane, leaving, "QuotaEnforced").get("status") == "True", "not enforced")
    with agent.client(leaving) as client:
        client.is_strict = False
        await until(lambda: refused(client), "more and more is taken")
        assert client.counters.errors["QuotaExceededError"] > 0
    await until(lambda: "kvstrata_quota_rejected_total" in agent.metrics(), "the refusal was not counted")
    await until(lambda: bool(tenant(plane, leaving)["status"].get("usage")), "no usage in the status")
    row = tenant(plane, leaving)["status"]["usage"][0]
    assert (row["poolRef"], row["tier"]) == (agent.pool, "dram")


def refused(client: Client) -> bool:
    """Store another prompt; true once nothing of it is taken."""
    return put(client, next(_seeds)) == 0
