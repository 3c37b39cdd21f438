"""Folders that the chart has made: what the operator makes of its template, and what a real API server lets it be."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from controlplane import ControlPlane, KubectlError, start
from controlplane.waiting import wait_until
from kvstrata_node import folders
from support.kube.chart_agents import daemon_set, template_of
from support.kube.chart_values import CASES, NAMESPACE, QUICKSTART, Object, of_kind, render
from support.operator.fleet import tier

pytestmark = pytest.mark.system

TIERS = [
    tier(size="256Mi", hostDRAM={"pageSize": "4Ki"}),
    tier("nvme", "NVMe", nvme={"path": "/var/lib/kvstrata/demo/nvme"}),
    tier("disk", "NVMe", nvme={"path": "/mnt/nvme/demo"}),
    tier("flash", "RemoteFlash", remoteFlash={"path": "/mnt/flash/demo"}),
]


def agent(values: Object) -> Object:
    """Pod template of the agents of pool `demo`."""
    made = daemon_set(template_of(render(values)), "demo", tiers=TIERS)
    return dict(made["spec"]["template"])


def types(pod: Object) -> dict[str, str]:
    return {v["hostPath"]["path"]: v["hostPath"]["type"] for v in pod["spec"]["volumes"] if "hostPath" in v}


def test_folders_are_made_and_owned_but_for_shared_flash() -> None:
    pod = agent(QUICKSTART)
    (owner,) = pod["spec"]["initContainers"]
    (main,) = pod["spec"]["containers"]
    given = folders._parser().parse_args(owner["args"])
    mounts = {m["mountPath"] for m in owner["volumeMounts"]}

    made = {"/run/kvstrata/demo", "/var/lib/kvstrata/demo", "/mnt/nvme/demo"}
    assert types(pod) == dict.fromkeys(made, "DirectoryOrCreate") | {"/mnt/flash/demo": "Directory"}
    assert {str(path): mode for path, mode in given.folders} == {
        "/run/kvstrata/demo": 0o770, "/var/lib/kvstrata/demo": 0o750, "/mnt/nvme/demo": 0o750,
    }  # fmt: skip
    assert mounts == made
    assert given.owner.user == pod["spec"]["securityContext"]["runAsUser"]
    assert owner["image"] == main["image"]
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_where_an_administrator_makes_them_nothing_is_root() -> None:
    pod = agent(CASES["everything"])

    assert set(types(pod).values()) == {"Directory"}
    assert "initContainers" not in pod["spec"]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A plane with the policies of the quickstart in force for the user `operations`, who may do everything."""
    with start(tmp_path_factory.mktemp("plane"), kwok=False, controllers=False) as plane:
        plane.kubectl("create", "namespace", NAMESPACE)
        for account in ("kvstrata-agent", "default"):
            plane.kubectl("create", "serviceaccount", account, "-n", NAMESPACE)
        plane.kubectl("create", "clusterrolebinding", "operations", "--clusterrole=cluster-admin", "--user=operations")
        kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(of_kind(render(QUICKSTART), *kinds)))
        assert wait_until(lambda: "admitted" not in answer(plane, changed(image="elsewhere/agent:1")), 90.0)
        yield plane


def changed(part: str = "initContainers", **changes: Any) -> Object:
    """The pod with fields of one container replaced."""
    pod = copy.deepcopy(agent(QUICKSTART))
    pod["spec"][part][0] |= changes
    return pod


def answer(plane: ControlPlane, pod: Object) -> str:
    body = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "agent"}}
    try:
        plane.kubectl(
            "create", "--dry-run=server", "--as=operations", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(body)
        )
    except KubectlError as e:
        return str(e)
    return "admitted"


def test_the_pod_is_admitted_as_the_operator_makes_it(plane: ControlPlane) -> None:
    assert answer(plane, agent(QUICKSTART)) == "admitted"
    assert answer(plane, changed(part="containers", image="kvstrata/agent@sha256:" + "1" * 64)) != "admitted"


OWN = "the init container folders is the chart's own command"
SECURITY = agent(QUICKSTART)["spec"]["initContainers"][0]["securityContext"]
REFUSED: dict[str, tuple[Object, str]] = {
    "another command": ({"command": ["python3", "-c", "0"]}, OWN),
    "another image of the repository": ({"image": "kvstrata/agent:other"}, OWN),
    "another repository": ({"image": "elsewhere/agent:0.1.0"}, "one of the repository that the chart names"),
    "an environment": ({"env": [{"name": "LD_PRELOAD", "value": "/var/lib/kvstrata/demo/x.so"}]}, OWN),
    "a mount over its program": ({"volumeMounts": [{"name": "storage", "mountPath": "/usr/lib/python3.11"}]}, OWN),
    "more than CHOWN": ({"securityContext": SECURITY | {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}}, OWN),
    "privileges": ({"securityContext": SECURITY | {"privileged": True, "allowPrivilegeEscalation": True}}, OWN),
    "to stay": ({"restartPolicy": "Always"}, OWN),
    "another name": ({"name": "more"}, "containers run without privileges"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_owns_folders_can_be_nothing_else(plane: ControlPlane, changes: Object, words: str) -> None:
    assert words in answer(plane, changed(**changes))


def test_the_agent_itself_is_no_more_than_before(plane: ControlPlane) -> None:
    security = agent(QUICKSTART)["spec"]["containers"][0]["securityContext"]

    assert "do not run as root" in answer(
        plane, changed(part="containers", securityContext=security | {"runAsUser": 0})
    )
    assert "without privileges" in answer(
        plane,
        changed(part="containers", securityContext=security | {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}),
    )
