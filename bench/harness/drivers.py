"""Parent side of driven processes: start them, send verbs, read answers. Owns the processes it starts."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

ROOT = Path(__file__).resolve().parents[2]

STOP_S = 10.0
"""Time for a process to end by itself once its stdin has ended."""


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


class Driver:
    """One driven process."""

    def __init__(self, command: Command) -> None:
        """Start it; returns before it is ready."""
        self.name = command.name
        self._log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115  Closed with the driver.
        self._process = subprocess.Popen(
            (str(command.python), "-m", command.module, *command.arguments),
            cwd=ROOT,
            env={**os.environ, **dict(command.environment)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        """End the process at once, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """End the process, by force when it does not end by itself. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def ask_all(drivers: Sequence[Driver], verb: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a verb to all, then wait for all; they work at the same time."""
    for driver in drivers:
        driver.send(verb, **arguments)
    return [d.read() for d in drivers]
