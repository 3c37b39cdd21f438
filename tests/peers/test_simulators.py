"""Simulators of others count the hits that our replay counts."""

import sys

import pytest

import peers
from bench.policy import simulators
from bench.policy.peers import PEERS
from bench.policy.replay import replay
from bench.policy.synthetic import synthetic

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
