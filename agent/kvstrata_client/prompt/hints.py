"""What is said of a prompt's blocks without reading them, and what became of it. Sans-I/O: yields calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.tiers import Lookup
from kvstrata_api.wire import Outcome
from kvstrata_client.prompt.routes import Job, granted_shares, knows, locate
from kvstrata_client.prompt.store import store
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Call, Operation
from kvstrata_client.verbs.results import PLACE_REMOTE, Dropped, Hinted, joined

Hinting = Callable[[Target, Sequence[BlockKey]], Call[Hinted]]


def touch(job: Job) -> Operation[int]:
    """Record use of the leading blocks that can be had; returns how many are on this node.

    0 from an agent that knows no touches.
    """
    if not knows(job.at, wire.Touch):
        return 0
    _, parts = yield from _parts(job)
    asked = tuple(calls.touch(job.target, keys) for keys in parts)
    return sum(answer.value for answer in (yield asked)) if asked else 0


def prefetch(job: Job) -> Operation[Hinted]:
    """Begin to bring the leading blocks that this node has into memory."""
    return (yield from _hint(job, lambda target, keys: calls.prefetch(target, keys, job.session)))


def fetch(job: Job) -> Operation[Hinted]:
    """Begin to bring the leading blocks into memory, from wherever they are."""
    hint: Hinting = lambda target, keys: calls.fetch(target, keys, job.session)  # noqa: E731
    return (yield from _hint(job, hint)) if knows(job.at, wire.Fetch) else Hinted()


def pin(job: Job, ttl_s: float) -> Operation[Hinted]:
    """Keep the leading blocks in memory for a time."""
    return (yield from _hint(job, lambda target, keys: calls.pin(target, keys, ttl_s)))


def unpin(job: Job) -> Operation[int]:
    """Take pins of the leading blocks back; returns how many."""
    _, parts = yield from _parts(job)
    asked = tuple(calls.unpin(job.target, keys) for keys in parts)
    return sum(answer.value for answer in (yield asked)) if asked else 0


def demote(job: Job) -> Operation[Hinted]:
    """Have the tenant's own blocks at the end of the prompt leave memory first, those from `job.first_block` on."""
    return (yield from _hint(job, calls.demote)) if knows(job.at, wire.Demote) else Hinted()


def share(job: Job) -> Operation[Hinted]:
    """Copy the leading blocks that can be had to where others read them: the tenant's shares and its domain."""
    found = yield from locate(job, is_use=False)
    if found is None or not found.route.blocks:
        return Hinted()
    write = found.grants.scope(found.grants.write_scope)
    is_own = write is None or not write.can_write or write.kind == "tenant"
    if is_own and not granted_shares(found):
        return Hinted(Outcome.REFUSED)
    blocks = min(found.route.blocks, job.wanted_blocks)
    nothing = np.empty((0, job.target.layout.block_bytes), np.uint8)
    stored = yield from store(replace(job, blocks_max=blocks), nothing, blocks, is_shared=True)
    done = stored.published + stored.existed
    if stored.refused:
        return Hinted(Outcome.PARTIAL if done else Outcome.REFUSED, stored.published)
    return Hinted(Outcome.ACCEPTED if blocks == job.wanted_blocks else Outcome.PARTIAL, stored.published)


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


def _hint(job: Job, hint: Hinting) -> Operation[Hinted]:
    """Give a hint on each part of the route, in one trip."""
    is_whole, parts = yield from _parts(job)
    asked = tuple(hint(job.target, keys) for keys in parts)
    if not asked:
        return Hinted()
    return joined([answer.value for answer in (yield asked)], is_whole=is_whole)


def _parts(job: Job) -> Operation[tuple[bool, list[tuple[BlockKey, ...]]]]:
    """Keys of the wanted blocks that can be had, by scope, and whether these are all."""
    found = yield from locate(job, is_use=False)
    if found is None:
        return False, []
    cut = [
        s.chain.part(max(job.first_block, s.chain.first), min(s.stop, job.wanted_blocks)) for s in found.route.segments
    ]
    return found.route.blocks >= job.wanted_blocks, [tuple(keys) for keys in cut if keys]
