"""The wheel as a user installs it: each process with its own pinned requirements and nothing else."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from zipfile import ZipFile

import pytest

from kvstrata_ui.server import has_charts

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "dashboards" / "kvstrata_ui" / "page"
UV = Path(sys.executable).with_name("uv")


def run(*command: str | Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | environ,
    )


def succeed(*command: str | Path, **environ: str) -> str:
    done = run(*command, **environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def build(out: Path, **environ: str) -> Path:
    succeed(UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", out, ROOT, **environ)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


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

    assert succeed(bin_ / "kvstrata", "version").startswith("kvstrata ")
    succeed(bin_ / "kvstrata", "validate", "-f", ROOT / "examples" / "01-quickstart" / "10-pool.yaml")
    succeed(bin_ / "python", "-c", "import kvstrata_client")
    assert succeed(bin_ / "kvstrata", "docs", "install") == (ROOT / "docs" / "install.md").read_text()
    for process in ("agent", "metadata", "operator"):
        refused = run(bin_ / f"kvstrata-{process}", "--help")
        assert refused.returncode == 1
        assert f"pip install 'kvstrata[{process}]'" in refused.stderr
    assert "pip install 'kvstrata[agent]'" in run(bin_ / "kvstrata", "up", "--print").stderr
    assert "pip install 'kvstrata[ui]'" in run(bin_ / "kvstrata", "ui", "--help").stderr


def test_the_command_line_has_what_it_draws_with_and_no_process_s_packages(wheel: Path, tmp_path: Path) -> None:
    bin_ = environment(wheel, "cli", tmp_path / "cli")

    succeed(bin_ / "python", "-c", "import aiohttp, rich, textual")
    assert "--listen" in succeed(bin_ / "kvstrata", "ui", "--help")
    assert run(bin_ / "kvstrata-operator", "--help").returncode == 1


@pytest.mark.parametrize("process", ["agent", "metadata", "operator"])
def test_each_process_starts_from_its_own_requirements_without_torch(wheel: Path, tmp_path: Path, process: str) -> None:
    bin_ = environment(wheel, process, tmp_path / process)

    assert "--metrics-port" in succeed(bin_ / f"kvstrata-{process}", "--help")
    assert run(bin_ / "python", "-c", "import torch").returncode == 1


@pytest.mark.skipif(not has_charts(), reason="the chart library was not fetched: npm is missing (make setup)")
def test_the_page_is_packed_with_its_dashboards_and_the_chart_library_with_its_licence(
    wheel: Path, tmp_path: Path
) -> None:
    with ZipFile(wheel) as packed:
        names = {name.removeprefix("kvstrata_ui/") for name in packed.namelist() if name.startswith("kvstrata_ui/")}
        assert "The MIT License" in packed.read("kvstrata_ui/page/vendor/uPlot.LICENSE").decode()
    page = {str(path.relative_to(PAGE.parent)) for path in PAGE.rglob("*") if path.is_file()}
    dashboards = {f"dashboards/{path.name}" for path in (ROOT / "dashboards").glob("*.json")}
    assert page | dashboards <= names
    assert "page/vendor/uPlot.iife.min.js" in names

    bin_ = environment(wheel, "metadata", tmp_path / "metadata")
    command = [str(bin_ / "kvstrata"), "ui", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as started:
        try:
            assert started.stdout is not None
            address = started.stdout.readline().strip()
            with urllib.request.urlopen(f"{address}api/dashboards", timeout=10) as answer:  # noqa: S310  Our own.
                assert {d["uid"] for d in json.load(answer)["dashboards"]} == {Path(name).stem for name in dashboards}
        finally:
            started.terminate()


NO_COMPILER = "/nonexistent/cc"


def native_files(wheel: Path) -> set[str]:
    return {Path(name).name for name in ZipFile(wheel).namelist() if name.startswith("kvstrata_native/")}


def test_a_compiler_gives_a_wheel_for_this_platform_with_kernels_that_run(wheel: Path, tmp_path: Path) -> None:
    python = environment(wheel, "client", tmp_path / "client") / "python"

    assert wheel.stem.endswith("-cp311-abi3-linux_" + os.uname().machine)
    assert "_kernels.abi3.so" in native_files(wheel)
    assert not [name for name in native_files(wheel) if name.endswith((".c", ".h"))]
    assert succeed(python, "-c", "import kvstrata_native; print(kvstrata_native.level)").strip() != "python"


def test_without_a_compiler_a_wheel_for_every_platform_runs_all_the_same(tmp_path: Path) -> None:
    pure = build(tmp_path / "wheel", CC=NO_COMPILER)
    python = environment(pure, "client", tmp_path / "client") / "python"

    assert pure.stem.endswith("-none-any")
    assert not [name for name in native_files(pure) if name.endswith(".so")]
    copied = "import kvstrata_native as n; b = bytearray(3); n.copy(b, b'kv!'); print(n.level, b.decode())"
    assert succeed(python, "-c", copied).split() == ["python", "kv!"]


def test_setup_without_a_compiler_says_so_and_goes_on(tmp_path: Path) -> None:
    sources = ROOT / "agent" / "kvstrata_native"
    for path in (ROOT / "hack" / "native_build.py", *sources.iterdir()):
        if path.suffix in {".py", ".c", ".h"}:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())

    done = run(sys.executable, tmp_path / "hack" / "native_build.py", CC=NO_COMPILER)

    assert done.returncode == 0
    assert f"left out: {NO_COMPILER}: No such file or directory" in done.stderr
