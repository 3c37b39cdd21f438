"""A prompt's prefix read in parts: leased once, then copied layer by layer while the engine computes with what it has.

The number of blocks is settled when the leases are given. After that a layer comes whole or the stream is lost: then
the engine computes the prompt without it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from kvfleet_api.blocks import BlockKey
from kvfleet_api.checksum import CHECKSUM_BYTES
from kvfleet_api.errors import BlockCorruptError, LeaseLostError
from kvfleet_api.wire import PART_SUMS_BYTES_MAX
from kvfleet_api.wire_handover import Handover
from kvfleet_client import batches, calls, handover_calls
from kvfleet_client.batches import Batch
from kvfleet_client.calls import Operation, Post
from kvfleet_client.chain import Route
from kvfleet_client.held import lost, void
from kvfleet_client.ranges import Cut, check_range, copy_layers, rows_for
from kvfleet_client.results import Bytes2D, Lease
from kvfleet_client.routes import Found, Job, goal_of, locate, locate_for_load

LEASE_S: Final = 120.0
"""A prefill takes seconds; an engine that is stopped for longer than this has lost its stream."""

ARRIVE_S: Final = 10.0
"""How long the reader of a hand-over waits for the next layer; a prefill computes one in milliseconds."""

WAIT_S: Final = 2.0
"""Of one question while it waits."""

Arrive = Callable[[Sequence[Lease], int, float], tuple[bytes, ...]]
"""Waits for parts of growing blocks behind so many, for so long; checksums for each, none when they are lost."""

End = Callable[[Sequence[Lease], Sequence[Lease]], bool]
"""Ends leases, with the suspects among them; true when all of them lived until now."""


class LayerStream:
    """Leading blocks of a prompt, to be read layer by layer. Blocking; one reader at a time. Use it in a `with` block.

    Leaving the block raises `LeaseLostError` when the leases did not live until then, unless another error is on its
    way: all that was read is void then, as it would be of a load.
    """

    def __init__(
        self,
        leases: Sequence[Lease],
        cut: Cut,
        end: End,
        shared_blocks: int = 0,
        *,
        is_whole: bool = True,
        arrive: Arrive | None = None,
    ) -> None:
        """Hold `leases` until `end` is called with them; `arrive` brings checksums of those that grow."""
        self._leases = tuple(leases)
        self._arrive = arrive
        self._suspects: tuple[Lease, ...] = ()
        self._cut = cut
        self._end = end
        self.blocks = len(self._leases)
        """Leading blocks that every layer is read of; the stream may be empty."""
        self.sources = tuple(lease.source for lease in self._leases)
        """For each block where it was: a tier name, or `remote`."""
        self.shared_blocks = shared_blocks
        """How many of them came from a scope that the tenant shares."""
        self.is_whole = is_whole
        """False where more of the prefix is there: memory cannot hold all of it at a time, or the agent knows no parts.
        A load brings it in helpings."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.close() and error is None:
            raise lost(self.blocks)

    def read(self, layers: range, into: Bytes2D | None = None) -> Bytes2D:
        """Copy and verify layers of all blocks: (blocks, bytes wanted of a block) uint8.

        Of a hand-over, waits for layers that its writer has not computed yet. Raises `BlockCorruptError` when a copy is
        not what its lease promised, and `LeaseLostError` after `close` and when the writer has gone.
        """
        check_range("layers", layers, self._cut.layout.layers)
        if len(self._leases) != self.blocks:
            raise LeaseLostError("the stream was closed")
        self._await_parts(layers.stop)
        rows = rows_for(self.blocks, self._cut, layers) if into is None else into
        sound = copy_layers(self._leases, self._cut, layers, rows)
        if sound < self.blocks:
            self._suspects = (self._leases[sound],)
            raise BlockCorruptError(
                f"layers {layers.start} to {layers.stop} of block {sound} differ from their checksums"
            )
        return rows

    def _await_parts(self, layers: int) -> None:
        """Wait until so many layers of the growing blocks are there. Raises `LeaseLostError` when they do not come."""
        ends_s = time.monotonic() + ARRIVE_S
        while growing := [x for x in self._leases if x.is_growing and len(x.parts) < layers * CHECKSUM_BYTES]:
            have, left_s = len(growing[0].parts) // CHECKSUM_BYTES, ends_s - time.monotonic()
            sums = self._arrive(growing, have, min(left_s, WAIT_S)) if self._arrive and left_s > 0 else ()
            if not sums:
                raise LeaseLostError(f"layer {have} of {len(growing)} growing blocks did not come")
            more = {id(x): replace(x, parts=x.parts + new) for x, new in zip(growing, sums, strict=True)}
            self._leases = tuple(more.get(id(x), x) for x in self._leases)

    def close(self) -> bool:
        """End the leases; true when all of them lived until now, and when there were none. Idempotent."""
        leases, self._leases = self._leases, ()
        is_valid = not leases or self._end(leases, self._suspects)
        void(leases)
        return is_valid


@dataclass(frozen=True, slots=True)
class Leased:
    """Leases of leading blocks, with checksums of their parts."""

    leases: tuple[Lease, ...]
    shared_blocks: int
    is_whole: bool
    """False when the agent has or knows the next block too."""


def lease_route(job: Job, cut: Cut, handover: Handover | None = None) -> Operation[Leased]:
    """Lease the longest prefix that can be had, and what grows behind it in a hand-over.

    Given back when this is interrupted.
    """
    found = yield from (locate(job) if handover else locate_for_load(job))
    held, is_whole = yield from _lease(job, cut, found)
    if job.at.is_stale:  # Seen only now: there may be a scope that we do not know yet.
        yield Post((calls.release(job.target, held),))
        yield (calls.scopes(job.target),)
        found = yield from locate(job)
        held, is_whole = yield from _lease(job, cut, found)
    if handover is not None and found is not None:
        held += yield from _lease_growing(job, cut, found, held, handover)
    if job.wanted_blocks and is_whole:  # Whoever gets less than there is loads it instead, and is counted there.
        yield Post((calls.count_load(job.target, job.wanted_blocks, len(held)),))
    return Leased(held, min(found.route.shared_blocks, len(held)) if found else 0, is_whole)


def _lease(job: Job, cut: Cut, found: Found | None) -> Operation[tuple[tuple[Lease, ...], bool]]:
    """Leases of leading blocks, and whether there are no more of them."""
    route = found.route if found else Route()
    held: list[Lease] = []
    is_whole = True
    try:
        wanted = range(min(route.blocks, job.wanted_blocks))
        for batch in batches.of_route(route, wanted, job.target.layout.block_bytes):
            yield from _lease_batch(job, cut, batch, held)
            if len(held) < batch.stop:
                is_whole = not (yield from _is_there(job, batch.chain.part(len(held), len(held) + 1)))
                break
    except BaseException:
        yield Post((calls.release(job.target, held),))
        raise
    return tuple(held), is_whole


def _lease_growing(
    job: Job, cut: Cut, found: Found, held: tuple[Lease, ...], handover: Handover
) -> Operation[tuple[Lease, ...]]:
    """Leases of blocks behind those that are held, which their writer is still at."""
    goal = goal_of(job, found)
    keys = goal.chain.part(len(held), job.wanted_blocks) if goal and goal.chain.first <= len(held) else ()
    if not keys:
        return ()
    try:
        leases: tuple[Lease, ...] = (yield (handover_calls.follow(job, keys, cut.part_bytes, handover),))[0].value
    except BaseException:
        yield Post((calls.release(job.target, held),))
        raise
    usable = tuple(x for x in leases if x.is_growing and (not held or x.connection == held[0].connection))
    if len(usable) < len(leases):
        yield Post((calls.release(job.target, leases),))
        return ()
    return usable


def _is_there(job: Job, keys: Sequence[BlockKey]) -> Operation[bool]:
    answers = yield (calls.lookup(job.target, keys, job.session, is_probe=True),)
    return bool(answers[0].value.blocks)


def _lease_batch(job: Job, cut: Cut, batch: Batch, held: list[Lease]) -> Operation[None]:
    """Lease a batch in helpings whose checksums fit one answer; ends early where something cannot be had."""
    parts = job.target.layout.block_bytes // cut.part_bytes
    step = max(1, PART_SUMS_BYTES_MAX // (parts * CHECKSUM_BYTES))
    for start in range(batch.start, batch.stop, step):
        keys = batch.chain.part(start, min(start + step, batch.stop))
        call = calls.acquire(job.target, keys, job.session, job.lease_s, job.deadline_s, cut.part_bytes)
        leases = (yield (call,))[0].value
        one_connection = held[0].connection if held else leases[0].connection if leases else 0
        proven = [x for x in leases if len(x.parts) == parts * CHECKSUM_BYTES and x.connection == one_connection]
        held += proven
        if len(proven) < len(leases):  # Of an agent that knows no parts, or of a connection made meanwhile.
            yield Post((calls.release(job.target, leases[len(proven) :]),))
        if len(proven) < len(keys):
            return
