"""A prompt's prefix read in parts: leased once, then copied layer by layer while the engine computes with what it has.

The number of blocks is settled when the leases are given. After that a layer comes whole or the stream is lost: then
the engine computes the prompt without it.

A prompt's prefix read in parts under asyncio: `streaming.LayerStream` for tasks of an event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from msgspec.structs import replace

from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import BlockCorruptError, LeaseLostError
from kvstrata_api.wire import PART_SUMS_BYTES_MAX, Handover
from kvstrata_client.prompt import batches
from kvstrata_client.prompt.batches import Batch
from kvstrata_client.prompt.chain import Route
from kvstrata_client.prompt.ranges import Cut, check_range, copy_layers, rows_for
from kvstrata_client.prompt.routes import Found, Job, goal_of, locate, locate_for_load
from kvstrata_client.verbs import calls, handover_calls
from kvstrata_client.verbs.calls import Operation, Post, Work
from kvstrata_client.verbs.leases import lost, void
from kvstrata_client.verbs.results import Bytes2D, Lease

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


@dataclass(frozen=True, slots=True)
class Leased:
    """Leases of leading blocks, with checksums of their parts."""

    leases: tuple[Lease, ...]
    shared_blocks: int
    is_whole: bool
    """False when the agent has or knows the next block too."""
    busy_s: float = 0.0
    """Not 0.0 where there are fewer only because the agent's path to the next block is congested: estimated seconds
    until it is free."""


class Layers:
    """Leased blocks and how much of them may be read: what the streams of both clients share. Asks nobody."""

    def __init__(self, leased: Leased, cut: Cut) -> None:
        """Begin with what was leased."""
        self._leases = leased.leases
        self._suspects: tuple[Lease, ...] = ()
        self._cut = cut
        self.blocks = len(self._leases)
        """Leading blocks that every layer is read of; the stream may be empty."""
        self.sources = tuple(lease.source for lease in self._leases)
        """For each block where it was: a tier name, or `remote`."""
        self.shared_blocks = leased.shared_blocks
        """How many of them came from a scope that the tenant shares."""
        self.is_whole = leased.is_whole
        """False where more of the prefix is there: memory cannot hold all of it at a time, or the agent knows no parts.
        A load brings it in helpings."""
        self.busy_s = leased.busy_s
        """See `Leased`."""

    def _check(self, layers: range) -> None:
        """Raise `InvalidInputError` for layers that the layout has not, `LeaseLostError` after the end."""
        check_range("layers", layers, self._cut.layout.layers)
        if len(self._leases) != self.blocks:
            raise LeaseLostError("the stream was closed")

    def _lacking(self, layers: int) -> list[Lease]:
        """Growing blocks of which fewer than the first `layers` are there."""
        return [x for x in self._leases if x.is_growing and len(x.parts) < layers * CHECKSUM_BYTES]

    def _grow(self, growing: Sequence[Lease], sums: Sequence[bytes]) -> None:
        """Add checksums that arrived. Raises `LeaseLostError` when none did."""
        if not sums:
            raise LeaseLostError(f"layer {parts_of(growing)} of {len(growing)} growing blocks did not come")
        more = {id(x): replace(x, parts=x.parts + new) for x, new in zip(growing, sums, strict=True)}
        self._leases = tuple(more.get(id(x), x) for x in self._leases)

    def _copy(self, layers: range, into: Bytes2D | None) -> Bytes2D:
        """Copy and verify layers that are there. Raises `BlockCorruptError`."""
        rows = rows_for(self.blocks, self._cut, layers) if into is None else into
        sound = copy_layers(self._leases, self._cut, layers, rows)
        if sound < self.blocks:
            self._suspects = (self._leases[sound],)
            raise BlockCorruptError(
                f"layers {layers.start} to {layers.stop} of block {sound} differ from their checksums"
            )
        return rows

    def _taken(self) -> tuple[Lease, ...]:
        leases, self._leases = self._leases, ()
        return leases


class LayerStream(Layers):
    """Leading blocks of a prompt, to be read layer by layer. Blocking; one reader at a time. Use it in a `with` block.

    Leaving the block raises `LeaseLostError` when the leases did not live until then, unless another error is on its
    way: all that was read is void then, as it would be of a load.
    """

    def __init__(self, leased: Leased, cut: Cut, end: End, arrive: Arrive) -> None:
        """Hold leases until `end` is called with them; `arrive` brings checksums of those that grow."""
        super().__init__(leased, cut)
        self._arrive = arrive
        self._end = end

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
        self._check(layers)
        ends_s = time.monotonic() + ARRIVE_S
        while growing := self._lacking(layers.stop):
            wait_s = min(ends_s - time.monotonic(), WAIT_S)
            self._grow(growing, self._arrive(growing, parts_of(growing), wait_s) if wait_s > 0 else ())
        return self._copy(layers, into)

    def close(self) -> bool:
        """End the leases; true when all of them lived until now, and when there were none. Idempotent."""
        leases = self._taken()
        is_valid = not leases or self._end(leases, self._suspects)
        void(leases)
        return is_valid


def parts_of(growing: Sequence[Lease]) -> int:
    """Leading parts that are there of the first of some growing blocks."""
    return len(growing[0].parts) // CHECKSUM_BYTES


def lease_route(job: Job, cut: Cut, handover: Handover | None = None) -> Operation[Leased]:
    """Lease the longest prefix that can be had, and what grows behind it in a hand-over.

    Given back when this is interrupted.
    """
    found = yield from (locate(job) if handover else locate_for_load(job))
    held, is_whole, busy_s = yield from _lease(job, cut, found)
    if job.at.is_stale:  # Seen only now: there may be a scope that we do not know yet.
        yield Post((calls.release(job.target, held),))
        yield (calls.scopes(job.target),)
        found = yield from locate(job)
        held, is_whole, busy_s = yield from _lease(job, cut, found)
    if handover is not None and found is not None:
        held += yield from _lease_growing(job, cut, found, held, handover)
    if job.wanted_blocks and is_whole:  # Whoever gets less than there is loads it instead, and is counted there.
        yield Post((calls.count_load(job.target, job.wanted_blocks, len(held)),))
    return Leased(held, min(found.route.shared_blocks, len(held)) if found else 0, is_whole, busy_s)


def _lease(job: Job, cut: Cut, found: Found | None) -> Operation[tuple[tuple[Lease, ...], bool, float]]:
    """Leases of leading blocks, whether there are no more of them, and how long the path to the next is congested."""
    route = found.route if found else Route()
    held: list[Lease] = []
    is_whole, busy_s = True, 0.0
    try:
        wanted = range(min(route.blocks, job.wanted_blocks))
        step = batches.large_batch_blocks(job.target.layout.block_bytes)
        for batch in batches.of_route(route, wanted, step):
            busy_s = yield from _lease_batch(job, cut, batch, held)
            if len(held) < batch.stop:
                is_whole = not (yield from _is_there(job, batch.chain.part(len(held), len(held) + 1)))
                break
    except BaseException:
        yield Post((calls.release(job.target, held),))
        raise
    return tuple(held), is_whole, busy_s


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


def _lease_batch(job: Job, cut: Cut, batch: Batch, held: list[Lease]) -> Operation[float]:
    """Lease a batch in helpings whose checksums fit one answer; ends early where something cannot be had.

    Returns how long the path to what is missing is congested.
    """
    parts = job.target.layout.block_bytes // cut.part_bytes
    step = max(1, PART_SUMS_BYTES_MAX // (parts * CHECKSUM_BYTES))
    for start in range(batch.start, batch.stop, step):
        keys = batch.chain.part(start, min(start + step, batch.stop))
        call = calls.acquire(job.target, keys, job.session, job.lease_s, job.deadline_s, cut.part_bytes)
        (answer,) = yield (call,)
        leases = answer.value
        one_connection = held[0].connection if held else leases[0].connection if leases else 0
        proven = [x for x in leases if len(x.parts) == parts * CHECKSUM_BYTES and x.connection == one_connection]
        held += proven
        if len(proven) < len(leases):  # Of an agent that knows no parts, or of a connection made meanwhile.
            yield Post((calls.release(job.target, leases[len(proven) :]),))
        if len(proven) < len(keys):
            return float(answer.busy_s)
    return 0.0


AsyncArrive = Callable[[Sequence[Lease], int, float], Awaitable[tuple[bytes, ...]]]
"""As `Arrive`."""

AsyncEnd = Callable[[Sequence[Lease], Sequence[Lease]], Awaitable[bool]]
"""As `End`."""

Perform = Callable[[Work], Awaitable[Any]]
"""Does work on memory in a thread; returns, also when cancelled, only when it is done."""


class AsyncLayerStream(Layers):
    """Leading blocks of a prompt, to be read layer by layer in an `async with` block. One reader at a time.

    Iterating yields each layer in turn. Leaving the block ends the leases whatever happened in it, cancellation
    included, and raises as `LayerStream` does.
    """

    def __init__(self, leased: Leased, cut: Cut, end: AsyncEnd, arrive: AsyncArrive, perform: Perform) -> None:
        """Hold leases until `end` is called with them; `arrive` brings checksums of those that grow."""
        super().__init__(leased, cut)
        self._arrive = arrive
        self._end = end
        self._perform = perform

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not await self.close() and error is None:
            raise lost(self.blocks)

    async def __aiter__(self) -> AsyncIterator[Bytes2D]:
        """Yield layers from the first to the last: each (blocks, bytes wanted of a layer) uint8, the caller's."""
        for layer in range(self._cut.layout.layers):
            yield await self.read(range(layer, layer + 1))

    async def read(self, layers: range, into: Bytes2D | None = None) -> Bytes2D:
        """Like `LayerStream.read`, copying in a thread.

        Cancelled, it returns when nothing is written to `into` any more; the stream may be read on.
        """
        self._check(layers)
        ends_s = asyncio.get_running_loop().time() + ARRIVE_S
        while growing := self._lacking(layers.stop):
            wait_s = min(ends_s - asyncio.get_running_loop().time(), WAIT_S)
            self._grow(growing, await self._arrive(growing, parts_of(growing), wait_s) if wait_s > 0 else ())
        made: list[Bytes2D] = []
        await self._perform(Work(lambda: made.append(self._copy(layers, into))))
        return made[0]

    async def close(self) -> bool:
        """See `LayerStream.close`. The leases end also when this is cancelled."""
        leases = self._taken()
        is_valid = not leases or await self._end(leases, self._suspects)
        void(leases)
        return is_valid
