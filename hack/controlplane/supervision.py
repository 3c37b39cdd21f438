"""Starts the supervisor of a control plane and talks to it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.errors import StateDirError
from controlplane.layout import Layout

_SCRIPT = Path(__file__).with_name("supervisor.py")
_BACKLOG = 16  # Requests are few and answered in milliseconds.
_TIMEOUT_S = 15.0
_STOP_S = 90.0  # All processes killed, what they changed undone, all files removed; disks may be busy.


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """One component as its supervisor sees it."""

    name: str
    pid: int
    state: str
    """`running`, `paused` or `exited`."""
    exit_code: int | None
    """Exit status, negative for a signal; None while it runs."""
    starts: int
    """How often it was started."""


class Supervision:
    """Requests to the supervisor of one state folder. Each is a connection of its own."""

    def __init__(self, at: Layout) -> None:
        """Speak to whoever serves the socket of this state folder."""
        self._at = at

    def call(self, op: str, **arguments: Any) -> Any:
        """Send one request and return its result.

        Raises `StateDirError` when nobody serves the socket, `ValueError` when the request is refused.
        """
        try:
            with socket.socket(socket.AF_UNIX) as connection, _short(self._at.socket) as path:
                connection.settimeout(_STOP_S if op == "stop" else _TIMEOUT_S)
                connection.connect(path)
                connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline()
        except OSError as e:
            raise StateDirError(f"no control plane serves {self._at.root}: {e}") from e
        if not line:
            raise StateDirError(f"the supervisor of {self._at.root} ended during {op!r}")
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(f"{op}: {reply['error']}")
        return reply["result"]

    def status(self) -> dict[str, ComponentStatus]:
        """Return every component by name, in the order of starting."""
        return {fields["name"]: ComponentStatus(**fields) for fields in self.call("status")}


def start_supervisor(
    at: Layout, owner_pid: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the supervisor of `at`, which ends everything when the process `owner_pid` ends.

    It and what it starts get `environment`, or this process's own.

    Its socket accepts requests when this returns. The pidfd is opened here and inherited, so an owner that ends
    at once is noticed too and a reused process id is never followed. Raises `ProcessLookupError` without owner.
    """
    owner_fd = os.pidfd_open(owner_pid)
    try:
        with _listening(at.socket) as listener, at.log("supervisor").open("ab") as log:
            fds = (listener.fileno(), owner_fd)
            descriptors = ("--listener-fd", str(fds[0]), "--owner-fd", str(fds[1]))
            return subprocess.Popen(
                (sys.executable, "-I", "-S", str(_SCRIPT), "--state", str(at.root), *descriptors),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=snapshot() if environment is None else environment,
                start_new_session=True,
            )
    finally:
        os.close(owner_fd)


def snapshot() -> dict[str, str]:
    """This process's environment, for a process that it starts while it has other threads.

    A process that inherits the environment by itself reads C's array of it until it has started, and a library that
    calls setenv(3) in another thread, as torch's do while they load, moves that array: "[Errno 14] Bad address".
    """
    return dict(os.environ)


def _listening(path: Path) -> socket.socket:
    """Return a listening Unix socket at `path`."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as short:
        listener.bind(short)
    listener.listen(_BACKLOG)
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield another name of a socket path that fits the 108 bytes of sockaddr_un (man 7 unix)."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
