"""Writes the keys, certificates and kubeconfigs of a control plane into its state folder."""

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controlplane.components import LOOPBACK, SERVICE_ADDRESS, Setup
from controlplane.layout import Layout
from controlplane.pki import Authority, KeyPair, service_account_keys

KWOK_USER = "kwok"
"""User name of kwok; bound to exactly the rights that it needs."""

KUBELET_CLIENT = "kube-apiserver-kubelet-client"
"""User as which the API server asks kubelets for logs and for commands in pods; bound when there are real nodes."""

_COMPONENT_USERS = {
    "kube-controller-manager": "system:kube-controller-manager",
    "kube-scheduler": "system:kube-scheduler",
    "kwok": KWOK_USER,
}  # The first two names are bound by the API server's own bootstrap policy.


def write_all(setup: Setup) -> None:
    """Make everything that the components and the administrator need."""
    at = setup.layout
    ca, etcd_ca = Authority.create("kvstrata-embedded"), Authority.create("kvstrata-embedded-etcd")
    addresses = {LOOPBACK, SERVICE_ADDRESS, setup.advertise_address or LOOPBACK}
    hosts = ("localhost", "kubernetes.default.svc", *sorted(addresses))
    pairs = {
        "ca": ca.pair,
        "etcd-ca": etcd_ca.pair,
        "apiserver": ca.issue_server("kube-apiserver", hosts),
        "etcd": etcd_ca.issue_server("etcd", (LOOPBACK, "localhost"), also_client=True),
        "etcd-client": etcd_ca.issue_client("kube-apiserver"),
        "kubelet-client": ca.issue_client(KUBELET_CLIENT),
        "admin": ca.issue_client("admin", ("system:masters",)),
    }
    for name, pair in pairs.items():
        write_private(at.pki(f"{name}.key"), pair.key_pem)
        write_private(at.pki(f"{name}.crt"), pair.public_pem)
    tokens = service_account_keys()
    write_private(at.pki("sa.key"), tokens.key_pem)
    write_private(at.pki("sa.pub"), tokens.public_pem)
    write_kubeconfig(at.admin_kubeconfig, setup.server, ca.pair.public_pem, certificate_user(pairs["admin"]))
    for component, user in _COMPONENT_USERS.items():
        identity = certificate_user(ca.issue_client(user))
        write_kubeconfig(at.kubeconfig(component), setup.server, ca.pair.public_pem, identity)


def issue_client(at: Layout, user: str, groups: Iterable[str]) -> KeyPair:
    """Issue a client certificate under the authority of a running control plane."""
    return _authority(at).issue_client(user, groups)


def issue_server(at: Layout, name: str, hosts: Iterable[str]) -> KeyPair:
    """Issue a serving certificate under the authority of a running control plane."""
    return _authority(at).issue_server(name, hosts)


def certificate_user(pair: KeyPair) -> dict[str, str]:
    """Return the `user` part of a kubeconfig that authenticates by certificate."""
    return {"client-certificate-data": _base64(pair.public_pem), "client-key-data": _base64(pair.key_pem)}


def token_user(token: str) -> dict[str, str]:
    """Return the `user` part of a kubeconfig that authenticates by bearer token."""
    return {"token": token}


def write_kubeconfig(
    path: Path, server: str, ca_pem: bytes, user: dict[str, str], *, namespace: str = "default"
) -> None:
    """Write a self-contained kubeconfig, readable by its owner alone. JSON is valid YAML."""
    cluster = {"server": server, "certificate-authority-data": _base64(ca_pem)}
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kvstrata", "cluster": cluster}],
        "users": [{"name": "kvstrata", "user": user}],
        "contexts": [
            {"name": "kvstrata", "context": {"cluster": "kvstrata", "user": "kvstrata", "namespace": namespace}}
        ],
        "current-context": "kvstrata",
    }
    write_private(path, json.dumps(config, indent=2).encode() + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """Write a file that was never readable by others, replacing an older one at once."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    staged.replace(path)


def _authority(at: Layout) -> Authority:
    """Return the authority of a running control plane."""
    return Authority.load(KeyPair(at.pki("ca.key").read_bytes(), at.pki("ca.crt").read_bytes()))


def _base64(content: bytes) -> str:
    """Return the standard base64 of `content`."""
    return base64.b64encode(content).decode()
