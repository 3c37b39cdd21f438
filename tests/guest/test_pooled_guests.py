"""One CXL device of two emulated machines: the real kernel's dax device in each, one file behind both.

Each guest is a host with its own kernel. What is killed is first the process in one of them, then the whole machine.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from guest import machine
from guest.boot import Report, run
from guest.cpio import file
from guest.errors import BootError, GuestError, UnavailableError
from kvstrata_api.units import MIB

pytestmark = [pytest.mark.guest, pytest.mark.timeout(3000)]

HERE = Path(__file__).parent
_BOOT_S = 600.0
_ANSWER_S = 300.0
CAPACITY_BYTES = 16 * MIB
"""Four of the device's slices."""


@dataclass
class Guest:
    """A running guest and the line to it."""

    name: str
    folder: Path
    pooled: Path
    log: list[str]
    error: GuestError | OSError | None = None
    report: Report | None = None
    _line: socket.socket | None = None
    _pending: bytes = b""
    _thread: threading.Thread | None = field(default=None, repr=False)

    def boot(self) -> None:
        more = {"/guest/tests/regions.py": file(HERE / "inside" / "regions.py", 0o644)}
        more |= {f"/guest/tests/{n}": file(HERE.parent / n, 0o644) for n in ("support/backends/contract.py",)}

        def booted() -> None:
            try:
                self.report = run(HERE / "pooled", more, self.folder, self.pooled)
            except (GuestError, OSError) as e:
                self.error = e

        self._thread = threading.Thread(target=booted, name=f"guest-{self.name}")
        self._thread.start()

    def tell(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; both are written to the log."""
        self._connect()
        assert self._line is not None
        began_s = time.monotonic()
        self._line.sendall(json.dumps(command).encode() + b"\n")
        while b"\n" not in self._pending:
            received = self._line.recv(65536)
            assert received, f"guest {self.name} is gone"
            self._pending += received
        text, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(text)
        shown = {k: v if len(str(v)) < 120 else f"{len(v)} of them" for k, v in (command | answer).items()}
        self.log.append(f"{self.name} {time.monotonic() - began_s:6.2f} s  {json.dumps(shown)}")
        return answer

    def _connect(self) -> None:
        end_s = time.monotonic() + _BOOT_S
        while self._line is None:
            if self.error is not None:
                raise self.error
            assert time.monotonic() < end_s, f"guest {self.name} did not come up"
            line = socket.socket(socket.AF_UNIX)
            line.settimeout(_ANSWER_S)
            try:
                line.connect(str(machine.Files(self.folder).commands))
            except OSError:
                line.close()
                time.sleep(0.2)
            else:
                self._line = line

    def kill(self) -> None:
        """End the whole machine as a loss of power does."""
        os.kill(int(machine.Files(self.folder).process.read_text()), signal.SIGKILL)
        self.join()
        self.log.append(f"{self.name}          the machine was killed")

    def join(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        assert self._thread is not None
        self._thread.join()

    def end(self) -> None:
        if self._thread is None:
            return
        with suppress(OSError, AssertionError, BootError):
            if self._thread.is_alive():
                self._connect()
                assert self._line is not None
                self._line.sendall(b'{"do": "end"}\n')
                self._thread.join(60)
        if self._thread.is_alive():
            self.kill()
        self.join()


@pytest.fixture
def guests(tmp_path: Path) -> Iterator[tuple[Guest, Guest]]:
    pooled = tmp_path / "pooled.mem"
    pooled.touch()
    os.truncate(pooled, machine.CXL_BYTES)
    log: list[str] = []
    pair = Guest("a", tmp_path / "a", pooled, log), Guest("b", tmp_path / "b", pooled, log)
    for guest in pair:
        guest.folder.mkdir()
        guest.boot()
    try:
        yield pair
    finally:
        for guest in pair:
            guest.end()
        text = "\n".join(log) + "\n"
        (tmp_path / "log.txt").write_text(text)
        print(text)  # noqa: T201  What the run did, for whoever asks with -s.


def _blocks(first: int, answer: dict[str, Any]) -> list[list[Any]]:
    return [[number, block] for number, block in enumerate(answer["blocks"], first)]


def _grown(guest: Guest, size_bytes: int) -> dict[str, Any]:
    """Ask for more until the dead are known as such."""
    end_s = time.monotonic() + 60
    while "refused" in (answer := guest.tell(do="resize", size_bytes=size_bytes)):
        assert time.monotonic() < end_s, answer
        time.sleep(0.5)
    return answer


def test_two_hosts_read_one_copy_and_survive_each_other(guests: tuple[Guest, Guest]) -> None:
    a, b = guests
    try:
        opened = [guest.tell(do="start", node=guest.name, size_bytes=CAPACITY_BYTES) for guest in guests]
    except UnavailableError as e:
        pytest.skip(f"no guest on this machine: {e}")
    assert [(one["medium"], one["is_emulated"]) for one in opened] == [("cxl-pooled", False)] * 2, opened
    assert not {*opened[0]["slices"]} & {*opened[1]["slices"]}

    # One copy, read by both.
    of_a = _blocks(1, a.tell(do="put", numbers=[*range(1, 25)]))
    of_b = _blocks(101, b.tell(do="put", numbers=[*range(101, 125)]))
    assert b.tell(do="read", node="a", blocks=of_a) == {"right": 24, "refused": []}
    assert a.tell(do="read", node="b", blocks=of_b) == {"right": 24, "refused": []}

    # kill -9 of the process of one: what it left can be read; its successor has its slices at once, empty.
    assert a.tell(do="kill") == {"status": -signal.SIGKILL}
    assert b.tell(do="read", node="a", blocks=of_a) == {"right": 24, "refused": []}
    again = a.tell(do="start", node="a", size_bytes=CAPACITY_BYTES)
    assert again["slices"] == opened[0]["slices"]
    gone = b.tell(do="read", node="a", blocks=of_a)
    assert gone["right"] == 0
    assert all("another owner" in why for why in gone["refused"])
    new_of_a = _blocks(201, a.tell(do="put", numbers=[*range(201, 225)]))
    assert b.tell(do="read", node="a", blocks=new_of_a)["right"] == 24
    assert b.tell(do="get", blocks=of_b) == {"right": 24}

    # kill -9 of the machine: its slices are had after the lapse, and what is read before or after is never wrong.
    a.kill()
    assert b.tell(do="read", node="a", blocks=new_of_a)["right"] == 24
    whole = 60 * 4 * MIB
    assert "refused" in b.tell(do="resize", size_bytes=whole), "the dead host's are not to be had at once"
    assert _grown(b, whole)["held"] == 60
    left = b.tell(do="read", node="a", blocks=new_of_a)
    assert left["right"] + len(left["refused"]) == 24
    assert left["right"] < 24, "at least one of its slices was taken"
    assert b.tell(do="get", blocks=of_b) == {"right": 24}, "the survivor lost nothing"
    of_b += _blocks(301, b.tell(do="put", numbers=[*range(301, 331)]))
    assert b.tell(do="get", blocks=of_b) == {"right": 54}
    assert isinstance(a.error, BootError)
    assert not b.error
