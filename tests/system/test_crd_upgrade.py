"""CRDs upgraded in place under stored objects of every kind: all read as before and can be written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from controlplane import ApiError, ControlPlane, start
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_api.schema_kinds import BY_NAME, KINDS
from support.kube.bad_manifests import examples
from support.kube.chart_rights import ROOT

pytestmark = pytest.mark.system

CRDS: Final = ROOT / "charts" / "kvstrata" / "files" / "crds"
RECORDED: Final = json.loads((ROOT / "tests" / "recorded_schemas.json").read_text())
"""Each kind's schema as it was first declared."""
STORED: Final = (
    "kvpool", "kvpoolnode", "kvtenant", "kvtrustdomain", "kvprefixshare", "kvoperation", "kvmodelcache",
)  # fmt: skip
TEAM: Final = "team-a"
SERVED_S: Final = 90.0
Object = dict[str, Any]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with start(tmp_path / "plane", kwok=False) as plane:
        yield plane


def first_crds() -> str:
    """CRDs with the first schemas; columns and other extras of later versions are left out."""
    made = []
    for path in sorted(CRDS.glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        (version,) = crd["spec"]["versions"]
        version["schema"] = {"openAPIV3Schema": RECORDED[crd["spec"]["names"]["kind"]]}
        version.pop("additionalPrinterColumns", None)
        version.pop("selectableFields", None)
        made.append({**crd, "metadata": {"name": crd["metadata"]["name"]}})
    return yaml.safe_dump_all(made)


def path_of(manifest: Object) -> str:
    kind = BY_NAME[manifest["kind"]]
    inside = f"/namespaces/{TEAM}" if kind.is_namespaced else ""
    return f"/apis/{names.API_VERSION}{inside}/{kind.plural}"


def is_stored(plane: ControlPlane, manifest: Object) -> bool:
    try:
        plane.api.post(path_of(manifest), {**manifest, "metadata": {"name": manifest["metadata"]["name"]}})
    except ApiError as e:
        if e.status in (404, 429, 503):  # Not served yet.
            return False
        raise
    return True


def is_new_schema_served(plane: ControlPlane) -> bool:
    """Whether a field that the first version had not is kept."""
    body: Object = {**examples()["kvpool-minimal"], "metadata": {"name": "probe"}}
    tier = {**body["spec"]["tiers"][0], "autoscale": {"minPerNode": "1Gi", "maxPerNode": "2Ti"}}
    probe = {**body, "spec": {**body["spec"], "tiers": [tier]}}
    try:
        made = plane.api.post(f"{path_of(body)}?dryRun=All", probe)
    except ApiError:
        return False
    return "autoscale" in made["spec"]["tiers"][0]


def test_objects_that_the_first_crds_took_read_and_write_under_these(plane: ControlPlane) -> None:
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=first_crds())
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
    plane.api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
    manifests = [examples()[stem] for stem in STORED]
    assert {m["kind"] for m in manifests} == {kind.name for kind in KINDS}
    for manifest in manifests:
        assert wait_until(lambda m=manifest: is_stored(plane, m), SERVED_S)  # type: ignore[misc]
    paths = [f"{path_of(m)}/{m['metadata']['name']}" for m in manifests]
    before = [plane.api.get(path) for path in paths]
    assert not is_new_schema_served(plane)

    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    assert wait_until(lambda: is_new_schema_served(plane), SERVED_S)

    for path, stored in zip(paths, before, strict=True):
        assert plane.api.get(path)["spec"] == stored["spec"], "nothing is pruned and no default is filled in"
        written = plane.api.put(path, stored)
        assert written["spec"] == stored["spec"]
        assert written["metadata"]["generation"] == stored["metadata"]["generation"]
