"""Errors of the embedded control plane: one root, one leaf per cause. Imports nothing."""


class ControlPlaneError(Exception):
    """Something about the embedded control plane failed; the message says what, where and why."""


class BuildError(ControlPlaneError):
    """A tool could neither be found nor built from its pinned Go module."""


class StateDirError(ControlPlaneError):
    """The state folder cannot be used: occupied, not ours, or without a living control plane."""


class StartError(ControlPlaneError):
    """A component ended early or did not become ready in time; the message holds the end of its log."""


class ApiUnreachableError(ControlPlaneError):
    """No HTTP answer from the API server: refused, cut, timed out, or its certificate was not trusted."""


class ApiError(ControlPlaneError):
    """The API server answered with an error status."""

    def __init__(self, message: str, *, status: int, reason: str = "") -> None:
        """Keep the HTTP `status` and the Kubernetes `reason` (such as `Forbidden`) beside the message."""
        super().__init__(message)
        self.status = status
        self.reason = reason


class KubectlError(ControlPlaneError):
    """kubectl ended with a non-zero exit status; the message holds its standard error."""
