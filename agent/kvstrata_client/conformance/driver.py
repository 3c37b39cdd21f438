"""The program that is tried: one request and one answer at a time, each a line of JSON, over its standard streams."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from kvstrata_api.errors import PermanentError

LINE_BYTES_MAX: Final = 4 << 20
"""Digests of the most blocks that a scenario asks for have less than 1 MiB."""
_READ_BYTES: Final = 1 << 16
_SHOWN_CHARS: Final = 200


class ConformanceError(PermanentError):
    """The program did not do what the protocol or the kit demands; says what was wanted and what came."""


class Driver:
    """One process of the program. Killed at the end, if it has not ended by then."""

    def __init__(self, command: Sequence[str], answer_s: float) -> None:
        """Start it. Raises `ConformanceError` when it cannot be started."""
        self._answer_s = answer_s
        self._received = bytearray()
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as e:
            raise ConformanceError(f"{command[0]}: {e.strerror or e}") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def ask(self, op: str, *, within_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises `ConformanceError` for none in time, and for no JSON object."""
        assert self._process.stdin is not None
        line = json.dumps({"op": op, **arguments}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as e:
            raise ConformanceError(f"{op}: the program takes no requests any more: {e}") from e
        answer = self._line(op, self._answer_s if within_s is None else within_s)
        try:
            parsed = json.loads(answer)
        except ValueError as e:
            raise ConformanceError(f"{op}: answer {_shown(answer)} is no JSON") from e
        if not isinstance(parsed, dict):
            raise ConformanceError(f"{op}: answer {_shown(answer)} is no JSON object")
        return parsed

    def kill(self) -> None:
        """End it without warning. Idempotent."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue

    def _line(self, op: str, within_s: float) -> bytes:
        assert self._process.stdout is not None
        fd, ends_s = self._process.stdout.fileno(), time.monotonic() + within_s
        received, poller = self._received, select.poll()
        poller.register(fd, select.POLLIN)
        while b"\n" not in received[-_READ_BYTES:]:
            if not poller.poll(max(0.0, ends_s - time.monotonic()) * 1e3):
                raise ConformanceError(f"{op}: no answer within {within_s:g} s")
            chunk = os.read(fd, _READ_BYTES)
            if not chunk:
                raise ConformanceError(f"{op}: the program ended, with status {self._process.wait()}")
            received += chunk
            if len(received) > LINE_BYTES_MAX:
                raise ConformanceError(f"{op}: an answer of more than {LINE_BYTES_MAX} B")
        line, _, rest = received.partition(b"\n")
        self._received = rest
        return bytes(line)


def _shown(answer: bytes) -> str:
    return repr(answer[:_SHOWN_CHARS].decode(errors="replace"))
