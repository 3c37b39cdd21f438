"""The life of a release on a real API server: install, upgrade, roll back, uninstall, and what becomes of CRDs."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane import ControlPlane, KubectlError, start
from controlplane.assets import find_tool
from controlplane.waiting import wait_until
from kvstrata_api import names

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvstrata"
NAMESPACE = "kvstrata-system"
SERVED_S = 90.0
"""Until the API server serves what CRDs say now; about a second on idle cores."""
REMOVED_S = 120.0
"""Until all CRDs are gone: seconds. The API server repeats a removal that failed within 300, so more hides one."""
LEFT = '{range .items[*]}{.metadata.name}: {.status.conditions[?(@.type=="Terminating")]}{"\\n"}{end}'
"""What kubectl prints of each CRD: its name, and what the API server says of its removal."""
TENANTS = f"/apis/{names.API_VERSION}/kvtenants"
Object = dict[str, Any]
Helm = Callable[..., str]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with start(tmp_path / "plane", kwok=False) as plane:  # Controllers: namespaces of a release end by them.
        yield plane


@pytest.fixture
def helm(plane: ControlPlane) -> Helm:
    """Runs Helm on the plane; returns what it prints."""

    def run(verb: str, *args: str | Path, values: Object | None = None) -> str:
        command = [str(find_tool("helm")), verb, "kvstrata", *map(str, args), "--namespace", NAMESPACE]
        given = ["--values", "-"] if verb in {"install", "upgrade"} else []
        command += [*given, "--kubeconfig", str(plane.kubeconfig)]
        text = json.dumps(values or {}) if given else None
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """The chart as a version before this one might have been: its tenants had no weight and nobody listed them so."""
    chart = tmp_path / "previous"
    shutil.copytree(CHART, chart)
    (path,) = chart.glob("files/crds/*kvtenants*.yaml")
    crd = yaml.safe_load(path.read_text())
    for version in crd["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        del spec["properties"]["weight"]
        version.pop("additionalPrinterColumns")
    path.write_text(path.read_text().partition("\nspec:")[0] + "\n" + yaml.safe_dump({"spec": crd["spec"]}))
    facts = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"^version: .*$", "version: 0.0.1", facts, flags=re.MULTILINE))
    return chart


def tenant(**spec: Any) -> str:
    spec = {"serviceAccounts": [{"namespace": "team-a", "name": "engine"}], **spec}
    body = {"apiVersion": names.API_VERSION, "kind": "KVTenant", "metadata": {"name": "team-a"}, "spec": spec}
    return yaml.safe_dump(body)


def apply(plane: ControlPlane, text: str) -> str:
    return plane.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", stdin=text)


def is_applied(plane: ControlPlane, text: str) -> bool:
    """Whether it was taken: what a CRD says now is served a moment after the CRD was written."""
    try:
        apply(plane, text)
    except KubectlError:
        return False
    return True


def weight(plane: ControlPlane) -> Any:
    """What is served of the field that the previous version had not."""
    return plane.api.get(f"{TENANTS}/team-a")["spec"].get("weight")


def crds(plane: ControlPlane) -> set[str]:
    return set(plane.kubectl("get", "crd", "-l", "app.kubernetes.io/part-of=kvstrata", "-o", "name").split())


def established(plane: ControlPlane) -> None:
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")


def passwords(plane: ControlPlane) -> list[str]:
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/kvstrata-redis-"
    return [str(plane.api.get(path + role)["data"]["password"]) for role in ("agent", "metadata")]


def replicas(plane: ControlPlane) -> int:
    return int(plane.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/kvstrata-operator")["spec"]["replicas"])


def test_an_upgrade_brings_new_fields_to_pools_and_tenants_that_stay(
    plane: ControlPlane, helm: Helm, previous: Path
) -> None:
    helm("install", previous, "--create-namespace")
    established(plane)
    apply(plane, tenant())
    with pytest.raises(KubectlError, match="weight"):
        apply(plane, tenant(weight=300))
    before, held = plane.api.get(f"{TENANTS}/team-a"), passwords(plane)

    helm("upgrade", CHART, values={"operator": {"replicas": 3}})
    assert wait_until(lambda: is_applied(plane, tenant(weight=300)), SERVED_S)
    after = plane.api.get(f"{TENANTS}/team-a")
    assert (after["metadata"]["uid"], after["spec"]["weight"]) == (before["metadata"]["uid"], 300)
    assert passwords(plane) == held
    assert replicas(plane) == 3

    helm("rollback", "1")
    assert replicas(plane) == 2
    assert passwords(plane) == held
    kept = plane.api.get(f"{TENANTS}/team-a")
    assert kept["metadata"]["uid"] == before["metadata"]["uid"]
    assert wait_until(lambda: weight(plane) is None, SERVED_S), "the chart's README says that it takes schemas back"
    helm("upgrade", CHART)
    assert wait_until(lambda: weight(plane) == 300, SERVED_S), "what nobody wrote meanwhile is stored still"


def test_an_uninstall_keeps_crds_a_new_release_takes_them_over_and_the_notes_remove_them(
    plane: ControlPlane, helm: Helm
) -> None:
    notes = helm("install", CHART, "--create-namespace")
    established(plane)
    apply(plane, tenant())
    made = crds(plane)

    helm("uninstall", "--cascade", "background", "--wait")
    plane.kubectl("wait", "--for=delete", f"namespace/{names.CA_NAMESPACE}", "--timeout=90s")
    assert crds(plane) == made
    assert plane.api.get(f"{TENANTS}/team-a")["metadata"]["name"] == "team-a"
    left = plane.kubectl("get", "deployments,statefulsets,secrets,roles,clusterroles", "-A", "-o", "name")
    assert "kvstrata" not in left

    helm("install", CHART)
    helm("uninstall", "--cascade", "background")
    (command,) = (line.strip() for line in notes.splitlines() if "kubectl delete crd" in line)
    path = f"{find_tool('kubectl').parent}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PATH": path}
    # In a group of its own: what it started must end with it.
    removing = subprocess.Popen(["sh", "-c", command], env=environment, start_new_session=True)
    try:
        assert removing.wait(REMOVED_S) == 0
    except subprocess.TimeoutExpired:
        pytest.fail(f"not removed within {REMOVED_S:.0f} s: {plane.kubectl('get', 'crd', '-o', f'jsonpath={LEFT}')}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(removing.pid, signal.SIGKILL)
        removing.wait()
    assert not crds(plane)


def test_crds_that_somebody_else_applies_are_upgraded_by_the_command_of_the_readme(
    plane: ControlPlane, helm: Helm, previous: Path
) -> None:
    text = (CHART / "README.md").read_text()
    (command,) = re.findall(r"`(kubectl apply [^`]*files/crds[^`]*)`", text)
    for path in (previous / "files" / "crds", CHART / "files" / "crds"):
        args = command.replace("charts/kvstrata/files/crds/", str(path)).split()[1:]
        plane.kubectl(*args)
        established(plane)
    helm("install", CHART, "--create-namespace", values={"crds": {"install": False}})

    assert wait_until(lambda: is_applied(plane, tenant(weight=300)), SERVED_S)
    helm("uninstall", "--cascade", "background")
    assert "kvtenants.kvstrata.io" in plane.kubectl("get", "crd", "-o", "name")


def test_the_quickstart_s_pool_is_made_once_and_outlives_upgrades_and_the_release(
    plane: ControlPlane, helm: Helm
) -> None:
    quickstart = ("-f", CHART / "values-quickstart.yaml")
    pool = f"/apis/{names.API_VERSION}/kvpools/demo"

    def uid() -> str:
        return str(plane.api.get(pool)["metadata"]["uid"])

    helm("install", CHART, "--create-namespace", *quickstart)
    first = uid()
    assert plane.api.get(f"{TENANTS}/demo")["spec"]["trustDomain"] == "demo"
    plane.kubectl("patch", "kvpool", "demo", "--type=merge", "-p", '{"spec": {"paused": true}}')
    helm("upgrade", CHART, *quickstart)
    helm("upgrade", CHART)
    helm("uninstall", "--cascade", "background")

    assert uid() == first
    plane.kubectl("wait", "--for=delete", f"namespace/{names.CA_NAMESPACE}", f"--timeout={REMOVED_S:.0f}s")
    helm("install", CHART, *quickstart)
    assert uid() == first
    assert plane.api.get(pool)["spec"]["paused"]
    helm("uninstall", "--cascade", "background")
