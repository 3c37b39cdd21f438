"""The agent as a process under its own identity: real API server, real tiers, real engines, and kill -9."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path

import pytest

import kvstrata_native
from controlplane import ControlPlane
from kvstrata_client.client import Client
from support.kube.agent import MIB, Agent, dram, got, keys_of, make_tenant, nvme, put, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def tenant(plane: ControlPlane) -> None:
    make_tenant(plane, "team-a")


@pytest.fixture
def agent(plane: ControlPlane, kubeconfig: Path, tmp_path: Path) -> Iterator[Agent]:
    """A pool of its own with DRAM above NVMe, and its agent, serving."""
    with Agent(plane, kubeconfig, tmp_path) as made:
        made.declare([dram(16 * MIB), nvme(tmp_path / "nvme", 256 * MIB)])
        made.start()
        yield made


def test_an_engine_stores_and_loads_and_the_status_says_so(agent: Agent) -> None:
    until(agent.says("Ready", "True"))
    with agent.client() as client:
        assert put(client, 1) == 16
        assert got(client, 1) == (16, {"dram"})

    until(lambda: agent.tier("dram").get("usedBytes", 0) > 0)
    assert agent.tier("nvme")["phase"] == "Ready"
    assert agent.tier("nvme")["probe"]["readBytesPerSecond"] > 0
    assert agent.condition("MetadataAvailable")["status"] == "False"
    assert agent.condition("CapacitySatisfied")["status"] == "True"
    assert 'kvstrata_published_blocks_total{node="node-a",pool="' in agent.metrics()
    assert f'kvstrata_agent_info{{engine="reference",kernels="{kvstrata_native.level}",node="node-a"' in agent.metrics()


def test_squeezed_memory_goes_to_disk_and_comes_back_the_same(agent: Agent) -> None:
    with agent.client() as client:
        for seed in range(1, 13):
            assert put(client, seed) == 16
        agent.redeclare([dram(4 * MIB), nvme(agent.home / "nvme", 256 * MIB)])
        # Counters of the status are late: nothing was in use there when all of it was.
        until(lambda: agent.has_reported() and agent.condition("TiersSettled").get("status") == "True")
        assert agent.tier("dram")["capacityBytes"] == 4 * MIB

        sources: set[str] = set()

        def is_whole(seed: int) -> bool:
            """Whether all 16 can be had; a busy machine may miss a deadline, which is a miss and never wrong bytes."""
            count, places = got(client, seed)
            sources.update(places)
            return count == 16

        for seed in range(1, 13):
            until(partial(is_whole, seed))
        assert "nvme" in sources


def leading_in(client: Client, seed: int, tier: str) -> int:
    """Blocks of a prompt, up to the first one that a tier has no copy of."""
    explained = (json.loads(client.explain(key=key)) for key in keys_of(client, seed))
    return sum(1 for _ in takewhile(lambda e: any(c["tier"] == tier for c in e.get("copies", ())), explained))


def test_blocks_on_disk_survive_kill_9(agent: Agent) -> None:
    with agent.client() as client:
        for seed in range(1, 25):
            assert put(client, seed) == 16
        until(lambda: sum(leading_in(client, seed, "nvme") for seed in range(1, 25)) > 16)
        written = [leading_in(client, seed, "nvme") for seed in range(1, 25)]
        agent.stop(signal.SIGKILL)
        agent.start()
        until(lambda: client.is_attached)

        found = [got(client, seed) for seed in range(1, 25)]
        assert all(count >= before for (count, _), before in zip(found, written, strict=True)), (found, written)
        assert set().union(*(places for _, places in found)) == {"nvme"}


def test_an_archived_session_is_the_same_one_after_kill_9(agent: Agent) -> None:
    with agent.client() as client:
        client.open_session("chat", priority="interactive")
        assert put(client, 1, session="chat") == 16
        assert client.complete_session("chat", wait_s=30.0).is_archived, "archived means: every block survives"
        archived = json.loads(client.explain(session="chat"))
        assert (archived["state"], archived["blocks_not_archived"]) == ("archived", 0)
        client.open_session("draft")
        assert put(client, 2, session="draft") == 16
        client.touch_session("draft", "decoding")
        journal = agent.home / "state" / "sessions.journal"
        until(lambda: journal.exists() and b"decoding" in journal.read_bytes())
        assert b"draft" not in journal.read_bytes(), "names are not on the disk"
    agent.stop(signal.SIGKILL)
    agent.start()

    with agent.client() as client:
        found = json.loads(client.explain(session="chat"))
        assert (found["state"], found["priority"], found["heads_not_here"]) == ("archived", "interactive", 0)
        assert all("nvme" in head["tiers"] for head in found["heads"])
        client.open_session("chat")
        until(lambda: json.loads(client.explain(session="chat"))["heads"][0]["tiers"] == ["dram", "nvme"])
        assert got(client, 1) == (16, {"dram"}), "brought up before anybody asked"
        draft = json.loads(client.explain(session="draft"))
        assert draft["state"] == "idle", "whoever decoded from it has died with the agent"


def test_every_restart_is_a_new_epoch(agent: Agent) -> None:
    epochs = []
    for _ in range(3):
        epochs.append(json.loads(agent.ready_file.read_text())["epoch"])
        agent.stop(signal.SIGKILL)
        agent.start()
    assert epochs == sorted(set(epochs))


def test_sigterm_ends_the_process_cleanly(agent: Agent) -> None:
    assert agent.stop(signal.SIGTERM) == 0
    assert not agent.socket.exists()
    assert not agent.ready_file.exists()


def test_a_path_that_cannot_be_written_fails_its_tier_alone(
    plane: ControlPlane, kubeconfig: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with Agent(plane, kubeconfig, tmp_path) as agent:
        agent.declare([dram(8 * MIB), nvme(tmp_path / "file" / "below", 64 * MIB)])
        agent.start()
        until(agent.says("TierReady", "False"))

        assert agent.tier("nvme")["phase"] == "Failed"
        assert "below" in agent.tier("nvme")["lastError"]
        assert agent.condition("Ready")["status"] == "True"
        with agent.client() as client:
            assert put(client, 1) == 16
            assert got(client, 1) == (16, {"dram"})


def test_more_than_the_machine_has_is_clamped_and_said_with_numbers(
    plane: ControlPlane, kubeconfig: Path, tmp_path: Path
) -> None:
    with Agent(plane, kubeconfig, tmp_path) as agent:
        agent.declare([dram(1 << 50), nvme(tmp_path / "nvme", 1 << 50)])
        agent.start()
        until(agent.says("CapacitySatisfied", "False"))

        message = agent.condition("CapacitySatisfied")["message"]
        assert "tier dram wants 1Pi" in message
        assert "tier nvme wants 1Pi" in message
        assert agent.tier("dram")["capacityBytes"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with agent.client() as client:
            assert put(client, 1) == 16


def test_a_drain_brings_every_block_to_disk_and_says_when_it_is_done(agent: Agent) -> None:
    with agent.client() as client:
        for seed in range(1, 5):
            assert put(client, seed) == 16
        agent.redeclare(
            [dram(16 * MIB), nvme(agent.home / "nvme", 256 * MIB)], drain={"requested": True, "mode": "Demote"}
        )
        until(lambda: agent.condition("Draining").get("reason") == "Drained")

        assert agent.tier("nvme")["blocks"] >= 60
        assert put(client, 99) == 0


def test_an_agent_serves_on_while_the_api_server_is_away(agent: Agent, plane: ControlPlane) -> None:
    with agent.client() as client:
        assert put(client, 1) == 16
        plane.stop_component("kube-apiserver", signum=signal.SIGKILL)
        try:
            assert got(client, 1) == (16, {"dram"})
            assert put(client, 2) == 16
        finally:
            plane.restart_apiserver()
        agent.redeclare([dram(8 * MIB), nvme(agent.home / "nvme", 256 * MIB)])
        until(lambda: agent.tier("dram").get("capacityBytes") == 8 * MIB)
