"""A KVModelCache under a real operator: staged by the agent's process, reported, labelled, and removed with it."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane
from kvstrata_api import names
from support.kube.agent import GROUP, MIB, custom, got, make_tenant, put, until
from support.operator.operated_fleet import Fleet, serving
from support.runner import leftovers

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(
    plane: ControlPlane, kubeconfig: Path, operator_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with serving(plane, kubeconfig, operator_config, tmp_path_factory.mktemp("models")) as made:
        yield made


def status(fleet: Fleet, name: str) -> dict[str, Any]:
    found: dict[str, Any] = fleet.plane.api.get(f"{GROUP}/kvmodelcaches/{name}").get("status") or {}
    return found


def label(fleet: Fleet, name: str) -> str:
    labels = fleet.plane.api.get(f"/api/v1/nodes/{fleet.agents[0].node}")["metadata"]["labels"]
    return str(labels.get(f"{names.LABEL_MODEL_PREFIX}{name}", ""))


def test_a_model_is_staged_by_the_agent_of_a_real_operator(fleet: Fleet, tmp_path: Path) -> None:
    agent, name = fleet.agents[0], f"{fleet.pool}-llama"
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.bin").write_bytes(os.urandom(8 * MIB + 3))
    spec = {
        "poolRef": fleet.pool,
        "source": {"url": f"file://{source}"},
        "revision": "r1",
        "nodes": {"names": [agent.node]},
    }
    fleet.plane.kubectl("apply", "-f", "-", stdin=json.dumps(custom("KVModelCache", name, spec)))

    fleet.plane.kubectl("wait", "--for=condition=Staged", f"kvmc/{name}", "--timeout=90s")

    folder = agent.home.parent / "nvme" / names.MODELS_FOLDER / name / "r1"
    assert (folder / "model.bin").read_bytes() == (source / "model.bin").read_bytes()
    seen = status(fleet, name)
    assert (seen["nodesWanted"], seen["nodesStaged"], seen["sizeBytes"]) == (1, 1, 8 * MIB + 3)
    assert seen["digest"] == next(m for m in agent.status()["models"] if m["name"] == name)["digest"]
    until(lambda: label(fleet, name) == "r1")
    with (folder / "model.bin").open("rb"):
        until(lambda: status(fleet, name).get("nodesInUse") == 1)

    fleet.plane.kubectl("delete", f"kvmc/{name}", "--timeout=60s")
    until(lambda: not folder.exists())
    until(lambda: not label(fleet, name))


def test_a_model_in_memory_leaves_blocks_where_they_are_found_and_outlives_the_agent(
    plane: ControlPlane, kubeconfig: Path, operator_config: Path, tmp_path: Path
) -> None:
    make_tenant(plane, "team-w")
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.bin").write_bytes(os.urandom(40 * MIB + 3))
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as memory,
        serving(plane, kubeconfig, operator_config, tmp_path, 64 * MIB, Path(memory)) as fleet,
    ):
        agent, name = fleet.agents[0], f"{fleet.pool}-llama"
        with agent.client("team-w") as client:
            assert put(client, 1) == 16
        spec = {
            "poolRef": fleet.pool,
            "tier": "dram",
            "source": {"url": f"file://{source}"},
            "revision": "r1",
            "nodes": {"names": [agent.node]},
        }
        fleet.plane.kubectl("apply", "-f", "-", stdin=json.dumps(custom("KVModelCache", name, spec)))
        fleet.plane.kubectl("wait", "--for=condition=Staged", f"kvmc/{name}", "--timeout=90s")

        assert agent.memory_dir is not None
        folder = agent.memory_dir / fleet.pool / "dram" / names.MODELS_FOLDER / name / "r1"
        assert (folder / "model.bin").read_bytes() == (source / "model.bin").read_bytes()
        until(lambda: dram_of(fleet)["capacityBytes"] < 24 * MIB)
        (source / "model.bin").unlink()
        agent.stop(signal.SIGKILL)
        agent.start()
        until(agent.has_reported)
        with agent.client("team-w") as client:
            assert got(client, 1)[0] == 16
        until(lambda: [m["state"] for m in agent.status()["models"]] == ["Staged"])
        assert (dram_of(fleet)["medium"], dram_of(fleet)["capacityBytes"] < 24 * MIB) == ("tmpfs-4Ki", True)

        fleet.plane.kubectl("delete", f"kvmc/{name}", "--timeout=60s")
        until(lambda: not folder.exists())
        until(lambda: dram_of(fleet)["capacityBytes"] == 64 * MIB)


def dram_of(fleet: Fleet) -> dict[str, Any]:
    """What the first agent reports of its memory."""
    found: dict[str, Any] = next(t for t in fleet.agents[0].status()["tiers"] if t["name"] == "dram")
    return found
