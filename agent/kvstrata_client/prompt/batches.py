"""Cuts a route or a chain into what one call speaks of. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvstrata_api.blocks import BlockKey
from kvstrata_client.prompt.chain import Chain, Route

BATCH_BLOCKS_MAX: Final = 32
BATCH_BYTES_MAX: Final = 32 << 20
"""Bound of what one call leases or reserves."""
AHEAD: Final = 4
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
    """Blocks of one batch of whoever has no other one at the time."""
    return AHEAD * batch_blocks(block_bytes)


def of_route(route: Route, blocks: range, step: int) -> Iterator[Batch]:
    """Cut a range of the route's blocks into batches of at most `step`, in order; no batch spans two chains."""
    for segment in route.segments:
        reach = range(max(blocks.start, segment.chain.first), min(blocks.stop, segment.stop))
        yield from of_chain(segment.chain, reach, step)


def of_chain(chain: Chain, blocks: range, step: int) -> Iterator[Batch]:
    """Cut a range of a chain's blocks, in order."""
    for start in range(blocks.start, blocks.stop, step):
        yield Batch(chain, start, min(start + step, blocks.stop))
