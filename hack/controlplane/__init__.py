"""A real Kubernetes control plane on this machine: built from pinned Go modules, started in seconds.

with controlplane.start(state_dir) as plane:
    plane.kubectl("get", "namespaces")
"""

from controlplane.errors import (
    ApiError,
    ApiUnreachableError,
    BuildError,
    ControlPlaneError,
    KubectlError,
    StartError,
    StateDirError,
)
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
