"""What came of fetching and of computing, held against the other choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.movement.path import MEASURED_PART, REMEASURED_S, Paths
from kvstrata_agent.policy.recompute import Source, Split
from kvstrata_agent.policy.regret import AWAITED_S, KEPT_MAX, Regrets

pytestmark = pytest.mark.unit

CHOICE = Split(blocks=4, ready_s=2.0, compute_s=1.0, all_fetch_s=5.0, all_compute_s=4.0, wait_s=0.5)


def test_a_fetch_that_took_longer_than_computing_is_regretted_by_the_difference() -> None:
    regrets = Regrets()

    slow = regrets.fetched(b"a", CHOICE, 7.0)
    assert (slow.source, slow.took_s, slow.estimated_s) == (Source.FETCH, 8.0, 3.0)
    assert slow.regret_s == 4.0
    assert regrets.find(b"a") is slow
    assert regrets.fetched(b"a", CHOICE, 0.1).took_s == 1.5, "the engine's own queue is waited for all the same"


def test_computing_ends_when_the_engine_brings_the_block_and_counts_once() -> None:
    regrets = Regrets()
    regrets.computes(b"b", CHOICE, 100.0)

    assert regrets.awaits
    (found,) = regrets.computed([b"a", b"b"], 107.0)
    assert (found.source, found.took_s, found.other_s, found.regret_s) == (Source.RECOMPUTE, 7.0, 5.0, 2.0)
    assert not list(regrets.computed([b"b"], 108.0))
    assert not regrets.awaits


def test_a_block_that_comes_much_later_says_nothing() -> None:
    regrets = Regrets()
    regrets.computes(b"b", CHOICE, 100.0)

    assert not list(regrets.computed([b"b"], 101.0 + AWAITED_S))
    assert regrets.find(b"b") is None


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=50))
def test_nothing_is_regretted_that_cost_no_more_than_the_other_choice(keys: list[bytes]) -> None:
    regrets = Regrets()
    for key in keys:
        assert regrets.fetched(key, CHOICE, 2.0).regret_s == 0.0


def test_what_is_kept_is_bounded() -> None:
    regrets = Regrets()
    for i in range(2 * KEPT_MAX):
        regrets.computes(i.to_bytes(4, "big"), CHOICE, 0.0)
        regrets.fetched(i.to_bytes(4, "big"), CHOICE, 0.0)

    assert len(regrets._awaited) == len(regrets._known) == KEPT_MAX
    assert regrets.find((0).to_bytes(4, "big")) is None


def test_a_slow_path_is_unknown_again_after_a_while_and_to_much_larger_loads() -> None:
    paths = Paths()
    speed = paths.between("remote", "dram").speed
    speed.begin(100.0)
    speed.end(101.0, 1000)

    assert paths.measured_bytes_per_s("remote", "dram", 1000, 101.0) == pytest.approx(1000.0)
    assert paths.measured_bytes_per_s("remote", "dram", int(1.1 * 1000 / MEASURED_PART), 101.0) == 0.0
    assert paths.measured_bytes_per_s("remote", "dram", 1000, 102.0 + REMEASURED_S) == 0.0
    assert paths.measured_bytes_per_s("other", "dram", 1000, 101.0) == 0.0
