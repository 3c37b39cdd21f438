"""Starts a control plane in a state folder, or refers to one that runs there."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from controlplane import components, kwok_rights
from controlplane.assets import find_tools
from controlplane.components import Setup
from controlplane.credentials import write_all, write_private
from controlplane.errors import ApiError, StartError, StateDirError
from controlplane.layout import Layout, Ports
from controlplane.plane import READY_S, ControlPlane
from controlplane.supervision import start_supervisor
from controlplane.waiting import wait_until

Command = Callable[[Setup], list[str]]

_STORE: dict[str, Command] = {"etcd": components.etcd, "kube-apiserver": components.apiserver}
_CONTROLLERS: dict[str, Command] = {
    "kube-controller-manager": components.controller_manager,
    "kube-scheduler": components.scheduler,
}
_KWOK: dict[str, Command] = {"kwok": components.kwok}
_PORT_TRIES = 3  # Another process takes a port between choosing and listening: rare, and independent each time.


def start(
    state_dir: Path | str,
    *,
    kwok: bool = True,
    controllers: bool = True,
    advertise_address: str | None = None,
    owner_pid: int | None = None,
) -> ControlPlane:
    """Start a control plane and return when it is ready: API, system namespaces, default service account.

    `state_dir` must not exist or be empty; it is removed at the end. The plane ends with the process `owner_pid`
    (default: the caller), however that ends. Without `controllers` there is neither controller manager nor
    scheduler: objects are stored and watched, but namespaces never finish deleting and pods stay pending.
    `advertise_address` opens the API server beyond the loopback, for real nodes.

    Raises `BuildError`, `StateDirError` or `StartError`; nothing is left behind then.
    """
    chosen = {**_STORE, **(_CONTROLLERS if controllers else {}), **(_KWOK if kwok else {})}
    binaries = find_tools((*chosen, "kubectl"))
    at = Layout(Path(state_dir).resolve())
    for attempt in range(1, _PORT_TRIES + 1):
        _claim(at)
        setup = Setup(at, Ports.choose(), binaries, advertise_address, _audit_dir())
        plane = _begin(setup, os.getpid() if owner_pid is None else owner_pid)
        try:
            _bring_up(plane, setup, chosen)
        except StartError as e:
            plane.stop()
            if "address already in use" not in str(e) or attempt == _PORT_TRIES:
                raise
        except BaseException:
            plane.stop()
            raise
        else:
            return plane
    raise AssertionError("the last attempt returns or raises")


def _audit_dir() -> Path | None:
    """Folder that the environment names for audit logs of all planes; see `hack/checks/rights_used.py`."""
    named = os.environ.get("KVSTRATA_AUDIT_DIR")
    return Path(named) if named else None


def attach(state_dir: Path | str) -> ControlPlane:
    """Refer to the control plane that runs in `state_dir`; leaving it as a context manager stops it.

    Raises `StateDirError` when the folder holds none.
    """
    at = Layout(Path(state_dir).resolve())
    try:
        marker = json.loads(at.marker.read_text())
    except (FileNotFoundError, NotADirectoryError) as e:
        raise StateDirError(f"{at.root} holds no control plane") from e
    return ControlPlane(at, marker["server"], Path(marker["kubectl"]))


def _claim(at: Layout) -> None:
    """Take an absent or empty folder. Raises `StateDirError` for any other."""
    if at.marker.exists():
        raise StateDirError(f"{at.root} holds a control plane already; `down` removes it")
    if at.root.exists() and any(at.root.iterdir()):
        raise StateDirError(f"{at.root} is not empty and not ours")
    at.make_folders()


def _begin(setup: Setup, owner_pid: int) -> ControlPlane:
    """Mark the folder and start the supervisor: from here on everything is cleaned up by it."""
    at, kubectl = setup.layout, setup.binaries["kubectl"]
    write_private(at.marker, json.dumps({"server": setup.server, "kubectl": str(kubectl)}).encode())
    return ControlPlane(at, setup.server, kubectl, start_supervisor(at, owner_pid))


def _bring_up(plane: ControlPlane, setup: Setup, chosen: dict[str, Command]) -> None:
    """Start the components in the order of their needs."""
    write_all(setup)
    for name in _STORE:
        _spawn(plane, setup, name, chosen[name])
    plane.wait_ready()
    if "kwok" in chosen:
        _grant_kwok(plane)
    for name, command in chosen.items():
        if name not in _STORE:
            _spawn(plane, setup, name, command)
    _wait_for(plane, "/api/v1/namespaces/default")
    _wait_for(plane, "/apis/scheduling.k8s.io/v1/priorityclasses/system-node-critical")
    if "kube-controller-manager" in chosen:
        _wait_for(plane, "/api/v1/namespaces/default/serviceaccounts/default")


def _spawn(plane: ControlPlane, setup: Setup, name: str, command: Command) -> None:
    """Start one component."""
    plane.supervision.call("spawn", name=name, argv=command(setup), log=str(setup.layout.log(name)))


def _grant_kwok(plane: ControlPlane) -> None:
    """Create kwok's role and bind it."""
    group = "/apis/rbac.authorization.k8s.io/v1"
    plane.api.post(f"{group}/clusterroles", kwok_rights.cluster_role())
    plane.api.post(f"{group}/clusterrolebindings", kwok_rights.cluster_role_binding())


def _wait_for(plane: ControlPlane, path: str) -> None:
    """Wait until an object exists."""
    if not wait_until(lambda: _exists(plane, path), READY_S):
        raise StartError(f"{path} does not exist after {READY_S} s")


def _exists(plane: ControlPlane, path: str) -> bool:
    """Whether the object at `path` exists; a component that has ended raises `StartError`."""
    plane.raise_for_ended()
    try:
        plane.api.get(path)
    except ApiError as e:
        if e.status == 404:
            return False
        raise
    return True
