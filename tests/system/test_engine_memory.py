"""Memory that dead engines left behind, with real files in real shared memory and real processes that hold them."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_agent.app import engine_memory
from kvstrata_agent.app.engine_memory import SHARED_MEMORY, YOUNG_S, EngineMemory, reap
from kvstrata_node import directories
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

pytestmark = pytest.mark.system

SIZE_BYTES: Final = 1 << 20
HOLD: Final = """
import mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, int(sys.argv[2]))
if sys.argv[3] == "mapped":
    memory = mmap.mmap(file, int(sys.argv[2]))
    memory[:] = bytes(len(memory))
    os.close(file)
elif sys.argv[3] == "read":
    os.write(file, bytes(int(sys.argv[2])))
    os.close(file)
    file = os.open(sys.argv[1], os.O_RDONLY)
print("held", flush=True)
time.sleep(600)
"""
"""Hold a file as an engine does: open, mapped and closed again, or open for reading."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory, where nobody else reaps."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="kvstrata-test-") as folder:
        yield Path(folder)


Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    with ExitStack() as stack:

        def start(path: Path, how: str, *before: str) -> subprocess.Popen[str]:
            program = (*before, sys.executable, "-c", HOLD, str(path), str(SIZE_BYTES), how)
            made = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
            stack.callback(made.wait)
            stack.callback(made.kill)
            assert made.stdout is not None
            stack.enter_context(made.stdout)
            assert made.stdout.readline() == "held\n"
            return made

        yield start


def later() -> float:
    """Unix time when what was just written is not young any more."""
    return time.time() + YOUNG_S + 1


@pytest.mark.parametrize("how", ["open", "mapped", "read"])
def test_what_a_living_process_holds_stays_and_goes_when_it_was_killed(memory: Path, hold: Hold, how: str) -> None:
    path = memory / "vllm_offload_a1b2.mmap"
    engine = hold(path, how)
    assert reap(memory, later()) == []
    engine.kill()
    engine.wait()
    ((name, size_bytes),) = reap(memory, later())
    assert name == path.name
    assert size_bytes == (0 if how == "open" else SIZE_BYTES)
    assert not path.exists()


def test_a_process_of_another_process_namespace_counts_as_well(memory: Path, hold: Hold) -> None:
    isolated = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run((*isolated, "true"), capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    path = memory / "vllm_offload_a1b2.mmap"
    engine = hold(path, "mapped", *isolated)
    assert reap(memory, later()) == []
    engine.kill()
    engine.wait()
    ends_s = time.monotonic() + 10
    while path.exists():
        assert time.monotonic() < ends_s, "its namespace is gone, and the file is not"
        reap(memory, later())


def test_what_is_not_vllms_or_young_stays(memory: Path) -> None:
    kept = memory / "elsewhere"
    kept.write_bytes(b"kept")
    for name in ("vllm_offload_.txt", "other_vllm_offload_a.mmap", "vllm_offload_a.mmap.bak"):
        (memory / name).write_bytes(b"kept")
    (memory / "vllm_offload_link.mmap").symlink_to(kept)
    (memory / "vllm_offload_folder.mmap").mkdir()
    named_twice = memory / "vllm_offload_twice.mmap"
    named_twice.write_bytes(b"kept")
    os.link(named_twice, memory / "twice")
    before = sorted(p.name for p in memory.iterdir())
    assert reap(memory, later()) == []
    young = memory / "vllm_offload_young.mmap"
    young.write_bytes(b"left")
    assert reap(memory, time.time()) == []
    assert reap(memory, later()) == [(young.name, 4096)]
    assert sorted(p.name for p in memory.iterdir()) == before


def test_a_round_is_bounded_and_counted(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "REAPED_MAX", 2)
    paths = [memory / f"vllm_offload_{n}.mmap" for n in range(3)]
    for path in paths:
        path.write_bytes(bytes(SIZE_BYTES))
    monkeypatch.setattr(engine_memory, "YOUNG_S", -1.0)
    registry = CollectorRegistry()
    counters = Counters(Instruments(AGENT, registry), "p", "n")

    async def two_rounds() -> None:
        await EngineMemory(counters, memory).reap()
        assert len([p for p in paths if p.exists()]) == 1
        await EngineMemory(counters, memory).reap()

    asyncio.run(two_rounds())
    named = {"pool": "p", "node": "n"}
    assert not any(p.exists() for p in paths)
    assert registry.get_sample_value("kvstrata_engine_memory_reaped_files_total", named) == 3


def test_whoever_opens_a_file_meanwhile_waits_and_ends_no_agent(memory: Path) -> None:
    """The kernel sends a signal to whoever holds a lease that somebody waits for."""
    path = memory / "vllm_offload_a1b2.mmap"
    path.write_bytes(b"left")
    file = os.open(path, os.O_RDONLY)
    try:
        with directories.write_lease(file):
            assert directories.has_write_lease(file)
            opening = subprocess.Popen((sys.executable, "-c", f"open({str(path)!r}, 'r+b')"))
            ends_s = time.monotonic() + 30
            while directories.has_write_lease(file):
                assert time.monotonic() < ends_s, "nobody opens it"
            assert opening.poll() is None
        assert opening.wait(30) == 0
    finally:
        os.close(file)


def test_a_machine_without_shared_memory_has_none_to_give_back(memory: Path) -> None:
    assert reap(memory / "absent", later()) == []
