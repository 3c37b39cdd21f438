"""What is run once more, and what is not."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "hack/run_tests.py"
UNSTEADY = """
from pathlib import Path

def test_{name}():
    seen = Path("{name}.seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""


HANGING = """
import asyncio
import time

def test_hanging():
    async def go():
        loop = asyncio.get_running_loop()
        def spin():
            time.sleep(0.3)
            loop.call_soon(spin)
        spin()
        await asyncio.Event().wait()
    asyncio.run(go())
"""
"""Its timeout is raised in a callback, where the event loop logs it and goes on."""
WATCHED = """
import watchdog
from watchdog import pytest_configure, pytest_runtest_protocol

watchdog.GRACE_S = 1.0
"""


def run(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(f"[pytest]\ntimeout = 2\npythonpath = {Path(__file__).parents[1]}\n")
    (folder / "conftest.py").write_text(WATCHED)
    (folder / "test_them.py").write_text("\n".join(tests))
    command = [sys.executable, str(SCRIPT), "--cache", str(folder / "cache"), "test_them.py"]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)


def test_what_passes_is_run_once(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_fine(): pass")
    assert done.returncode == 0
    assert "run_tests:" not in done.stdout


def test_what_fails_once_is_named_with_its_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_fine(): pass", UNSTEADY.format(name="a"), UNSTEADY.format(name="b"))
    assert done.returncode == 0
    assert "assert was_there" in done.stdout
    assert "UNSTEADY" in done.stdout
    assert "test_them.py::test_a" in done.stdout.partition("UNSTEADY")[2]
    assert "test_them.py::test_b" in done.stdout.partition("UNSTEADY")[2]


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_broken(): assert False", UNSTEADY.format(name="a"))
    assert done.returncode == 1
    assert "UNSTEADY" not in done.stdout


def test_a_third_failure_is_not_chance(tmp_path: Path) -> None:
    done = run(tmp_path, *(UNSTEADY.format(name=name) for name in "abc"))
    assert done.returncode == 1
    assert "once more" not in done.stdout


def test_a_test_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_fine(): pass", HANGING, "def test_fine_too(): pass")
    assert done.returncode == 1
    assert "in test_hanging" in done.stderr, "the stack tells where"
    assert "2 passed" in done.stdout
    assert "FAILED test_them.py::test_hanging" in done.stdout


def test_a_file_that_cannot_be_read_as_a_test_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "def test_(: pass").returncode != 0
