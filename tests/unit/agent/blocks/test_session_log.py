"""Laws of what is remembered of sessions."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.session_log import PER_SESSION_MAX, TOGETHER_S, Happened, SessionEvent, SessionLog

pytestmark = pytest.mark.unit

A, B = ("t", "a"), ("t", "b")


def load(at_s: float, *, dram: int = 0, lacking: int = 0, weighed: bytes = b"") -> SessionEvent:
    return SessionEvent(Happened.LOAD, at_s, at_s, blocks=Counter(dram=dram), lacking=lacking, weighed=weighed)


def state(at_s: float, name: str) -> SessionEvent:
    return SessionEvent(Happened.STATE, at_s, at_s, name)


def test_batches_of_one_prompt_are_one_event() -> None:
    log = SessionLog()
    log.note(A, load(0.0, dram=3))
    log.note(A, load(0.9, dram=2, lacking=1, weighed=b"x"))
    log.note(A, load(1.8, dram=1, weighed=b"y"))
    log.note(A, load(2.0 + TOGETHER_S, dram=7))

    first, second = log.of(A)
    assert (first.at_s, first.until_s, first.blocks["dram"], first.lacking, first.weighed) == (0.0, 1.8, 6, 1, b"x")
    assert second.blocks["dram"] == 7


def test_a_state_that_stays_is_noted_once() -> None:
    log = SessionLog()
    for at_s, name in ((0.0, "open"), (5.0, "open"), (6.0, "idle"), (7.0, "open")):
        log.note(A, state(at_s, name))

    assert [(e.at_s, e.state) for e in log.of(A)] == [(0.0, "open"), (6.0, "idle"), (7.0, "open")]


def test_a_state_that_is_said_again_after_a_load_is_not_noted_again() -> None:
    log = SessionLog()
    log.note(A, state(0.0, "decoding"))
    log.note(A, load(1.0))
    log.note(A, state(2.0, "decoding"))
    log.note(A, state(3.0, "idle"))

    assert [(e.what, e.state) for e in log.of(A)] == [("state", "decoding"), ("load", ""), ("state", "idle")]


def test_the_session_that_was_heard_of_least_lately_gives_way() -> None:
    log = SessionLog(events_max=4)
    for at_s in (0.0, 10.0):
        log.note(A, load(at_s))
        log.note(B, load(at_s))
    log.note(A, load(20.0))

    assert log.of(B) == []
    assert [e.at_s for e in log.of(A)] == [0.0, 10.0, 20.0]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["open", "idle", ""])), max_size=300), st.integers(1, 90))
def test_it_is_bounded_and_counts_what_it_has(events: list[tuple[int, str]], most: int) -> None:
    log = SessionLog(events_max=most)
    for i, (session, name) in enumerate(events):
        log.note(("t", str(session)), state(2.0 * i, name) if name else load(2.0 * i))
        held = [log.of(("t", str(s))) for s in range(6)]
        assert len(log) == sum(map(len, held)) <= most
        assert all(len(h) <= PER_SESSION_MAX for h in held)

    for s in range(6):
        log.forget(("t", str(s)))
    assert len(log) == 0
