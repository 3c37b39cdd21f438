"""Every example is accepted by a real API server, as it stands."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from controlplane import ControlPlane, KubectlError
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_api.schema import CRD_DIR
from support.kube.chart_values import CHART, Object, helm, render

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(p for p in EXAMPLES.iterdir() if p.name[:2].isdigit())
ENGINES = [folder for folder in FOLDERS if (folder / "Containerfile").exists()]
WAIT_S = 30.0
"""A policy is in force some seconds after it was stored."""
VALUES = sorted(EXAMPLES.glob("*/chart/values.yaml"))
TRANSCRIPTS = sorted((EXAMPLES / "transcripts").glob("*.jsonl"))
KINDS = ("kvpools", "kvpoolnodes", "kvtenants", "kvtrustdomains", "kvprefixshares", "kvoperations", "kvmodelcaches")


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """An API server that knows our kinds and has the examples' namespaces."""
    namespaces = str(EXAMPLES / "01-quickstart" / "00-namespaces.yaml")
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD_DIR))
    control_plane.kubectl(
        "wait", "--for=condition=Established", *(f"crd/{k}.kvstrata.io" for k in KINDS), "--timeout=90s"
    )
    control_plane.kubectl("apply", "-f", namespaces)
    yield control_plane
    control_plane.kubectl("delete", "--wait=false", "-f", namespaces)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_an_example_is_accepted_as_it_stands(plane: ControlPlane, folder: Path) -> None:
    told = plane.kubectl("apply", "--dry-run=server", "-f", str(folder))

    assert told.count("(server dry run)") >= 2


@pytest.fixture(scope="module")
def held(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kubeconfig of an administrator whom the chart's admission policies hold, which are in force."""
    policies = [o for o in render({}) if o["kind"].startswith("ValidatingAdmissionPolicy")]
    kubeconfig = plane.client_kubeconfig("alice", [], tmp_path_factory.mktemp("alice") / "kubeconfig")
    plane.kubectl("create", "clusterrolebinding", "alice", "--clusterrole=cluster-admin", "--user=alice")
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(policies))
    try:
        eventually_refused(plane, kubeconfig)
        yield kubeconfig
    finally:
        plane.kubectl("delete", "--wait=true", "-f", "-", stdin=yaml.safe_dump_all(policies))
        plane.kubectl("delete", "clusterrolebinding", "alice")


def eventually_refused(plane: ControlPlane, kubeconfig: Path) -> None:
    """Wait until an engine's pod without the label of its pool is refused."""
    (pod, *_) = pods(EXAMPLES / "05-vllm")
    del pod["metadata"]["labels"]["kvstrata.io/pool"]
    assert wait_until(lambda: "an engine sees the socket of its own pool" in refusal(plane, kubeconfig, [pod]), WAIT_S)


def refusal(plane: ControlPlane, kubeconfig: Path, objects: Sequence[Object]) -> str:
    """What the API server has against new objects; empty when it takes them."""
    options = ("create", "--dry-run=server", "-f", "-")
    try:
        plane.kubectl(*options, stdin=yaml.safe_dump_all(objects), kubeconfig=kubeconfig)
    except KubectlError as e:
        return str(e)
    return ""


def pods(folder: Path) -> Iterator[Object]:
    """Pods that a folder's Deployments and Jobs would make."""
    for path in sorted(folder.glob("*.yaml")):
        for made in yaml.safe_load_all(path.read_text()):
            if "template" in made["spec"]:
                template = made["spec"]["template"]
                metadata = {"name": "p", "namespace": made["metadata"]["namespace"], **template["metadata"]}
                restart = {"restartPolicy": template["spec"].get("restartPolicy", "Always")}
                yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] | restart}


@pytest.mark.parametrize("folder", ENGINES, ids=lambda p: p.name)
def test_the_charts_policies_admit_an_examples_objects_and_the_pods_that_come_of_them(
    plane: ControlPlane, held: Path, folder: Path
) -> None:
    objects = [o for path in sorted(folder.glob("*.yaml")) for o in yaml.safe_load_all(path.read_text())]
    made = list(pods(folder))

    assert made
    assert refusal(plane, held, [*objects, *made]) == ""


def test_the_charts_policies_admit_the_pod_of_the_page(plane: ControlPlane, held: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (EXAMPLES.parent / "docs" / "engine-pods.md").read_text(), re.DOTALL)
    pod = yaml.safe_load(text)
    pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"] = "team-alpha", "engine"

    assert refusal(plane, held, [pod]) == ""


def test_an_engine_mounts_the_folder_that_the_model_cache_makes_where_the_chart_lets_it() -> None:
    folder = EXAMPLES / "10-weights"
    cache = yaml.safe_load((folder / "25-weights.yaml").read_text())
    values = yaml.safe_load((folder / "chart" / "values.yaml").read_text())
    (pod,) = pods(folder)
    name, spec = cache["metadata"]["name"], cache["spec"]
    tier = f"{values['agent']['hostPaths']['memory']}/{spec['poolRef']}/{spec['poolRef']}/{spec['tier']}"
    (weights,) = (v["hostPath"]["path"] for v in pod["spec"]["volumes"] if v["name"] == "weights")

    assert pod["spec"]["nodeSelector"] == {f"{names.LABEL_MODEL_PREFIX}{name}": spec["revision"]}
    assert weights == f"{tier}/{names.MODELS_FOLDER}/{name}/{spec['revision']}"
    assert values["admissionPolicies"]["tenantHostPaths"] == [f"{tier}/{names.MODELS_FOLDER}"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_an_example_has_a_readme_that_says_how_to_apply_it(folder: Path) -> None:
    assert f"kubectl apply -f examples/{folder.name}/" in (folder / "README.md").read_text()


@pytest.mark.parametrize("path", VALUES, ids=lambda p: p.parts[-3])
def test_values_of_an_example_are_values_of_the_chart(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    if "nodePreparation" in values:
        assert "--set nodePreparation.image.digest=" in (path.parents[1] / "README.md").read_text()
        values["nodePreparation"]["image"] = {"digest": "sha256:" + "1" * 64}
    wrong = {**values, "noSuchValue": 1}

    assert render(values)
    assert helm("template", "kvstrata", str(CHART), values=wrong).returncode != 0


def test_the_examples_table_names_every_folder() -> None:
    table = (EXAMPLES / "README.md").read_text()

    assert FOLDERS
    assert all(f"`{folder.name}`" in table for folder in FOLDERS)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem[:8])
def test_a_transcript_has_turns_in_order_that_each_add_something(path: Path) -> None:
    turns = [json.loads(line) for line in path.read_text().splitlines()]

    assert len(turns) >= 6
    assert all(turn["appended"] and turn["output"] for turn in turns)
    assert all(a["timestamp_us"] <= b["timestamp_us"] for a, b in pairwise(turns))


def test_transcripts_come_with_their_licence_and_stay_small() -> None:
    folder = EXAMPLES / "transcripts"

    assert "Apache License" in (folder / "LICENSE").read_text()
    assert "16a14ada" in (folder / "README.md").read_text()
    assert sum(p.stat().st_size for p in folder.iterdir()) < 300_000
