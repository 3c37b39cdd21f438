"""Store a prompt's blocks: the operation behind `PrefixCache.store`. Sans-I/O: copies memory, yields calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfleet_api.errors import KvFleetError
from kvfleet_client import batches, calls
from kvfleet_client.batches import Batch
from kvfleet_client.calls import Operation, Post, Work
from kvfleet_client.chain import Chain, Route, Segment, StorePlan, plan_store
from kvfleet_client.copying import fill, refill
from kvfleet_client.results import Bytes2D, Lease, Published, Reservation, Stored
from kvfleet_client.routes import Found, Job, goal_of, granted_shares, locate

Filler = Callable[[int, Reservation], bytes | None]
"""Fills the slot of a batch's i-th block; returns its checksum, or None when there is nothing good to write."""


@dataclass(slots=True)
class _Tally:
    """Outcomes so far."""

    wanted: int = 0
    published: int = 0
    existed: int = 0
    copied: int = 0
    error: KvFleetError | None = None


def store(job: Job, blocks: Bytes2D, first: int) -> Operation[Stored]:
    """Make a prompt's blocks available: in shares that the tenant grants, and the rest in the write scope.

    `blocks` holds the bytes of those from `first` on.
    """
    found = yield from locate(job)
    if found is None:
        return Stored()
    tally = _Tally()
    for share in granted_shares(found):
        reached = yield from _store_in(job, found, share, (blocks, first), tally)
        found = found.with_share(reached)
    goal = goal_of(job, found)
    if goal is not None:
        yield from _store_in(job, found, goal, (blocks, first), tally)
    refused = tally.wanted - tally.published - tally.existed
    return Stored(tally.published, tally.existed, tally.copied, refused, tally.error)


def _store_in(job: Job, found: Found, goal: Segment, held: tuple[Bytes2D, int], tally: _Tally) -> Operation[Segment]:
    """Store in one chain what it lacks; returns how far it goes then. `held`: bytes, and which block is the first."""
    blocks, first = held
    plan = plan_store(job.prompt, first, first + len(blocks), found.route, goal)
    if plan.target is None:
        return goal
    tally.wanted += len(plan.copy) + len(plan.write)
    rows = blocks[plan.write.start - first :] if plan.write else blocks[:0]
    stop = yield from _carry_out(job, plan, plan.target, found.route, rows, tally)
    return Segment(goal.chain, stop)


def _carry_out(job: Job, plan: StorePlan, goal: Chain, route: Route, rows: Bytes2D, tally: _Tally) -> Operation[int]:
    """Copy, then write `rows`, until a block cannot be taken: what follows it could not be found.

    Returns the block up to which the goal goes now.
    """
    block_bytes = job.target.layout.block_bytes
    for source in batches.of_route(route, plan.copy, block_bytes):
        taken = yield from _copy_batch(job, source, goal, tally)
        if taken < source.stop - source.start:
            return source.start + taken
    for batch in batches.of_chain(goal, plan.write, block_bytes):
        taken = yield from _write_batch(job, batch, rows[batch.start - plan.write.start :], tally)
        if taken < batch.stop - batch.start:
            return batch.start + taken
    return plan.write.stop


def _write_batch(job: Job, batch: Batch, rows: Bytes2D, tally: _Tally) -> Operation[int]:
    """Write the caller's bytes; slots may come in several helpings. Returns how many leading blocks are there now."""
    done = 0
    while batch.start + done < batch.stop:
        rest = Batch(batch.chain, batch.start + done, batch.stop)
        taken = yield from _commit(job, rest, _filler(rows[done:]), tally)
        if not taken:
            break
        done += taken
    return done


def _filler(rows: Bytes2D) -> Filler:
    return lambda i, slot: fill(slot, memoryview(rows[i]))


def _copy_batch(job: Job, source: Batch, goal: Chain, tally: _Tally) -> Operation[int]:
    """Copy blocks of the route into the goal's scope; returns how many leading ones are there now."""
    at = source.start
    while at < source.stop:
        taken = yield from _copy_helping(job, Batch(source.chain, at, source.stop), goal, tally)
        if not taken:
            break
        at += taken
    return at - source.start


def _copy_helping(job: Job, source: Batch, goal: Chain, tally: _Tally) -> Operation[int]:
    """Lease as much of a batch as can be had and commit it; returns how many leading blocks are there now."""
    answers = yield (calls.acquire(job.target, source.keys, job.session, job.lease_s, job.deadline_s),)
    leases: tuple[Lease, ...] = answers[0].value
    if not leases:
        return 0
    published = tally.published
    try:
        batch = Batch(goal, source.start, source.start + len(leases))
        return (yield from _commit(job, batch, lambda i, slot: refill(leases[i], slot), tally))
    finally:
        tally.copied += tally.published - published
        yield Post((calls.release(job.target, leases),))


def _commit(job: Job, batch: Batch, filler: Filler, tally: _Tally) -> Operation[int]:
    """Reserve, fill and publish a batch; returns how many leading blocks are there now."""
    answers = yield (calls.reserve(job.target, batch.parent, batch.keys, job.session),)
    slots: tuple[Reservation, ...] = answers[0].value
    if not slots:
        tally.error = answers[0].error or tally.error
        return 0
    filled: list[tuple[Reservation, bytes]] = []
    results: Sequence[Published] = ()
    try:
        yield Work(lambda: _fill(slots, filler, filled))
        results = yield from _publish(job, filled)
    finally:
        # What was sent for publishing is the agent's, whatever became of it; the rest is given back.
        unfilled = [s for s in slots if s.reservation][len(filled) if results else 0 :]
        if unfilled:
            yield Post((calls.abandon(job.target, unfilled),))
    return _count(slots, results, tally)


def _fill(slots: Sequence[Reservation], filler: Filler, filled: list[tuple[Reservation, bytes]]) -> None:
    """Fill slots in order until there is nothing good to write."""
    for i, slot in enumerate(slots):
        if not slot.reservation:
            continue
        checksum = filler(i, slot)
        if checksum is None:
            return
        filled.append((slot, checksum))


def _publish(job: Job, filled: Sequence[tuple[Reservation, bytes]]) -> Operation[tuple[Published, ...]]:
    if not filled:
        return ()
    answers = yield (calls.publish(job.target, [s for s, _ in filled], [c for _, c in filled]),)
    return tuple(answers[0].value)


def _count(slots: Sequence[Reservation], results: Sequence[Published], tally: _Tally) -> int:
    """Count outcomes up to the first refusal; returns how many leading blocks are there now."""
    outcomes = iter(results)
    for done, slot in enumerate(slots):
        outcome = next(outcomes, Published.REFUSED) if slot.reservation else Published.EXISTED
        if outcome is Published.REFUSED:
            return done
        tally.published += outcome is Published.PUBLISHED
        tally.existed += outcome is Published.EXISTED
    return len(slots)
