"""A cluster as release 0.1.0 left it, upgraded in the order of docs/install.md: nothing is lost, and pools are Ready.

`tests/recorded/release-0.1.0.json` has that release's definitions, without descriptions, and the objects that its
operator had brought to rest, with statuses, scope keys and ConfigMaps. Later ones only take what it has.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from controlplane import ApiError, ControlPlane, start
from controlplane.waiting import wait_until
from kvstrata_api import names, validate
from kvstrata_api.schema_kinds import BY_NAME
from support.kube.chart_rights import ROOT
from support.operator.agents import LEASE_S, FakeAgents
from support.operator.process import CONVERGED_S, SYSTEM, Cluster, running

pytestmark = pytest.mark.system

RECORDED: Final = json.loads((ROOT / "tests" / "recorded" / "release-0.1.0.json").read_text())
CRDS: Final = ROOT / "charts" / "kvstrata" / "files" / "crds"
POOL: Final = "llama"
PLURALS: Final = {"Namespace": "namespaces", "Node": "nodes", "Secret": "secrets", "ConfigMap": "configmaps"}
Object = dict[str, Any]
Where = tuple[str, str]
"""Kind and name."""


def path_of(obj: Object) -> str:
    """Where an object lies."""
    kind, space = BY_NAME.get(obj["kind"]), obj["metadata"].get("namespace")
    group = f"apis/{names.API_VERSION}" if kind else "api/v1"
    inside = f"/namespaces/{space}" if space else ""
    return f"/{group}{inside}/{kind.plural if kind else PLURALS[obj['kind']]}/{obj['metadata']['name']}"


def where(obj: Object) -> Where:
    return obj["kind"], obj["metadata"]["name"]


def restore(plane: ControlPlane) -> dict[Where, Object]:
    """Make the recorded objects, each under the uid that this cluster gives it; returns them as they are stored."""
    left = json.dumps(RECORDED["objects"])
    made: dict[Where, Object] = {}
    for at in range(len(RECORDED["objects"])):
        obj = json.loads(left)[at]
        folder, before = path_of(obj).rpartition("/")[0], obj["metadata"].pop("uid", "")
        assert wait_until(lambda o=obj, f=folder: is_made(plane, f, o), CONVERGED_S)  # type: ignore[misc]
        stored = plane.api.get(path_of(obj))
        if before:
            left = left.replace(before, stored["metadata"]["uid"])
        made[where(obj)] = stored
    for obj in json.loads(left):
        if obj.get("status") and obj["kind"] in BY_NAME:
            stored = plane.api.get(path_of(obj))
            made[where(obj)] = plane.api.put(f"{path_of(obj)}/status", {**stored, "status": obj["status"]})
    return made


def is_made(plane: ControlPlane, folder: str, obj: Object) -> bool:
    try:
        plane.api.post(folder, {k: v for k, v in obj.items() if k != "status"})
    except ApiError as e:
        if e.status in (404, 429, 503):  # Its kind is not served yet.
            return False
        if e.status != 409:
            raise
    return True


@pytest.fixture(scope="module")
def before_and_plane(
    tmp_path_factory: pytest.TempPathFactory, rights: str
) -> Iterator[tuple[dict[Where, Object], ControlPlane]]:
    """A cluster with the release's objects, under the definitions of this version."""
    with start(tmp_path_factory.mktemp("plane"), kwok=False) as plane:
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(RECORDED["crds"]))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
        plane.kubectl("create", "namespace", SYSTEM)
        before = restore(plane)
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=rights)
        yield before, plane


def without_hbm_devices(spec: Object) -> Object:
    """What this version no longer has (docs/decisions/159)."""
    tiers = [t | {"hbm": {}} if t.get("hbm") else t for t in spec.get("tiers", ())]
    return spec | {"tiers": tiers} if tiers else spec


def with_defaults(spec: Object) -> Object:
    """A KVPoolNode's spec with the fields that came since and have a default, which the operator writes."""
    reading = {"hbm": {"reading": "Copied"}}
    return spec | {"tiers": [tier | reading if "hbm" in tier else tier for tier in spec["tiers"]]}


def test_what_the_release_stored_is_valid_and_whole_under_these_definitions(
    before_and_plane: tuple[dict[Where, Object], ControlPlane],
) -> None:
    before, plane = before_and_plane
    for at, old in before.items():
        if at[0] not in BY_NAME:
            continue
        assert wait_until(
            lambda o=old: plane.api.get(path_of(o))["spec"] == without_hbm_devices(o["spec"]),  # type: ignore[misc]
            CONVERGED_S,
        ), at
        now = plane.api.get(path_of(old))
        assert now["status"] == old["status"], at
        assert validate.validate(now) == [], at
        written = plane.api.put(path_of(now), now)
        assert (written["spec"], written["metadata"]["uid"]) == (now["spec"], old["metadata"]["uid"]), at


def test_this_operator_takes_the_cluster_over_and_loses_nothing(
    before_and_plane: tuple[dict[Where, Object], ControlPlane], tmp_path: Path
) -> None:
    before, plane = before_and_plane
    accounts = (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)
    configs = {name: plane.service_account_kubeconfig(SYSTEM, name, tmp_path / name) for name in accounts}
    # Agents live on while the operator is replaced: their Leases are of the version before.
    with FakeAgents(configs[names.FIELD_MANAGER_AGENT], SYSTEM, lease_s=15 * LEASE_S) as agents:
        agents.manners.obeys = True
        with running(configs, tmp_path) as replica:
            cluster = Cluster(plane, replica.log)
            labels = {"for": POOL}
            plane.api.post("/api/v1/nodes", {"kind": "Node", "metadata": {"name": "worker-3", "labels": labels}})
            cluster.sees(lambda: cluster.kv("kvpools", POOL)["status"]["nodesReady"] == "3/3")
            cluster.says("kvpools", POOL, "Ready", "True")
            cluster.sees(lambda: rolled(cluster))
            cluster.says("kvtenants", "team-a", "EraseCompleted", "True")
            now = {at: plane.api.get(path_of(old)) for at, old in before.items()}

    for at, old in before.items():
        assert now[at]["metadata"]["uid"] == old["metadata"]["uid"], f"{at} was made anew"
        if at[0] == "Secret":
            assert now[at]["data"] == old["data"], f"{at}: keys are those that blocks were stored under"
        if at[0] in BY_NAME and at[0] != "KVPoolNode":
            assert now[at]["spec"] == without_hbm_devices(old["spec"]), at
    for tenant in ("team-a", "team-b"):
        kept = ("keyVersion", "lastErase", "eraseStarted", "effectiveDomain")
        then, since = before["KVTenant", tenant]["status"], now["KVTenant", tenant]["status"]
        assert {k: since.get(k) for k in kept} == {k: then.get(k) for k in kept}
    assert now["KVOperation", "flush"]["status"] == before["KVOperation", "flush"]["status"], "it is not done again"
    for node in ("worker-1", "worker-2"):
        at = ("KVPoolNode", f"{POOL}.{node}")
        # The last one is shared by all nodes, of which there is one more.
        assert now[at]["spec"]["tiers"][:-1] == with_defaults(without_hbm_devices(before[at]["spec"]))["tiers"][:-1]
        assert not now[at]["spec"].get("drain", {}).get("requested", False), "nobody was emptied"


def rolled(cluster: Cluster) -> bool:
    """Whether every agent follows the pool as this version reads it."""
    status = cluster.kv("kvpools", POOL)["status"]
    return bool(status["updateRevision"]) and status["currentRevision"] == status["updateRevision"]
