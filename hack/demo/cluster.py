"""Where the demo runs: a control plane of its own, or the cluster of the current kubeconfig."""

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import controlplane
from controlplane import ControlPlane, ControlPlaneError
from controlplane.credentials import token_user, write_kubeconfig
from controlplane.supervision import snapshot
from demo.errors import DemoError
from kvstrata_api.names import SYSTEM_NAMESPACE

_KUBECTL_S: Final = 120.0
_LIFE: Final = "2h"  # Of tokens; the demo takes less than a minute, KEEP=1 an afternoon.
_EMBEDDED_LIFE_S: Final = 24 * 3600
"""The same in a cluster of our own, where a soak takes hours and nobody projects new tokens."""


class Cluster(Protocol):
    """What the demo needs of Kubernetes, as its administrator."""

    @property
    def kubectl_command(self) -> str:
        """How a person calls kubectl for this cluster."""

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints. Raises `DemoError`."""

    def token(self, namespace: str, account: str, audience: str) -> str:
        """Issue a token of a ServiceAccount for an audience, as a kubelet would project it."""

    def process_kubeconfig(self, account: str, path: Path) -> Path:
        """Write a kubeconfig with which a process acts as a ServiceAccount of the system namespace."""

    def add_nodes(self, names: Sequence[str], labels: dict[str, str]) -> None:
        """Add Node objects that nobody schedules to."""

    def detach(self) -> None:
        """Let the cluster outlive this process."""

    def close(self) -> None:
        """Take away what this object brought. Idempotent."""


class EmbeddedCluster:
    """A control plane that belongs to the demo."""

    def __init__(self, state_dir: Path) -> None:
        """Start it. Raises `DemoError`."""
        try:
            # No controllers and no kwok: whatever a controller would do here, the operator or the demo does itself.
            self._plane: ControlPlane = controlplane.start(state_dir, kwok=False, controllers=False)
        except ControlPlaneError as e:
            raise DemoError(f"the control plane does not start: {e}") from e

    @property
    def kubectl_command(self) -> str:
        """How a person calls kubectl for this cluster."""
        return f"{self._plane.kubectl_path} --kubeconfig {self._plane.kubeconfig}"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as the administrator."""
        try:
            return self._plane.kubectl(*arguments, stdin=stdin)
        except ControlPlaneError as e:
            raise DemoError(str(e)) from e

    def token(self, namespace: str, account: str, audience: str) -> str:
        """Issue a token."""
        return self._plane.service_account_token(namespace, account, audience, expiration_s=_EMBEDDED_LIFE_S)

    def process_kubeconfig(self, account: str, path: Path) -> Path:
        """Write the kubeconfig of a process."""
        return self._plane.service_account_kubeconfig(SYSTEM_NAMESPACE, account, path, expiration_s=_EMBEDDED_LIFE_S)

    def add_nodes(self, names: Sequence[str], labels: dict[str, str]) -> None:
        """Add Node objects without a machine behind them, closed for pods."""
        for name in names:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(_node(name, labels)))

    def detach(self) -> None:
        """Let the plane outlive this process."""
        self._plane.detach()

    def close(self) -> None:
        """Stop the plane."""
        self._plane.stop()


class CurrentCluster:
    """The cluster of the current kubeconfig; nodes are objects of our own, and are removed at the end."""

    def __init__(self) -> None:
        """Look for kubectl and the cluster. Raises `DemoError` that says what is missing."""
        found = shutil.which("kubectl")
        if found is None:
            raise DemoError("kubectl is not in PATH; install it, or run without CLUSTER=current")
        self._kubectl = found
        self._nodes: list[str] = []
        self.kubectl("version", "-o", "json")

    @property
    def kubectl_command(self) -> str:
        """How a person calls kubectl for this cluster."""
        return "kubectl"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl with the current kubeconfig."""
        try:
            done = subprocess.run(
                (self._kubectl, *arguments),
                input=stdin or "",
                capture_output=True,
                text=True,
                env=snapshot(),
                timeout=_KUBECTL_S,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise DemoError(f"kubectl {' '.join(arguments)}: no end after {_KUBECTL_S:.0f} s") from e
        if done.returncode != 0:
            raise DemoError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def token(self, namespace: str, account: str, audience: str) -> str:
        """Issue a token."""
        wanted = ("--audience", audience) if audience else ()
        told = self.kubectl("create", "token", account, "-n", namespace, "--duration", _LIFE, *wanted)
        return told.strip()

    def process_kubeconfig(self, account: str, path: Path) -> Path:
        """Write the kubeconfig of a process: server and authority of the current context, a token of the account."""
        told: dict[str, Any] = json.loads(self.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
        cluster = told["clusters"][0]["cluster"]
        token = self.token(SYSTEM_NAMESPACE, account, "")
        write_kubeconfig(path, cluster["server"], _authority(cluster), token_user(token), namespace=SYSTEM_NAMESPACE)
        return path

    def add_nodes(self, names: Sequence[str], labels: dict[str, str]) -> None:
        """Add Node objects without a machine behind them, closed for pods."""
        for name in names:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(_node(name, labels)))
            self._nodes.append(name)

    def detach(self) -> None:
        """Leave the nodes."""
        self._nodes.clear()

    def close(self) -> None:
        """Remove the nodes."""
        if self._nodes:
            self.kubectl("delete", "node", "--ignore-not-found", "--wait=false", *self._nodes)
        self._nodes.clear()


def _node(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "spec": {"unschedulable": True},
    }


def _authority(cluster: dict[str, Any]) -> bytes:
    """Return the certificate authority of a kubeconfig's cluster, in PEM."""
    if "certificate-authority-data" in cluster:
        return base64.b64decode(cluster["certificate-authority-data"])
    if "certificate-authority" in cluster:
        return Path(cluster["certificate-authority"]).read_bytes()
    raise DemoError(f"cluster {cluster['server']}: the kubeconfig names no certificate authority")
