"""Children on demand: a warm process without threads forks them, so that a real process costs milliseconds.

A child is `module:function` of an importable module; it gets a `Channel` to its maker and the arguments as keywords.
So is a program of ours, which would import for seconds (`run_program`): with its own arguments, environment and log.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MESSAGE_BYTES_MAX = 64 << 10
WAIT_S = 60.0
POLL_S = 0.001
CLUSTER = "kvstrata_kube.connection"
"""What programs load with their first connection to a cluster: as much again as before."""
LATER = {"kvstrata_client.cli": ("kvstrata_agent.app.standalone.main",)}
"""What a program loads once it knows what it is to do."""
_PR_SET_PDEATHSIG = 1


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
        with contextlib.suppress(ProcessLookupError):  # The nursery reaps its children as they end.
            while time.monotonic() < end_s:
                os.kill(self.pid, 0)
                time.sleep(POLL_S)
            raise TimeoutError(f"process {self.pid} has not ended {WAIT_S:.0f} s after it was killed")


class Program(Child):
    """A child that runs a program, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, channel: Channel) -> None:
        super().__init__(pid, channel)
        self.returncode: int | None = None
        self._hearing = threading.Lock()

    def poll(self) -> int | None:
        """Its status once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(POLL_S)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status, the negated number of the signal that killed it; raises `subprocess.TimeoutExpired`."""
        end_s = time.monotonic() + timeout if timeout is not None else None
        with self._hearing:
            while self.returncode is None:
                try:
                    self.returncode = self.channel.hear(
                        WAIT_S if end_s is None else max(POLL_S, end_s - time.monotonic())
                    )
                except TimeoutError:
                    if end_s is not None and time.monotonic() >= end_s:
                        raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
                else:
                    self.channel.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; one that has ended gets none."""
        if self.returncode is None:
            self.signal(number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


class Nursery:
    """Owns the warm process; `modules` are imported in it beforehand."""

    def __init__(self, modules: Sequence[str], *, is_shared: bool = False) -> None:
        """`is_shared` for one that outlives the file of tests that wanted it first."""
        self._modules = modules
        self._is_shared = is_shared
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if self._is_shared:
            from support.runner.leftovers import SHARED

            environment[SHARED] = "1"
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
        return Child(*self._forked(work, arguments, is_program=False))

    def run(self, work: str, **arguments: Any) -> Program:
        """The same of one whose exit status counts."""
        return Program(*self._forked(work, arguments, is_program=True))

    def _forked(self, work: str, arguments: Mapping[str, Any], *, is_program: bool) -> tuple[int, Channel]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._asking:
            socket.send_fds(self._socket, [json.dumps([work, arguments, is_program]).encode()], [theirs.fileno()])
            theirs.close()
            return int(self._socket.recv(32)), Channel(ours)


def run_program(
    module: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, out: Path | None = None
) -> Program:
    """Start `python -m module`, whose `main` takes the arguments; `log` gets its standard error at the end.

    `environment` None: that of this process. `out` gets its standard output at the end; None: that of the tests.
    """
    found = dict(os.environ if environment is None else environment)
    files = [path for path in (log, out) if path is not None]
    for path in files:
        path.touch()  # Who looks for what it says need not wait until it is there.
    given = {"module": module, "argv": list(argv), "environment": found, "files": [str(path) for path in files]}
    return _warm(module).run(f"{__name__}:become", **given)


@functools.cache
def _warm(module: str) -> Nursery:
    """One for each program, up to the end of this process: what one imports is not there in another."""
    return Nursery([module, CLUSTER, *LATER.get(module, ())], is_shared=True).__enter__()


def become(
    channel: Channel, *, module: str, argv: Sequence[str], files: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Be a program, in a child, and end as an interpreter does; standard error and output go to `files`."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in zip((sys.stderr, sys.stdout), files, strict=False):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    program = importlib.import_module(module)
    sys.argv = [str(program.__file__), *argv]
    channel.close()
    sys.exit(program.main(list(argv)))


def main() -> None:
    """Fork until the maker goes away."""
    for module in sys.argv[2:]:
        importlib.import_module(module)
    sys.modules["support.nursery"] = sys.modules[__name__]  # Or each child would load it once more.
    gc.freeze()
    asked, here = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    asked.send(b"ready")
    ends: dict[int, tuple[int, int]] = {}
    """Process id of what a descriptor tells the end of, and where its status is wanted; -1: nowhere."""
    while True:
        ready = _ready((asked.fileno(), *ends))
        for pidfd in ends.keys() & ready:
            _reap(pidfd, *ends.pop(pidfd))
        if asked.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 1)
        if not message:
            return
        work, arguments, is_program = json.loads(message)
        pid = os.fork()
        if pid == 0:
            asked.close()
            for pidfd, (_, status_fd) in ends.items():
                os.close(pidfd)
                if status_fd >= 0:
                    os.close(status_fd)
            _live(work, arguments, fds[0], here)
        if not is_program:
            os.close(fds[0])
        ends[os.pidfd_open(pid)] = pid, fds[0] if is_program else -1
        asked.send(str(pid).encode())


def _ready(descriptors: Iterable[int]) -> set[int]:
    """Wait until one of them can be read; `select` takes none from 1024 on, which a maker with many files gives us."""
    watched = select.poll()
    for descriptor in descriptors:
        watched.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in watched.poll()}


def _reap(pidfd: int, pid: int, status_fd: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    if status_fd >= 0:
        with socket.socket(fileno=status_fd) as channel, contextlib.suppress(OSError):  # Nobody may listen any more.
            channel.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _live(work: str, arguments: Mapping[str, Any], fd: int, parent: int) -> None:
    """Do a child's work and leave without the maker's exit handlers, unless it is left by `SystemExit`."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        module, function = work.split(":")
        getattr(importlib.import_module(module), function)(Channel(socket.socket(fileno=fd)), **arguments)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001  Whatever it is, the child ends here.
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
