"""Keeps N batches of a prompt in flight while earlier ones are copied. Sans-I/O: yields calls.

A batch is what one call leases or reserves: consecutive blocks of one chain. While one is copied, the agent works on
those around it, so that nobody waits for a round trip.
"""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Final, Protocol

from kvstrata_api.blocks import BlockKey
from kvstrata_client.prompt.chain import Chain, Route
from kvstrata_client.verbs.calls import Calls, Operation, Post

BATCH_BLOCKS_MAX: Final = 32
BATCH_BYTES_MAX: Final = 32 << 20
"""Bound of what one call leases or reserves."""
BATCHES_IN_FLIGHT: Final = 4
"""Batches that a load or a store has at a time, beside those that it gives back: 128 MiB, half of a large extent.

With two the two processes still wait for each other after nearly every batch, more than four bring nothing."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks `start` to `stop` of a prompt, all in one chain."""

    chain: Chain
    start: int
    stop: int

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Their keys."""
        return self.chain.part(self.start, self.stop)


def batch_blocks(block_bytes: int) -> int:
    """Blocks of one batch; at least one, however large it is."""
    return min(BATCH_BLOCKS_MAX, max(1, BATCH_BYTES_MAX // block_bytes))


def large_batch_blocks(block_bytes: int) -> int:
    """Blocks of one batch of an operation that has one batch at a time."""
    return BATCHES_IN_FLIGHT * batch_blocks(block_bytes)


def batches_of(route: Route, blocks: range, step: int) -> Iterator[Batch]:
    """Split a range of the route's blocks into batches of at most `step`, in order; no batch spans two chains."""
    for segment in route.segments:
        first, last = max(blocks.start, segment.chain.first), min(blocks.stop, segment.stop)
        for start in range(first, last, step):
            yield Batch(segment.chain, start, min(start + step, last))


class Pipeline(Protocol):
    """Batches of one load or store: those that arrived and wait to be copied, and those in flight."""

    @property
    def arrived(self) -> Sized:
        """Batches that can be copied."""

    @property
    def in_flight(self) -> Sized:
        """Calls that were sent ahead and not answered yet."""

    def send_next(self) -> Operation[None]:
        """Ask for the next batch, if more is of use now."""

    def copy_next(self) -> Operation[None]:
        """Copy the first batch that arrived, and send what follows from it."""

    def collect_next(self) -> Operation[None]:
        """Process the answers to the first calls in flight."""

    def close(self) -> None:
        """Ask for no more, and give back what arrived."""

    def giving_back(self) -> Calls:
        """Take what is of no use any more, as calls that give it back; none where there is nothing."""


def run_pipeline(pipeline: Pipeline, count: int) -> Operation[None]:
    """Keep `count` batches in flight until nothing is left to copy or collect; what is of no use is given back."""
    try:
        for _ in range(count):  # One by one: the first one is not to wait for the others.
            yield from pipeline.send_next()
        while pipeline.arrived or pipeline.in_flight:
            yield from pipeline.copy_next() if pipeline.arrived else pipeline.collect_next()
            if unused := pipeline.giving_back():
                yield Post(unused)
    except BaseException:
        pipeline.close()
        if unused := pipeline.giving_back():
            yield Post(unused)
        raise
