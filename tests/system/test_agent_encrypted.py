"""Encryption at rest, end to end: the operator makes keys, the agent seals, and who loses a key loses its blocks.

Real API server, operator, agent and engine. The pool is paused, so that the operator leaves its one node to the test.
"""

import base64
import json
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ApiError, ControlPlane
from kvstrata_api import names
from support.kube.agent import GROUP, MIB, SYSTEM, Agent, custom, dram, got, nvme, put, until
from support.operator.process import Replica, running

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

TEAM = "canary-team"
SEEDS = range(1, 13)
SECRETS = f"/api/v1/namespaces/{SYSTEM}/secrets"


@pytest.fixture(scope="module")
def kubeconfigs(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("identities")
    accounts = (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)
    return {name: plane.service_account_kubeconfig(SYSTEM, name, folder / name) for name in accounts}


@pytest.fixture(scope="module")
def operator(kubeconfigs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with running(kubeconfigs, tmp_path_factory.mktemp("operator")) as replica:
        yield replica


@pytest.fixture
def agent(plane: ControlPlane, kubeconfigs: dict[str, Path], operator: Replica, tmp_path: Path) -> Iterator[Agent]:
    """An agent with small memory above a large encrypted NVMe tier, and a tenant whose keys the operator has made."""
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": TEAM}})
    plane.api.post(f"/api/v1/namespaces/{TEAM}/serviceaccounts", {"metadata": {"name": "engine"}})
    accounts = {"serviceAccounts": [{"namespace": TEAM, "name": "engine"}]}
    plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", TEAM, accounts))
    until(lambda: "v1.data" in entries(plane))
    with Agent(plane, kubeconfigs[names.FIELD_MANAGER_AGENT], tmp_path) as made:
        made.declare([dram(4 * MIB), sealed(tmp_path)], admission={"type": "Always"})
        plane.kubectl("patch", f"kvp/{made.pool}", "--type=merge", "-p", '{"spec": {"paused": true}}')
        made.start()
        yield made


def sealed(home: Path) -> dict[str, Any]:
    return {**nvme(home / "nvme", 256 * MIB), "encryption": {"type": "AESGCM"}}


def secret(plane: ControlPlane, name: str) -> dict[str, str]:
    """Entries of a Secret, decoded; none when it is absent."""
    try:
        found = plane.api.get(f"{SECRETS}/{name}").get("data") or {}
    except ApiError as e:
        if e.status == 404:
            return {}
        raise
    return {entry: base64.b64decode(said).decode("latin-1") for entry, said in found.items()}


def entries(plane: ControlPlane) -> dict[str, str]:
    return secret(plane, names.scope_secret_name("tenant", TEAM))


def patch_keks(plane: ControlPlane, **changes: str | None) -> None:
    body = json.dumps({"data": changes})
    plane.kubectl("patch", f"secret/{names.KEK_SECRET}", "--type=merge", "-p", body, "-n", SYSTEM)


def at_rest(agent: Agent) -> bytes:
    return b"".join(p.read_bytes() for p in (agent.home / "nvme").rglob("*") if p.is_file())


def on_disk(agent: Agent) -> int:
    """Blocks in the NVMe tier, as the agent's metrics tell."""
    lines = agent.metrics().splitlines()
    found = [line for line in lines if line.startswith("kvstrata_tier_blocks") and 'tier="nvme"' in line]
    return int(float(found[0].rsplit(" ", 1)[1])) if found else 0


def restart(agent: Agent) -> None:
    assert agent.process is not None
    agent.stop(signal.SIGKILL)
    agent.start()


def read_all(agent: Agent) -> int:
    """Blocks that an engine gets; every byte of them is compared."""
    with agent.client(TEAM) as client:
        return sum(got(client, seed)[0] for seed in SEEDS)


def test_keys_come_turn_and_go_and_blocks_with_them(agent: Agent, plane: ControlPlane) -> None:
    with agent.client(TEAM) as client:
        for seed in SEEDS:
            assert put(client, seed) == 16
    until(lambda: on_disk(agent) > 100)
    until(lambda: agent.tier("nvme").get("encrypted"))
    assert agent.tier("nvme")["medium"].startswith("file-")
    assert not agent.tier("dram").get("encrypted", False)
    assert TEAM.encode() not in at_rest(agent)
    assert entries(plane)["v1.data"].startswith("k1:")

    # The blocks survive the agent, and the KEK that wrapped their key.
    restart(agent)
    until(lambda: read_all(agent) > 100)
    patch_keks(plane, k2=base64.b64encode(secrets.token_bytes(32)).decode())
    until(lambda: entries(plane)["v1.data"].startswith("k2:"))
    kept = secret(plane, names.KEK_SECRET)["k2"].encode("latin-1")
    patch_keks(plane, k1=None)
    restart(agent)
    until(lambda: read_all(agent) > 100)

    # Without any KEK nothing is served and nothing is lost: the operator's new one does not open the old key.
    plane.api.delete(f"{SECRETS}/{names.KEK_SECRET}")
    until(lambda: set(secret(plane, names.KEK_SECRET)) == {"k3"})
    assert entries(plane)["v1.data"].startswith("k2:")
    restart(agent)
    assert on_disk(agent) == 0
    assert read_all(agent) == 0
    patch_keks(plane, k2=base64.b64encode(kept).decode())
    until(lambda: on_disk(agent) > 100)
    until(lambda: entries(plane)["v1.data"].startswith("k3:"))
    until(lambda: read_all(agent) > 100)

    # Shredded: the tenant goes, and with its Secret everything that it ever stored.
    plane.kubectl("delete", "kvtenant", TEAM)
    until(lambda: not entries(plane))
    until(lambda: on_disk(agent) == 0)
    until(lambda: not list((agent.home / "nvme").rglob("seg-*")))
