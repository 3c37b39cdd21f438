"""Weights of models by a real agent process: staged, reported, pinned while mapped, evicted for KV when idle."""

import hashlib
import json
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane
from support.kube.agent import GROUP, MIB, Agent, dram, make_tenant, nvme, put, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

TIER_BYTES = 256 * MIB


@pytest.fixture(scope="module", autouse=True)
def tenant(plane: ControlPlane) -> None:
    make_tenant(plane, "team-a")


@pytest.fixture
def agent(plane: ControlPlane, kubeconfig: Path, tmp_path: Path) -> Iterator[Agent]:
    with Agent(plane, kubeconfig, tmp_path) as made:
        made.declare([dram(16 * MIB), nvme(tmp_path / "nvme", TIER_BYTES)])
        made.start()
        yield made


def source_of(root: Path, size_bytes: int) -> Path:
    """A small model: settings, and one safetensors file with two tensors."""
    root.mkdir()
    half = os.urandom(size_bytes // 2)
    entries = {
        name: {"dtype": "U8", "shape": [len(half)], "data_offsets": [i * len(half), (i + 1) * len(half)]}
        for i, name in enumerate("ab")
    }
    header = json.dumps(entries).encode()
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + half + half[::-1])
    (root / "config.json").write_text("{}")
    return root


def order(agent: Agent, source: Path, **more: Any) -> None:
    fields = {"name": "llama", "uid": "uid-llama", "generation": 1, "tier": "nvme", "revision": "r1"}
    made = {**fields, "source": {"url": f"file://{source}"}, "weight": 100, "idleSeconds": 86_400, **more}
    body = json.dumps({"spec": {"models": [made]}})
    agent.plane.kubectl("patch", f"kvpn/{agent.name}", "--type=merge", "-p", body)


def report(agent: Agent, revision: str = "r1") -> dict[str, Any]:
    found = agent.plane.api.get(f"{GROUP}/kvpoolnodes/{agent.name}").get("status", {}).get("models", [])
    return next((m for m in found if m["revision"] == revision), {})


def test_a_model_is_staged_reported_and_takes_room_from_kv(agent: Agent, tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", 48 * MIB)
    size_bytes = sum(p.stat().st_size for p in source.iterdir())

    order(agent, source)
    until(lambda: report(agent).get("state") == "Staged")

    seen = report(agent)
    folder = tmp_path / "nvme" / "kvstrata-models" / "llama" / "r1"
    assert seen["path"] == str(folder)
    assert seen["sizeBytes"] == seen["stagedBytes"] == seen["sourceBytes"] == size_bytes
    lines = "".join(
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.stat().st_size}  {p.name}\n"
        for p in sorted(source.iterdir())
    )
    assert seen["digest"] == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
    for file in source.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    until(lambda: agent.tier("nvme").get("capacityBytes") == TIER_BYTES - size_bytes)
    until(lambda: agent.condition("ModelsStaged").get("status") == "True")
    until(lambda: f'origin="source",pool="{agent.pool}"}} {size_bytes:.1f}' in _plain(agent.metrics()))

    agent.stop(signal.SIGKILL)
    agent.start()
    until(agent.has_reported)
    until(lambda: report(agent).get("state") == "Staged" and agent.tier("nvme").get("phase") == "Ready")
    assert agent.tier("nvme")["capacityBytes"] == TIER_BYTES - size_bytes

    agent.plane.kubectl("patch", f"kvpn/{agent.name}", "--type=merge", "-p", '{"spec":{"models":[]}}')
    until(lambda: not folder.parent.exists())
    until(lambda: agent.tier("nvme").get("capacityBytes") == TIER_BYTES)


def _plain(metrics: str) -> str:
    """Numbers without exponents."""
    lines = []
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        is_ours = name.startswith("kvstrata_model_")
        lines.append(f"{name} {float(value):.1f}" if is_ours else line)
    return "\n".join(lines)


def test_a_mapped_model_stays_and_an_idle_one_goes_when_kv_wants_the_room(agent: Agent, tmp_path: Path) -> None:
    order(agent, source_of(tmp_path / "source", 160 * MIB), idleSeconds=0)
    until(lambda: report(agent).get("state") == "Staged")
    folder = tmp_path / "nvme" / "kvstrata-models" / "llama" / "r1"
    with (folder / "model.safetensors").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    until(lambda: report(agent).get("inUse") is True)

    with agent.client() as client:
        seeds = iter(range(1, 10_000))

        def is_full() -> bool:
            put(client, next(seeds))
            tier = agent.tier("nvme")
            return bool(tier.get("usedBytes", 0) > 0.85 * tier["capacityBytes"])

        until(is_full)
        assert report(agent)["state"] == "Staged"
        assert (folder / "model.safetensors").exists()

        mapped.close()
        until(lambda: put(client, next(seeds)) and report(agent).get("state") == "Evicted")

    assert report(agent)["reason"] == "RoomForKv"
    assert not folder.exists()
    until(lambda: agent.tier("nvme").get("capacityBytes") == TIER_BYTES)
    agent.stop(signal.SIGTERM)
    agent.start()
    until(agent.has_reported)
    assert report(agent)["state"] == "Evicted"
    assert not folder.exists()


def test_what_cannot_be_staged_says_why(agent: Agent, tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", 2 * MIB)
    order(agent, source, digest="sha256:" + "0" * 64)
    until(lambda: report(agent).get("reason") == "DigestMismatch")
    assert agent.condition("ModelsStaged")["reason"] == "DigestMismatch"
    for generation, closed in enumerate((tmp_path / "nvme", tmp_path / "state", Path("/var/run/secrets")), 10):
        order(agent, closed, generation=generation)
        until(lambda: "is no source of weights" in report(agent).get("message", ""))
        order(agent, tmp_path / "nowhere", generation=generation + 10)
        until(lambda: report(agent).get("reason") == "SourceAway")
    large = tmp_path / "large"
    large.mkdir()
    with (large / "model.bin").open("wb") as file:
        file.truncate(TIER_BYTES)
    order(agent, large, generation=3)
    until(lambda: report(agent).get("reason") == "TooLarge")
    order(agent, source, generation=4)
    until(lambda: report(agent).get("state") == "Staged")
