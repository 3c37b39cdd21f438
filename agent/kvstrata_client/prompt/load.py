"""Load a prompt's leading blocks: the operation behind `PrefixCache.load`. Sans-I/O: copies memory, yields calls."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvstrata_client.prompt import pipeline
from kvstrata_client.prompt.chain import Route
from kvstrata_client.prompt.pipeline import BATCHES_IN_FLIGHT, Batch, run_pipeline
from kvstrata_client.prompt.routes import Job, PromptLocations, locate, locate_for_load
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Ahead, Calls, Collect, Operation, Post, Work
from kvstrata_client.verbs.copying import copy_verified_each
from kvstrata_client.verbs.results import Answer, Bytes2D, Lease, Loaded


class DeviceRows(Protocol):
    """Where a load puts blocks that is no host memory: rows on a device, or pages of an engine there."""

    def __len__(self) -> int:
        """Blocks that there is room for."""

    def copy(self, first: int, leases: Sequence[Lease]) -> Sequence[bool]:
        """Copy blocks to the places from `first` on and verify each copy; whether each is right.

        It comes back when the device is done. `Lease.tensor` has a block that lies in a device.
        """


class _HostRows:
    """Rows of an array, (blocks, block bytes) uint8."""

    def __init__(self, rows: Bytes2D) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def copy(self, first: int, leases: Sequence[Lease]) -> Sequence[bool]:
        return copy_verified_each(leases, [(memoryview(row),) for row in self._rows[first : first + len(leases)]])


@dataclass(slots=True)
class _Progress:
    """What has been copied so far, and proven."""

    sources: list[str] = field(default_factory=list)
    corrupt_blocks: int = 0
    lost_blocks: int = 0
    busy_s: float = 0.0
    """Of the last answer that leases could be used of."""


@dataclass(slots=True)
class _LeasedBatch:
    """Blocks that one answer leased, and what of them was copied."""

    start: int
    """Block of the prompt that the first one is."""
    leases: Sequence[Lease]
    sound: list[str] = field(default_factory=list)
    """Source of each block whose copy is right."""
    suspects: list[Lease] = field(default_factory=list)

    def copy(self, rows: DeviceRows, first: int) -> None:
        """Copy and verify; what lies behind the first copy that is wrong is of no use."""
        sound = list(rows.copy(first, self.leases))
        right = sound.index(False) if False in sound else len(sound)
        self.sound += [lease.source for lease in self.leases[:right]]
        self.suspects += self.leases[right : right + 1]


_InFlight = tuple[Ahead, _LeasedBatch | None, Batch | None]
"""Calls in flight: they release a batch that was copied, and ask for another one."""


@dataclass(slots=True)
class _LoadPipeline:
    """One run over a route: what is leased, what is in flight, and what was copied."""

    job: Job
    rows: DeviceRows
    """Where blocks are copied to."""
    in_place: bool
    """Blocks in devices are leased there."""
    done: _Progress
    batches: Iterator[Batch]
    """Those that were not asked for yet."""
    leased_stop: int = 0
    """The block behind the last one that is leased."""
    arrived: deque[_LeasedBatch] = field(default_factory=deque)
    """Leased and not copied yet."""
    in_flight: deque[_InFlight] = field(default_factory=deque)
    unused: list[Sequence[Lease]] = field(default_factory=list)
    """Leases to be given back."""
    is_open: bool = True
    """False once no more leases are of use."""
    has_gap: bool = False
    """True once a copy was wrong, or a lease over."""

    def __post_init__(self) -> None:
        self.leased_stop = self.job.first_block + len(self.done.sources)

    def next_batch(self) -> Batch | None:
        """The next one to ask for now; None behind the end, and where no more leases, or not yet, are of use."""
        is_wanted = self.is_open and not (self.in_flight and self.job.at.is_crowded)
        return next(self.batches, None) if is_wanted else None

    def add_leases(self, batch: Batch, answer: Answer[Sequence[Lease]]) -> None:
        """Add leases of leading blocks of a batch; note whether the path to the others is congested."""
        count = calls.usable(answer.value)
        leases, closed = answer.value[:count], answer.value[count:]
        if closed:
            self.unused.append(closed)
        if leases and (not self.is_open or batch.start != self.leased_stop):
            self.unused.append(leases)
        elif self.is_open:
            self.done.busy_s = answer.busy_s
            if leases:
                self.arrived.append(_LeasedBatch(batch.start, leases))
            self.leased_stop += len(leases)
            self.is_open = self.leased_stop == batch.stop

    def close(self, kept: int = 0) -> None:
        """Ask for no more, and give back what is leased but for the first `kept` batches."""
        self.is_open = False
        while len(self.arrived) > kept:
            self.unused.append(self.arrived.pop().leases)

    def settle(self, batch: _LeasedBatch, lived: int) -> None:
        """Keep what was copied when all leases lived until then.

        A lease that is over explains a wrong copy, and makes a right one luck.
        """
        if self.has_gap:
            return
        if lived < len(batch.leases):
            self.done.lost_blocks += len(batch.leases)
        else:
            self.done.sources += batch.sound
            self.done.corrupt_blocks += len(batch.suspects)
        self.has_gap = lived < len(batch.leases) or bool(batch.suspects)
        if self.has_gap:
            self.close()

    def send_next(self, copied: _LeasedBatch | None = None) -> Operation[None]:
        """Ask for the next batch, and release one that was copied."""
        job, batch = self.job, self.next_batch()
        releasing = (calls.release(job.target, copied.leases, copied.suspects),) if copied else ()
        acquiring: Calls = ()
        if batch:
            wanted = (job.target, batch.keys, job.session, job.lease_s, job.deadline_s)
            call = calls.acquire(*wanted)
            acquiring = (calls.in_place(call) if self.in_place else call,)
        ahead = Ahead((*releasing, *acquiring))
        if ahead.calls:
            yield ahead
            self.in_flight.append((ahead, copied, batch))

    def copy_next(self) -> Operation[None]:
        """Copy the first batch that arrived."""
        batch = self.arrived[0]
        yield Work(lambda: batch.copy(self.rows, batch.start - self.job.first_block))
        if batch.suspects:
            self.close(kept=1)
        yield from self.send_next(batch)
        self.arrived.popleft()

    def collect_next(self) -> Operation[None]:
        """Settle the batch that was released, and add what was leased."""
        ahead, released, batch = self.in_flight.popleft()
        answers = yield Collect(ahead)
        if released is not None:
            self.settle(released, answers[0].value)
        if batch is not None:
            self.add_leases(batch, answers[-1])

    def giving_back(self) -> Calls:
        """End leases that are of no use any more."""
        unused, self.unused = self.unused, []
        return tuple(calls.release(self.job.target, leases) for leases in unused)


def load(job: Job, into: Bytes2D | DeviceRows | None) -> Operation[Loaded]:
    """Copy the longest prefix that can be had into `into` (or a new buffer), each block verified after the copy.

    What goes to a device is in no buffer: `data` has no rows then.
    """
    found = yield from locate_for_load(job)
    data, done = yield from _load_route(job, found, into)
    if job.at.is_stale:  # Seen only now: there may be a scope that we do not know yet.
        yield (calls.scopes(job.target),)
        found = yield from locate(job)
        data, done = yield from _load_route(job, found, into)
    shared = min(max(0, found.route.shared_blocks - job.first_block), len(done.sources)) if found else 0
    blocks = len(done.sources)
    if job.lacking_blocks:
        yield Post((calls.count_load(job.target, job.lacking_blocks, blocks),))
    faults = (done.corrupt_blocks, done.lost_blocks)
    return Loaded(blocks, data[:blocks], tuple(done.sources), shared, *faults, done.busy_s)


def _load_route(
    job: Job, found: PromptLocations | None, into: Bytes2D | DeviceRows | None
) -> Operation[tuple[Bytes2D, _Progress]]:
    """Copy blocks in order until one cannot be had.

    They come in batches: while one is copied, the agent ends the leases of those before it and gives those of the ones
    behind it. Where memory is too small for that, the rest is loaded one batch at a time: of several in flight, those
    behind may have had the room that the first one needed. Where the path is congested, nothing is asked for again.
    """
    route, first = found.route if found else Route(), job.first_block
    expected = max(0, min(route.blocks, job.wanted_blocks) - first)
    is_host = into is None or isinstance(into, np.ndarray)
    data = into if isinstance(into, np.ndarray) else _buffer(job.target, expected if is_host else 0)
    rows: DeviceRows = _HostRows(data) if into is None or isinstance(into, np.ndarray) else into
    done, blocks, count = _Progress(), min(len(rows), expected), BATCHES_IN_FLIGHT
    step = pipeline.batch_blocks(job.target.layout.block_bytes)
    while (start := len(done.sources)) < blocks:
        batches = pipeline.batches_of(route, range(first + start, first + blocks), step)
        devices = job.target.devices
        in_place = not is_host and devices is not None and not devices.error
        run = _LoadPipeline(job, rows, in_place, done, batches)
        yield from run_pipeline(run, count)
        if run.has_gap or (len(done.sources) == start and (count == 1 or done.busy_s)):
            break
        count = 1
    return data, done


def _buffer(target: Target, blocks: int) -> Bytes2D:
    return np.empty((blocks, target.layout.block_bytes), np.uint8)


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
