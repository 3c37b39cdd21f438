"""What a real API server says to the chart: its objects, its rights, its pods."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from controlplane import ApiError, ControlPlane, KubectlError, start
from controlplane.waiting import wait_until
from kvstrata_api import names
from support.kube.chart_agents import redis_set
from support.kube.chart_values import CASES, NAMESPACE, Object, foreign, of_kind, render

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(tmp_path_factory.mktemp("plane"), kwok=False, controllers=False) as plane:
        for namespace in (NAMESPACE, names.CA_NAMESPACE):
            plane.kubectl("create", "namespace", namespace)
        plane.kubectl("apply", "-f", str(Path(__file__).parent / "monitoring_crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
        yield plane


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_a_real_api_server_takes_every_object_as_it_is(plane: ControlPlane, values: Object) -> None:
    objects = foreign(render(values))

    said = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-",
        stdin=yaml.safe_dump_all(objects),
    )  # fmt: skip

    assert len(said.splitlines()) == len(objects)
    assert all(line.endswith("serverside-applied (server dry run)") for line in said.splitlines())


def test_a_field_that_does_not_exist_would_be_refused(plane: ControlPlane) -> None:
    """Positive control of the dry run."""
    (service, *_) = of_kind(render({}), "Service")
    service["spec"]["prots"] = []

    with pytest.raises(KubectlError, match="prots"):
        plane.kubectl(
            "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(service)
        )


FORBIDDEN = {
    "kvstrata-agent": [
        ("create", "kvpools.kvstrata.io"), ("patch", "kvpoolnodes.kvstrata.io"), ("patch", "kvtenants.kvstrata.io"),
        ("list", "secrets"), ("create", "pods"), ("list", "nodes"), ("delete", "leases.coordination.k8s.io"),
        ("create", "serviceaccounts/token"),
    ],
    "kvstrata-metadata": [
        ("patch", "kvpools.kvstrata.io"), ("list", "secrets"), ("update", "leases.coordination.k8s.io"),
        ("watch", "kvtenants.kvstrata.io"), ("create", "tokenreviews.authentication.k8s.io"), ("create", "pods"),
    ],
    "kvstrata-operator": [
        ("list", "secrets"), ("create", "kvpools.kvstrata.io"), ("delete", "kvpools.kvstrata.io"),
        ("create", "tokenreviews.authentication.k8s.io"), ("update", "nodes"), ("patch", "nodes/status"),
        ("create", "pods"), ("delete", "pods"), ("create", "daemonsets.apps"),
        ("create", "clusterroles.rbac.authorization.k8s.io"),
    ],
}  # fmt: skip
ALLOWED = {
    "kvstrata-agent": [
        ("watch", "kvpools.kvstrata.io", ""), ("patch", "kvpoolnodes/status.kvstrata.io", ""),
        ("list", "secrets", NAMESPACE), ("patch", "leases.coordination.k8s.io", NAMESPACE),
        ("create", "tokenreviews.authentication.k8s.io", ""),
    ],
    "kvstrata-metadata": [
        ("list", "leases.coordination.k8s.io", NAMESPACE), ("create", "secrets", NAMESPACE),
        ("create", "leases.coordination.k8s.io", NAMESPACE), ("list", "kvtenants.kvstrata.io", ""),
    ],
    "kvstrata-operator": [
        ("patch", "kvpools.kvstrata.io", ""), ("deletecollection", "kvpoolnodes.kvstrata.io", ""),
        ("watch", "nodes", ""), ("patch", "nodes", ""), ("watch", "kvmodelcaches.kvstrata.io", ""),
        ("create", "secrets", NAMESPACE), ("update", "leases.coordination.k8s.io", NAMESPACE),
        ("create", "events", ""),
        ("patch", "daemonsets.apps", NAMESPACE), ("delete", "pods", NAMESPACE),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def ruled(plane: ControlPlane) -> ControlPlane:
    """A plane with the chart's identities and rights in force; the API server hears of them by watches of its own."""
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(render(CASES["only rights"])))
    wait_until(lambda: not any(refusals(plane, account) for account in ALLOWED), 90.0)
    return plane


def refusals(plane: ControlPlane, account: str) -> list[str]:
    """What an identity needs and may not do."""
    return [f"{v} {r}" for v, r, namespace in ALLOWED[account] if not may(plane, account, v, r, namespace)]


def may(plane: ControlPlane, account: str, verb: str, resource: str, namespace: str) -> bool:
    name, _, group = resource.partition(".")
    name, _, subresource = name.partition("/")
    attributes = {"verb": verb, "resource": name, "subresource": subresource, "group": group, "namespace": namespace}
    spec = {"user": f"system:serviceaccount:{NAMESPACE}:{account}", "resourceAttributes": attributes}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    return bool(plane.api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)["status"]["allowed"])


@pytest.mark.parametrize("account", FORBIDDEN)
def test_an_identity_may_not_reach_beyond_its_part(ruled: ControlPlane, account: str) -> None:
    """In `default`: nobody may read Secrets outside the system namespace."""
    allowed = [f"{v} {r}" for v, r in FORBIDDEN[account] if may(ruled, account, v, r, "default")]

    assert not allowed


@pytest.mark.parametrize("account", ALLOWED)
def test_an_identity_may_do_its_part(ruled: ControlPlane, account: str) -> None:
    assert not refusals(ruled, account)


@pytest.fixture(scope="module")
def restricted(plane: ControlPlane) -> str:
    """A namespace that admits only pods of the Pod Security Standard `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": "restricted", "labels": labels}
    plane.api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    for account in ("default", "kvstrata-operator", "kvstrata-metadata", "kvstrata-redis"):
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
        plane.api.post("/api/v1/namespaces/restricted/serviceaccounts", body)
    return "restricted"


def dry_run_pod(plane: ControlPlane, namespace: str, workload: Object) -> None:
    claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())]
    spec = workload["spec"]["template"]["spec"]
    spec["volumes"] += [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    plane.api.post(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


@pytest.mark.parametrize("case", ["defaults", "everything"])
def test_every_pod_meets_the_restricted_standard(plane: ControlPlane, restricted: str, case: str) -> None:
    objects = render(CASES[case])
    workloads = [*of_kind(objects, "Deployment"), *redis_set(objects)]

    assert len(workloads) == 3
    for workload in workloads:
        dry_run_pod(plane, restricted, workload)


def test_a_pod_that_may_be_root_would_be_refused(plane: ControlPlane, restricted: str) -> None:
    """Positive control of the standard."""
    (workload, *_) = of_kind(render({"podSecurityContext": {"runAsNonRoot": None}}), "Deployment")

    with pytest.raises(ApiError, match="restricted"):
        dry_run_pod(plane, restricted, workload)


@pytest.mark.parametrize("case", ["defaults", "everything"])
def test_a_real_api_server_takes_the_redis_that_the_operator_makes_of_the_template(
    plane: ControlPlane, case: str
) -> None:
    (made,) = redis_set(render(CASES[case]))

    said = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(made)
    )
    assert said.strip() == f"statefulset.apps/{names.REDIS} serverside-applied (server dry run)"
    (redis,) = made["spec"]["template"]["spec"]["containers"]
    assert redis["env"] == [{"name": names.REDIS_MEMORY_VARIABLE, "value": str(256 << 20)}]
    assert (redis["resources"]["requests"]["memory"], redis["resources"]["limits"]["memory"]) == ("320Mi", "384Mi")
