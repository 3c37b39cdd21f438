"""The embedded control plane for real: TLS, identities, fake nodes, faults."""

import contextlib
import http.client
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from controlplane import ApiError, ApiUnreachableError, ControlPlane, KubectlError, StartError
from controlplane.client import ApiClient, trusting
from controlplane.components import ISSUER
from controlplane.layout import Layout
from controlplane.pki import Authority
from controlplane.testing import scratch_namespace, session_plane
from controlplane.waiting import wait_until

pytestmark = pytest.mark.system

AUDIENCE = "kvstrata"
START_S_MAX = 120.0  # A few seconds on idle cores; the bound only catches a start that hangs.


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A plane of our own: these tests restart and pause it."""
    began_s = time.monotonic()
    with contextlib.contextmanager(session_plane)(tmp_path_factory.mktemp("plane")) as plane:
        took_s = time.monotonic() - began_s
        sys.stdout.write(f"control plane ready after {took_s:.1f} s\n")
        assert took_s < START_S_MAX
        yield plane


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    with scratch_namespace(plane) as name:
        yield name


@pytest.fixture
def powerless(plane: ControlPlane, namespace: str) -> str:
    """A service account without any right; its name."""
    plane.api.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "powerless"}})
    return "powerless"


def config_map(plane: ControlPlane, namespace: str, name: str) -> None:
    """Create a ConfigMap, the smallest thing worth keeping."""
    plane.api.post(f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": name}, "data": {"k": "v"}})


def review(plane: ControlPlane, token: str, audience: str) -> dict[str, Any]:
    """Return the status of a TokenReview."""
    spec = {"token": token, "audiences": [audience]}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    status: dict[str, Any] = plane.api.post("/apis/authentication.k8s.io/v1/tokenreviews", body)["status"]
    return status


def test_a_started_plane_has_its_namespaces_priorities_and_default_account(plane: ControlPlane) -> None:
    names = {item["metadata"]["name"] for item in plane.api.get("/api/v1/namespaces")["items"]}
    classes = {i["metadata"]["name"] for i in plane.api.get("/apis/scheduling.k8s.io/v1/priorityclasses")["items"]}

    assert {"default", "kube-system", "kube-public"} <= names
    assert {"system-node-critical", "system-cluster-critical"} <= classes
    assert plane.api.get("/api/v1/namespaces/default/serviceaccounts/default")
    assert plane.api.get("/version")["gitVersion"] == "v1.34.4"


def test_the_state_folder_and_its_secrets_are_closed_to_others(plane: ControlPlane) -> None:
    files = [p for p in plane.state_dir.rglob("*.key") if p.is_file()]

    assert files
    assert plane.state_dir.stat().st_mode & 0o077 == 0
    assert all(p.stat().st_mode & 0o077 == 0 for p in [*files, plane.kubeconfig])


def test_a_client_that_does_not_know_our_authority_refuses_the_server(plane: ControlPlane) -> None:
    stranger = ApiClient(plane.server, ssl.create_default_context())

    with pytest.raises(ApiUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.get("/version")


def test_the_serving_certificate_is_refused_under_another_name(plane: ControlPlane) -> None:
    context = trusting(Layout(plane.state_dir))
    address = urlsplit(plane.server)
    assert address.hostname

    with socket.create_connection((address.hostname, address.port)) as raw:
        context.wrap_socket(raw, server_hostname="localhost").close()
    with (
        socket.create_connection((address.hostname, address.port)) as raw,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(raw, server_hostname="example.org")


@pytest.mark.parametrize("token", [None, "admin-token"])
@pytest.mark.parametrize("path", ["/readyz", "/version", "/api/v1/secrets"])
def test_a_call_without_valid_credentials_is_unauthorized(plane: ControlPlane, path: str, token: str | None) -> None:
    anonymous = ApiClient(plane.server, trusting(Layout(plane.state_dir)), token)

    with pytest.raises(ApiError) as refused:
        anonymous.get(path)
    assert refused.value.status == http.HTTPStatus.UNAUTHORIZED


def test_a_certificate_of_a_foreign_authority_is_unauthorized(plane: ControlPlane, tmp_path: Path) -> None:
    pair = Authority.create("kvstrata-embedded").issue_client("admin", ("system:masters",))
    (tmp_path / "key").write_bytes(pair.key_pem)
    (tmp_path / "crt").write_bytes(pair.public_pem)
    context = trusting(Layout(plane.state_dir))
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")

    with pytest.raises(ApiError) as refused:
        ApiClient(plane.server, context).get("/api/v1/secrets")
    assert refused.value.status == http.HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("identity", [None, "admin"])
def test_etcd_is_closed_to_everybody_but_the_api_server(plane: ControlPlane, identity: str | None) -> None:
    at = Layout(plane.state_dir)
    argument = next(a for a in etcd_arguments(plane) if a.startswith("--listen-client-urls="))
    address = urlsplit(argument.split("=", 1)[1])
    assert address.hostname
    context = ssl.create_default_context(cafile=str(at.pki("etcd-ca.crt")))
    if identity:
        context.load_cert_chain(at.pki(f"{identity}.crt"), at.pki(f"{identity}.key"))
    connection = http.client.HTTPSConnection(address.hostname, address.port, context=context, timeout=5)

    def ask() -> int:
        connection.request("GET", "/version")
        return connection.getresponse().status

    with contextlib.closing(connection), pytest.raises((ssl.SSLError, ConnectionResetError)):
        ask()


def etcd_arguments(plane: ControlPlane) -> list[str]:
    """Return the command line of the running etcd."""
    return Path(f"/proc/{plane.status()['etcd'].pid}/cmdline").read_text().split("\0")


def test_a_token_for_our_audience_passes_a_review_for_it_and_names_its_account(
    plane: ControlPlane, namespace: str, powerless: str
) -> None:
    token = plane.service_account_token(namespace, powerless, AUDIENCE)

    status = review(plane, token, AUDIENCE)

    assert status["authenticated"] is True
    assert status["audiences"] == [AUDIENCE]
    assert status["user"]["username"] == f"system:serviceaccount:{namespace}:{powerless}"


@pytest.mark.parametrize("asked", ["another", ISSUER])
def test_a_token_for_our_audience_fails_a_review_for_another(
    plane: ControlPlane, namespace: str, powerless: str, asked: str
) -> None:
    token = plane.service_account_token(namespace, powerless, AUDIENCE)

    assert not review(plane, token, asked).get("authenticated", False)


def test_a_token_for_the_api_server_fails_a_review_for_our_audience(
    plane: ControlPlane, namespace: str, powerless: str
) -> None:
    token = plane.service_account_token(namespace, powerless)

    assert review(plane, token, ISSUER)["authenticated"] is True
    assert not review(plane, token, AUDIENCE).get("authenticated", False)


def test_a_forged_token_fails_a_review(plane: ControlPlane, namespace: str, powerless: str) -> None:
    token = plane.service_account_token(namespace, powerless, AUDIENCE)
    head, payload, signature = token.split(".")

    assert not review(plane, f"{head}.{payload}.{signature[::-1]}", AUDIENCE).get("authenticated", False)


def test_a_token_for_our_audience_does_not_open_the_api_server(
    plane: ControlPlane, namespace: str, powerless: str
) -> None:
    token = plane.service_account_token(namespace, powerless, AUDIENCE)

    with pytest.raises(ApiError) as refused:
        ApiClient(plane.server, trusting(Layout(plane.state_dir)), token).get("/api/v1/namespaces")
    assert refused.value.status == http.HTTPStatus.UNAUTHORIZED


def test_a_deleted_account_fails_a_review(plane: ControlPlane, namespace: str, powerless: str) -> None:
    token = plane.service_account_token(namespace, powerless, AUDIENCE)

    plane.api.delete(f"/api/v1/namespaces/{namespace}/serviceaccounts/{powerless}")

    # The API server may answer from its token cache for ten seconds.
    assert wait_until(lambda: not review(plane, token, AUDIENCE).get("authenticated", False), 90)


def test_a_powerless_account_is_known_and_forbidden_everything(
    plane: ControlPlane, namespace: str, powerless: str, tmp_path: Path
) -> None:
    kubeconfig = plane.service_account_kubeconfig(namespace, powerless, tmp_path / "powerless.kubeconfig")

    who = plane.kubectl("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}", kubeconfig=kubeconfig)

    assert who == f"system:serviceaccount:{namespace}:{powerless}"
    with pytest.raises(KubectlError, match=r"(?i)forbidden"):
        plane.kubectl("get", "configmaps", kubeconfig=kubeconfig)


def test_rights_are_what_the_role_grants_and_no_more(
    plane: ControlPlane, namespace: str, powerless: str, tmp_path: Path
) -> None:
    kubeconfig = plane.service_account_kubeconfig(namespace, powerless, tmp_path / "reader.kubeconfig")
    plane.kubectl("create", "role", "reader", "-n", namespace, "--verb=get,list", "--resource=configmaps")
    subject = f"--serviceaccount={namespace}:{powerless}"
    plane.kubectl("create", "rolebinding", "reader", "-n", namespace, "--role=reader", subject)

    config_map(plane, namespace, "readable")

    def can_read() -> bool:
        try:
            return "readable" in plane.kubectl("get", "configmaps", "-o", "name", kubeconfig=kubeconfig)
        except KubectlError:
            return False  # The authorizer learns of the role through a watch.

    assert wait_until(can_read, 90)
    with pytest.raises(KubectlError, match=r"(?i)forbidden"):
        plane.kubectl("create", "configmap", "mine", kubeconfig=kubeconfig)
    with pytest.raises(KubectlError, match=r"(?i)forbidden"):
        plane.kubectl("get", "configmaps", "-n", "kube-system", kubeconfig=kubeconfig)


@pytest.mark.parametrize("component", ["kwok", "kube-scheduler"])
def test_components_have_identities_of_their_own_that_read_no_secrets(plane: ControlPlane, component: str) -> None:
    kubeconfig = Layout(plane.state_dir).kubeconfig(component)

    assert plane.kubectl("auth", "can-i", "list", "pods", "-A", kubeconfig=kubeconfig).strip() == "yes"
    with pytest.raises(KubectlError, match=r"(?i)forbidden"):
        plane.kubectl("get", "secrets", "-A", kubeconfig=kubeconfig)


def test_a_certificate_is_issued_for_any_user(plane: ControlPlane, tmp_path: Path) -> None:
    kubeconfig = plane.client_kubeconfig("alice", ("auditors",), tmp_path / "alice.kubeconfig")

    who = plane.kubectl("auth", "whoami", "-o", "jsonpath={.status.userInfo}", kubeconfig=kubeconfig)

    assert '"username":"alice"' in who
    assert '"auditors"' in who


def test_fake_nodes_become_ready_and_run_pods(plane: ControlPlane, namespace: str) -> None:
    names = [f"fake-{i}" for i in range(3)]
    plane.add_fake_nodes(names, {"kvstrata.test/kind": "fake"}, {"cpu": "4", "memory": "8Gi", "pods": "10"})
    pod = {
        "metadata": {"name": "sleeper"},
        "spec": {
            "nodeSelector": {"kvstrata.test/kind": "fake"},
            "containers": [{"name": "c", "image": "none", "resources": {"requests": {"cpu": "1"}}}],
        },
    }

    plane.api.post(f"/api/v1/namespaces/{namespace}/pods", pod)

    path = f"/api/v1/namespaces/{namespace}/pods/sleeper"
    assert wait_until(lambda: plane.api.get(path)["status"]["phase"] == "Running", 90)
    assert plane.api.get(path)["spec"]["nodeName"] in names
    assert plane.api.get("/api/v1/nodes/fake-0")["status"]["allocatable"]["cpu"] == "4"


def test_a_deleted_namespace_goes_with_what_it_holds(plane: ControlPlane) -> None:
    with scratch_namespace(plane) as name:
        config_map(plane, name, "kept")

    def is_gone() -> bool:
        return name not in {item["metadata"]["name"] for item in plane.api.get("/api/v1/namespaces")["items"]}

    assert wait_until(is_gone, 90)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_of_the_api_server_keeps_data_and_credentials(
    plane: ControlPlane, namespace: str, powerless: str, tmp_path: Path, signum: signal.Signals
) -> None:
    config_map(plane, namespace, "kept")
    kubeconfig = plane.service_account_kubeconfig(namespace, powerless, tmp_path / "kept.kubeconfig")
    before = plane.status()["kube-apiserver"]
    began_s = time.monotonic()

    plane.restart_apiserver(signum=signum)

    after = plane.status()["kube-apiserver"]
    sys.stdout.write(f"API server ready {time.monotonic() - began_s:.1f} s after {signal.Signals(signum).name}\n")
    assert after.pid != before.pid
    assert after.starts == before.starts + 1
    assert plane.api.get(f"/api/v1/namespaces/{namespace}/configmaps/kept")["data"] == {"k": "v"}
    assert powerless in plane.kubectl("auth", "whoami", kubeconfig=kubeconfig)


def test_a_paused_api_server_answers_nothing_and_then_goes_on_by_itself(plane: ControlPlane) -> None:
    began_s = time.monotonic()

    plane.pause_apiserver(1.0)

    assert plane.status()["kube-apiserver"].state == "paused"
    assert plane.api.get("/readyz") == "ok"
    assert time.monotonic() - began_s >= 1.0
    assert plane.status()["kube-apiserver"].state == "running"


def test_a_pause_can_be_ended_early(plane: ControlPlane) -> None:
    plane.pause_apiserver(300.0)

    plane.resume_apiserver()

    assert plane.api.get("/readyz") == "ok"


def test_an_ended_etcd_is_told_with_the_end_of_its_log(plane: ControlPlane) -> None:
    plane.stop_component("etcd", signum=signal.SIGKILL)

    with pytest.raises(StartError, match=f"etcd ended with -{signal.SIGKILL.value}"):
        plane.wait_ready()

    plane.restart("etcd")
    assert wait_until(plane.is_ready, 90)
