"""Errors of the emulated machine. Imports nothing."""


class GuestError(Exception):
    """Something about the emulated machine failed; the message says what and why."""


class UnavailableError(GuestError):
    """QEMU or the kernel cannot be had on this machine; the message says what is missing."""


class BootError(GuestError):
    """The guest did not come up, or ended before its script did; the message holds the end of its log."""
