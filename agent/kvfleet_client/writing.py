"""Make a run of chained blocks available: what every store comes down to. Sans-I/O: copies memory, yields calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfleet_api.blocks import BlockKey
from kvfleet_api.errors import KvFleetError
from kvfleet_client import calls
from kvfleet_client.batches import batch_blocks
from kvfleet_client.calls import Calls, Operation, Post, Work
from kvfleet_client.results import Answer, Published, Reservation
from kvfleet_client.target import Target

Filler = Callable[[int, Reservation], bytes | None]
"""Fills the slot of a run's i-th block; returns its checksum, or None when there is nothing good to write."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that continue each other, in one scope."""

    target: Target
    keys: Sequence[BlockKey]
    parent: bytes
    """Digest that the first key continues."""
    session: str = ""

    def reserving(self, start: int) -> Calls:
        """Ask for slots of a batch that begins with the run's i-th block; nothing behind the end."""
        batch = self.keys[start : start + batch_blocks(self.target.layout.block_bytes)]
        if not batch:
            return ()
        parent = self.keys[start - 1].digest if start else self.parent
        return (calls.reserve(self.target, parent, batch, self.session),)


@dataclass(slots=True)
class Tally:
    """Outcomes so far."""

    published: int = 0
    existed: int = 0
    error: KvFleetError | None = None
    """What the agent said when it had no slots."""


@dataclass(slots=True)
class _Helping:
    """Slots that one answer brought, and what was written into them."""

    start: int
    """The run's block that the first one is for."""
    slots: Sequence[Reservation]
    sums: list[bytes]
    """Checksums of the leading `open` ones that are filled."""

    @property
    def open(self) -> list[Reservation]:
        """Slots that there is something to write into."""
        return [s for s in self.slots if s.reservation]

    def fill(self, filler: Filler) -> None:
        """Fill slots in order until there is nothing good to write."""
        for i, slot in enumerate(self.slots, self.start):
            if not slot.reservation:
                continue
            found = filler(i, slot)
            if found is None:
                return
            self.sums.append(found)


def write(run: Run, filler: Filler, tally: Tally) -> Operation[int]:
    """Make a run's blocks available in order, until one cannot be taken; returns how many leading ones are then.

    Slots come in helpings. Those of the next are asked for together with the publication of the last: a round trip
    for each, and no more than two batches reserved at a time.
    """
    done = 0
    slots = yield from _reserve(run, 0, tally)
    while slots:
        helping = _Helping(done, slots, [])
        taken, slots = yield from _commit(run, helping, filler, tally)
        done += taken
        if taken == len(helping.slots) and not slots and tally.error is None:
            slots = yield from _reserve(
                run, done, tally
            )  # What is published now may make room, or be nothing to wait for.
    return done


def _reserve(run: Run, start: int, tally: Tally) -> Operation[Sequence[Reservation]]:
    asked = run.reserving(start)
    answers = (yield asked) if asked else ()
    return _granted(answers, tally)


def _granted(answers: Sequence[Answer[Sequence[Reservation]]], tally: Tally) -> Sequence[Reservation]:
    if not answers:
        return ()
    answer = answers[0]
    if not answer.value:
        tally.error = answer.error or tally.error
    return answer.value


def _commit(run: Run, helping: _Helping, filler: Filler, tally: Tally) -> Operation[tuple[int, Sequence[Reservation]]]:
    """Fill and publish; returns how many leading blocks are there now, and the slots of the next helping."""
    results: Sequence[Published] = ()
    following: Sequence[Reservation] = ()
    fillable = helping.open
    try:
        yield Work(lambda: helping.fill(filler))
        filled = fillable[: len(helping.sums)]
        publishing: Calls = (calls.publish(run.target, filled, helping.sums),) if filled else ()
        is_whole = len(filled) == len(fillable)
        asked = (*publishing, *(run.reserving(helping.start + len(helping.slots)) if is_whole else ()))
        answers = (yield asked) if asked else ()
        results = answers[0].value if publishing else ()
        following = _granted(answers[len(publishing) :], tally)
    finally:
        # What was sent for publishing is the agent's, whatever became of it; the rest is given back.
        unfilled = fillable[len(helping.sums) if results else 0 :]
        if unfilled:
            yield Post((calls.abandon(run.target, unfilled),))
    taken = _count(helping.slots, results, tally)
    if taken < len(helping.slots) and following:  # They are behind a gap: nobody could find them.
        yield Post((calls.abandon(run.target, following),))
        following = ()
    return taken, following


def _count(slots: Sequence[Reservation], results: Sequence[Published], tally: Tally) -> int:
    """Count outcomes up to the first refusal; returns how many leading blocks are there now."""
    outcomes = iter(results)
    for done, slot in enumerate(slots):
        outcome = next(outcomes, Published.REFUSED) if slot.reservation else Published.EXISTED
        if outcome is Published.REFUSED:
            return done
        tally.published += outcome is Published.PUBLISHED
        tally.existed += outcome is Published.EXISTED
    return len(slots)
