"""`kvstrata install --check` against a real API server: what it finds, and that its own commands mend it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane, start
from controlplane.assets import find_tool
from support.kube.chart_values import CHART, NAMESPACE

pytestmark = pytest.mark.system

QUICKSTART = CHART / "values-quickstart.yaml"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(tmp_path_factory.mktemp("plane"), kwok=False, controllers=False) as plane:
        offered = {"cpu": "4", "memory": "8Gi", "pods": "10", "hugepages-2Mi": "0"}
        body: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "n0", "labels": {"kubernetes.io/os": "linux"}},
        }
        plane.api.post("/api/v1/nodes", body | {"status": {"allocatable": offered, "capacity": offered}})
        yield plane


def check(plane: ControlPlane, *arguments: str | Path) -> tuple[int, list[Json]]:
    """Exit status and findings."""
    kubectl = str(Path(find_tool("kubectl")).parent)
    command = [sys.executable, "-m", "kvstrata_client.cli", "install", "--check", "-o", "json", *map(str, arguments)]
    done = subprocess.run(
        [*command, "--kubeconfig", str(plane.kubeconfig)],
        capture_output=True,
        text=True,
        env=environment(kubectl),
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, list(json.loads(done.stdout)["findings"])


def environment(tools: str) -> dict[str, str]:
    import os

    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def failures(found: list[Json]) -> list[Json]:
    return [one for one in found if one["is_failure"]]


def test_the_quickstart_works_on_a_cluster_with_nothing_but_a_node(plane: ControlPlane) -> None:
    status, found = check(plane, "-f", QUICKSTART)

    assert (status, failures(found)) == (0, [])


def test_what_is_in_the_way_is_mended_by_what_it_says(plane: ControlPlane, tmp_path: Path) -> None:
    pools = tmp_path / "pool.yaml"
    pools.write_text((CHART / "examples/01-quickstart/10-pool.yaml").read_text())
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    for path in sorted((CHART / "files/crds").glob("*.yaml")):
        plane.kubectl("apply", "--server-side", "-f", str(path))
    status, found = check(plane, "-f", QUICKSTART, "--pool", pools)

    assert status == 1
    assert {one["subject"].split()[0] for one in failures(found)} == {"CRD", "namespace", "KVPool"}
    mends = [one["mend"].replace("NODE", "n0") for one in failures(found)]
    for mend in mends:
        for command in mend.split(" && "):
            assert command.startswith("kubectl ")
            plane.kubectl(*command.removeprefix("kubectl ").split())
    status, found = check(plane, "-f", QUICKSTART, "--pool", pools)
    assert (status, failures(found)) == (0, [])
    assert any("agents there have pages of 4Ki" in one["what"] for one in found)


def test_without_a_cluster_it_says_so(plane: ControlPlane, tmp_path: Path) -> None:
    lost = tmp_path / "kubeconfig"
    lost.write_text(plane.kubeconfig.read_text().replace("https://127.0.0.1:", "https://127.0.0.1:1"))
    command = [sys.executable, "-m", "kvstrata_client.cli", "install", "--check", "--kubeconfig", str(lost)]
    tools = environment(str(Path(find_tool("kubectl")).parent))
    done = subprocess.run(command, capture_output=True, text=True, env=tools, check=False)

    assert done.returncode == 1
    assert done.stderr.startswith("kvstrata: kubectl: ")
