"""Laws of a batch on its way: whatever ends first, no buffer is used twice at once, and quiet means quiet."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.fleet.peers.nixl import Landed
from kvstrata_agent.fleet.peers.transfer import LANES, MOVING, Pipeline, Steps
from kvstrata_api.errors import BackendFailedError

pytestmark = pytest.mark.unit

Step = tuple[str, int]
steps = st.lists(st.tuples(st.sampled_from(["land", "land", "land", "fail", "verify", "verify", "verify", "stop"]),
                           st.integers(0, LANES)), max_size=60)  # fmt: skip


class Later(Executor):
    """Threads that begin when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **_: Any) -> "Future[Any]":
        """Note a call."""
        self.waiting.append(lambda: call(*args))
        return Future()


class Ends:
    """Both ends of a pipeline: reads and verifications that end in the order of the test."""

    def __init__(self, pieces: int, buffers: int, spoiled: int = -1) -> None:
        self.flights: dict[int, tuple[int, Landed]] = {}
        self.spoiled = spoiled
        self.threads = Later()
        self.out = set(range(buffers))
        self.begun: list[int] = []
        self.taken_over: list[int] = []
        done = Steps(self._read, self._take_over, self._give_back)
        self.pipeline = Pipeline(done, range(pieces), range(buffers), self.threads)
        self.pipeline.start()
        self.check()

    def _read(self, piece: int, buffer: int) -> Landed:
        assert buffer in self.out, "given back before"
        assert buffer not in self.flights, "NIXL may still write to it"
        self.begun.append(piece)
        landed: Landed = Future()
        self.flights[buffer] = piece, landed
        return landed

    def _take_over(self, piece: int, buffer: int) -> int:
        assert not self.pipeline.quiet.done(), "nobody waits any more"
        assert buffer in self.out
        assert buffer not in self.flights, "another piece lands in it"
        if piece == self.spoiled:
            raise ValueError("not foreseen")
        self.taken_over.append(piece)
        return piece

    def _give_back(self, buffer: int) -> None:
        assert buffer not in self.flights, "NIXL may still write to it"
        self.out.remove(buffer)

    def do(self, step: Step) -> None:
        """One thing happens, where it can."""
        what, which = step
        if what == "stop":
            self.pipeline.stop()
        elif what == "verify" and self.threads.waiting:
            self.threads.waiting.pop(which % len(self.threads.waiting))()
        elif what in {"land", "fail"} and self.flights:
            _, landed = self.flights.pop(sorted(self.flights)[which % len(self.flights)])
            if what == "land":
                landed.set_result(None)
            else:
                landed.set_exception(BackendFailedError("nixl transfer: ERR"))
        self.check()

    def check(self) -> None:
        """What holds at every time."""
        assert len(self.flights) <= MOVING
        if self.pipeline.quiet.done():
            assert not self.threads.waiting
            assert self.out == set(self.flights), "what NIXL does not hold is given back"

    def finish(self) -> None:
        """Let everything end that has begun."""
        while self.flights or self.threads.waiting:
            self.do(("land", 0))
            self.do(("verify", 0))


@given(steps, st.integers(0, 9), st.integers(1, LANES))
def test_every_order_of_events_ends_with_all_buffers_back(order: list[Step], pieces: int, buffers: int) -> None:
    ends = Ends(pieces, buffers)
    for step in order:
        ends.do(step)
    ends.finish()

    assert ends.pipeline.quiet.done()
    assert ends.out == set()
    assert sorted(ends.pipeline.results) == sorted(ends.taken_over)
    assert ends.begun == list(range(len(ends.begun)))
    if not any(what in {"stop", "fail"} for what, _ in order):
        assert sorted(ends.taken_over) == list(range(pieces))
    assert not ends.pipeline.is_broken or any(what == "fail" for what, _ in order)


@given(steps, st.integers(1, 9), st.integers(0, 8))
def test_a_verification_that_fails_ends_the_batch_and_is_told(order: list[Step], pieces: int, spoiled: int) -> None:
    ends = Ends(pieces, LANES, spoiled)
    for step in order:
        ends.do(step)
    ends.finish()

    assert ends.pipeline.quiet.done()
    assert ends.out == set()
    assert spoiled not in ends.pipeline.results
    if spoiled < pieces and not any(what in {"stop", "fail"} for what, _ in order):
        assert isinstance(ends.pipeline.error, ValueError)


def test_the_wire_has_the_next_piece_while_others_are_verified() -> None:
    ends = Ends(3 * LANES, LANES)
    for _ in range(3 * LANES):
        ends.do(("land", 0))

    assert len(ends.begun) == LANES
    assert len(ends.threads.waiting) == LANES
    ends.do(("verify", 0))
    assert len(ends.begun) == LANES + 1


def test_one_that_is_stopped_waits_for_what_is_verified_and_not_for_the_wire() -> None:
    ends = Ends(2 * LANES, LANES)
    ends.do(("land", 0))
    ends.do(("stop", 0))
    assert not ends.pipeline.quiet.done()

    ends.do(("verify", 0))

    assert ends.pipeline.quiet.done()
    assert len(ends.out) == len(ends.flights) == MOVING
