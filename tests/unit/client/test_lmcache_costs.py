"""Laws of what loads of LMCache's objects are thought to cost, without LMCache."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_client.connectors.lmcache_costs import RECENT_S, LoadCosts, announce, known

pytestmark = pytest.mark.unit

rates = st.floats(1.0, 1e6)
seconds = st.floats(1e-6, 10.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(lookup_s: float, *loads: tuple[str, int, float]) -> LoadCosts:
    costs = LoadCosts(Clock())
    costs.looked_up(lookup_s)
    for load in loads:
        costs.loaded(*load)
    return costs


@given(st.integers(1, 1 << 20), rates)
def test_nothing_is_declined_before_something_was_loaded(tokens: int, rate: float) -> None:
    costs = LoadCosts(Clock())
    costs.looked_up(9.0)

    assert costs.can_pay(tokens, rate)


@given(seconds, seconds, st.integers(1, 4096), rates, st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_what_cannot_pay_whole_cannot_pay_in_part(
    lookup_s: float, load_s: float, loaded: int, rate: float, tokens: int, more: int
) -> None:
    costs = measured(lookup_s, ("dram", loaded, load_s))

    assert costs.can_pay(tokens + more, rate) or not costs.can_pay(tokens, rate)


def test_a_lookup_that_takes_longer_than_computing_is_declined() -> None:
    costs = measured(0.010, ("dram", 1000, 0.010))  # 10 ms, and 100,000 tokens per second.

    assert costs.can_pay(1000, 10_000)  # 20 ms against 100 ms.
    assert not costs.can_pay(100, 10_000)  # 11 ms against 10 ms.
    assert not costs.can_pay(1 << 20, 200_000)


def test_the_fastest_tier_of_late_counts() -> None:
    costs = measured(0.0, ("nvme", 100, 1.0), ("dram", 100, 0.001), ("dram+nvme", 100, 0.5))

    assert costs.can_pay(100, 10_000)
    assert costs.report() == {"lookup_s": 0.0, "tokens_per_s": {"nvme": 100, "dram": 100_000, "dram+nvme": 200}}


def test_what_was_measured_long_ago_is_measured_again() -> None:
    clock = Clock()
    costs = LoadCosts(clock)
    costs.loaded("dram", 100, 10.0)
    assert not costs.can_pay(100, 1000)
    clock.now_s = RECENT_S

    assert costs.can_pay(100, 1000)


def test_newer_loads_weigh_more() -> None:
    costs = measured(0.0, ("dram", 100, 1.0), *[("dram", 100, 0.01)] * 30)

    assert costs.can_pay(100, 5000)


def test_a_policy_finds_an_adapters_measurements_as_long_as_there_is_the_adapter() -> None:
    costs = LoadCosts(Clock())
    announce("a model", costs)

    assert known("a model") is costs
    assert known("another") is None
    del costs
    gc.collect()
    assert known("a model") is None
