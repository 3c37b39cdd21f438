"""The wheel as a user installs it: each process with its own pinned requirements and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=240)


def succeed(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    succeed(UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", out, ROOT)
    return next(out.glob("*.whl"))


def environment(wheel: Path, process: str, at: Path) -> Path:
    """Make a virtual environment with one process's pinned requirements; returns its bin folder."""
    succeed(UV, "venv", "--python", sys.executable, at)
    python = at / "bin" / "python"
    pinned = ROOT / "requirements" / f"{process}.txt"
    succeed(UV, "pip", "install", "--python", python, "--require-hashes", "-r", pinned)
    succeed(UV, "pip", "install", "--python", python, "--no-deps", wheel)
    return at / "bin"


def test_the_client_installs_alone_and_names_what_a_process_needs(wheel: Path, tmp_path: Path) -> None:
    bin_ = environment(wheel, "client", tmp_path / "client")

    assert succeed(bin_ / "kvfleet", "version").startswith("kvfleet ")
    succeed(bin_ / "kvfleet", "validate", "-f", ROOT / "examples" / "01-quickstart" / "10-pool.yaml")
    succeed(bin_ / "python", "-c", "import kvfleet_client")
    for process in ("agent", "metadata", "operator"):
        refused = run(bin_ / f"kvfleet-{process}", "--help")
        assert refused.returncode == 1
        assert f"pip install 'kvfleet[{process}]'" in refused.stderr


@pytest.mark.parametrize("process", ["agent", "metadata", "operator"])
def test_each_process_starts_from_its_own_requirements_without_torch(wheel: Path, tmp_path: Path, process: str) -> None:
    bin_ = environment(wheel, process, tmp_path / process)

    assert "--metrics-port" in succeed(bin_ / f"kvfleet-{process}", "--help")
    assert run(bin_ / "python", "-c", "import torch").returncode == 1
