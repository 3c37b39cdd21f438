"""Laws of the accounts of loads: what the fleet held, what was captured, what readers were given."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.serve.load_counts import STALE_S, UNKNOWN, LoadBook
from kvstrata_api.wire import KEYS_MAX

pytestmark = pytest.mark.unit

PLACES = ("dram", "nvme", "remote")


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[bytes], list[str], int]:
    """Some keys of one chain, in order; where the leading ones are, and how many of these were captured."""
    start, count = draw(st.integers(0, 12)), draw(st.integers(1, 8))
    held = draw(st.lists(st.sampled_from(PLACES), max_size=count))
    return keys(*range(start, start + count)), held, draw(st.integers(0, len(held)))


@given(st.lists(requests(), max_size=6), st.integers(0, 20), st.integers(0, 20))
def test_held_are_captured_and_captured_are_delivered(
    asked: list[tuple[list[bytes], list[str], int]], wanted: int, lacking: int
) -> None:
    book, loaded = LoadBook(), max(0, wanted - lacking)
    for digests, held, captured in asked:
        book.note(digests, held, captured, 1.0)

    counts = book.end(wanted, loaded)

    assert counts.delivered <= counts.captured <= counts.held
    assert counts.delivered.total() == loaded
    assert counts.held.total() <= max(wanted, loaded)


@given(st.lists(st.sampled_from(PLACES), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 40))
def test_a_load_in_batches_is_one_whole(places: list[str], step: int, lost: int) -> None:
    book, loaded = LoadBook(), max(0, len(places) - lost)
    for i in range(0, len(places), step):
        part = places[i : i + step]
        book.note(keys(*range(i, i + len(part))), part, len(part), float(i))
    book.released(99.0)

    counts = book.end(len(places), loaded)

    assert counts.held == counts.captured == Counter(places)
    assert counts.delivered == Counter(places[:loaded])
    assert counts.took_s == 99.0


def test_what_was_asked_for_twice_counts_once_and_where_it_was_first() -> None:
    book = LoadBook()
    book.note(keys(1, 2, 3), ["dram", "nvme", "nvme"], 3, 1.0)
    book.note(keys(2, 3), ["dram", "dram"], 2, 2.0)

    assert book.end(3, 3).delivered == {"dram": 1, "nvme": 2}


def test_a_request_that_is_answered_later_keeps_its_place_in_the_chain() -> None:
    book = LoadBook()
    book.begin(keys(0, 1, 2, 3), 1.0)
    book.note(keys(4, 5, 6, 7), ["dram"] * 4, 4, 1.1)
    book.note(keys(0, 1, 2, 3), ["nvme"] * 4, 4, 1.5)

    assert book.end(8, 6).delivered == {"nvme": 4, "dram": 2}


def test_loads_that_overlap_take_the_time_in_which_any_of_them_went_on() -> None:
    book = LoadBook()
    book.note(keys(0), ["dram"], 1, 1.0)
    book.note(keys(1), ["dram"], 1, 2.0)
    book.released(3.0)
    first = book.end(1, 1)
    book.released(5.0)
    second = book.end(1, 1)

    assert (first.took_s, second.took_s) == (2.0, 2.0)


def test_what_nobody_was_asked_for_is_held_alone() -> None:
    book = LoadBook()
    book.note(keys(1, 2, 3, 4), ["dram", "remote", "remote"], 1, 1.0)

    counts = book.end(4, 1)

    assert (counts.held, counts.captured, counts.delivered) == ({"dram": 1, "remote": 2}, {"dram": 1}, {"dram": 1})


def test_what_lies_behind_a_gap_is_no_prefix() -> None:
    book = LoadBook()
    book.note(keys(1, 2), ["dram"], 1, 1.0)
    book.note(keys(3, 4), ["dram", "dram"], 2, 1.0)

    assert book.end(4, 1).held == {"dram": 1}


def test_a_gap_that_closes_is_none() -> None:
    book = LoadBook()
    book.note(keys(1, 2), ["dram"], 1, 1.0)
    book.note(keys(2, 3), ["remote", "dram"], 2, 1.0)

    assert book.end(3, 3).delivered == {"dram": 2, "remote": 1}


def test_blocks_that_nobody_leased_are_somewhere() -> None:
    counts = LoadBook().end(5, 4)

    assert counts.held == counts.captured == counts.delivered == {UNKNOWN: 4}
    assert counts.took_s == 0.0


def test_a_load_that_was_given_up_is_forgotten() -> None:
    book = LoadBook()
    book.note(keys(1, 2), ["nvme", "nvme"], 2, 1.0)
    book.note(keys(7), ["dram"], 1, 2.0 + STALE_S)
    book.released(3.0 + STALE_S)

    counts = book.end(1, 1)

    assert (counts.held, counts.took_s) == ({"dram": 1}, 1.0)


def test_whoever_never_counts_fills_no_memory() -> None:
    book, batch = LoadBook(), 1024
    for i in range(0, 3 * KEYS_MAX, batch):
        book.note(keys(*range(i, i + batch)), ["dram"] * batch, batch, 1.0)

    assert book.end(10 * KEYS_MAX, 0).held.total() <= KEYS_MAX + batch
