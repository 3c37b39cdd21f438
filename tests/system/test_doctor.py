"""`kvstrata doctor` against a real API server, with the real kubectl: what is well, what is not, and what says so."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane, start
from controlplane.assets import find_tool
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_api import names
from support.kube.chart_rights import install_kinds
from support.kube.objects import GROUP, SYSTEM, make_node, make_pool, make_tenant

pytestmark = pytest.mark.system

Json = dict[str, Any]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, rights: str) -> Iterator[ControlPlane]:
    """Without controllers: what Deployments report is written here."""
    with start(tmp_path_factory.mktemp("plane"), kwok=False, controllers=False) as plane:
        install_kinds(plane, rights)
        yield plane


def ask(plane: ControlPlane, *words: str) -> tuple[int, Any]:
    """Exit status of a command, and its answer as JSON."""
    kubectl = str(Path(find_tool("kubectl")).parent)
    command = [sys.executable, "-m", "kvstrata_client.cli", *words, "-o", "json"]
    done = subprocess.run(
        [*command, "--kubeconfig", str(plane.kubeconfig)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{kubectl}{os.pathsep}{os.environ['PATH']}"},
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def examine(plane: ControlPlane, *arguments: str) -> tuple[int, list[Json]]:
    """Exit status and findings."""
    status, found = ask(plane, "doctor", *arguments)
    return status, list(found["findings"])


def stamp(ago_s: float = 0.0) -> str:
    return (datetime.now(UTC) - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def condition(type_: str, reason: str, status: str = "True", message: str = "") -> Json:
    when = {"lastTransitionTime": stamp()[:19] + "Z", "observedGeneration": 1}
    return {"type": type_, "status": status, "reason": reason, "message": message, **when}


def state(plane: ControlPlane, path: str, **status: Any) -> None:
    plane.api.patch(f"{path}/status", {"status": status})


def make_deployment(plane: ControlPlane, name: str) -> str:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    plane.api.post(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments", {"metadata": {"name": name}, "spec": spec})
    return f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{name}"


def test_a_cluster_is_well_until_it_is_not(plane: ControlPlane, place: AgentIdentity) -> None:
    operator, metadata = (make_deployment(plane, f"kvstrata-{part}") for part in ("operator", "metadata"))
    for path in (operator, metadata):
        state(plane, path, replicas=1, availableReplicas=1, readyReplicas=1)
    make_pool(plane, place)
    make_node(plane, place)
    make_tenant(plane, "alpha", serviceAccounts=[{"namespace": "a", "name": "engine"}])
    node = f"{GROUP}/kvpoolnodes/{names.pool_node_name(place.pool, place.node)}"
    pool, tenant = f"{GROUP}/kvpools/{place.pool}", f"{GROUP}/kvtenants/alpha"
    state(plane, pool, conditions=[condition("Accepted", "Accepted"), condition("Ready", "AllNodesReady")])
    state(plane, tenant, conditions=[condition("Accepted", "Accepted"), condition("Ready", "Ready")])
    state(plane, node, conditions=[condition("AgentConnected", "Serving"), condition("Ready", "Serving")])
    lease_name = names.agent_lease_name(place.pool, place.node)
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
    lease = {"holderIdentity": "n", "leaseDurationSeconds": 15, "renewTime": stamp()}
    plane.api.post(leases, {"metadata": {"name": lease_name}, "spec": lease})

    assert examine(plane) == (0, [])
    status, shown = ask(plane, "status")
    assert (status, shown["pools"][0]["ready"], shown["findings"]) == (0, True, {"broken": 0, "warnings": 0})
    assert {one["name"]: one["available"] for one in shown["processes"]} == {
        "kvstrata-operator": 1,
        "kvstrata-metadata": 1,
    }
    assert ask(plane, "tenants", "alpha") == (0, shown["tenants"][0])

    plane.api.patch(f"{leases}/{lease_name}", {"spec": {"renewTime": stamp(300)}})
    state(plane, operator, replicas=1, availableReplicas=0, readyReplicas=0)
    wish = "KVTrustDomain 'lab' does not admit tenant 'alpha'"
    state(plane, tenant, conditions=[condition("Ready", "NotAdmitted", "False", wish)])
    status, found = examine(plane)

    assert status == 1
    assert ask(plane, "status")[1]["findings"] == {"broken": 2, "warnings": 1}
    assert ask(plane, "tenants")[0] == 1
    assert [(one["weight"], one["subject"], one["reason"]) for one in found] == [
        ("broken", "Deployment kvstrata-operator", "NotAvailable"),
        ("broken", f"KVPoolNode {place.pool}.{place.node}", "LeaseExpired"),
        ("warning", "KVTenant alpha", "NotAdmitted"),
    ]
    assert all(one["mend"] for one in found)
    look = found[1]["mend"]
    assert look.startswith(f"kubectl -n {SYSTEM} get pods")
    plane.kubectl(*look.split()[1:])


def test_a_cluster_that_does_not_answer_is_said(plane: ControlPlane, tmp_path: Path) -> None:
    lost = tmp_path / "kubeconfig"
    lost.write_text(plane.kubeconfig.read_text().replace("https://127.0.0.1:", "https://127.0.0.1:1"))
    command = [sys.executable, "-m", "kvstrata_client.cli", "doctor", "--kubeconfig", str(lost)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))

    assert (done.returncode, done.stdout, done.stderr.startswith("kvstrata: kubectl: ")) == (1, "", True)
