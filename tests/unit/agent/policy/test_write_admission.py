"""What is not written to flash: what is unlikely to return, as long as that costs few hits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy import admission
from kvstrata_agent.policy.admission import LOSS_MAX, WriteAdmission
from kvstrata_agent.policy.expected_reuse import ExpectedReuse, MarkTable, RequestFacts

pytestmark = pytest.mark.unit

NOTHING: list[int] = []


def judged(offers: list[tuple[int, float]], asked_blocks: int) -> WriteAdmission[int]:
    """After blocks with such chances left memory, and so many were asked for."""
    known: WriteAdmission[int] = WriteAdmission()
    for point, (blocks, chance) in enumerate(offers, 1):
        known.offered(point, blocks, chance)
    for _ in range(16):
        known.asked(NOTHING, asked_blocks // 16)
    return known


def test_nothing_is_declined_before_anything_is_known() -> None:
    assert WriteAdmission[int]().takes(0.0)


def test_what_never_returns_is_declined_and_what_does_is_written() -> None:
    known = judged([(10_000, 0.0), (500, 0.9)], 16_000)

    assert not known.takes(0.0)
    assert known.takes(0.9)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), max_size=30), st.integers(16, 100_000))
def test_returns_of_what_is_declined_are_not_expected_to_cost_more_than_may_be_lost(
    offers: list[tuple[int, float]], asked_blocks: int
) -> None:
    known = judged(offers, asked_blocks)

    lost_blocks = sum(blocks * chance for blocks, chance in offers if not known.takes(chance))
    assert lost_blocks <= LOSS_MAX * asked_blocks + 1e-6


def test_returns_that_nobody_expected_end_it() -> None:
    known = judged([(1000, 0.0), (500, 0.9)], 16_000)
    assert not known.takes(0.0)
    for _ in range(16):
        known.asked([1], 10)  # The thousand blocks, of which none was to return.

    assert known.takes(0.0)


def test_what_is_waited_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "FOLLOWED_MAX", 10)
    known: WriteAdmission[int] = WriteAdmission()
    for point in range(100):
        known.offered(point, 1, 0.0)

    assert len(known._followed) == 10


def test_a_chance_is_told_once_records_go_back_far_enough() -> None:
    table: MarkTable[int] = MarkTable()
    reuse: ExpectedReuse[int] = ExpectedReuse(table)
    for i in range(400):
        reuse.begin([2 * i + 1], None, RequestFacts(), float(i))
        if i % 2:
            reuse.begin([2 * i + 1], None, RequestFacts(), i + 0.5)
    young, old = 2 * 390 + 1, 2 * 2 + 1

    assert reuse.return_chance(young, table.marks[young], 400.0) is not None
    assert reuse.return_chance(old, table.marks[old], 400.0) is None, "nothing that is remembered is twice as old"
