"""A running control plane: its credentials, its faults on demand, its end."""

import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from controlplane.client import ApiClient
from controlplane.credentials import (
    certificate_user,
    issue_client,
    issue_server,
    token_user,
    write_kubeconfig,
    write_private,
)
from controlplane.errors import ApiError, ApiUnreachableError, KubectlError, StartError, StateDirError
from controlplane.identities import request_token
from controlplane.layout import Layout
from controlplane.nodes import DEFAULT_CAPACITY, create_nodes, fake_node, ready_names
from controlplane.supervision import ComponentStatus, Supervision, snapshot
from controlplane.waiting import wait_until

APISERVER = "kube-apiserver"
READY_S = 60.0
"""Default bound of every wait for readiness; ready planes take a few seconds on two idle cores."""
TOKEN_LIFE_S = 3600
"""Default life span of service-account tokens."""

_LOG_TAIL_BYTES = 2000
_KUBECTL_TIMEOUT_S = 120.0


class ControlPlane:
    """One control plane and what may be done with it; leaving it as a context manager stops it."""

    def __init__(
        self, at: Layout, server: str, kubectl: Path, supervisor: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Refer to the plane of a state folder; `supervisor` is given by the process that started it."""
        self._at = at
        self._kubectl = kubectl
        self._supervisor = supervisor
        self.supervision = Supervision(at)
        """Requests to the process that owns the components."""
        self.server = server
        """URL of the API server."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def state_dir(self) -> Path:
        """Folder of everything that belongs to this plane; removed by `stop`."""
        return self._at.root

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self._at.admin_kubeconfig

    @property
    def ca_file(self) -> Path:
        """Certificate of the authority that signed the API server's certificate, in PEM."""
        return self._at.pki("ca.crt")

    @property
    def kubectl_path(self) -> Path:
        """The kubectl that belongs to this API server."""
        return self._kubectl

    @property
    def api(self) -> ApiClient:
        """A client that acts as the administrator."""
        return ApiClient.admin(self.server, self._at)

    def kubectl(self, *args: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl as the administrator, or as who `kubeconfig` says; return its standard output.

        Raises `KubectlError` when it fails or takes more than two minutes.
        """
        fixed = ("--kubeconfig", str(kubeconfig or self.kubeconfig), "--cache-dir", str(self._at.kubectl_cache))
        command = (str(self._kubectl), *fixed, *args)
        try:
            done = subprocess.run(
                command,
                input=stdin or "",
                capture_output=True,
                text=True,
                env=snapshot(),
                timeout=_KUBECTL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise KubectlError(f"kubectl {' '.join(args)}: no end after {_KUBECTL_TIMEOUT_S} s") from e
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> dict[str, ComponentStatus]:
        """Return every component by name. Raises `StateDirError` when nothing runs."""
        return self.supervision.status()

    def log_path(self, component: str) -> Path:
        """Return the log file of a component."""
        return self._at.log(component)

    def is_ready(self) -> bool:
        """Whether the API server says of itself that it is ready."""
        try:
            return bool(self.api.get("/readyz") == "ok")
        except (ApiError, ApiUnreachableError):
            return False

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait for the API server. Raises `StartError` when a component has ended or time is up."""

        def is_up() -> bool:
            self.raise_for_ended()
            return self.is_ready()

        if not wait_until(is_up, timeout_s):
            raise StartError(f"{APISERVER} is not ready after {timeout_s} s:\n{self._log_tail(APISERVER)}")

    def raise_for_ended(self) -> None:
        """Raise `StartError` when a component has ended."""
        for component in self.status().values():
            if component.state == "exited":
                tail = self._log_tail(component.name)
                raise StartError(f"{component.name} ended with {component.exit_code}:\n{tail}")

    def restart_apiserver(self, *, signum: int = signal.SIGTERM, grace_s: float = 5.0) -> None:
        """Restart the API server with the same data, port and certificates; return when it is ready."""
        self.restart(APISERVER, signum=signum, grace_s=grace_s)
        self.wait_ready()

    def restart(self, component: str, *, signum: int = signal.SIGTERM, grace_s: float = 5.0) -> None:
        """End a component by `signum`, by SIGKILL after `grace_s`, and start it again; not waiting for readiness."""
        self.stop_component(component, signum=signum, grace_s=grace_s)
        self.supervision.call("respawn", name=component)

    def stop_component(self, component: str, *, signum: int = signal.SIGTERM, grace_s: float = 5.0) -> None:
        """End a component and leave it ended; `restart` brings it back."""
        self.resume(component)
        self.supervision.call("signal", name=component, signum=signum)
        if not wait_until(lambda: self._has_ended(component), grace_s):
            self.supervision.call("signal", name=component, signum=signal.SIGKILL)
            wait_until(lambda: self._has_ended(component), grace_s)

    def pause_apiserver(self, duration_s: float) -> None:
        """Freeze the API server and return at once; it goes on after `duration_s` or at `resume_apiserver`.

        Connections stay open and unanswered meanwhile, as behind a hung server or a network that drops packets.
        """
        self.pause(APISERVER, duration_s)

    def resume_apiserver(self) -> None:
        """End a pause early; harmless without one."""
        self.resume(APISERVER)

    def pause(self, component: str, duration_s: float) -> None:
        """Freeze a component and return at once; it goes on after `duration_s` or at `resume`."""
        self.supervision.call("pause", name=component, duration_s=duration_s)

    def resume(self, component: str) -> None:
        """End a pause early; harmless without one."""
        self.supervision.call("resume", name=component)

    def service_account_token(
        self, namespace: str, name: str, audience: str | None = None, *, expiration_s: int = TOKEN_LIFE_S
    ) -> str:
        """Issue a token of an existing service account; without `audience` it is for the API server."""
        return request_token(self.api, namespace, name, audience, expiration_s)

    def service_account_kubeconfig(
        self, namespace: str, name: str, path: Path, *, expiration_s: int = TOKEN_LIFE_S
    ) -> Path:
        """Write a kubeconfig under which a program acts as an existing service account; return its path."""
        token = self.service_account_token(namespace, name, expiration_s=expiration_s)
        write_kubeconfig(path, self.server, self.ca_file.read_bytes(), token_user(token), namespace=namespace)
        return path

    def client_kubeconfig(self, user: str, groups: Iterable[str], path: Path) -> Path:
        """Write a kubeconfig with a new client certificate of `user` in `groups`; return its path."""
        identity = certificate_user(issue_client(self._at, user, groups))
        write_kubeconfig(path, self.server, self.ca_file.read_bytes(), identity)
        return path

    def write_serving_pair(self, name: str, hosts: Iterable[str], certificate: Path, key: Path) -> None:
        """Write a new serving certificate of the plane's authority for `hosts`, and its key."""
        pair = issue_server(self._at, name, hosts)
        write_private(certificate, pair.public_pem)
        write_private(key, pair.key_pem)

    def add_fake_nodes(
        self,
        names: Iterable[str],
        labels: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
        *,
        timeout_s: float = READY_S,
    ) -> None:
        """Create nodes that kwok plays and wait until pods can be scheduled to all of them.

        Raises `ApiError` when one is refused and `StartError` when they are not ready in time.
        """
        wanted = set(names)
        create_nodes(self.api, (fake_node(n, labels or {}, capacity or DEFAULT_CAPACITY) for n in sorted(wanted)))
        if not wait_until(lambda: wanted <= self._ready_nodes(), timeout_s):
            missing = sorted(wanted - self._ready_nodes())
            raise StartError(f"{len(missing)} of {len(wanted)} fake nodes not ready, first {missing[:3]}")

    def detach(self) -> None:
        """Let the plane outlive the process that it was tied to, until somebody stops it."""
        self.supervision.call("detach")

    def stop(self) -> None:
        """Kill the components and remove the state folder. Stopping twice is harmless."""
        try:
            self.supervision.call("stop")
        except StateDirError:
            self._end_supervisor()
            remove_remains(self._at)
        if self._supervisor is not None:
            self._supervisor.wait()

    def _end_supervisor(self) -> None:
        """Kill a supervisor that does not answer; its components die with it."""
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()

    def _ready_nodes(self) -> set[str]:
        """Names of the nodes that are ready now."""
        return ready_names(self.api.get("/api/v1/nodes")["items"])

    def _has_ended(self, component: str) -> bool:
        """Whether a component runs no more."""
        return self.status()[component].state == "exited"

    def _log_tail(self, component: str) -> str:
        """Return the end of a component's log."""
        content = self.log_path(component).read_bytes()
        return content[-_LOG_TAIL_BYTES:].decode(errors="replace")


def remove_remains(at: Layout) -> None:
    """Remove the folder of a plane whose supervisor was killed; never a folder that is not marked as one."""
    if at.marker.exists():
        shutil.rmtree(at.root)
