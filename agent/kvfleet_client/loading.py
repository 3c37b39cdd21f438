"""Load a prompt's leading blocks: the operation behind `PrefixCache.load`. Sans-I/O: copies memory, yields calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvfleet_client import batches, calls
from kvfleet_client.batches import Batch
from kvfleet_client.calls import Operation, Post, Work
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
    """Copy blocks in order until one cannot be had."""
    block_bytes = job.target.layout.block_bytes
    route = found.route if found else Route()
    hoped = min(route.blocks, job.wanted_blocks)
    data = np.empty((hoped, block_bytes), np.uint8) if into is None else into
    done = _Progress()
    for batch in batches.of_route(route, range(min(len(data), hoped)), block_bytes):
        yield from _load_batch(job, batch, data, done)
        if len(done.sources) < batch.stop:
            break
    return data, done


def _load_batch(job: Job, batch: Batch, data: Bytes2D, done: _Progress) -> Operation[None]:
    """Load a batch, in several helpings where memory is too small to hold all of it at a time."""
    at = batch.start
    while at < batch.stop:
        yield from _load_helping(job, Batch(batch.chain, at, batch.stop), data, done)
        if len(done.sources) == at or done.corrupt_blocks or done.lost_blocks:
            return
        at = len(done.sources)


def _load_helping(job: Job, batch: Batch, data: Bytes2D, done: _Progress) -> Operation[None]:
    """Lease as much of a batch as can be had, copy it, give it back, and keep it when its leases lived until then."""
    answers = yield (calls.acquire(job.target, batch.keys, job.session, job.lease_s, job.deadline_s),)
    leases: tuple[Lease, ...] = answers[0].value
    if not leases:
        return

    sound: list[str] = []
    suspects: list[Lease] = []

    def copy() -> None:
        for lease, row in zip(leases, data[batch.start : batch.stop], strict=False):
            if not copy_verified(lease, memoryview(row)):
                suspects.append(lease)
                return
            sound.append(lease.source)

    have_lived = yield from copy_leased(job.target, leases, copy, suspects)
    if not have_lived:  # A lease that is over explains a wrong copy, and makes a right one luck.
        done.lost_blocks += len(leases)
        return
    done.sources += sound
    done.corrupt_blocks += len(suspects)


def copy_leased(
    target: Target, leases: Sequence[Lease], copy: Callable[[], None], suspects: Sequence[Lease]
) -> Operation[bool]:
    """Copy and give the leases back, with the `suspects` that `copy` found; true when all lived until then."""
    try:
        yield Work(copy)
        lived = yield (calls.release(target, leases, suspects),)
    except BaseException:
        yield Post((calls.release(target, leases),))  # Once more is harmless.
        raise
    return bool(lived[0].value >= len(leases))
