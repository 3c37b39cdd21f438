"""Make a run of chained blocks available: what every store comes down to. Sans-I/O: copies memory, yields calls."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import KvStrataError, TierFullError
from kvstrata_client.prompt.batches import AHEAD, batch_blocks
from kvstrata_client.prompt.pipeline import along
from kvstrata_client.prompt.routes import Attachment
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Ahead, Call, Calls, Collect, Operation, Work
from kvstrata_client.verbs.results import Answer, Published, Reservation

Filler = Callable[[int, Reservation], bytes | None]
"""Fills the slot of a run's i-th block; returns its checksum, or None when there is nothing good to write."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that continue each other, in one scope."""

    target: Target
    at: Attachment
    keys: Sequence[BlockKey]
    parent: bytes
    """Digest that the first key continues."""
    session: str = ""

    @property
    def step(self) -> int:
        """Blocks of one batch."""
        return batch_blocks(self.target.layout.block_bytes)

    def reserving(self, start: int) -> Call[tuple[Reservation, ...]]:
        """Ask for slots of a batch that begins with the run's i-th block."""
        parent = self.keys[start - 1].digest if start else self.parent
        return calls.reserve(self.target, parent, self.keys[start : start + self.step], self.session)


@dataclass(slots=True)
class Tally:
    """Outcomes so far."""

    published: int = 0
    existed: int = 0
    error: KvStrataError | None = None
    """Why the last blocks that were refused were."""
    busy_s: float = 0.0
    """Estimated seconds until the path is free that the last answer waited for in vain."""


@dataclass(slots=True)
class _Helping:
    """Slots that one answer brought, and what was written into them."""

    start: int
    """The run's block that the first one is for."""
    slots: Sequence[Reservation]
    sums: list[bytes] = field(default_factory=list)
    """Checksums of the leading `open` ones that are filled."""

    @property
    def open(self) -> list[Reservation]:
        """Slots that there is something to write into."""
        return [s for s in self.slots if s.reservation]

    @property
    def is_whole(self) -> bool:
        """True when there was something good for all of them."""
        return len(self.sums) == len(self.open)

    @property
    def unfilled(self) -> list[Reservation]:
        """Those that hold nothing yet."""
        return self.open[len(self.sums) :]

    def fill(self, filler: Filler) -> None:
        """Fill slots in order until there is nothing good to write."""
        for i, slot in enumerate(self.slots, self.start):
            if not slot.reservation:
                continue
            found = filler(i, slot)
            if found is None:
                return
            self.sums.append(found)

    def publishing(self, target: Target) -> Calls:
        """Ask for what is filled to be published; nothing where nothing is."""
        filled = self.open[: len(self.sums)]
        return (calls.publish(target, filled, self.sums),) if filled else ()


_Turn = tuple[Ahead, _Helping | None, int | None]
"""What is under way: a helping that is being published, and the run's block from which on slots were asked for."""


@dataclass(slots=True)
class _Walk:
    """One walk along a run: what has slots, what is under way, and how far it got."""

    run: Run
    filler: Filler
    tally: Tally
    done: int
    """Leading blocks of the run that are there now."""
    reach: int = 0
    """The block behind the last one that has a slot."""
    asked: int = 0
    """The block up to which slots were asked for."""
    ready: deque[_Helping] = field(default_factory=deque)
    """Slots to be filled."""
    flying: deque[_Turn] = field(default_factory=deque)
    unused: list[Reservation] = field(default_factory=list)
    """Slots to be given back."""
    is_open: bool = True
    """False once no more slots are of use."""
    has_gap: bool = False
    """True once a block could not be taken: nobody could find what follows it."""

    def __post_init__(self) -> None:
        self.reach = self.asked = self.done

    def reserving(self) -> Calls:
        """Ask for slots of the next batch; nothing behind the end, and where no more, or not yet, are of use."""
        start = self.asked
        if not self.is_open or start >= len(self.run.keys) or (self.flying and self.run.at.is_crowded):
            return ()
        self.asked += self.run.step
        return (self.run.reserving(start),)

    def take(self, start: int, answer: Answer[Sequence[Reservation]]) -> None:
        """Note slots that came for the blocks from `start` on."""
        slots, wanted = answer.value, min(self.run.step, len(self.run.keys) - start)
        if len(slots) < wanted and start == self.done:  # With nothing of ours in the way.
            self.tally.error = answer.error or (TierFullError(answer.refusal) if answer.refusal else self.tally.error)
        if not self.is_open or start != self.reach:
            self.unused += [s for s in slots if s.reservation]
            return
        self.tally.busy_s = answer.busy_s
        if slots:
            self.ready.append(_Helping(start, slots))
            self.reach += len(slots)
        self.is_open = len(slots) == wanted

    def close(self, kept: int = 0) -> None:
        """Give back what has slots but for the first `kept` helpings."""
        self.is_open = False
        while len(self.ready) > kept:
            self.unused += self.ready.pop().open

    def settle(self, helping: _Helping, results: Sequence[Published]) -> None:
        """Note what became of a helping."""
        if self.has_gap:
            return
        taken = _count(helping.slots, results, self.tally)
        self.done += taken
        if taken < len(helping.slots):
            self.tally.error = TierFullError(
                f"{len(helping.slots) - taken} slots were taken back before they were published"
            )
            self.has_gap = True
            self.close()

    def send_next(self, helping: _Helping | None = None) -> Operation[None]:
        """Look for slots of the next batch, and have a helping published."""
        start, reserving = self.asked, self.reserving()
        ahead = Ahead((*(helping.publishing(self.run.target) if helping else ()), *reserving))
        if ahead.calls:
            yield ahead
        if ahead.calls or helping:
            self.flying.append((ahead, helping, start if reserving else None))

    def work_next(self) -> Operation[None]:
        """Fill the first helping that is ready."""
        helping = self.ready[0]
        yield Work(lambda: helping.fill(self.filler))
        if not helping.is_whole:
            self.close(kept=1)
            self.unused += helping.unfilled
        yield from self.send_next(helping)
        self.ready.popleft()  # Now it is the agent's, whatever becomes of it.

    def collect_next(self) -> Operation[None]:
        """Take in what became of a helping, and what slots came."""
        ahead, helping, start = self.flying.popleft()
        answers = (yield Collect(ahead)) if ahead.calls else ()
        if helping is not None:
            self.settle(helping, answers[0].value if helping.sums else ())
        if start is not None:
            self.take(start, answers[-1])

    def giving_back(self) -> Calls:
        """Abandon slots that are of no use any more."""
        unused, self.unused = self.unused, []
        return (calls.abandon(self.run.target, unused),) if unused else ()


def write(run: Run, filler: Filler, tally: Tally) -> Operation[int]:
    """Make a run's blocks available in order, until one cannot be taken; returns how many leading ones are then.

    Slots come in helpings. While one is filled, the agent publishes those before it and looks for slots of those
    behind it, so that nobody waits for a round trip. Where there is too little room for that, what is published by
    then may make some, or be nothing to wait for: the rest is walked along batch by batch.
    """
    done, batches = 0, AHEAD
    while done < len(run.keys):
        walk = _Walk(run, filler, tally, done)
        yield from along(walk, batches)
        is_stuck = walk.has_gap or walk.done == done
        done, batches = walk.done, 1
        if is_stuck:
            break
    return done


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
