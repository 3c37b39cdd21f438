"""Laws of the LMCache adapter's locks, and of its board and workers, without LMCache and without sockets."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_client.connectors import lmcache_board, object_workers
from kvstrata_client.connectors import lmcache_board as lmcache_locks
from kvstrata_client.connectors.lmcache_board import LOCK_S, Board, Locks
from kvstrata_client.connectors.lmcache_names import Namer
from kvstrata_client.connectors.object_transfers import Keys
from kvstrata_client.connectors.object_workers import Task, Workers
from support.client.model import OWN
from support.client.opaque_objects import BLOCK, PRINT, named

pytestmark = pytest.mark.unit


# Locks


def held(number: int) -> Keys:
    return Namer(PRINT).keys(OWN.secret, named(number), BLOCK)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40))
def test_the_last_unlock_and_no_other_takes_the_pin_back(steps: list[tuple[bool, int]]) -> None:
    locks, counts = Locks(lambda: 0.0), dict.fromkeys(range(4), 0)
    for is_lock, number in steps:
        if is_lock:
            locks.take([named(number)], [held(number)])
            counts[number] += 1
        else:
            freed = locks.give([named(number)])
            assert freed == ([held(number)] if counts[number] == 1 else [])
            counts[number] = max(0, counts[number] - 1)
    assert len(locks) == sum(c > 0 for c in counts.values())


def test_locks_that_nobody_takes_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_locks, "LOCKS_MAX", 2)
    now = [0.0]
    locks = Locks(lambda: now[0])
    locks.take([named(0), named(1), named(2)], [held(0), held(1), held(2)])
    assert len(locks) == 2

    now[0] = LOCK_S
    locks.take([named(3)], [held(3)])
    assert locks.give([named(0)]) == []
    assert locks.give([named(3)]) == [held(3)]


# Board and workers


def test_every_result_is_announced_once_and_fetched_once() -> None:
    announced: list[int] = []
    board: Board[str] = Board(lambda: announced.append(1))
    board.put(1, "a")
    board.put(2, "b")

    assert (board.take(1), board.take(1), board.take_all(), board.take_all()) == ("a", None, {2: "b"}, {})
    board.close()
    board.put(3, "c")
    assert len(announced) == 2


def test_results_that_nobody_fetches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_board, "RESULTS_MAX", 2)
    board: Board[str] = Board(lambda: None)
    for task in range(5):
        board.put(task, str(task))

    assert board.take_all() == {3: "3", 4: "4"}


def test_submitting_never_waits_and_every_task_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_workers, "TASKS_MAX", 2)
    free, begun = threading.Event(), threading.Event()
    ends: list[str] = []
    workers = Workers("t", 1)

    def first() -> None:
        begun.set()
        free.wait()
        ends.append("ran")

    workers.submit(Task(first, lambda: ends.append("gave up")))
    begun.wait()
    for _ in range(4):  # Two find a place in the queue.
        workers.submit(Task(lambda: ends.append("ran"), lambda: ends.append("gave up")))
    assert ends == ["gave up"] * 2

    free.set()
    workers.close()
    workers.close()
    workers.submit(Task(lambda: ends.append("ran"), lambda: ends.append("gave up")))

    assert len(ends) == 6
    assert ends[-1] == "gave up"


@pytest.mark.filterwarnings("ignore")
def test_a_task_that_breaks_is_given_up_and_the_next_one_runs() -> None:
    ends: list[str] = []
    done = threading.Event()
    workers = Workers("t", 1)
    workers.submit(Task(lambda: ends.append(str(1 // 0)), lambda: ends.append("gave up")))
    workers.submit(Task(done.set, lambda: None))

    assert done.wait(5)
    assert ends == ["gave up"]
    assert workers.is_alive
    workers.close()
    assert not workers.is_alive
