"""A real Kubernetes control plane on this machine: of released or self-built programs, started in seconds.

with controlplane.start(state_dir) as plane:
    plane.kubectl("get", "namespaces")

What runs a plane needs this tree's packages; what finds and builds programs has to work before anything is installed,
so the former is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from controlplane.errors import (
    ApiError,
    ApiUnreachableError,
    BuildError,
    ControlPlaneError,
    KubectlError,
    StartError,
    StateDirError,
)

if TYPE_CHECKING:
    from controlplane.plane import ControlPlane
    from controlplane.run import attach, start

__all__ = [
    "ApiError",
    "ApiUnreachableError",
    "BuildError",
    "ControlPlane",
    "ControlPlaneError",
    "KubectlError",
    "StartError",
    "StateDirError",
    "attach",
    "start",
]

_LATE = {"ControlPlane": "controlplane.plane", "attach": "controlplane.run", "start": "controlplane.run"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
