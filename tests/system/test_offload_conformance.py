"""The kit for offload libraries: the reference passes, each seeded defect is named, and an agent runs on a library."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvstrata_native
import native_build
from kvstrata_client.conformance import offload
from kvstrata_native.choice import PYTHON
from support.client.conformance_kit import kit
from support.runner.alone import environment

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(400),
    pytest.mark.skipif(kvstrata_native.level == PYTHON, reason="the interface is of compiled kernels"),
]

SOURCES = Path(kvstrata_native.__file__).parent
PATIENT_S = 60.0
DEFECTS = {
    1: ("digests", "wrong digest"),
    2: ("bounds", "write beyond the buffer"),
    3: ("completions", "lost completion"),
    4: ("errors", "wrong error: bad length"),
    5: ("verifies", "checksum failure ignored"),
    6: ("torn", "torn input"),
    7: ("fingerprints", "found in another scope"),
    8: ("fences", "a fence is ignored"),
}
"""Number in $KVO_DEFECT, the check that has to find it, and how it is named."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of the reference by itself, that says it is emulated and can be wrong."""
    made = tmp_path_factory.mktemp("offload") / "emulated.so"
    assert native_build.compile_offload(SOURCES, made, "-DKVO_EMULATED", "-DKVO_DEFECTS", "-O1") is None
    return made


def test_the_reference_passes() -> None:
    ended = kit("--offload", str(SOURCES / native_build.LIBRARY), "--answer-s", str(PATIENT_S))
    assert (ended.status, ended.told) == (0, {"passed": len(offload.CHECKS), "failed": 0, "failures": {}}), ended.errors
    assert [row.split()[0] for row in ended.rows] == list(offload.CHECKS)


def test_a_library_of_its_own_passes(library: Path) -> None:
    ended = kit("--offload", str(library), "--answer-s", str(PATIENT_S))
    assert (ended.status, ended.told["failures"]) == (0, {}), ended.errors


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_and_named(library: Path, monkeypatch: pytest.MonkeyPatch, defect: int) -> None:
    check, said = DEFECTS[defect]
    monkeypatch.setenv("KVO_DEFECT", str(defect))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    assert said in offload.run(library, check, PATIENT_S).failure


def test_a_failure_is_told_by_table_json_and_exit_status(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVO_DEFECT", "1")
    ended = kit("--offload", str(library), "--scenario", "digests", "--scenario", "copies")
    assert (ended.status, ended.told["passed"], list(ended.told["failures"])) == (1, 1, ["digests"])
    listed = kit("--offload", str(library), "--list")
    assert (listed.status, len(listed.rows)) == (0, len(offload.CHECKS))
    assert kit("--offload", str(library), "--scenario", "vectors").status == 2
    none = kit("--offload", str(library.with_name("none.so")))
    assert (none.status, none.told) == (1, {})


def test_a_crash_and_a_hang_are_told_as_such(library: Path) -> None:
    crash = "raise SystemExit(__import__('os').kill(__import__('os').getpid(), 11))"
    done = subprocess.run((sys.executable, "-c", crash), check=False, capture_output=True, text=True)
    assert offload._failure(done.returncode, done.stdout, done.stderr) == f"crashes: {signal.SIGSEGV.name}"
    assert "hangs" in offload.run(library, "torn", -offload.ENDED_S + 0.01).failure


def test_an_agent_runs_on_the_library_and_says_that_it_is_emulated(library: Path, tmp_path: Path) -> None:
    ready, state = tmp_path / "ready", tmp_path / "state"
    command = [
        sys.executable, "-m", "kvstrata_client.cli", "up", "--state-dir", str(state), "--ready-file", str(ready),
        "--offload", str(library),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as started:
        try:
            assert started.stdout is not None
            for line in started.stdout:  # Until it says whom it serves.
                if "kvstrata" in line and ready.exists():
                    break
        finally:
            started.terminate()
            _, errors = started.communicate(timeout=60)
    status = json.loads((state / "status.json").read_text())["status"]  # The last one, which is written at the end.
    assert status["offloadEngine"] == "emulated-accelerator 1.0 (emulated)"
    assert "offload engine is emulated" in errors
    assert started.returncode == 0


def test_an_agent_without_the_library_says_so_and_ends(tmp_path: Path) -> None:
    missing = str(tmp_path / "engine.so")
    command = [
        sys.executable, "-m", "kvstrata_client.cli", "up", "--state-dir", str(tmp_path / "state"), "--offload", missing
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment())
    assert done.returncode == 1
    assert f"--offload {missing}" in done.stderr
