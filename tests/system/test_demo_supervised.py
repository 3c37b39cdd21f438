"""Processes of the demo: who waits for one is told of its start, its end and its next start, and of nothing else."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.errors import DemoError
from demo.supervised import Supervised

pytestmark = pytest.mark.system

SAYS = (
    "import json, pathlib, sys, time; path = pathlib.Path(sys.argv[-1]); new = path.with_suffix('.new')\n"
    "def up(turn): new.write_text(json.dumps({'turn': turn})); new.rename(path); time.sleep(60)\n"
)
"""As `ready.write` does: whoever looks sees the whole of it or nothing."""
UP = SAYS + "up(1)"
ENDS = "print('no good')"
ENDS_ONCE = SAYS + "been = path.with_suffix('.been')\nif been.exists(): up(2)\nbeen.touch()"
WAIT_S = 20.0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Supervised]:
    with Supervised(tmp_path / "state") as its:
        yield its


def start(processes: Supervised, script: str) -> None:
    processes.start("it", "python", ["-c", script])


def test_who_waits_while_a_process_is_being_started_is_not_told_that_it_ended(
    processes: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = processes._calls.call

    def late(op: str, **fields: Any) -> Any:
        time.sleep(0.5 if op == "spawn" else 0.0)
        return call(op, **fields)

    monkeypatch.setattr(processes._calls, "call", late)
    starting = threading.Thread(target=start, args=(processes, UP))
    starting.start()
    while not processes.was_started("it"):
        time.sleep(0.01)
    assert processes.wait_ready("it", WAIT_S) == {"turn": 1}
    starting.join()


def test_the_end_of_a_process_is_told_with_its_log(processes: Supervised) -> None:
    start(processes, ENDS)
    with pytest.raises(DemoError, match="it ended after at most 20 s; its log ends:\nno good"):
        processes.wait_ready("it", WAIT_S)


def test_a_process_that_somebody_starts_again_is_waited_for(processes: Supervised) -> None:
    start(processes, ENDS_ONCE)

    def again() -> None:
        while processes.is_running("it"):
            time.sleep(0.01)
        processes.restart("it")

    watching = threading.Thread(target=again)
    watching.start()
    assert processes.wait_ready("it", WAIT_S, is_restarted=True) == {"turn": 2}
    watching.join()


def test_a_killed_process_does_not_say_that_it_is_up(processes: Supervised) -> None:
    start(processes, UP)
    processes.wait_ready("it", WAIT_S)
    processes.kill("it")
    with pytest.raises(DemoError, match="it ended"):
        processes.wait_ready("it", WAIT_S)


def test_processes_start_while_a_library_changes_the_environment(tmp_path: Path) -> None:
    """As torch does while it loads in the demo's other thread: `os.putenv` is setenv(3) without Python's own books."""
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            for n in range(400):  # More than C's array holds at first, so that it moves.
                os.putenv(f"KVSTRATA_TEST_{n}", "x" * 50)
            for n in range(400):
                os.unsetenv(f"KVSTRATA_TEST_{n}")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for n in range(20):
            with Supervised(tmp_path / f"state-{n}") as processes:
                assert processes.names == ()
    finally:
        is_over.set()
        changing.join()
