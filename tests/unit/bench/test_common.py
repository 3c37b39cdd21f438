"""Laws of the benchmarks' figures: more is better, 1.0 is level, and the last line has one shape."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness import cases
from bench.harness.common import Result, Sample, beyond, machine, rate_ratio, table, time_ratio

pytestmark = pytest.mark.unit

figures = st.lists(st.floats(1e-6, 1e12), min_size=5, max_size=9)


@given(figures, st.floats(1.01, 1e3))
def test_a_greater_rate_is_better(rates: list[float], factor: float) -> None:
    slow, fast = Sample(tuple(rates)), Sample(tuple(r * factor for r in rates))

    assert rate_ratio(fast, slow) == pytest.approx(factor)
    assert rate_ratio(slow, fast) == pytest.approx(1 / factor)


@given(figures, st.floats(1.01, 1e3))
def test_a_shorter_time_is_better(seconds: list[float], factor: float) -> None:
    fast, slow = Sample(tuple(seconds)), Sample(tuple(s * factor for s in seconds))

    assert time_ratio(fast, slow) == pytest.approx(factor)
    assert time_ratio(slow, fast) == pytest.approx(1 / factor)


@given(figures)
def test_equals_are_level(values: list[float]) -> None:
    sample = Sample(tuple(values))

    assert rate_ratio(sample, sample) == time_ratio(sample, sample) == 1.0
    assert beyond(sample, sample) == 0.0


def test_a_ratio_compares_what_was_measured_at_the_same_time() -> None:
    drifting = Sample((1.0, 2.0, 4.0, 8.0, 16.0))

    assert rate_ratio(Sample((2.0, 4.0, 8.0, 16.0, 32.0)), drifting) == 2.0


def test_an_absent_peer_has_no_ratio() -> None:
    sample = Sample((1.0,) * 5)

    assert rate_ratio(sample, None) is None
    assert time_ratio(sample, None) is None


def test_fewer_than_five_repeats_are_no_sample() -> None:
    with pytest.raises(AssertionError, match="4 repeats"):
        Sample((1.0,) * 4)


def test_the_last_line_has_the_agreed_keys_and_stays_one_line() -> None:
    result = Result("local", quick=True, versions={}, ratios={"put_2MiB_vs_memcpy": 0.912345, "x": None}, values={})

    line = result.line({"cpu": "some\ncpu"})

    assert "\n" not in line
    said = json.loads(line)
    assert list(said) == ["bench", "quick", "machine", "versions", "ratios", "values"]
    assert said["ratios"] == {"put_2MiB_vs_memcpy": 0.9123, "x": None}


def test_the_machine_says_what_figures_depend_on() -> None:
    assert {"cpu", "cores", "memory_gib", "kernel"} <= machine().keys()


def test_a_table_keeps_its_columns_apart() -> None:
    lines = table(("what", "GB/s"), [("put", "1.00"), ("a longer name", "10.00")]).splitlines()

    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("plan", [cases.full(), cases.quick(), cases.tiny()])
def test_every_plan_repeats_enough_and_holds_its_sets(plan: cases.Plan) -> None:
    every = (*plan.one_client, *plan.many_clients, plan.small)

    assert all(case.repeats >= 5 for case in every)
    assert "2MiB" in {case.size for case in plan.one_client}
    assert plan.capacity_bytes > 2 * max(case.set_bytes for case in every)
