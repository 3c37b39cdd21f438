"""What is learned of returns: worth follows what was seen, memory is bounded, and pins are not this module's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy import return_times
from kvstrata_agent.policy.expected_reuse import ExpectedReuse, MarkTable, RequestFacts, Return, Victims
from kvstrata_agent.policy.return_times import BINS, FIT_RECORDS, ReturnTimes, age_bin, gittins

pytestmark = pytest.mark.unit

RECORDS = 1024


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_bins_are_in_the_order_of_ages(one_s: float, other_s: float) -> None:
    assert (one_s <= other_s) <= (age_bin(one_s) <= age_bin(other_s))
    assert 0 <= age_bin(one_s) < BINS


@given(st.lists(st.floats(0, 0.9), min_size=BINS, max_size=BINS))
def test_worth_is_a_rate_that_no_time_to_wait_beats(hazard: list[float]) -> None:
    worths = gittins(np.array(hazard))

    assert (worths >= 0).all()
    first_s = return_times.FIRST_AGE_S
    survives = 1 - hazard[0]
    assert worths[0] >= hazard[0] / (0.5 * (1 + survives) * first_s) - 1e-9


def test_classes_are_told_apart_by_what_decides_returns_and_by_nothing_else() -> None:
    times = ReturnTimes(2, RECORDS)
    for i in range(RECORDS):
        number = times.note((i % 2, i % 5), float(i))
        if i % 2:
            times.returned(number, i + 8.0)
    times.fit(float(RECORDS))

    assert times.class_of((0, 0)) == times.class_of((0, 4)) != times.class_of((1, 0)) == times.class_of((1, 4))
    returning, other = times.note((1, 0), 2e3), times.note((0, 0), 2e3)
    assert times.worth(returning, 2e3) > 100 * times.worth(other, 2e3)
    assert times.worth(returning, 2e3 + 600) < times.worth(returning, 2e3)


def test_the_chance_of_a_return_is_what_was_seen_and_ages_that_nobody_saw_promise_nothing() -> None:
    times = ReturnTimes(1, RECORDS)
    for i in range(RECORDS):
        number = times.note((i % 4,), float(i))
        if i % 4 == 3:
            times.returned(number, i + 8.0)
    times.fit(float(RECORDS) + 100.0)

    returning, other = times.note((3,), 2e3), times.note((0,), 2e3)
    assert times.chance(returning, 2e3, 60.0) > 0.95
    assert times.chance(returning, 2e3, 1.0) < 0.1
    assert times.chance(other, 2e3, math.inf) < 0.05
    assert times.overall_chance(0.0, math.inf) == pytest.approx(0.25, abs=0.05)


def test_an_old_record_is_forgotten_and_a_late_return_changes_nothing() -> None:
    times = ReturnTimes(1, 16)
    first = times.note((0,), 0.0)
    for i in range(16):
        times.note((0,), float(i))

    times.returned(first, 20.0)

    assert not times.is_known(first)
    times.fit(20.0)


def test_classes_that_are_learned_from_a_part_of_the_records_are_those_of_all() -> None:
    times = ReturnTimes(2)
    known = 3 * FIT_RECORDS + 5
    for i in range(known):
        number = times.note((i % 3, i % 7), float(i))
        if i % 3:
            times.returned(number, i + (8.0 if i % 3 == 1 else 800.0))
    times.fit(float(known) + 1e4)

    classes = {times.class_of((level, 0)) for level in range(3)}
    assert len(classes) == 3
    for number in range(0, known, 997):
        assert times.worth(number, 1e9) == times.worth(times.note(times.features_of(number), 0.0), 1e9)


def test_while_nothing_returns_what_came_last_is_worth_most() -> None:
    times = ReturnTimes(1)
    for i in range(1000):
        times.note((0,), float(i))
    times.fit(1000.0)

    worths = [times.worth(number, 1000.0) for number in range(0, 1000, 100)]
    assert worths == sorted(worths)
    assert worths[-1] > 2 * worths[0]


def test_turns_are_told_apart_one_by_one_and_then_by_doublings() -> None:
    turns = [*range(9), 9, 15, 16, 31, 32, 10_000]
    table: MarkTable[str] = MarkTable()
    reuse = ExpectedReuse(table)
    levels = []
    for turn in range(10_001):
        reuse.begin(["a"], [1], RequestFacts(session="s"), float(turn))
        if turn in turns:
            levels.append(reuse.explain("a", table.marks["a"])["turn"])

    assert levels == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 10, 11, 15]


def test_memory_is_bounded_by_records() -> None:
    reuse: ExpectedReuse[int] = ExpectedReuse(MarkTable(), 64)
    for i in range(2000):
        chain = [1, 10 * i + 2, 10 * i + 3]
        reuse.begin(chain, [1, 1, 1], RequestFacts(session=i, kind=f"k{i}", stop=f"s{i}"), float(i))

    assert reuse.remembered() <= 4 * 64 + 16


class Learner:
    """Expected reuse with its marks."""

    def __init__(self) -> None:
        self.table: MarkTable[str] = MarkTable()
        self.reuse: ExpectedReuse[str] = ExpectedReuse(self.table, RECORDS)
        self.begin = self.reuse.begin

    def worth(self, point: str, now_s: float) -> float:
        return self.reuse.worth(point, self.table.marks[point], now_s)


def _learned() -> Learner:
    """One session in two has a second turn after eight seconds; it rewrites the last block of the first."""
    reuse = Learner()
    at_s = 0.0
    for i in range(400):
        at_s += 20.0
        kind = "agent" if i % 2 else "once"
        chain = ["system", f"a{i}", f"b{i}", f"c{i}"]
        reuse.begin(chain, [4, 4, 4, 1], RequestFacts(kind=kind), at_s)
        if i % 2:
            reuse.begin([*chain[:3], f"d{i}", f"e{i}"], [4, 4, 4, 4, 1], RequestFacts(kind="last"), at_s + 8.0)
    return reuse


def test_what_returned_before_is_worth_more_than_what_never_did() -> None:
    reuse = _learned()
    reuse.begin(["system", "x", "y"], [4, 4, 4], RequestFacts(kind="agent"), 9000.0)
    reuse.begin(["system", "u", "v"], [4, 4, 4], RequestFacts(kind="once"), 9000.0)

    assert reuse.worth("x", 9001.0) > 10 * reuse.worth("u", 9001.0)
    assert reuse.worth("system", 9001.0) > 10 * reuse.worth("u", 9001.0)


def test_what_a_later_turn_has_left_out_is_worth_less_than_before() -> None:
    reuse = _learned()
    reuse.begin(["system", "x", "y", "z", "t"], [4, 4, 4, 1, 1], RequestFacts(kind="agent"), 9000.0)
    before = reuse.worth("z", 9007.0)
    reuse.begin(["system", "x", "y", "w", "q"], [4, 4, 4, 4, 1], RequestFacts(kind="agent"), 9008.0)

    assert reuse.worth("z", 9009.0) < before / 10


def test_an_engines_word_that_a_session_is_complete_is_learned() -> None:
    reuse = Learner()
    for i in range(300):
        at_s, chain = 30.0 * i, ["system", f"a{i}", f"b{i}"]
        told = Return.SOON if i % 2 else Return.COMPLETE
        reuse.begin(chain, [4, 4, 4], RequestFacts(next_turn=told), at_s)
        if i % 2:
            reuse.begin([*chain, f"c{i}"], [4, 4, 4, 4], RequestFacts(next_turn=Return.COMPLETE), at_s + 20.0)
    reuse.begin(["system", "x", "y"], [4, 4, 4], RequestFacts(next_turn=Return.SOON), 9e3)
    reuse.begin(["system", "u", "v"], [4, 4, 4], RequestFacts(next_turn=Return.COMPLETE), 9e3)

    assert reuse.worth("x", 9e3 + 1) > 10 * reuse.worth("u", 9e3 + 1)


def test_an_engines_word_that_comes_after_the_request_counts_as_if_it_had_come_with_it() -> None:
    reuse = Learner()
    for i in range(300):
        at_s, chain = 30.0 * i, ["system", f"a{i}", f"b{i}"]
        reuse.begin(chain, [4, 4, 4], RequestFacts(), at_s)
        reuse.reuse.expect(chain[-1], reuse.table.marks[chain[-1]], Return.SOON if i % 2 else Return.COMPLETE)
        if i % 2:
            reuse.begin([*chain, f"c{i}"], [4, 4, 4, 4], RequestFacts(next_turn=Return.COMPLETE), at_s + 20.0)
    for last, told in (("y", Return.SOON), ("v", Return.COMPLETE)):
        reuse.begin(["system", f"before {last}", last], [4, 4, 4], RequestFacts(), 9e3)
        reuse.reuse.expect(last, reuse.table.marks[last], told)

    assert reuse.worth("before y", 9e3 + 1) > 10 * reuse.worth("before v", 9e3 + 1)
    assert reuse.worth("y", 9e3 + 1) > 10 * reuse.worth("v", 9e3 + 1)


@given(st.dictionaries(st.integers(0, 60), st.floats(0, 1), min_size=1, max_size=Victims.SAMPLE))
def test_victims_are_leaves_and_the_least_of_a_small_cache_goes_first(worths: dict[int, float]) -> None:
    here = dict(worths)
    victims: Victims[int, float] = Victims(lambda count: list(here)[:count], here.__contains__)
    taken = []
    while here:
        leaf = victims.next(worths.__getitem__)
        assert leaf in here
        del here[leaf]
        victims.taken()
        taken.append(worths[leaf])

    assert taken == sorted(taken)


def test_blocks_that_are_always_used_together_are_taken_for_one_draw() -> None:
    draws, here = [], set(range(1000))

    def sample(count: int) -> list[int]:
        draws.append(count)
        return sorted(here)[:count]

    victims: Victims[int, float] = Victims(sample, here.__contains__)
    for at in range(60):
        here.discard(victims.next(float))
        victims.taken(is_same_run=at % 30 > 0)

    assert len(draws) <= 1 + 60 // Victims.SAMPLE + 2 // Victims.TAKEN, "and where all that was drawn is gone"


def test_a_point_that_two_records_waited_for_is_forgotten_once() -> None:
    reuse: ExpectedReuse[int] = ExpectedReuse(MarkTable(), 16)
    for i in range(64):
        for turn, last in enumerate((4, 5, 4)):  # The tail is superseded, and then used again after all.
            reuse.begin([0, 10 * i + 1, 10 * i + 2, 10 * i + last], [1, 4, 4, 1], RequestFacts(), 3.0 * i + turn)
        reuse.begin([0, 10 * i + 6], [1] * 2, RequestFacts(), 3.0 * i + 2)

    assert reuse.remembered() <= 4 * 16


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8, unique=True), max_size=30))
def test_without_sizes_each_point_is_one_block(chains: list[list[int]]) -> None:
    marked = []
    for has_sizes in (True, False):
        table: MarkTable[int] = MarkTable()
        reuse = ExpectedReuse(table, RECORDS)
        for i, chain in enumerate(chains):
            reuse.begin(chain, [1] * len(chain) if has_sizes else None, RequestFacts(), float(i))
        marked.append((table.marks, [reuse.times.features_of(n) for n in range(reuse.times.noted)]))
    assert marked[0] == marked[1]


@given(
    st.dictionaries(st.integers(0, 30), st.floats(0, 1), min_size=2, max_size=Victims.SAMPLE),
    st.data(),
)
def test_what_is_worth_more_than_it_was_or_is_offered_anew_is_judged_by_what_it_is_worth_now(
    worths: dict[int, float], data: st.DataObject
) -> None:
    victims: Victims[int, float] = Victims(lambda count: list(worths)[:count], worths.__contains__)
    victims.next(worths.__getitem__)

    risen = data.draw(st.sets(st.sampled_from(sorted(worths)), min_size=1))
    worths |= {leaf: worths[leaf] + 1 for leaf in risen}
    victims.renew()
    assert worths[victims.next(worths.__getitem__)] == min(worths.values())

    fallen = data.draw(st.sampled_from(sorted(worths)))
    worths[fallen] = -1.0
    victims.offer(fallen, -1.0)
    assert victims.next(worths.__getitem__) == fallen


@given(st.lists(st.integers(0, 500), min_size=1, max_size=400))
def test_samples_keep_a_bounded_number_of_leaves(drawn: list[int]) -> None:
    victims: Victims[int, float] = Victims(lambda count: drawn[:count], lambda _: True)
    for turn in range(40):
        victims.renew()
        victims.next(lambda leaf, turn=turn: (leaf * 7919 + turn) % 101)  # type: ignore[misc]

        assert len(victims._pool) <= Victims.KEPT
        assert len(victims._entries) <= len(victims._pool)
        drawn = drawn[1:] + drawn[:1]
