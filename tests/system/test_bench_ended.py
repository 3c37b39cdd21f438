"""What `bench.connectors` has started and made goes with it, whatever ends it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.drivers import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ENDS_S = 60.0
"""On a machine that does much else."""

FAMILY = """
import sys
from pathlib import Path
from bench import connectors
from bench.harness import engines
from bench.harness.drivers import Command, Driver

def start(place, case):
    Path("/dev/shm", f"vllm_offload_{place.offloading('stuck')}.mmap").touch()
    place.stack.enter_context(engines.redis_server(place.folder))
    place.stack.push(engines.LmcacheServer(place.python, place.folder, {}, 64))
    stuck = place.stack.enter_context(
        Driver(Command("stuck", Path(sys.executable), "stuck", tuple(sys.argv[3:]), (("PYTHONPATH", sys.argv[1]),)))
    )
    stuck.versions()
    print(place.folder, flush=True)
    stuck.ask("run")

connectors.FAMILIES["vllm"] = connectors.Family("none", start, {}, ())
connectors.peers.ensure = lambda *_: Path(sys.argv[1], "python")
connectors.engines.make_model = lambda *_: None
connectors.main(["--tiny", "--engines", "vllm", "--directory", sys.argv[2]])
"""
"""A family whose engine never answers: everything besides is the benchmark's own."""

STUCK = """
import subprocess, sys, time
if sys.argv[1:]:
    subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print('{"versions": {}}', flush=True)
time.sleep(600)
"""


Process = tuple[int, str]
"""Its number, and when it was started."""


def processes() -> dict[Process, int]:
    """What runs, with its parent. What has ended and waits to be asked for is gone."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *more = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # Gone meanwhile.
            continue
        if state != "Z":
            found[int(folder.name), more[17]] = int(parent)
    return found


def tree(root: int) -> set[Process]:
    """A process, those that it has started, and theirs."""
    running = processes()
    members = {process for process in running if process[0] == root}
    while more := {p for p, parent in running.items() if parent in {m[0] for m in members}} - members:
        members |= more
    return members


@pytest.fixture
def near() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's, of which the kernel takes 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="be-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_everything_goes_with_the_benchmark(number: signal.Signals, tmp_path: Path, near: Path) -> None:
    folders = {"bin": tmp_path / "bin", "files": tmp_path / "files", "temporary": near}
    for name in ("bin", "files"):
        folders[name].mkdir()
    (folders["bin"] / "stuck.py").write_text(STUCK)
    server = folders["bin"] / "lmcache"
    server.write_text("#!/bin/sh\nexec sleep 600\n")
    server.chmod(0o755)
    # An engine's own processes are what the kernel ends by nobody's wish but the engine's.
    workers = () if number == signal.SIGKILL else ("sleep", "600")
    command = (sys.executable, "-c", FAMILY, str(folders["bin"]), str(folders["files"]), *workers)
    variables = {**os.environ, "TMPDIR": str(folders["temporary"])}

    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as bench:
        assert bench.stdout is not None
        shared = Path("/dev/shm", f"vllm_offload_{Path(bench.stdout.readline().strip()).name}-stuck.mmap")
        started = tree(bench.pid)
        try:
            assert shared.exists()
            assert len(started) == 5 + bool(workers), "the benchmark, an agent, Redis, LMCache, the engine"
            os.killpg(bench.pid, number)
            status = bench.wait(ENDS_S)
            ends_s = time.monotonic() + ENDS_S
            while left := started & processes().keys():
                assert time.monotonic() < ends_s, left
                time.sleep(0.05)
            if number != signal.SIGKILL:
                assert status not in (0, -signal.SIGKILL)
                assert [list(folders[name].iterdir()) for name in ("files", "temporary")] == [[], []]
                assert not shared.exists()
        finally:
            shared.unlink(missing_ok=True)
            for number_of, _ in started & processes().keys():
                os.kill(number_of, signal.SIGKILL)
