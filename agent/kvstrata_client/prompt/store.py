"""Store a prompt's blocks: the operation behind `PrefixCache.store`. Sans-I/O: copies memory, yields calls."""

from dataclasses import dataclass, field

from kvstrata_client.prompt import batches
from kvstrata_client.prompt.batches import Batch
from kvstrata_client.prompt.chain import Chain, Route, Segment, StorePlan, plan_store
from kvstrata_client.prompt.publish import Filler, Run, Tally, write
from kvstrata_client.prompt.routes import Found, Job, goal_of, granted_shares, locate
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Operation, Post
from kvstrata_client.verbs.copying import fill, refill
from kvstrata_client.verbs.results import Bytes2D, Lease, Stored


@dataclass(slots=True)
class _Outcome:
    """What became of it so far."""

    wanted: int = 0
    copied: int = 0
    tally: Tally = field(default_factory=Tally)


def store(job: Job, blocks: Bytes2D, first: int) -> Operation[Stored]:
    """Make a prompt's blocks available: in shares that the tenant grants, and the rest in the write scope.

    `blocks` holds the bytes of those from `first` on.
    """
    found = yield from locate(job)
    if found is None:
        return Stored()
    outcome = _Outcome()
    for share in granted_shares(found):
        reached = yield from _store_in(job, found, share, (blocks, first), outcome)
        found = found.with_share(reached)
    goal = goal_of(job, found)
    if goal is not None:
        yield from _store_in(job, found, goal, (blocks, first), outcome)
    tally = outcome.tally
    refused = outcome.wanted - tally.published - tally.existed
    error = tally.error if refused else None
    return Stored(tally.published, tally.existed, outcome.copied, refused, error, tally.busy_s)


def _store_in(
    job: Job, found: Found, goal: Segment, held: tuple[Bytes2D, int], outcome: _Outcome
) -> Operation[Segment]:
    """Store in one chain what it lacks; returns how far it goes then. `held`: bytes, and which block is the first."""
    blocks, first = held
    plan = plan_store(job.prompt, first, first + len(blocks), found.route, goal)
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
    step = batches.large_batch_blocks(job.target.layout.block_bytes)
    for source in batches.of_route(route, plan.copy, step):
        stop = yield from _copy_batch(job, source, goal, outcome)
        if stop < source.stop:
            return stop
    return (yield from _write(job, goal, plan.write, lambda i, slot: fill(slot, memoryview(rows[i])), outcome))


def _write(job: Job, goal: Chain, blocks: range, filler: Filler, outcome: _Outcome) -> Operation[int]:
    """Write blocks of a chain; returns the one up to which they are there now."""
    run = Run(job.target, job.at, goal.part(blocks.start, blocks.stop), goal.parent_of(blocks.start), job.session)
    return blocks.start + (yield from write(run, filler, outcome.tally))


def _copy_batch(job: Job, source: Batch, goal: Chain, outcome: _Outcome) -> Operation[int]:
    """Copy blocks of the route into the goal's scope; returns the one up to which they are there now."""
    at = source.start
    while at < source.stop:
        stop = yield from _copy_helping(job, Batch(source.chain, at, source.stop), goal, outcome)
        if stop == at:
            break
        at = stop
    return at


def _copy_helping(job: Job, source: Batch, goal: Chain, outcome: _Outcome) -> Operation[int]:
    """Lease as much of a batch as can be had and copy it; returns the block up to which that is there now."""
    answers = yield (calls.acquire(job.target, source.keys, job.session, job.lease_s, job.deadline_s),)
    leases: tuple[Lease, ...] = answers[0].value
    if not leases:
        return source.start
    published = outcome.tally.published
    leased = range(source.start, source.start + len(leases))
    try:
        return (yield from _write(job, goal, leased, lambda i, slot: refill(leases[i], slot), outcome))
    finally:
        outcome.copied += outcome.tally.published - published
        yield Post((calls.release(job.target, leases),))
