"""What is said of a prompt's blocks without reading them: touch, prefetch, drop. Sans-I/O: yields calls."""

from collections.abc import Callable, Sequence

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.tiers import Lookup
from kvstrata_client.prompt.routes import Job, knows, locate
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Call, Operation
from kvstrata_client.verbs.results import PLACE_REMOTE, Dropped

Counting = Callable[[Target, Sequence[BlockKey]], Call[int]]


def touch(job: Job) -> Operation[int]:
    """Record use of the leading blocks that can be had; returns how many are on this node.

    0 from an agent that knows no touches.
    """
    return (yield from _each_segment(job, calls.touch)) if knows(job.at, wire.Touch) else 0


def prefetch(job: Job) -> Operation[int]:
    """Begin to bring the leading blocks into memory; returns how many are on their way now."""
    return (yield from _each_segment(job, lambda target, keys: calls.prefetch(target, keys, job.session)))


def drop(job: Job) -> Operation[Dropped]:
    """Remove the tenant's own blocks of the prompt from this node, from `job.first_block` on; those behind go first."""
    found = (yield from locate(job, is_use=False)) if knows(job.at, wire.Drop) else None
    own = found.grants.own if found is not None else None
    if found is None or own is None:
        return Dropped()
    dropped = kept = 0
    for segment in [*found.continued, *(s for s in found.roots if s.chain.scope == own.id)]:
        keys = segment.chain.part(job.first_block, min(segment.stop, job.wanted_blocks))
        if not keys:
            continue
        (answer,) = yield (calls.drop(job.target, keys),)
        skipped = max(0, job.first_block - segment.chain.first)
        here = [not place & PLACE_REMOTE for place in segment.found.places[skipped:]]
        for was_here, state in zip(here, answer.value, strict=False):
            kept += state != Lookup.MISS
            dropped += was_here and state == Lookup.MISS
    return Dropped(dropped, kept)


def _each_segment(job: Job, counting: Counting) -> Operation[int]:
    """Call a verb that counts for each part of the route, in one trip."""
    found = yield from locate(job, is_use=False)
    if found is None:
        return 0
    parts = [s.chain.part(0, min(s.stop, job.wanted_blocks)) for s in found.route.segments]
    asked = tuple(counting(job.target, keys) for keys in parts if keys)
    return sum(answer.value for answer in (yield asked)) if asked else 0
