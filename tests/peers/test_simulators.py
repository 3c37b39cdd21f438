"""Simulators of others count the hits that our replay counts."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

import peers
from bench.policy import simulators
from bench.policy.peers import PEERS
from bench.policy.synthetic import synthetic
from kvstrata_agent.replay.cache import replay
from kvstrata_agent.replay.traces import read_folder

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

PEER = "simulators"
TRACE = synthetic(300)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    try:
        peers.ensure(simulators.ENVIRONMENT, _say)
    except peers.InstallError as e:
        pytest.skip(f"the simulators' environment could not be made: {e}")


def test_lru_of_every_simulator_is_ours() -> None:
    rows = simulators.compare(TRACE, (5, 25))

    assert {(r.simulator, r.policy) for r in rows} == {
        ("libcachesim", "leaf-LRU"), ("libcachesim", "plain LRU"), ("LMCache", "plain LRU"),
        ("kvcache-simulator", "leaf-LRU"),
    }  # fmt: skip
    assert len(rows) == 8
    for row in rows:
        assert abs(row.difference_points) <= simulators.DIFFERENCE_POINTS_MAX, row
        assert 10 < row.ours_percent < 95, row


def test_policies_of_libcachesim_keep_prefixes_no_better_than_the_limit() -> None:
    capacity = TRACE.unique_blocks // 20
    percent, version = simulators.libcachesim(TRACE, capacity)

    assert version == simulators.VERSION
    assert tuple(percent) == simulators.LIBCACHESIM
    assert percent["LRU"] == pytest.approx(replay(TRACE, capacity, PEERS["leaf-LRU"]).hit_percent)
    assert all(0 < hits < percent["LRU"] for name, hits in percent.items() if name in ("SIEVE", "S3-FIFO"))


def test_pictures_are_drawn_of_each_trace_and_of_the_gap(tmp_path: Path) -> None:
    cells = [
        {"trace": "a/made.jsonl", "size_percent": size, "peers": {"leaf-LRU": 40.0 + size, "ARC": 41.0 + size},
         "ours": {"none": 44.0 + size, "trace": 45.0 + size, "engine": 46.0 + size}, "limit": 50.0 + size,
         "base": "leaf-LRU"}
        for size in (1, 5)
    ]  # fmt: skip

    drawn = {Path(path).name for path in simulators.plot(tmp_path / "new", cells)}

    assert drawn == {f"{name}.{form}" for name in ("gap-closed", "hits-a-made") for form in ("png", "svg")}
    assert (tmp_path / "new/gap-closed.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "new/hits-a-made.svg").read_text()


@pytest.mark.parametrize("version", range(1, 9))
def test_lcs_that_libcachesim_writes_is_read(tmp_path: Path, version: int) -> None:
    records = [(1, 7, 64, 2), (1, 8, 1, -1), (4, 7, 64, -1)]
    (tmp_path / "in").write_bytes(b"".join(struct.pack("<IQIq", *record) for record in records))
    written = tmp_path / "folder" / "out"
    written.parent.mkdir()
    script = (
        "import sys, libcachesim as l\n"
        "r = l.TraceReader(sys.argv[1], l.TraceType.ORACLE_GENERAL_TRACE)\n"
        "l.Util.convert_to_lcs(r._reader, sys.argv[2], False, False, int(sys.argv[3]))\n"
    )
    python = str(peers.python_of(simulators.ENVIRONMENT))
    subprocess.run((python, "-c", script, tmp_path / "in", written, str(version)), check=True, capture_output=True)

    (trace,) = read_folder(written.parent).traces

    assert trace.format == "libCacheSim lcs"
    assert trace.at_s == [1.0, 1.0, 4.0]
    assert (trace.accesses, trace.unique_blocks) == (3, 2)
    assert trace.paths[0] == trace.paths[2] != trace.paths[1]
