"""Errors of the real nodes. Imports nothing of this package."""

from controlplane import ControlPlaneError


class NodesError(ControlPlaneError):
    """Something about the real nodes failed; the message says what and why."""


class UnavailableError(NodesError):
    """This machine cannot have real nodes; the message says what is missing."""
