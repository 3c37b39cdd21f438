"""Agents that die and come back with warm memory: the real process, its real memory files, and a client that waits."""

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from controlplane import ControlPlane
from kvstrata import Client, PrefixCache
from support.kube.agent import MIB, Agent, content, dram, got, keys_of, make_tenant, nvme, put, until
from support.runner import leftovers
from support.runner.huge_pages import more_huge_pages

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SEEDS = range(1, 9)
BLOCKS = 16 * len(SEEDS)


@pytest.fixture(scope="module", autouse=True)
def tenant(plane: ControlPlane) -> None:
    make_tenant(plane, "team-a")


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as directory:
        yield Path(directory)


@pytest.fixture
def agent(plane: ControlPlane, kubeconfig: Path, tmp_path: Path, memory_dir: Path) -> Iterator[Agent]:
    """A pool of its own with lasting DRAM above NVMe, and its agent, serving."""
    with Agent(plane, kubeconfig, tmp_path, memory_dir=memory_dir) as made:
        made.declare([dram(16 * MIB, persistence="AgentRestart"), nvme(tmp_path / "nvme", 256 * MIB)])
        made.start()
        yield made


def all_found(client: Client) -> tuple[int, set[str]]:
    """Read everything back, every byte compared: how many blocks, and from where."""
    found = [got(client, seed) for seed in SEEDS]
    return sum(count for count, _ in found), set().union(*(places for _, places in found))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_every_block_in_memory_is_there_after_a_restart(agent: Agent, end: signal.Signals) -> None:
    with agent.client() as client:
        for seed in SEEDS:
            assert put(client, seed) == 16
        for restarts in range(1, 4):
            agent.stop(end)
            agent.start()
            until(lambda: client.is_attached)

            assert all_found(client) == (BLOCKS, {"dram"})
            assert put(client, 100 + restarts) == 16
            until(lambda: agent.tier("dram").get("recoveredBlocks", 0) >= BLOCKS)
            assert 'kvstrata_tier_recovered_blocks{node="node-a",pool="' in agent.metrics()


def test_a_client_sees_misses_while_the_agent_is_away_and_hits_when_it_is_back(agent: Agent) -> None:
    with agent.client() as client:
        for seed in SEEDS:
            assert put(client, seed) == 16
    prompt = np.arange(SEEDS[0] * 100_000, SEEDS[0] * 100_000 + 16 * 16, dtype=np.uint32)
    with Client.attach(client.target, wait_s=20.0) as patient:  # Not strict: as engines are.
        cache = PrefixCache(patient)
        assert cache.load(prompt).blocks == 16
        agent.stop(signal.SIGKILL)
        assert cache.load(prompt).blocks == 0
        agent.start()
        until(lambda: patient.is_attached)

        warm = cache.load(prompt)
    assert [row.tobytes() for row in warm.data] == [content(SEEDS[0], i) for i in range(16)]
    assert set(warm.sources) == {"dram"}


def test_an_engine_that_goes_on_writing_after_its_agent_died_reaches_no_block_of_the_next_one(agent: Agent) -> None:
    with agent.client() as client:
        held = client.reserve(keys_of(client, 50))
        views = [slot.view for slot in held if slot.view is not None]
        assert len(views) == 16
        for seed in SEEDS:
            assert put(client, seed) == 16
        agent.stop(signal.SIGKILL)
        agent.start()
        until(lambda: client.is_attached)
        for view in views:
            view[:] = b"\xdd" * len(view)
        for seed in range(60, 64):
            assert put(client, seed) == 16
        for view in views:
            view[:] = b"\xee" * len(view)

        assert all_found(client) == (BLOCKS, {"dram"})
        assert [got(client, seed)[0] for seed in range(60, 64)] == [16] * 4
        del views, held


def test_memory_of_a_tier_that_is_gone_is_given_back(agent: Agent, memory_dir: Path, tmp_path: Path) -> None:
    with agent.client() as client:
        assert put(client, 1) == 16
        assert list(memory_dir.rglob("ext-*"))
        agent.stop(signal.SIGKILL)
        agent.redeclare(
            [dram(16 * MIB, persistence="AgentRestart") | {"name": "other"}, nvme(tmp_path / "nvme", 1 << 28)]
        )
        agent.start()

        assert not list(memory_dir.rglob("dram/**/ext-*"))


def test_where_there_is_no_memory_file_system_the_status_says_so(
    plane: ControlPlane, kubeconfig: Path, tmp_path: Path
) -> None:
    with Agent(plane, kubeconfig, tmp_path) as agent:
        agent.declare([dram(8 * MIB, persistence="AgentRestart")])
        agent.start()
        until(lambda: agent.tier("dram").get("phase") == "Ready")

        assert agent.tier("dram")["medium"] == "memfd-4Ki"
        assert "is not on a tmpfs" in agent.tier("dram")["lastError"]
        assert "tier dram: memory ends with the agent" in agent.condition("TierReady")["message"]
        assert agent.condition("Ready")["status"] == "True"


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """64 huge pages on a hugetlbfs of our own; given back afterwards."""
    with more_huge_pages(64) as are_there:
        directory = tempfile.mkdtemp(prefix="kvstrata-test-")
        mounted = subprocess.run(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", directory], check=False)
        try:
            if mounted.returncode or not are_there:
                pytest.skip("no 128 MiB in one piece for huge pages here, no hugetlbfs, or no root to reserve them")
            yield
        finally:
            subprocess.run(["umount", "--lazy", directory], check=False)
            shutil.rmtree(directory)


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_stay_warm_too(plane: ControlPlane, kubeconfig: Path, tmp_path: Path, memory_dir: Path) -> None:
    with Agent(plane, kubeconfig, tmp_path, memory_dir=memory_dir) as agent:
        agent.declare([dram(64 * MIB, pageSize="2Mi", persistence="AgentRestart")])
        agent.start()
        with agent.client() as client:
            for seed in SEEDS:
                assert put(client, seed) == 16
            for _ in range(2):
                agent.stop(signal.SIGKILL)
                agent.start()
                until(lambda: client.is_attached)
                assert all_found(client) == (BLOCKS, {"dram"})

        until(lambda: agent.tier("dram").get("recoveredBlocks") == BLOCKS)
        assert agent.tier("dram")["medium"] == "hugetlbfs-2Mi"
        assert agent.condition("HugepagesReserved")["status"] == "True"
        assert json.loads(agent.ready_file.read_text())["epoch"] > 0
