"""Layers and heads of leased blocks: which parts of a block they are, and verified copies of them. Pure memory.

A block is contiguous by layer, then K and V, then head. So a range of layers is one stretch of it, and a range of heads
is one stretch for each layer and each of K and V. The agent gives a checksum for each part of the size that was asked
for; a part is copied and hashed in one pass, as whole blocks are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata_api.blocks import Layout
from kvstrata_api.checksum import CHECKSUM_BYTES, bind, bind_part
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.verbs.results import Bytes2D, Lease
from kvstrata_native import copy_digest


@dataclass(frozen=True, slots=True)
class Cut:
    """How blocks of a layout are cut into parts, and which parts a reader wants."""

    layout: Layout
    heads: range | None = None
    """KV heads wanted of each layer; None wants all of them, and parts are whole layers."""

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for heads that the layout has not."""
        if self.heads is not None:
            check_range("heads", self.heads, self.layout.kv_heads)

    @property
    def part_bytes(self) -> int:
        """Bytes of one part: a layer, or one head's K or V of a layer."""
        parts = self.layout.layers * (1 if self.heads is None else 2 * self.layout.kv_heads)
        return self.layout.block_bytes // parts

    @property
    def layer_bytes(self) -> int:
        """Bytes wanted of each layer of a block."""
        return self.part_bytes * (1 if self.heads is None else 2 * len(self.heads))

    def parts(self, layers: range) -> Iterator[int]:
        """Numbers of the parts that make up layers, in the order of the block."""
        if self.heads is None:
            yield from layers
            return
        for layer in layers:
            for kv in range(2):
                yield from ((2 * layer + kv) * self.layout.kv_heads + head for head in self.heads)


def check_range(name: str, wanted: range, limit: int) -> None:
    """Raise `InvalidInputError` unless `wanted` is a stretch of 0 to `limit`, with something in it."""
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= limit:
        raise InvalidInputError(f"{name} {wanted.start} to {wanted.stop}: 0 <= start < stop <= {limit} wanted")


def copy_layers(leases: Sequence[Lease], cut: Cut, layers: range, into: Bytes2D) -> int:
    """Copy layers of leased blocks into rows of `into`: (blocks, `cut.layer_bytes` x layers) uint8, C-contiguous.

    Returns how many leading blocks' copies are what their leases promise; what follows in `into` is of no use.
    """
    parts = tuple(cut.parts(layers))
    rows = into.reshape(len(leases), len(parts), cut.part_bytes)
    for number, lease in enumerate(leases):
        if not _copy_parts(lease, cut.part_bytes, parts, rows[number]):
            return number
    return len(leases)


def _copy_parts(lease: Lease, part_bytes: int, parts: Sequence[int], into: Bytes2D) -> bool:
    bound = bind(lease.digest, lease.epoch, lease.stamp)
    for part, row in zip(parts, into, strict=True):
        view = lease.view[part * part_bytes : (part + 1) * part_bytes]
        promised = lease.parts[part * CHECKSUM_BYTES : (part + 1) * CHECKSUM_BYTES]
        if copy_digest(memoryview(row), view, bind_part(bound, part)) != promised:
            return False
    return True


def rows_for(blocks: int, cut: Cut, layers: range) -> Bytes2D:
    """Memory for `copy_layers`."""
    return np.empty((blocks, cut.layer_bytes * len(layers)), np.uint8)
