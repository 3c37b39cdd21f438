"""Command lines of the components. Pure: paths and ports in, argument lists out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controlplane.layout import Layout, Ports

LOOPBACK = "127.0.0.1"

ISSUER = "https://kubernetes.default.svc"
"""Issuer of service-account tokens, and so the API server's own and only audience.

Tokens for other audiences need no entry in `--api-audiences`: TokenReview checks a token against the audiences
that the review names (apiserver, registry/authentication/tokenreview), while requests to the API server itself
are checked against this list. Adding `kvstrata` there would let an agent's token open the API server.
"""

FAKE_NODE_ANNOTATION = {"kwok.x-k8s.io/node": "fake"}
"""Annotation of the nodes that kwok plays."""

_CLIENT_RATE = ("--kube-api-qps=1000", "--kube-api-burst=2000")
"""The defaults (20/s) are for sharing a busy API server; here they alone would double the start time."""

_SERVICE_RANGE = "10.96.0.0/16"  # The range that kubeadm uses; only real nodes route it.

SERVICE_ADDRESS = "10.96.0.1"
"""Where pods of real nodes find the API server: the first address of the range."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a control plane consists of and how it is reached."""

    layout: Layout
    ports: Ports
    binaries: Mapping[str, Path]
    """Path of each tool by name."""
    advertise_address: str | None = None
    """Address for clients on other machines or in other network namespaces; None: the loopback only."""
    audit_dir: Path | None = None
    """Where the API server logs who asked what, by `policy.yaml` of that folder; None: nowhere."""

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.advertise_address or LOOPBACK}:{self.ports.api}"


def etcd(setup: Setup) -> list[str]:
    """Run one member with mutual TLS under an authority of its own.

    Nothing but the API server may reach etcd, so certificates of the cluster's authority do not open it. Its
    writes are not synced: the data goes with the state folder, and syncing would only slow every test.
    """
    at = setup.layout
    client = f"https://{LOOPBACK}:{setup.ports.etcd_client}"
    peer = f"https://{LOOPBACK}:{setup.ports.etcd_peer}"
    tls = [
        flag
        for prefix in ("", "peer-")
        for flag in (
            f"--{prefix}client-cert-auth",
            f"--{prefix}trusted-ca-file={at.pki('etcd-ca.crt')}",
            f"--{prefix}cert-file={at.pki('etcd.crt')}",
            f"--{prefix}key-file={at.pki('etcd.key')}",
        )
    ]
    return [
        str(setup.binaries["etcd"]),
        "--name=embedded",
        f"--data-dir={at.etcd_data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=embedded={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        *tls,
    ]


def apiserver(setup: Setup) -> list[str]:
    """Authenticate by client certificate or service-account token, never anonymously; authorize by RBAC."""
    at = setup.layout
    return [
        str(setup.binaries["kube-apiserver"]),
        f"--etcd-servers=https://{LOOPBACK}:{setup.ports.etcd_client}",
        f"--etcd-cafile={at.pki('etcd-ca.crt')}",
        f"--etcd-certfile={at.pki('etcd-client.crt')}",
        f"--etcd-keyfile={at.pki('etcd-client.key')}",
        f"--secure-port={setup.ports.api}",
        *_reachability(setup),
        f"--tls-cert-file={at.pki('apiserver.crt')}",
        f"--tls-private-key-file={at.pki('apiserver.key')}",
        f"--client-ca-file={at.pki('ca.crt')}",
        f"--kubelet-certificate-authority={at.pki('ca.crt')}",
        f"--kubelet-client-certificate={at.pki('kubelet-client.crt')}",
        f"--kubelet-client-key={at.pki('kubelet-client.key')}",
        "--kubelet-preferred-address-types=InternalIP",  # Nobody here resolves names of nodes.
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={at.pki('sa.pub')}",
        f"--service-account-signing-key-file={at.pki('sa.key')}",
        f"--service-cluster-ip-range={_SERVICE_RANGE}",
        "--anonymous-auth=false",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        *_audit(setup),
    ]


def controller_manager(setup: Setup) -> list[str]:
    """Let each controller act under its own service account, as on real clusters."""
    at = setup.layout
    return [
        str(setup.binaries["kube-controller-manager"]),
        f"--kubeconfig={at.kubeconfig('kube-controller-manager')}",
        f"--service-account-private-key-file={at.pki('sa.key')}",
        f"--root-ca-file={at.pki('ca.crt')}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
        *_CLIENT_RATE,
    ]


def scheduler(setup: Setup) -> list[str]:
    """Run the default scheduler, without a port of its own."""
    return [
        str(setup.binaries["kube-scheduler"]),
        f"--kubeconfig={setup.layout.kubeconfig('kube-scheduler')}",
        "--leader-elect=false",
        "--secure-port=0",
        "--profiling=false",
        *_CLIENT_RATE,
    ]


def kwok(setup: Setup) -> list[str]:
    """Play the kubelet of every node that carries the annotation, heartbeats included."""
    selector = ",".join(f"{key}={value}" for key, value in FAKE_NODE_ANNOTATION.items())
    return [
        str(setup.binaries["kwok"]),
        f"--kubeconfig={setup.layout.kubeconfig('kwok')}",
        f"--manage-nodes-with-annotation-selector={selector}",
        "--manage-all-nodes=false",
        "--node-lease-duration-seconds=40",  # The kubelet's default.
    ]


def _audit(setup: Setup) -> list[str]:
    """Return where requests are logged: a file for each plane, named by its port and folder."""
    if setup.audit_dir is None:
        return []
    log = setup.audit_dir / f"{setup.ports.api}-{setup.layout.root.name}.log"
    return [f"--audit-policy-file={setup.audit_dir / 'policy.yaml'}", f"--audit-log-path={log}"]


def _reachability(setup: Setup) -> list[str]:
    """Return where the API server listens and what it announces.

    On the loopback alone nothing may be announced: endpoints in 127.0.0.0/8 are invalid, and without a default
    route the API server would find no other address and refuse to start.
    """
    if setup.advertise_address is None:
        loopback = (f"--bind-address={LOOPBACK}", f"--advertise-address={LOOPBACK}")
        return [*loopback, "--endpoint-reconciler-type=none"]
    return ["--bind-address=0.0.0.0", f"--advertise-address={setup.advertise_address}"]
