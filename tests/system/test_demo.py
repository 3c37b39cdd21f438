"""`make demo` as a user runs it: its last line, its exit status, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.installing import ROOT
from kvstrata_ui.server import has_charts

pytestmark = pytest.mark.system

pytest.importorskip("torch", reason="the demo computes with torch")
pytest.importorskip("transformers", reason="the demo runs a model of transformers")

WALL_S = 280.0
"""Bound of one run; 20 to 90 s on two idle cores, by how fast they compute."""


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-m", "demo")
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def folders() -> set[Path]:
    return set((ROOT / ".demo").glob("kvstrata-*"))


def processes_of(folder: Path) -> list[str]:
    """Command lines that name a demo's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.timeout(300)
def test_the_demo_keeps_every_promise_and_leaves_nothing_behind(demo: subprocess.Popen[str]) -> None:
    before = folders()
    said, _ = demo.communicate(timeout=WALL_S)
    last: dict[str, Any] = json.loads(said.splitlines()[-1])["demo"]

    assert demo.returncode == 0, said
    assert last["logits_equal"] is True
    assert last["wrong_blocks"] == 0
    assert min(last["restored_from"].values()) > 0
    assert last["hit_blocks"] >= sum(last["restored_from"].values()) > 0
    assert "kvpoolnode" in said
    if has_charts():
        assert "page: http://127.0.0.1:" in said
        assert "picture of it: build/demo.png" in said or "no picture: chromium is not installed" in said
    else:
        assert "no page: kvstrata ui: the chart library is missing" in said
    assert folders() == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_demo_that_is_cut_off_leaves_nothing_behind(demo: subprocess.Popen[str], signum: int) -> None:
    before = folders()
    assert demo.stdout is not None
    for line in demo.stdout:
        if "ServiceAccounts" in line:
            break
    (folder,) = folders() - before
    assert processes_of(folder)
    os.kill(demo.pid, signum)
    status = demo.wait(WALL_S)
    end_s = time.monotonic() + 30
    while (folder.exists() or processes_of(folder)) and time.monotonic() < end_s:
        time.sleep(0.1)

    assert status == (130 if signum == signal.SIGINT else -signum), "it was over before the signal came"
    assert not folder.exists()
    assert processes_of(folder) == []
