"""Store blocks: the operation behind `PrefixCache.store`. Sans-I/O: copies memory, yields calls.

Every store comes down to runs: blocks that continue each other in one scope, of which the leading ones are made
available until one cannot be taken, because nobody could find what follows it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import KvStrataError, TierFullError
from kvstrata_client.prompt import pipeline
from kvstrata_client.prompt.chain import Chain, Route, Segment, StorePlan, plan_store
from kvstrata_client.prompt.pipeline import BATCHES_IN_FLIGHT, Batch, run_pipeline
from kvstrata_client.prompt.routes import Attachment, Job, PromptLocations, goal_of, granted_shares, locate
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Ahead, Call, Calls, Collect, Operation, Post, Work
from kvstrata_client.verbs.copying import fill_each, refill
from kvstrata_client.verbs.results import Answer, Bytes2D, Lease, Published, Reservation, Stored

Filler = Callable[[Sequence[int], Sequence[Reservation]], Sequence[bytes]]
"""Fills slots of a run's blocks, by their numbers; returns checksums of the leading ones that there was something good
to write for."""


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
        return pipeline.batch_blocks(self.target.layout.block_bytes)

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
    """Estimated seconds until the path is free that the last answer was short of slots for."""


@dataclass(slots=True)
class _ReservedBatch:
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
        """Fill slots, up to the first one that there is nothing good to write into."""
        self.sums += filler([i for i, slot in enumerate(self.slots, self.start) if slot.reservation], self.open)

    def publishing(self, target: Target) -> Calls:
        """Ask for what is filled to be published; nothing where nothing is."""
        filled = self.open[: len(self.sums)]
        return (calls.publish(target, filled, self.sums),) if filled else ()


_InFlight = tuple[Ahead, _ReservedBatch | None, int | None]
"""Calls in flight: they publish a batch that was filled, and ask for slots from a block of the run on."""


@dataclass(slots=True)
class _StorePipeline:
    """One pass over a run: what has slots, what is in flight, and what is published."""

    run: Run
    filler: Filler
    tally: Tally
    done: int
    """Leading blocks of the run that are there now."""
    reserved_stop: int = 0
    """The block behind the last one that has a slot."""
    asked_stop: int = 0
    """The block up to which slots were asked for."""
    arrived: deque[_ReservedBatch] = field(default_factory=deque)
    """Slots to be filled."""
    in_flight: deque[_InFlight] = field(default_factory=deque)
    unused: list[Reservation] = field(default_factory=list)
    """Slots to be given back."""
    is_open: bool = True
    """False once no more slots are of use."""
    has_gap: bool = False
    """True once a block could not be taken: nobody could find what follows it."""

    def __post_init__(self) -> None:
        self.reserved_stop = self.asked_stop = self.done

    def reserving(self) -> Calls:
        """Ask for slots of the next batch; nothing behind the end, and where no more, or not yet, are of use."""
        start = self.asked_stop
        if not self.is_open or start >= len(self.run.keys) or (self.in_flight and self.run.at.is_crowded):
            return ()
        self.asked_stop += self.run.step
        return (self.run.reserving(start),)

    def add_slots(self, start: int, answer: Answer[Sequence[Reservation]]) -> None:
        """Add slots that came for the blocks from `start` on."""
        slots, wanted = answer.value, min(self.run.step, len(self.run.keys) - start)
        if len(slots) < wanted and start == self.done:  # With nothing of ours in the way.
            self.tally.error = answer.error or (TierFullError(answer.refusal) if answer.refusal else self.tally.error)
        if not self.is_open or start != self.reserved_stop:
            self.unused += [s for s in slots if s.reservation]
            return
        self.tally.busy_s = answer.busy_s
        if slots:
            self.arrived.append(_ReservedBatch(start, slots))
            self.reserved_stop += len(slots)
        self.is_open = len(slots) == wanted

    def close(self, kept: int = 0) -> None:
        """Ask for no more, and give back what has slots but for the first `kept` batches."""
        self.is_open = False
        while len(self.arrived) > kept:
            self.unused += self.arrived.pop().open

    def settle(self, batch: _ReservedBatch, results: Sequence[Published]) -> None:
        """Count what became of a batch."""
        if self.has_gap:
            return
        taken = _count(batch.slots, results, self.tally)
        self.done += taken
        if taken < len(batch.slots):
            self.tally.error = TierFullError(
                f"{len(batch.slots) - taken} slots were taken back before they were published"
            )
            self.has_gap = True
            self.close()

    def send_next(self, filled: _ReservedBatch | None = None) -> Operation[None]:
        """Ask for slots of the next batch, and publish one that was filled."""
        start, reserving = self.asked_stop, self.reserving()
        ahead = Ahead((*(filled.publishing(self.run.target) if filled else ()), *reserving))
        if ahead.calls:
            yield ahead
        if ahead.calls or filled:
            self.in_flight.append((ahead, filled, start if reserving else None))

    def copy_next(self) -> Operation[None]:
        """Fill the first batch that arrived."""
        batch = self.arrived[0]
        yield Work(lambda: batch.fill(self.filler))
        if not batch.is_whole:
            self.close(kept=1)
            self.unused += batch.unfilled
        yield from self.send_next(batch)
        self.arrived.popleft()  # Now it is the agent's, whatever becomes of it.

    def collect_next(self) -> Operation[None]:
        """Settle the batch that was published, and add the slots that came."""
        ahead, published, start = self.in_flight.popleft()
        answers = (yield Collect(ahead)) if ahead.calls else ()
        if published is not None:
            self.settle(published, answers[0].value if published.sums else ())
        if start is not None:
            self.add_slots(start, answers[-1])

    def giving_back(self) -> Calls:
        """Abandon slots that are of no use any more."""
        unused, self.unused = self.unused, []
        return (calls.abandon(self.run.target, unused),) if unused else ()


def write(run: Run, filler: Filler, tally: Tally) -> Operation[int]:
    """Make a run's blocks available in order, until one cannot be taken; returns how many leading ones are then.

    Slots come in batches. While one is filled, the agent publishes those before it and reserves those behind it, so
    that nobody waits for a round trip. Where there is too little room for that, what is published by then may make
    some, or be nothing to wait for: the rest is stored one batch at a time.
    """
    done, count = 0, BATCHES_IN_FLIGHT
    while done < len(run.keys):
        storing = _StorePipeline(run, filler, tally, done)
        yield from run_pipeline(storing, count)
        is_stuck = storing.has_gap or storing.done == done
        done, count = storing.done, 1
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


@dataclass(slots=True)
class _Outcome:
    """What became of it so far."""

    wanted: int = 0
    copied: int = 0
    tally: Tally = field(default_factory=Tally)


def store(job: Job, blocks: Bytes2D, first: int, *, is_shared: bool = False) -> Operation[Stored]:
    """Make a prompt's blocks available: in shares that the tenant grants, and the rest in the write scope.

    `blocks` holds the bytes of those from `first` on. With `is_shared` nothing goes to the tenant's own scope.
    """
    found = yield from locate(job, is_use=False)
    if found is None:
        return Stored()
    outcome = _Outcome()
    for share in granted_shares(found):
        stored = yield from _store_in(job, found, share, (blocks, first), outcome)
        found = found.with_share(stored)
    goal = goal_of(job, found)
    reached = found.route.blocks
    if goal is not None and not (
        is_shared and found.grants.own is not None and goal.chain.scope == found.grants.own.id
    ):
        reached = max(reached, (yield from _store_in(job, found, goal, (blocks, first), outcome)).stop)
    tally = outcome.tally
    refused = outcome.wanted - tally.published - tally.existed
    error = tally.error if refused else None
    return Stored(tally.published, tally.existed, outcome.copied, refused, error, tally.busy_s, reached)


def _store_in(
    job: Job, found: PromptLocations, goal: Segment, held: tuple[Bytes2D, int], outcome: _Outcome
) -> Operation[Segment]:
    """Store in one chain what it lacks; returns how far it goes then. `held`: bytes, and which block is the first."""
    blocks, first = held
    plan = plan_store(job.prompt, first, first + len(blocks), found.route, goal, may_gap=job.may_gap)
    if plan.target is None:
        return goal
    outcome.wanted += len(plan.copy) + len(plan.write)
    rows = blocks[plan.write.start - first :] if plan.write else blocks[:0]
    stop = yield from _carry_out(job, plan, plan.target, found.route, rows, outcome)
    return Segment(goal.chain, stop)


def _carry_out(
    job: Job, plan: StorePlan, goal: Chain, route: Route, rows: Bytes2D, outcome: _Outcome
) -> Operation[int]:
    """Copy, then write `rows`, until a block cannot be taken: what follows it could not be found.

    Returns the block up to which the goal goes now.
    """
    step = pipeline.large_batch_blocks(job.target.layout.block_bytes)
    for source in pipeline.batches_of(route, plan.copy, step):
        stop = yield from _copy_batch(job, source, goal, outcome)
        if stop < source.stop:
            return stop

    def fill(indices: Sequence[int], slots: Sequence[Reservation]) -> list[bytes]:
        return fill_each(slots, [(memoryview(rows[i]),) for i in indices])

    return (yield from _write(job, goal, plan.write, fill, outcome))


def _write(job: Job, goal: Chain, blocks: range, filler: Filler, outcome: _Outcome) -> Operation[int]:
    """Write blocks of a chain; returns the one up to which they are there now."""
    run = Run(job.target, job.at, goal.part(blocks.start, blocks.stop), goal.parent_of(blocks.start), job.session)
    return blocks.start + (yield from write(run, filler, outcome.tally))


def _copy_batch(job: Job, source: Batch, goal: Chain, outcome: _Outcome) -> Operation[int]:
    """Copy blocks of the route into the goal's scope; returns the one up to which they are there now."""
    at = source.start
    while at < source.stop:
        stop = yield from _copy_leased(job, Batch(source.chain, at, source.stop), goal, outcome)
        if stop == at:
            break
        at = stop
    return at


def _copy_leased(job: Job, source: Batch, goal: Chain, outcome: _Outcome) -> Operation[int]:
    """Lease as much of a batch as can be had and copy it; returns the block up to which that is there now."""
    answers = yield (calls.acquire(job.target, source.keys, job.session, job.lease_s, job.deadline_s),)
    leases: tuple[Lease, ...] = answers[0].value
    if not leases:
        return source.start
    published = outcome.tally.published
    leased = range(source.start, source.start + len(leases))
    try:
        return (yield from _write(job, goal, leased, lambda *wanted: _refill(leases, *wanted), outcome))
    finally:
        outcome.copied += outcome.tally.published - published
        yield Post((calls.release(job.target, leases),))


def _refill(leases: Sequence[Lease], indices: Sequence[int], slots: Sequence[Reservation]) -> list[bytes]:
    """Fill slots with leased blocks, up to the first copy that is wrong."""
    sums: list[bytes] = []
    for i, slot in zip(indices, slots, strict=True):
        made = refill(leases[i], slot)
        if made is None:
            break
        sums.append(made)
    return sums
