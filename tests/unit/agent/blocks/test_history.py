"""Laws of the memory of decisions: bounded, apart by scope, and the latest of each block first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.history import PER_BLOCK_MAX, Decision, Event, History, What
from kvstrata_api.blocks import ScopeId

pytestmark = pytest.mark.unit

MOST = 12
notes = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=80)


def scope(name: str) -> ScopeId:
    return ScopeId(f"tenant/{name}/uid/v1")


def decision(at_s: float) -> Decision:
    return Decision(What.EVICTED, at_s, "room")


@given(notes)
def test_what_is_remembered_is_the_latest_of_a_block_in_its_scope(noted: list[tuple[str, int]]) -> None:
    history = History(10_000)
    for at, (name, number) in enumerate(noted):
        history.note(scope(name), Event(bytes([number]), decision(at)))

    for name in "abc":
        for number in range(6):
            times = [at for at, seen in enumerate(noted) if seen == (name, number)]
            found = [event.decision.at_s for event in history.of(scope(name), bytes([number]))]
            assert found == times[::-1][:PER_BLOCK_MAX]
            last = history.last(scope(name), bytes([number]))
            assert (last.decision.at_s if last else None) == (times[-1] if times else None)


@given(notes)
def test_memory_is_bounded_and_what_is_left_is_the_newest_of_each_scope(noted: list[tuple[str, int]]) -> None:
    history = History(MOST)
    for at, (name, number) in enumerate(noted):
        history.note(scope(name), Event(bytes([number]), decision(at)))
        assert len(history) <= MOST
        assert history.last(scope(name), bytes([number])) is not None

    for name in "abc":
        mine = [(at, number) for at, (seen, number) in enumerate(noted) if seen == name]
        found = {e.decision.at_s for n in range(6) for e in history.of(scope(name), bytes([n]))}
        oldest = min(found, default=len(noted))
        newer = {n for at, n in mine if at >= oldest}
        assert {n for n in range(6) if history.of(scope(name), bytes([n]))} == newer


def test_a_scope_that_floods_the_memory_leaves_others_their_share() -> None:
    history = History(MOST)
    for number in range(MOST // 3):
        history.note(scope("quiet"), Event(bytes([number]), decision(0.0)))
    for at in range(10 * MOST):
        history.note(scope("loud"), Event(at.to_bytes(2, "big"), decision(at)))

    assert all(history.of(scope("quiet"), bytes([n])) for n in range(MOST // 3))


def test_what_was_erased_is_not_remembered() -> None:
    history = History()
    for name in "ab":
        for number in (1, 2):
            history.note(scope(name), Event(bytes([number]), decision(1.0)))
    history.forget(scope("a"))
    history.forget_block(scope("b"), bytes([1]))

    assert [history.of(scope("a"), bytes([n])) for n in (1, 2)] == [[], []]
    assert (history.of(scope("b"), bytes([1])), len(history.of(scope("b"), bytes([2])))) == ([], 1)
