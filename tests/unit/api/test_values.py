"""Laws of units and conditions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kvstrata_api import units
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.base import COUNT_MAX, QUANTITY_PATTERN, Quantity
from kvstrata_api.models.conditions import Condition, Status, is_true, merge

pytestmark = pytest.mark.unit

conditions = st.lists(
    st.builds(
        Condition,
        type=st.sampled_from(["Ready", "Accepted", "Degraded"]),
        status=st.sampled_from(Status),
        reason=st.just("Because"),
    ),
    max_size=6,
)


@given(st.integers(1, units.QUANTITY_BYTES_MAX))
def test_a_quantity_is_read_back_exactly(size_bytes: int) -> None:
    assert units.parse_quantity(units.format_quantity(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", ["0", "-1", "1.5Gi", "64gi", "Gi", "", "1e3", "9999999999Ei", "64 Gi"])
def test_a_quantity_that_is_not_whole_and_positive_is_refused_by_value(text: str) -> None:
    with pytest.raises(InvalidInputError, match="quantity"):
        units.parse_quantity(text)


@given(st.integers(1, 1 << 80))
def test_a_sum_is_rounded_down_to_a_quantity_that_the_api_server_takes(size_bytes: int) -> None:
    stored = units.whole_quantity(size_bytes)

    assert re.match(QUANTITY_PATTERN, units.format_quantity(stored))
    assert min(size_bytes, units.SIZE_BYTES_MAX) - (1 << 50) < stored <= size_bytes


@pytest.mark.parametrize("text", ["4Ei", "4095Pi", "3999Pi", "999999Ti", "999999999999999999", "999P", "5Ei", "7Ei"])
def test_the_largest_quantities_of_a_crd_count_as_what_can_be_counted(text: str) -> None:
    assert re.match(QUANTITY_PATTERN, text)
    assert TypeAdapter(Quantity).validate_python(text) == min(units.parse_quantity(text), COUNT_MAX)


def test_rounded_quantities_read_well() -> None:
    assert units.format_rounded(1_319_413_953_331) == "1.2Ti"
    assert units.format_rounded(64 * units.GIB) == "64Gi"
    assert units.format_rounded(0) == "0"


@given(conditions, conditions)
def test_merging_twice_is_merging_once(old: list[Condition], new: list[Condition]) -> None:
    once = merge(old, new, "2026-01-01T00:00:00Z")

    assert merge(once, new[-1:], "2026-01-02T00:00:00Z") == once


@given(conditions, conditions)
def test_merge_keeps_one_condition_of_each_type(old: list[Condition], new: list[Condition]) -> None:
    merged = merge(old, new, "now")

    assert len({c.type for c in merged}) == len(merged)
    assert {c.type for c in merged} == {c.type for c in old + new}


def test_the_transition_time_moves_only_when_the_status_flips() -> None:
    first = merge((), [Condition(type="Ready", status=Status.TRUE, reason="Up")], "t1")
    same = merge(first, [Condition(type="Ready", status=Status.TRUE, reason="StillUp")], "t2")
    flipped = merge(same, [Condition(type="Ready", status=Status.FALSE, reason="Down")], "t3")

    assert [c[0].last_transition_time for c in (first, same, flipped)] == ["t1", "t1", "t3"]
    assert is_true(same, "Ready")
    assert not is_true(flipped, "Ready")
