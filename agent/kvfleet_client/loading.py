"""Load a prompt's leading blocks: the operation behind `PrefixCache.load`. Sans-I/O: copies memory, yields calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvfleet_client import batches, calls
from kvfleet_client.calls import Answers, Calls, Operation, Post, Work
from kvfleet_client.chain import Route
from kvfleet_client.copying import copy_verified
from kvfleet_client.results import Bytes2D, Lease, Loaded
from kvfleet_client.routes import Found, Job, locate, locate_for_load
from kvfleet_client.target import Target


@dataclass(slots=True)
class _Progress:
    """What has been copied so far."""

    sources: list[str] = field(default_factory=list)
    corrupt_blocks: int = 0
    lost_blocks: int = 0


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
    return Loaded(blocks, data[:blocks], tuple(done.sources), shared, done.corrupt_blocks, done.lost_blocks)


def _load_route(job: Job, found: Found | None, into: Bytes2D | None) -> Operation[tuple[Bytes2D, _Progress]]:
    """Copy blocks in order until one cannot be had; each helping is asked for while the one before it is given back."""
    route = found.route if found else Route()
    hoped = min(route.blocks, job.wanted_blocks)
    data = np.empty((hoped, job.target.layout.block_bytes), np.uint8) if into is None else into
    wanted, done = range(min(len(data), hoped)), _Progress()
    asked = _acquiring(job, route, wanted)
    leases: tuple[Lease, ...] = (yield asked)[0].value if asked else ()
    while leases:
        ahead = _acquiring(job, route, wanted[len(done.sources) + len(leases) :])
        leases = yield from _load_helping(job, leases, data[len(done.sources) :], ahead, done)
    return data, done


def _acquiring(job: Job, route: Route, wanted: range) -> Calls:
    """Ask for as many of the leading ones as one call speaks of; memory may be too small to hold all of them."""
    batch = next(batches.of_route(route, wanted, job.target.layout.block_bytes), None)
    if batch is None:
        return ()
    return (calls.acquire(job.target, batch.keys, job.session, job.lease_s, job.deadline_s),)


def _load_helping(
    job: Job, leases: Sequence[Lease], rows: Bytes2D, ahead: Calls, done: _Progress
) -> Operation[tuple[Lease, ...]]:
    """Copy what is leased, and keep it when its leases lived until then; returns the next helping, if it is of use."""
    sound: list[str] = []
    suspects: list[Lease] = []

    def copy() -> None:
        for lease, row in zip(leases, rows, strict=False):
            if not copy_verified(lease, memoryview(row)):
                suspects.append(lease)
                return
            sound.append(lease.source)

    have_lived, answers = yield from copy_leased(job.target, leases, copy, suspects, ahead)
    following: tuple[Lease, ...] = answers[0].value if answers else ()
    if not have_lived:  # A lease that is over explains a wrong copy, and makes a right one luck.
        done.lost_blocks += len(leases)
        if following:
            yield Post((calls.release(job.target, following),))
        return ()
    done.sources += sound
    done.corrupt_blocks += len(suspects)
    return following


def copy_leased(
    target: Target, leases: Sequence[Lease], copy: Callable[[], None], suspects: Sequence[Lease], ahead: Calls = ()
) -> Operation[tuple[bool, Answers]]:
    """Copy and give the leases back, with the `suspects` that `copy` found; true when all lived until then.

    Calls that are `ahead` go the same way unless there are suspects; their answers are returned.
    """
    try:
        yield Work(copy)
        answers = yield (calls.release(target, leases, suspects), *(() if suspects else ahead))
    except BaseException:
        yield Post((calls.release(target, leases),))  # Once more is harmless.
        raise
    return bool(answers[0].value >= len(leases)), answers[1:]
