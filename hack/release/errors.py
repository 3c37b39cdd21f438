"""Errors of a release. Imports nothing."""


class ReleaseError(Exception):
    """A part could not be made or is not true; the message says what and why."""
