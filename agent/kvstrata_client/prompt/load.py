"""Load a prompt's leading blocks: the operation behind `PrefixCache.load`. Sans-I/O: copies memory, yields calls."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata_client.prompt import batches
from kvstrata_client.prompt.batches import AHEAD, Batch
from kvstrata_client.prompt.chain import Route
from kvstrata_client.prompt.pipeline import along
from kvstrata_client.prompt.routes import Found, Job, locate, locate_for_load
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Ahead, Calls, Collect, Operation, Post, Work
from kvstrata_client.verbs.copying import copy_verified
from kvstrata_client.verbs.results import Answer, Bytes2D, Lease, Loaded


@dataclass(slots=True)
class _Progress:
    """What has been copied so far, and proven."""

    sources: list[str] = field(default_factory=list)
    corrupt_blocks: int = 0
    lost_blocks: int = 0
    busy_s: float = 0.0
    """Of the last answer that leases could be used of."""


@dataclass(slots=True)
class _Helping:
    """Blocks that one answer leased, and what of them was copied."""

    start: int
    """Block of the prompt that the first one is."""
    leases: Sequence[Lease]
    sound: list[str] = field(default_factory=list)
    """Where those were whose copies are right."""
    suspects: list[Lease] = field(default_factory=list)

    def copy(self, data: Bytes2D) -> None:
        """Copy and verify in order, up to the first copy that is wrong."""
        for lease, row in zip(self.leases, data[self.start :], strict=False):
            if not copy_verified(lease, memoryview(row)):
                self.suspects.append(lease)
                return
            self.sound.append(lease.source)


_Turn = tuple[Ahead, _Helping | None, Batch | None]
"""What is under way: a helping that is given back, and a batch that was asked for."""


@dataclass(slots=True)
class _Walk:
    """One walk along a route: what is leased, what is under way, and how far it got."""

    job: Job
    data: Bytes2D
    """Where blocks are copied to."""
    done: _Progress
    batches: Iterator[Batch]
    """Those that were not asked for yet."""
    reach: int = 0
    """The block behind the last one that is leased."""
    ready: deque[_Helping] = field(default_factory=deque)
    """Leased and not copied yet."""
    flying: deque[_Turn] = field(default_factory=deque)
    unused: list[Sequence[Lease]] = field(default_factory=list)
    """Leases to be given back."""
    is_open: bool = True
    """False once no more leases are of use."""
    has_gap: bool = False
    """True once a copy was wrong, or a lease over."""

    def __post_init__(self) -> None:
        self.reach = len(self.done.sources)

    def next_batch(self) -> Batch | None:
        """The next one to ask for now; None behind the end, and where no more leases, or not yet, are of use."""
        is_wanted = self.is_open and not (self.flying and self.job.at.is_crowded)
        return next(self.batches, None) if is_wanted else None

    def take(self, batch: Batch, answer: Answer[Sequence[Lease]]) -> None:
        """Note leases of leading blocks of a batch, and whether the path to the others is congested."""
        leases = answer.value
        if leases and (not self.is_open or batch.start != self.reach):
            self.unused.append(leases)
        elif self.is_open:
            self.done.busy_s = answer.busy_s
            if leases:
                self.ready.append(_Helping(batch.start, leases))
            self.reach += len(leases)
            self.is_open = self.reach == batch.stop

    def close(self, kept: int = 0) -> None:
        """Give back what is leased but for the first `kept` helpings."""
        self.is_open = False
        while len(self.ready) > kept:
            self.unused.append(self.ready.pop().leases)

    def settle(self, helping: _Helping, lived: int) -> None:
        """Keep what was copied when all leases lived until then.

        A lease that is over explains a wrong copy, and makes a right one luck.
        """
        if self.has_gap:
            return
        if lived < len(helping.leases):
            self.done.lost_blocks += len(helping.leases)
        else:
            self.done.sources += helping.sound
            self.done.corrupt_blocks += len(helping.suspects)
        self.has_gap = lived < len(helping.leases) or bool(helping.suspects)
        if self.has_gap:
            self.close()

    def send_next(self, helping: _Helping | None = None) -> Operation[None]:
        """Ask for the next batch, and give a helping back."""
        job, batch = self.job, self.next_batch()
        releasing = (calls.release(job.target, helping.leases, helping.suspects),) if helping else ()
        acquiring = (calls.acquire(job.target, batch.keys, job.session, job.lease_s, job.deadline_s),) if batch else ()
        ahead = Ahead((*releasing, *acquiring))
        if ahead.calls:
            yield ahead
            self.flying.append((ahead, helping, batch))

    def work_next(self) -> Operation[None]:
        """Copy the first helping that is ready."""
        helping = self.ready[0]
        yield Work(lambda: helping.copy(self.data))
        if helping.suspects:
            self.close(kept=1)
        yield from self.send_next(helping)
        self.ready.popleft()

    def collect_next(self) -> Operation[None]:
        """Take in what became of a helping, and what was leased."""
        ahead, helping, batch = self.flying.popleft()
        answers = yield Collect(ahead)
        if helping is not None:
            self.settle(helping, answers[0].value)
        if batch is not None:
            self.take(batch, answers[-1])

    def giving_back(self) -> Calls:
        """End leases that are of no use any more."""
        unused, self.unused = self.unused, []
        return tuple(calls.release(self.job.target, leases) for leases in unused)


def load(job: Job, into: Bytes2D | None) -> Operation[Loaded]:
    """Copy the longest prefix that can be had into `into` (or a new buffer), each block verified after the copy."""
    found = yield from locate_for_load(job)
    data, done = yield from _load_route(job, found, into)
    if job.at.is_stale:  # Seen only now: there may be a scope that we do not know yet.
        yield (calls.scopes(job.target),)
        found = yield from locate(job)
        data, done = yield from _load_route(job, found, into)
    shared = min(found.route.shared_blocks, len(done.sources)) if found else 0
    blocks = len(done.sources)
    if job.wanted_blocks:
        yield Post((calls.count_load(job.target, job.wanted_blocks, blocks),))
    faults = (done.corrupt_blocks, done.lost_blocks)
    return Loaded(blocks, data[:blocks], tuple(done.sources), shared, *faults, done.busy_s)


def _load_route(job: Job, found: Found | None, into: Bytes2D | None) -> Operation[tuple[Bytes2D, _Progress]]:
    """Copy blocks in order until one cannot be had.

    They come in helpings: while one is copied, the agent ends the leases of those before it and gives those of the ones
    behind it. Where memory is too small for that, the rest is walked along batch by batch: of several under way, those
    behind may have had the room that the first one wanted. Where the path is congested, nothing is asked for again.
    """
    route = found.route if found else Route()
    hoped = min(route.blocks, job.wanted_blocks)
    data = np.empty((hoped, job.target.layout.block_bytes), np.uint8) if into is None else into
    done, blocks, count = _Progress(), min(len(data), hoped), AHEAD
    step = batches.batch_blocks(job.target.layout.block_bytes)
    while (start := len(done.sources)) < blocks:
        walk = _Walk(job, data, done, batches.of_route(route, range(start, blocks), step))
        yield from along(walk, count)
        if walk.has_gap or (len(done.sources) == start and (count == 1 or done.busy_s)):
            break
        count = 1
    return data, done


def copy_leased(
    target: Target, leases: Sequence[Lease], copy: Callable[[], None], suspects: Sequence[Lease]
) -> Operation[bool]:
    """Copy and give the leases back, with the `suspects` that `copy` found; true when all lived until then."""
    try:
        yield Work(copy)
        answers = yield (calls.release(target, leases, suspects),)
    except BaseException:
        yield Post((calls.release(target, leases),))  # Once more is harmless.
        raise
    return bool(answers[0].value >= len(leases))
