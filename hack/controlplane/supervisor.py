"""Process of its own that owns the components of one control plane and cleans up after whoever started it.

Runs as a script in a session of its own, on the standard library alone (`python -I -S supervisor.py`, 20 ms):

- A pidfd of the owner becomes readable when the owner ends, `kill -9` included: every component is killed and
  the state folder removed.
- Components die with this process (PR_SET_PDEATHSIG), so killing the supervisor leaves none behind either.
- Commands that were asked for with `at_end` run after that, the last one first: they undo what components changed on
  the machine.
- A Unix socket in the state folder, which only its user can enter, takes one JSON request per connection.

A component that ends by itself stays ended: a test that kills one wants to see the consequences.
"""

import argparse
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Operation = Callable[..., Any]
"""Takes the fields of a request and returns its JSON result."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REQUEST_BYTES_MAX = 1 << 20  # A request is an argument list; the limit only bounds memory.
_REQUEST_TIMEOUT_S = 5.0  # Bounds how long a stuck client can hold up the loop.
_REMOVE_TRIES = 20  # A kubectl that still writes its cache can make removing the folder fail a few times.
_REMOVE_PAUSE_S = 0.05
_AT_END_TIMEOUT_S = 10.0  # A command that hangs must not keep the state folder.


@dataclass(slots=True)
class Component:
    """One child process and what is needed to start it again."""

    argv: list[str]
    log: str
    """File that standard output and error are appended to."""
    process: subprocess.Popen[bytes]
    starts: int = 1
    resume_at_s: float | None = None
    """Monotonic second at which a pause ends; None when running."""


class Supervisor:
    """Starts, signals, pauses and finally ends components; single-threaded, every request is short."""

    def __init__(self, state_dir: Path) -> None:
        """Own `state_dir`, which is removed at the end."""
        self._state_dir = state_dir
        self._components: dict[str, Component] = {}
        self._at_end: list[list[str]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.is_detached = False
        """Whether the end of the owner is to be ignored from now on."""

    def handle(self, request: dict[str, Any]) -> Any:
        """Carry out one request and return its JSON result.

        Raises `KeyError` for an unknown operation or component, `ValueError` for one that cannot be done now.
        """
        operations: dict[str, Operation] = {
            "spawn": self._spawn,
            "respawn": self._respawn,
            "signal": self._signal,
            "pause": self._pause,
            "resume": self._resume,
            "status": self._status,
            "detach": self._detach,
            "at_end": self._add_at_end,
        }
        return operations[request.pop("op")](**request)

    def next_deadline_s(self) -> float | None:
        """Return the monotonic second of the next end of a pause, or None."""
        return min((c.resume_at_s for c in self._components.values() if c.resume_at_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """End pauses that are over and collect ended processes."""
        for name, component in self._components.items():
            component.process.poll()
            if component.resume_at_s is not None and component.resume_at_s <= now_s:
                self._resume(name)

    def end(self) -> None:
        """Kill every component with its process group, undo what they changed and remove the state folder."""
        for component in self._components.values():
            _kill_group(component.process, signal.SIGKILL)
        for component in self._components.values():
            component.process.wait()
        for argv in reversed(self._at_end):
            _run(argv)
        for _ in range(_REMOVE_TRIES):
            shutil.rmtree(self._state_dir, ignore_errors=True)
            if not self._state_dir.exists():
                return
            time.sleep(_REMOVE_PAUSE_S)

    def _spawn(self, name: str, argv: list[str], log: str) -> int:
        """Start a component that does not run yet; return its process id."""
        if name in self._components:
            raise ValueError(f"{name} was started before; respawn it")
        self._components[name] = Component(argv, log, self._start(argv, log))
        return self._components[name].process.pid

    def _respawn(self, name: str) -> int:
        """Start a component that has ended once more, with the same arguments; return its process id."""
        component = self._components[name]
        if component.process.poll() is None:
            raise ValueError(f"{name} still runs as process {component.process.pid}")
        component.process = self._start(component.argv, component.log)
        component.starts += 1
        component.resume_at_s = None
        return component.process.pid

    def _signal(self, name: str, signum: int) -> None:
        """Send a signal to a component's process group; nothing happens when it has ended."""
        _kill_group(self._components[name].process, signum)

    def _pause(self, name: str, duration_s: float) -> None:
        """Stop a component for a time, and return when it has stopped; it goes on even when nobody asks for it."""
        component = self._components[name]
        if component.process.poll() is not None:
            raise ValueError(f"{name} does not run")
        _kill_group(component.process, signal.SIGSTOP)
        # A signal stops nothing before one of the process's threads gets a CPU to take it; the others serve until then.
        os.waitid(os.P_PID, component.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        component.resume_at_s = time.monotonic() + duration_s

    def _resume(self, name: str) -> None:
        """Let a paused component go on."""
        component = self._components[name]
        component.resume_at_s = None
        _kill_group(component.process, signal.SIGCONT)

    def _status(self) -> list[dict[str, Any]]:
        """Return name, process id, state, exit status and number of starts of each component."""
        return [_describe(name, component) for name, component in self._components.items()]

    def _detach(self) -> None:
        """Outlive the owner from now on."""
        self.is_detached = True

    def _add_at_end(self, argv: list[str]) -> None:
        """Run a command when all components have ended."""
        self._at_end.append(argv)

    def _start(self, argv: list[str], log: str) -> subprocess.Popen[bytes]:
        """Start a process that dies with this one, in a session of its own."""
        supervisor_pid = os.getpid()

        def die_with_supervisor() -> None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor_pid:  # It died before the line above took effect.
                os._exit(1)

        with Path(log).open("ab") as output:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._state_dir,
                start_new_session=True,
                preexec_fn=die_with_supervisor,  # noqa: PLW1509 - this process has no threads
            )


def serve(supervisor: Supervisor, listener: socket.socket, owner_fd: int) -> None:
    """Serve requests until one says stop, the owner ends, or a signal asks for the end; then clean up."""
    wake_receiver, wake_sender = _wake_on_signals()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(owner_fd, selectors.EVENT_READ)
    selector.register(wake_receiver, selectors.EVENT_READ)
    ending: socket.socket | None = None
    while True:
        deadline_s = supervisor.next_deadline_s()
        wait_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = {key.fileobj for key, _ in selector.select(wait_s)}
        supervisor.tick(time.monotonic())
        if wake_receiver in ready and _is_asked_to_end(wake_receiver):
            break
        if owner_fd in ready:
            break
        if listener in ready and (ending := _answer(supervisor, listener)):
            break
        if supervisor.is_detached and owner_fd in selector.get_map():
            selector.unregister(owner_fd)
    supervisor.end()
    wake_sender.close()
    if ending:
        _send(ending, {"result": None})


def _answer(supervisor: Supervisor, listener: socket.socket) -> socket.socket | None:
    """Answer one request; a request to stop is returned unanswered, to be answered when all is gone."""
    connection, _ = listener.accept()
    connection.settimeout(_REQUEST_TIMEOUT_S)
    try:
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline(_REQUEST_BYTES_MAX))
        if request["op"] == "stop":
            return connection
        reply = {"result": supervisor.handle(request)}
    except (KeyError, ValueError, TypeError, OSError) as e:
        reply = {"error": f"{type(e).__name__}: {e}"}
    _send(connection, reply)
    return None


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    """Write one reply and hang up; a client that has gone is no error."""
    with connection:
        try:
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except OSError as e:
            print(f"reply lost: {e}", file=sys.stderr)


def _describe(name: str, component: Component) -> dict[str, Any]:
    """Return one component as JSON."""
    exit_code = component.process.poll()
    running = "running" if component.resume_at_s is None else "paused"
    return {
        "name": name,
        "pid": component.process.pid,
        "state": running if exit_code is None else "exited",
        "exit_code": exit_code,
        "starts": component.starts,
    }


def _run(argv: list[str]) -> None:
    """Run a command to its end; what it says is logged."""
    try:
        subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=_AT_END_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        print(f"at the end: {e}", file=sys.stderr, flush=True)


def _kill_group(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signal a component's process group; one that was collected already has none."""
    if process.poll() is None:
        os.killpg(process.pid, signum)


def _wake_on_signals() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets; a byte arrives at the first for every signal that is handled here."""
    receiver, sender = socket.socketpair()
    receiver.settimeout(0.0)
    sender.settimeout(0.0)
    signal.set_wakeup_fd(sender.fileno())
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    return receiver, sender


def _is_asked_to_end(wake_receiver: socket.socket) -> bool:
    """Empty the wake-up socket; true when a signal asks this process to end."""
    return not {signal.SIGTERM, signal.SIGINT}.isdisjoint(wake_receiver.recv(4096))


def main() -> None:
    """Take over the descriptors named on the command line and serve."""
    parser = argparse.ArgumentParser(description="Owns the processes of one embedded control plane.")
    parser.add_argument("--state", type=Path, required=True, help="state folder; removed at the end")
    parser.add_argument("--listener-fd", type=int, required=True, help="listening Unix socket for requests")
    parser.add_argument("--owner-fd", type=int, required=True, help="pidfd whose process this one follows")
    given = parser.parse_args()
    serve(Supervisor(given.state), socket.socket(fileno=given.listener_fd), given.owner_fd)


if __name__ == "__main__":
    main()
