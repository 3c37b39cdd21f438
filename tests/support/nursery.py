"""Children on demand: a warm process without threads forks them, so that a real client process costs milliseconds.

A child is `module:function` of an importable module; it gets a `Channel` to its maker and the arguments as keywords.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

MESSAGE_BYTES_MAX = 64 << 10
WAIT_S = 60.0


class Channel:
    """Whole JSON messages between a child and its maker."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def say(self, message: Any) -> None:
        """Send one message."""
        self._socket.send(json.dumps(message).encode())

    def hear(self, within_s: float = WAIT_S) -> Any:
        """Wait for the next message. Raises `EOFError` when the other side is gone, `TimeoutError` when silent."""
        self._socket.settimeout(within_s)
        try:
            received = self._socket.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            received = b""
        if not received:
            raise EOFError("the other side is gone")
        return json.loads(received)

    def close(self) -> None:
        """Close our side."""
        self._socket.close()


class Child:
    """One forked process, as its maker sees it."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel

    def signal(self, number: int) -> None:
        """Send a signal; a dead child gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and wait until it is gone, with its descriptors and locks."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(EOFError):
            while True:
                self.channel.hear()
        self.channel.close()
        end_s = time.monotonic() + WAIT_S
        with contextlib.suppress(ProcessLookupError):  # The nursery has its children reaped as they end.
            while time.monotonic() < end_s:
                os.kill(self.pid, 0)
                time.sleep(0.001)
            raise TimeoutError(f"process {self.pid} has not ended {WAIT_S:.0f} s after it was killed")


class Nursery:
    """Owns the warm process; `modules` are imported in it beforehand."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "support.nursery", str(theirs.fileno()), *self._modules]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
        theirs.close()
        self._socket = ours
        self._socket.settimeout(WAIT_S * 3)
        assert self._socket.recv(16) == b"ready", "the nursery did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait(WAIT_S)

    def start(self, work: str, **arguments: Any) -> Child:
        """Fork a child that runs `module:function`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._socket, [json.dumps([work, arguments]).encode()], [theirs.fileno()])
        theirs.close()
        pid = int(self._socket.recv(32))
        return Child(pid, Channel(ours))


def main() -> None:
    """Fork until the maker goes away."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps them.
    for module in sys.argv[2:]:
        importlib.import_module(module)
    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            asked.close()
            _live(message, fds[0])
        os.close(fds[0])
        asked.send(str(pid).encode())


def _live(message: bytes, fd: int) -> None:
    """Do a child's work and leave without the maker's exit handlers."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        work, arguments = json.loads(message)
        module, function = work.split(":")
        getattr(importlib.import_module(module), function)(Channel(socket.socket(fileno=fd)), **arguments)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
