"""What routers are told of pages: laws of the book of events, without vLLM."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_client.connectors.vllm import events
from kvstrata_client.connectors.vllm.events import EventBook, Place, Removed, Sizes, Stored, medium_of

pytestmark = pytest.mark.unit

PAGE, BLOCKS = 32, 2
HERE, DISK, AWAY = Place("CPU", "LOCAL"), Place("STORAGE", "LOCAL"), Place("CPU", "REMOTE")


@dataclass
class Request:
    """What the book reads of vLLM's; each hash names the page and the request."""

    request_id: str = "a"
    pages: int = 8
    hash_tokens: int = PAGE

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.pages * PAGE))

    @property
    def block_hashes(self) -> list[bytes]:
        return [f"{end}".encode() for end in range(self.hash_tokens, self.pages * PAGE + 1, self.hash_tokens)]


@dataclass
class Bench:
    savers: int = 1
    hash_tokens: int = PAGE
    now_s: float = 0.0
    numbers: int = 0
    book: EventBook = field(init=False)

    def __post_init__(self) -> None:
        sizes = Sizes(PAGE, self.hash_tokens, BLOCKS, self.savers, 2.0)
        media = {"dram": "CPU", "nvme": "STORAGE"}
        self.book = EventBook(sizes, lambda _r, first, stop: (first, stop), lambda: self.now_s, media)
        self.book.begin("a")

    def begin(self, first: int, stop: int, request: Request | None = None) -> int:
        self.numbers += 1
        self.book.saving(self.numbers, request or Request(), first, stop)
        return self.numbers

    def save(self, first: int, stop: int, *, whole: tuple[bool, ...] = (True,), request: Request | None = None) -> None:
        number = self.begin(first, stop, request)
        for is_whole in whole:
            self.book.saved({number: (1, is_whole)})


def pages(*numbers: int) -> tuple[bytes, ...]:
    return tuple(f"{(n + 1) * PAGE}".encode() for n in numbers)


def test_a_page_is_stored_once_all_its_blocks_are_with_parent_tokens_and_what_the_engine_says() -> None:
    bench = Bench()
    bench.save(0, 3)
    (first,) = bench.book.take()
    assert first == Stored(pages(0), None, tuple(range(PAGE)), HERE, (0, 1))
    bench.save(3, 8)
    (second,) = bench.book.take()
    assert second == Stored(pages(1, 2, 3), pages(0)[0], tuple(range(PAGE, 4 * PAGE)), HERE, (1, 4))
    bench.save(0, 8)
    assert bench.book.take() == [], "known pages are not told of again"


def test_every_worker_that_saves_has_to_have_stored_all_of_it() -> None:
    bench = Bench(savers=2)
    number = bench.begin(0, 4)
    bench.book.saved({number: (1, True)})
    assert (bench.book.take(), bench.book.is_waiting) == ([], True)
    bench.book.saved({number: (1, True)})
    assert (len(bench.book.take()), bench.book.is_waiting) == (1, False)
    bench.save(4, 8, whole=(True, False))
    assert bench.book.take() == []


def test_behind_a_gap_nothing_is_stored_and_a_save_that_never_ends_is_not_waited_for() -> None:
    bench = Bench()
    bench.save(0, 2)
    bench.save(2, 4, whole=(False,))
    bench.save(4, 6)
    assert [e.hashes for e in bench.book.take()] == [pages(0)]
    bench.begin(6, 8)
    assert bench.book.is_waiting
    bench.now_s += 2.0 * events.PENDING_S_FACTOR
    assert not bench.book.is_waiting


def test_what_a_lookup_finds_is_stored_where_it_lies_and_goes_on_from_there() -> None:
    bench = Bench()
    bench.book.found(Request(), ("dram",) * 3 + ("nvme",) + ("remote",) * 3, 16, is_answered=True)
    found = bench.book.take()
    assert [(e.hashes, e.place) for e in found] == [(pages(0), HERE), (pages(1), DISK), (pages(2), AWAY)]
    bench.save(7, 10)
    assert [e.hashes for e in bench.book.take()] == [pages(3, 4)]
    bench.book.found(Request(), ("dram",) * 4 + ("remote",) * 2, 6, is_answered=True)
    moved = bench.book.take()
    assert [(type(e), e.hashes, e.place) for e in moved] == [(Removed, pages(1), DISK), (Stored, pages(1), HERE)]


def test_pages_that_were_asked_for_and_not_found_are_removed_unless_nobody_answered() -> None:
    bench = Bench()
    bench.save(0, 16)
    bench.book.take()
    bench.book.found(Request(), ("dram",) * 4, 12, is_answered=False)
    assert bench.book.take() == []
    bench.book.found(Request(), ("dram",) * 5, 12, is_answered=True)
    assert bench.book.take() == [Removed(pages(2, 3, 4, 5), HERE)], "what was not asked for is not known to be gone"
    bench.book.lost(Request(), 3)
    assert bench.book.take() == [Removed(pages(1), HERE)]
    bench.book.lost(Request(), 3)
    assert bench.book.take() == []


def test_a_request_that_has_ended_is_told_of_and_a_strange_report_is_passed_over() -> None:
    bench = Bench()
    number = bench.begin(0, 4)
    bench.book.finish("a")
    bench.book.saved({number: (1, True), 77: (1, True)})
    assert [e.hashes for e in bench.book.take()] == [pages(0, 1)]
    bench.book.found(Request("unknown"), ("dram",) * 4, 4, is_answered=True)
    assert bench.book.take() == []


def test_hashes_finer_than_a_page_name_it_by_the_last_one() -> None:
    bench = Bench(hash_tokens=8)
    bench.save(0, 4, request=Request(hash_tokens=8))
    assert [e.hashes for e in bench.book.take()] == [pages(0, 1)]


def test_pages_beyond_the_bound_are_removed_the_longest_untouched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAGES_MAX", 4)
    bench = Bench()
    bench.save(0, 8)
    bench.book.found(Request(), ("dram",) * 2, 2, is_answered=True)
    bench.book.take()
    bench.save(8, 12)
    stored, removed = bench.book.take()
    assert (stored.hashes, removed) == (pages(4, 5), Removed(pages(1, 2), HERE))


def test_all_pages_are_removed_at_a_reset_and_stored_again_after_it() -> None:
    bench = Bench()
    bench.save(0, 4)
    bench.book.saving(99, Request(), 4, 8)
    bench.book.take()
    bench.book.reset()
    bench.book.saved({99: (1, True)})
    assert bench.book.take() == [Removed(pages(0, 1), HERE)]
    assert not bench.book.is_waiting
    bench.book.begin("a")
    bench.save(0, 4)
    assert [event.hashes for event in bench.book.take()] == [pages(0, 1)]


acts = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 15), st.integers(1, 8), st.booleans()),
        st.tuples(st.just("find"), st.integers(0, 16), st.integers(0, 16), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 15), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@given(acts)
def test_who_follows_the_events_knows_each_page_at_one_place_and_removes_what_he_knows(acts: list[Any]) -> None:
    bench = Bench()
    known: dict[bytes, Place] = {}
    for what, a, b, flag in acts:
        if what == "save":
            bench.save(a, min(16, a + b), whole=(flag,))
        elif what == "find":
            bench.book.found(Request(), ("dram", "nvme")[b % 2 : b % 2 + 1] * min(a, b), b, is_answered=flag)
        else:
            bench.book.lost(Request(), a)
        for event in bench.book.take():
            for page in event.hashes:
                if isinstance(event, Removed):
                    assert known.pop(page) == event.place
                else:
                    assert known.get(page, event.place) == event.place
                    known[page] = event.place
        if what == "find" and flag:
            there = min(a, b) // BLOCKS
            assert not set(pages(*range(there, b // BLOCKS))) & set(known)
            assert set(pages(*range(there))) <= set(known)


def test_memory_is_told_from_the_rest() -> None:
    assert [medium_of(t) for t in ("HBM", "HostDRAM", "CXL")] == ["CPU"] * 3
    assert [medium_of(t) for t in ("NVMe", "RemoteFlash", "Object", "")] == ["STORAGE"] * 4
