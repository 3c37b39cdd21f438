"""Processes of the demo, owned by a supervisor that ends them and removes their files when the demo ends, however."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from controlplane.errors import StateDirError
from controlplane.layout import Layout
from controlplane.supervision import Supervision, snapshot, start_supervisor
from controlplane.waiting import wait_until
from demo.errors import DemoError

_TAIL_BYTES: Final = 3000
_STOP_S: Final = 15.0
_COMPLAINTS_MAX: Final = 8


class Supervised:
    """A state folder and the processes that live in it."""

    def __init__(self, root: Path, options: Sequence[str] = ()) -> None:
        """Own `root`, an empty folder; removed with everything in it at the end. Our programs are given `options`."""
        self._at = Layout(root)
        self._options = options
        self._at.make_folders()
        self._at.marker.write_text(json.dumps({"server": "", "kubectl": ""}))
        temporary = root / "tmp"  # Of killed processes, which remove nothing themselves.
        temporary.mkdir()
        self._supervisor = start_supervisor(self._at, os.getpid(), {**snapshot(), "TMPDIR": str(temporary)})
        self._calls = Supervision(self._at)
        self._ready: dict[str, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def root(self) -> Path:
        """The state folder."""
        return self._at.root

    def start(self, name: str, program: str, arguments: Sequence[str]) -> None:
        """Start one of our programs; `wait_ready` tells when it is up."""
        ready = self.root / f"{name}.ready.json"
        argv = [str(Path(sys.executable).with_name(program)), *arguments, *self._options, "--ready-file", str(ready)]
        self._calls.call("spawn", name=name, argv=argv, log=str(self._at.log(name)))
        self._ready[name] = ready  # Last: whoever sees it in another thread finds a process.

    def spawn(self, name: str, argv: Sequence[str]) -> None:
        """Start another program, which has ways of its own to say that it is up."""
        self._calls.call("spawn", name=name, argv=list(argv), log=str(self._at.log(name)))

    def terminate(self, name: str) -> None:
        """Ask a process to end by itself and give it the time; `stop` ends it otherwise."""
        self._calls.call("signal", name=name, signum=signal.SIGTERM)
        wait_until(lambda: not self.is_running(name), _STOP_S)

    def restart(self, name: str) -> None:
        """Start a process that has ended once more, with the same arguments."""
        self._ready[name].unlink(missing_ok=True)  # Of a process that ended by itself.
        self._calls.call("respawn", name=name)

    def kill(self, name: str) -> None:
        """`kill -9` a process; returns when it has ended."""
        self._calls.call("signal", name=name, signum=signal.SIGKILL)
        if not wait_until(lambda: not self.is_running(name), _STOP_S):
            raise DemoError(f"{name} does not end after SIGKILL")
        self._ready[name].unlink(missing_ok=True)

    def terminate_all(self) -> None:
        """Ask every process to end by itself and give it the time; whatever is left ends with `stop`."""
        for name in self._ready:
            self._calls.call("signal", name=name, signum=signal.SIGTERM)
        wait_until(lambda: not any(self.is_running(name) for name in self._ready), _STOP_S)

    def is_running(self, name: str) -> bool:
        """Whether a process of this name was started and has not ended."""
        found = self._calls.status().get(name)
        return found is not None and found.state != "exited"

    def pid(self, name: str) -> int | None:
        """Of a process that runs; None for one that has ended or was never started."""
        found = self._calls.status().get(name)
        return found.pid if found is not None and found.state != "exited" else None

    def was_started(self, name: str) -> bool:
        """Whether a process of this name was ever started."""
        return name in self._ready

    def wait_ready(self, name: str, timeout_s: float, *, is_restarted: bool = False) -> dict[str, Any]:
        """Wait until a process says that it is up; returns what it says. Raises `DemoError` with the end of its log.

        The end of a process that somebody starts again (`is_restarted`) ends the wait only when its time is up.
        """
        path = self._ready[name]

        def is_up() -> bool:
            return path.exists() or not (is_restarted or self.is_running(name))

        if not wait_until(is_up, timeout_s) or not path.exists():
            why = "is not up" if self.is_running(name) else "ended"
            raise DemoError(f"{name} {why} after at most {timeout_s:.0f} s; its log ends:\n{self.log_tail(name)}")
        told: dict[str, Any] = json.loads(path.read_text())
        return told

    def log_tail(self, name: str) -> str:
        """Return the end of a process's log."""
        content = self._at.log(name).read_bytes() if self._at.log(name).exists() else b""
        return content[-_TAIL_BYTES:].decode(errors="replace")

    @property
    def names(self) -> tuple[str, ...]:
        """Processes that were started."""
        return tuple(self._ready)

    def complaints(self, name: str) -> list[str]:
        """Return the last lines of a process's log that are no mere information, with its name."""
        lines = (line for line in self.log_tail(name).splitlines() if '"level": "info"' not in line)
        return [f"{name}: {line}" for line in lines][-_COMPLAINTS_MAX:]

    def detach(self) -> None:
        """Let the processes outlive this one."""
        self._calls.call("detach")

    def stop(self) -> None:
        """Kill everything and remove the folder. Idempotent."""
        stop_at(self.root)
        self._supervisor.wait(_STOP_S)


def stop_at(root: Path) -> None:
    """End whatever runs in a state folder and remove it; harmless when there is nothing."""
    try:
        Supervision(Layout(root)).call("stop")
    except StateDirError:
        from controlplane.plane import remove_remains

        remove_remains(Layout(root))
