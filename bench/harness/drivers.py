"""Parent side of driven processes: start them, send verbs, read answers. Owns the processes it starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TextIO

ROOT = Path(__file__).resolve().parents[2]

STOP_S = 10.0
"""Time for a process to end by itself once its stdin has ended."""
WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL")
"""Begin of a command that ends with the thread that started it, however that ends: PR_SET_PDEATHSIG outlives exec."""


class AbsentError(Exception):
    """A process that is to be compared with cannot be had; says why."""


class FailedError(Exception):
    """A driven process broke off; carries the end of what it said."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start one driven process."""

    name: str
    python: Path
    module: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Variables beside the inherited ones."""


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: what it has started and made goes with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


class Driver:
    """One driven process, which ends with the thread that started it."""

    def __init__(self, command: Command) -> None:
        """Start it in a group of its own, which a terminal's Ctrl-C does not reach; returns before it is ready."""
        self.name = command.name
        self._log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  Closed with the driver.
        self._process = subprocess.Popen(
            (*WITH_PARENT, str(command.python), "-m", command.module, *command.arguments),
            cwd=ROOT,
            env={**os.environ, **dict(command.environment)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process; at once where we are interrupted, so that all are gone before somebody loses patience."""
        if kind is not None and not issubclass(kind, Exception):
            self.kill()
        self.close()

    def versions(self) -> dict[str, str]:
        """Wait until it is ready; what it measures. Raises `AbsentError` when it cannot be had."""
        try:
            answer = self.read()
        except FailedError as e:
            raise AbsentError(str(e)) from e
        if "absent" in answer:
            raise AbsentError(answer["absent"])
        return dict(answer["versions"])

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a verb and wait for its answer. Raises `FailedError`."""
        self.send(verb, **arguments)
        return self.read()

    def send(self, verb: str, **arguments: Any) -> None:
        """Send a verb without waiting. Raises `FailedError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as e:
            raise FailedError(f"{self.name}: {e}: {self._said()}") from e

    def read(self) -> dict[str, Any]:
        """Read the answer to the oldest verb under way. Raises `FailedError`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise FailedError(f"{self.name} ended with {self._process.wait()}: {self._said()}")
        return dict(json.loads(line))

    def _said(self, chars: int = 400) -> str:
        self._log.seek(0)
        return " ".join(self._log.read().split())[-chars:]

    def kill(self) -> None:
        """End the process and those that it has started at once, whatever they do."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, by force when it does not end by itself. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):  # It ended before it took all that it was sent.
                    pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._log.close()


def ask_all(drivers: Sequence[Driver], verb: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a verb to all, then wait for all; they work at the same time."""
    for driver in drivers:
        driver.send(verb, **arguments)
    return [d.read() for d in drivers]
