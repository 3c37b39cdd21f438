"""A prompt's prefix read in parts: leased once, then copied layer by layer while the engine computes with what it has.

The number of blocks is settled when the leases are given. After that a layer comes whole or the stream is lost: then
the engine computes the prompt without it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import BlockCorruptError, LeaseLostError
from kvstrata_api.wire import PART_SUMS_BYTES_MAX, Handover
from kvstrata_client.prompt import pipeline
from kvstrata_client.prompt.chain import Route, Segment
from kvstrata_client.prompt.pipeline import Batch
from kvstrata_client.prompt.routes import Job, PromptLocations, goal_of, locate, locate_for_load
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Operation, Perform, Post, Work
from kvstrata_client.verbs.copying import HeadRange, check_range, copy_layers, rows_for
from kvstrata_client.verbs.leases import lost, void
from kvstrata_client.verbs.results import Bytes2D, Lease

LEASE_S: Final = 120.0
"""A prefill takes seconds; an engine that is stopped for longer than this has lost its stream."""

ARRIVE_S: Final = 10.0
"""How long the reader of a hand-over waits for the next layer; a prefill computes one in milliseconds."""

POLL_S: Final = 2.0
"""How long one `Arrive` waits at the agent."""

Arrive = Callable[[Sequence[Lease], int, float], tuple[bytes, ...]]
"""Waits for parts of partial blocks behind so many, for so long; checksums for each, none when they are lost."""

End = Callable[[Sequence[Lease], Sequence[Lease], bool], bool]
"""Ends leases, with the suspects among them, and is told whether all layers were read; true when all of them lived
until now."""


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
    wanted_blocks: int = 0
    """What the agent was told of this request when it was made: blocks wanted, without those that are partial; 0 where
    it was told nothing."""

    @property
    def whole_sources(self) -> tuple[str, ...]:
        """Where the blocks were of which it was told that they came."""
        return tuple(lease.source for lease in self.leases if self.wanted_blocks and not lease.is_partial)


class Layers:
    """Leased blocks and how much of them may be read: what the streams of both clients share. Sends nothing."""

    def __init__(self, leased: Leased, heads: HeadRange) -> None:
        """Begin with what was leased."""
        self._leases = leased.leases
        self._suspects: tuple[Lease, ...] = ()
        self._read_layers = 0
        self._heads = heads
        self.blocks = len(self._leases)
        """Leading blocks that every layer is read of; the stream may be empty."""
        self.sources = tuple(lease.source for lease in self._leases)
        """For each block where it was: a tier name, or `remote`."""
        self.shared_blocks = leased.shared_blocks
        """How many of them came from a scope that the tenant shares."""
        self.is_whole = leased.is_whole
        """False where more of the prefix is there: memory cannot hold all of it at a time, or the agent knows no parts.
        A load brings it in batches."""
        self.busy_s = leased.busy_s
        """See `Leased`."""

    def _check(self, layers: range) -> None:
        """Raise `InvalidInputError` for layers that the layout has not, `LeaseLostError` after the end."""
        check_range("layers", layers, self._heads.layout.layers)
        if len(self._leases) != self.blocks:
            raise LeaseLostError("the stream was closed")

    def _lacking(self, layers: int) -> list[Lease]:
        """Partial blocks of which fewer than the first `layers` are there."""
        return [x for x in self._leases if x.is_partial and len(x.parts) < layers * CHECKSUM_BYTES]

    def _add_parts(self, partial: Sequence[Lease], sums: Sequence[bytes]) -> None:
        """Add checksums that arrived. Raises `LeaseLostError` when none did."""
        if not sums:
            raise LeaseLostError(f"layer {parts_of(partial)} of {len(partial)} partial blocks did not come")
        more = {id(x): replace(x, parts=x.parts + new) for x, new in zip(partial, sums, strict=True)}
        self._leases = tuple(more.get(id(x), x) for x in self._leases)

    def _copy(self, layers: range, into: Bytes2D | None) -> Bytes2D:
        """Copy and verify layers that are there. Raises `BlockCorruptError`."""
        rows = rows_for(self.blocks, self._heads, layers) if into is None else into
        sound = copy_layers(self._leases, self._heads, layers, rows)
        if sound < self.blocks:
            self._suspects = (self._leases[sound],)
            raise BlockCorruptError(
                f"layers {layers.start} to {layers.stop} of block {sound} differ from their checksums"
            )
        self._read_layers = max(self._read_layers, layers.stop)
        return rows

    @property
    def _is_read(self) -> bool:
        return self._read_layers == self._heads.layout.layers

    def _taken(self) -> tuple[Lease, ...]:
        leases, self._leases = self._leases, ()
        return leases


class LayerStream(Layers):
    """Leading blocks of a prompt, to be read layer by layer. Blocking; one reader at a time. Use it in a `with` block.

    Leaving the block raises `LeaseLostError` when the leases did not live until then, unless another error is on its
    way: all that was read is void then, as it would be of a load.
    """

    def __init__(self, leased: Leased, heads: HeadRange, end: End, arrive: Arrive) -> None:
        """Hold leases until `end` is called with them; `arrive` brings checksums of those that are partial."""
        super().__init__(leased, heads)
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
        while partial := self._lacking(layers.stop):
            wait_s = min(ends_s - time.monotonic(), POLL_S)
            self._add_parts(partial, self._arrive(partial, parts_of(partial), wait_s) if wait_s > 0 else ())
        return self._copy(layers, into)

    def close(self) -> bool:
        """End the leases; true when all of them lived until now, and when there were none. Idempotent."""
        leases = self._taken()
        is_valid = not leases or self._end(leases, self._suspects, self._is_read)
        void(leases)
        return is_valid


def partial_sources(leases: Sequence[Lease]) -> tuple[str, ...]:
    """Where the partial blocks among some leases are written."""
    return tuple(lease.source for lease in leases if lease.is_partial)


def parts_of(partial: Sequence[Lease]) -> int:
    """Leading parts that are there of the first of some partial blocks."""
    return len(partial[0].parts) // CHECKSUM_BYTES


def lease_route(job: Job, heads: HeadRange, handover: Handover | None = None) -> Operation[Leased]:
    """Lease the longest prefix that can be had, and the partial blocks of a hand-over behind it.

    Given back when this is interrupted.
    """
    found = yield from (locate(job) if handover else locate_for_load(job))
    held, is_whole, busy_s = yield from _lease(job, heads, found)
    if job.at.is_stale:  # Seen only now: there may be a scope that we do not know yet.
        yield Post((calls.release(job.target, held),))
        yield (calls.scopes(job.target),)
        found = yield from locate(job)
        held, is_whole, busy_s = yield from _lease(job, heads, found)
    partial: tuple[Lease, ...] = ()
    if handover is not None and found is not None:
        partial = yield from _lease_partial(job, heads.part_bytes, held, goal_of(job, found), handover)
    # Whoever gets less than there is loads it instead, and is counted there. What is partial may never be whole: it is
    # counted at the end.
    counted = job.wanted_blocks - len(partial) if is_whole else 0
    if counted:
        yield Post((calls.count_load(job.target, counted, len(held)),))
    held += partial
    shared = min(found.route.shared_blocks, len(held)) if found else 0
    return Leased(held, shared, is_whole, busy_s, counted)


def _lease(
    job: Job, heads: HeadRange, found: PromptLocations | None
) -> Operation[tuple[tuple[Lease, ...], bool, float]]:
    """Leases of leading blocks, whether there are no more of them, and how long the path to the next is congested."""
    route = found.route if found else Route()
    held: list[Lease] = []
    is_whole, busy_s = True, 0.0
    try:
        wanted = range(min(route.blocks, job.wanted_blocks))
        step = pipeline.large_batch_blocks(job.target.layout.block_bytes)
        for batch in pipeline.batches_of(route, wanted, step):
            busy_s = yield from _lease_batch(job, heads.part_bytes, batch, held)
            if len(held) < batch.stop:
                is_whole = not (yield from _is_there(job, batch.chain.part(len(held), len(held) + 1)))
                break
    except BaseException:
        yield Post((calls.release(job.target, held),))
        raise
    return tuple(held), is_whole, busy_s


def _lease_partial(
    job: Job, part_bytes: int, held: tuple[Lease, ...], goal: Segment | None, handover: Handover
) -> Operation[tuple[Lease, ...]]:
    """Leases of blocks behind those that are held, which their writer is still computing."""
    keys = goal.chain.part(len(held), job.wanted_blocks) if goal and goal.chain.first <= len(held) else ()
    if not keys:
        return ()
    try:
        plain = calls.acquire(job.target, keys, job.session, job.lease_s, job.deadline_s, part_bytes)
        leases: tuple[Lease, ...] = (yield (calls.follow(plain, handover),))[0].value
    except BaseException:
        yield Post((calls.release(job.target, held),))
        raise
    usable = tuple(x for x in leases if x.is_partial and (not held or x.connection == held[0].connection))
    if len(usable) < len(leases):
        yield Post((calls.release(job.target, leases),))
        return ()
    return usable


def _is_there(job: Job, keys: Sequence[BlockKey]) -> Operation[bool]:
    answers = yield (calls.lookup(job.target, keys, job.session, is_probe=True),)
    return bool(answers[0].value.blocks)


def _lease_batch(job: Job, part_bytes: int, batch: Batch, held: list[Lease]) -> Operation[float]:
    """Lease a batch by calls whose checksums fit one answer each; ends early where something cannot be had.

    Returns how long the path to what is missing is congested.
    """
    parts = job.target.layout.block_bytes // part_bytes
    step = max(1, PART_SUMS_BYTES_MAX // (parts * CHECKSUM_BYTES))
    for start in range(batch.start, batch.stop, step):
        keys = batch.chain.part(start, min(start + step, batch.stop))
        call = calls.acquire(job.target, keys, job.session, job.lease_s, job.deadline_s, part_bytes)
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

AsyncEnd = Callable[[Sequence[Lease], Sequence[Lease], bool], Awaitable[bool]]
"""As `End`."""


class AsyncLayerStream(Layers):
    """Leading blocks of a prompt, to be read layer by layer in an `async with` block. One reader at a time.

    Iterating yields each layer in turn. Leaving the block ends the leases whatever happened in it, cancellation
    included, and raises as `LayerStream` does.
    """

    def __init__(self, leased: Leased, heads: HeadRange, end: AsyncEnd, arrive: AsyncArrive, perform: Perform) -> None:
        """Hold leases until `end` is called with them; `arrive` brings checksums of those that are partial."""
        super().__init__(leased, heads)
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
        for layer in range(self._heads.layout.layers):
            yield await self.read(range(layer, layer + 1))

    async def read(self, layers: range, into: Bytes2D | None = None) -> Bytes2D:
        """Like `LayerStream.read`, copying in a thread.

        Cancelled, it returns when nothing is written to `into` any more; the stream may be read on.
        """
        self._check(layers)
        ends_s = asyncio.get_running_loop().time() + ARRIVE_S
        while partial := self._lacking(layers.stop):
            wait_s = min(ends_s - asyncio.get_running_loop().time(), POLL_S)
            self._add_parts(partial, await self._arrive(partial, parts_of(partial), wait_s) if wait_s > 0 else ())
        made: list[Bytes2D] = []
        await self._perform(Work(lambda: made.append(self._copy(layers, into))))
        return made[0]

    async def close(self) -> bool:
        """See `LayerStream.close`. The leases end also when this is cancelled."""
        leases = self._taken()
        is_valid = not leases or await self._end(leases, self._suspects, self._is_read)
        void(leases)
        return is_valid
