"""Command lines, kubeconfigs, certificates and ports of the control plane, without starting anything."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from controlplane import components, kwok_rights
from controlplane.components import Setup
from controlplane.credentials import token_user, write_kubeconfig
from controlplane.layout import Layout, Ports
from controlplane.nodes import fake_node, ready_names
from controlplane.pins import TOOLS
from controlplane.pki import Authority
from controlplane.ports import free_ports

pytestmark = pytest.mark.unit

Command = Callable[[Setup], list[str]]

STATE = Path("/state")
COMMANDS = [components.etcd, components.apiserver, components.controller_manager, components.scheduler, components.kwok]


def make_setup(advertise_address: str | None = None) -> Setup:
    binaries = {name: Path("/bin") / name for name in TOOLS}
    return Setup(Layout(STATE), Ports(api=6443, etcd_client=2379, etcd_peer=2380), binaries, advertise_address)


def flags(command: list[str]) -> dict[str, str]:
    """Return `--flag=value` arguments as a mapping."""
    return dict(argument.split("=", 1) for argument in command[1:] if "=" in argument)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_component_skips_verification(command: Command) -> None:
    line = " ".join(command(make_setup()))

    assert "insecure" not in line
    assert "token-auth-file" not in line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_file_of_a_component_is_in_the_state_folder(command: Command) -> None:
    paths = [value for value in flags(command(make_setup())).values() if value.startswith("/")]

    assert paths
    assert all(Path(path).is_relative_to(STATE) for path in paths)


@pytest.mark.parametrize("command", [components.etcd, components.apiserver])
def test_without_an_advertised_address_servers_listen_on_the_loopback_alone(command: Command) -> None:
    line = " ".join(command(make_setup()))

    assert "127.0.0.1" in line
    assert "0.0.0.0" not in line


def test_an_advertised_address_opens_the_api_server_and_not_etcd() -> None:
    opened = make_setup("10.88.0.1")

    assert flags(components.apiserver(opened))["--advertise-address"] == "10.88.0.1"
    assert flags(components.apiserver(opened))["--bind-address"] == "0.0.0.0"
    assert "0.0.0.0" not in " ".join(components.etcd(opened))
    assert opened.server == "https://10.88.0.1:6443"


def test_the_authority_of_the_cluster_does_not_open_etcd() -> None:
    etcd, apiserver = flags(components.etcd(make_setup())), flags(components.apiserver(make_setup()))

    assert etcd["--trusted-ca-file"] != apiserver["--client-ca-file"]
    assert "--client-cert-auth" in components.etcd(make_setup())


def test_no_two_components_share_a_kubeconfig() -> None:
    commands = (components.controller_manager, components.scheduler, components.kwok)
    used = [flags(command(make_setup()))["--kubeconfig"] for command in commands]

    assert len(set(used)) == len(used)


def test_kwok_may_touch_nothing_but_nodes_pods_events_and_leases() -> None:
    rules = kwok_rights.cluster_role()["rules"]
    touched = {resource.split("/")[0] for rule in rules for resource in rule["resources"]}

    assert touched == {"nodes", "pods", "events", "leases"}
    assert not any("*" in rule["verbs"] + rule["resources"] + rule["apiGroups"] for rule in rules)


def test_a_kubeconfig_is_readable_by_its_owner_alone_and_verifies_the_server(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"

    write_kubeconfig(path, "https://127.0.0.1:6443", b"PEM", token_user("secret"), namespace="kv")

    config = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert config["clusters"][0]["cluster"] == {
        "server": "https://127.0.0.1:6443",
        "certificate-authority-data": "UEVN",
    }
    assert config["contexts"][0]["context"]["namespace"] == "kv"


def test_a_client_certificate_carries_user_and_groups_and_cannot_serve() -> None:
    authority = Authority.load(Authority.create("test").pair)

    issued = x509.load_pem_x509_certificate(authority.issue_client("alice", ("blue", "green")).public_pem)

    names = {attribute.value for attribute in issued.subject}
    usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    issued.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.pair.public_pem))
    assert names == {"alice", "blue", "green"}
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_serving_certificate_names_its_addresses() -> None:
    issued = Authority.create("test").issue_server("server", ("127.0.0.1", "localhost"))

    names = x509.load_pem_x509_certificate(issued.public_pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert [str(n.value) for n in names.value] == ["127.0.0.1", "localhost"]


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(20)

    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        free = free_ports(1)[0]
        monkeypatch.setattr("controlplane.ports.random.SystemRandom.sample", lambda *_: [taken, free])

        assert free_ports(1) == (free,)


def test_a_fake_node_keeps_the_labels_and_capacity_it_is_given() -> None:
    node = fake_node("n1", {"zone": "a"}, {"cpu": "8"})

    assert node["metadata"]["labels"]["zone"] == "a"
    assert node["metadata"]["annotations"] == components.FAKE_NODE_ANNOTATION
    assert node["status"]["allocatable"] == node["status"]["capacity"] == {"cpu": "8"}


@pytest.mark.parametrize(
    ("ready", "taints", "counted"),
    [
        ("True", [], {"n1"}),
        ("False", [], set()),
        ("True", [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}], set()),
    ],
)
def test_a_node_counts_as_ready_once_pods_can_go_there(
    ready: str, taints: list[dict[str, str]], counted: set[str]
) -> None:
    node = {
        "metadata": {"name": "n1"},
        "spec": {"taints": taints},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }

    assert ready_names([node]) == counted
