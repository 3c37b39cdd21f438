"""What `hack/run_tests.py` reports: failures at their first try, tests that hang, and whatever a test leaves behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "hack/run_tests.py"
UNSTEADY = """
from pathlib import Path

def test_unsteady():
    seen = Path("unsteady.seen")
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
PLUGINS = """
from support.runner import leftovers, watchdog

pytest_plugins = ("support.runner.leftovers", "support.runner.watchdog")
leftovers.GRACE_S = watchdog.GRACE_S = 1.0
"""

PLUGINS_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
"""Each run is of two processes, and hypothesis alone takes as long to import as the rest."""


def run(folder: Path, *tests: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(f"[pytest]\ntimeout = 2\npythonpath = {Path(__file__).parents[1]}\n")
    (folder / "conftest.py").write_text(PLUGINS)
    (folder / "test_them.py").write_text("\n".join(tests))
    command = [
        sys.executable,
        str(SCRIPT),
        "--workers",
        "1",
        "--results",
        str(folder / "results"),
        "test_them.py",
        *more,
    ]
    environment = os.environ | PLUGINS_ALONE
    return subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)


def test_what_passes_passes_with_its_reasons_and_times(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import pytest",
        "def test_fine(): pass",
        "@pytest.mark.skip(reason='no such device')\ndef test_left_out(): pass",
    )
    assert done.returncode == 0, done.stdout
    assert "skipped: 1\n     1  no such device" in done.stdout
    assert "failed: 0" in done.stdout
    assert "test_them::test_fine" in done.stdout.partition("slowest")[2]


def test_what_fails_once_has_failed(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_fine(): pass", UNSTEADY)
    assert done.returncode == 1
    assert "failed: 1\n        test_them::test_unsteady" in done.stdout


def test_a_test_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_fine(): pass", HANGING, "def test_fine_too(): pass")
    assert done.returncode == 1
    assert "in test_hanging" in done.stderr, "the stack tells where"
    assert "2 passed" in done.stdout
    assert "FAILED test_them.py::test_hanging" in done.stdout


def test_a_file_that_cannot_be_read_as_a_test_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "def test_(: pass").returncode != 0


LEAVES = {
    "process": "import subprocess\ndef test_it(): subprocess.Popen(['sleep', '20'])",
    "process that was let go": (
        "import subprocess\ndef test_it(): subprocess.run(['sh', '-c', 'setsid sleep 20 >/dev/null 2>&1 & '"
        "\n    'until grep -q sleep /proc/$!/comm; do :; done'])"  # Before that it has no environment to be known by.
    ),
    "temporary file": "import tempfile\ndef test_it(): tempfile.mkdtemp()",
    "temporary file in memory": (
        "import tempfile\nfrom support.runner import leftovers\ndef test_it(): tempfile.mkdtemp(dir=leftovers.memory())"
    ),
}


def test_what_is_left_is_told_of_the_file_that_left_it(tmp_path: Path) -> None:
    (tmp_path / "test_thereafter.py").write_text("def test_fine(): pass")
    done = run(tmp_path, LEAVES["temporary file"], more=("test_thereafter.py",))
    assert "failed: 1\n        test_them::test_it\n            failed on teardown" in done.stdout


@pytest.mark.parametrize("what", LEAVES)
def test_what_is_left_behind_fails_the_run_and_is_named(what: str, tmp_path: Path) -> None:
    done = run(tmp_path, LEAVES[what])
    for process in re.findall(r"process (\d+): sleep", done.stdout):
        os.kill(int(process), signal.SIGKILL)
    assert done.returncode == 1, done.stdout
    assert re.sub(" (that|in) .*", "", what) in done.stdout.partition("leaves behind:")[2]
