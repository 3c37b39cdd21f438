"""Verified copies between the agent's memory and the caller's: of whole blocks, and of their layers and heads.

A block is contiguous by layer, then K and V, then head. So a range of layers is one range of bytes, and a range of
heads is one for each layer and each of K and V. The agent gives a checksum for each part of the size that was asked
for; a part is copied and hashed in one pass, as whole blocks are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstrata_api.blocks import Layout
from kvstrata_api.checksum import CHECKSUM_BYTES, bind, bind_part, checksum
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.verbs.results import Bytes2D, Lease, Reservation
from kvstrata_native import copy, copy_digest, copy_digest_each, copy_threads

Pieces = tuple[memoryview, ...]
"""The caller's memory of one block or object, in order: unsigned bytes, contiguous each."""


def copy_verified(lease: Lease, into: memoryview) -> bool:
    """Copy a leased block and check the copy; False means a miss, and that `into` holds nothing of use.

    The copy is what is checked: bytes that change under us, because the lease had ended, cannot pass.
    """
    return copy_digest(into, lease.view, bind(lease.digest, lease.epoch, lease.stamp)) == lease.checksum


def is_intact(lease: Lease) -> bool:
    """Check a leased block where it lies, for a reader that uses it in place; False means a miss.

    It holds for as long as the lease lives, if nobody who may write the scope is hostile: `copy_verified` does not
    depend on that.
    """
    return checksum(lease.view, lease.digest, lease.epoch, lease.stamp) == lease.checksum


def fill(reservation: Reservation, block: memoryview) -> bytes:
    """Copy a block into its reserved slot; return the checksum to publish it with.

    The checksum is of the caller's bytes, not of the slot's: whoever else writes there spoils the block, but never
    gets a checksum for it.
    """
    return copy_digest(_slot(reservation), block, _bound(reservation))


def copy_verified_each(leases: Sequence[Lease], into: Sequence[Pieces]) -> list[bool]:
    """Do what `copy_verified` does for each of several blocks, and let go of the GIL once for all of them."""
    if all(len(pieces) == 1 for pieces in into):
        copies = [(pieces[0], x.view, bind(x.digest, x.epoch, x.stamp)) for x, pieces in zip(leases, into, strict=True)]
        return [made == x.checksum for x, made in zip(leases, copy_digest_each(copies, copy_threads), strict=True)]
    return [_copy_into_pieces(x, pieces) for x, pieces in zip(leases, into, strict=True)]


def fill_each(reservations: Sequence[Reservation], blocks: Sequence[Pieces]) -> list[bytes]:
    """Do what `fill` does for each of several blocks, and let go of the GIL once for all of them."""
    if all(len(block) == 1 for block in blocks):
        slots = [(_slot(x), block[0], _bound(x)) for x, block in zip(reservations, blocks, strict=True)]
        return copy_digest_each(slots, copy_threads)
    return [_fill_from_pieces(x, block) for x, block in zip(reservations, blocks, strict=True)]


def _copy_into_pieces(lease: Lease, into: Pieces) -> bool:
    running, at = xxhash.xxh3_128(seed=bind(lease.digest, lease.epoch, lease.stamp)), 0
    for piece in into:
        copy(piece, lease.view[at : at + len(piece)])
        running.update(piece)  # The copy, as the caller will read it.
        at += len(piece)
    return running.digest() == lease.checksum and at == len(lease.view)


def _fill_from_pieces(reservation: Reservation, block: Pieces) -> bytes:
    view, running, at = _slot(reservation), xxhash.xxh3_128(seed=_bound(reservation)), 0
    for piece in block:
        running.update(piece)
        copy(view[at : at + len(piece)], piece)
        at += len(piece)
    assert at == len(view), f"{at} B for a slot of {len(view)} B"
    return bytes(running.digest())


def _slot(reservation: Reservation) -> memoryview:
    assert reservation.view is not None, "a block that exists already is not written"
    return reservation.view


def _bound(reservation: Reservation) -> int:
    return bind(reservation.digest, reservation.epoch, reservation.stamp)


def cut(pieces: Pieces, step: int) -> list[Pieces]:
    """Cut memory into parts of `step` bytes, the last one of what is left; no byte is copied."""
    parts: list[Pieces] = []
    part: list[memoryview] = []
    room = step
    for piece in pieces:
        while len(piece):
            part.append(piece[:room])
            room -= len(part[-1])
            piece = piece[len(part[-1]) :]  # noqa: PLW2901  What is left of it.
            if not room:
                parts.append(tuple(part))
                part, room = [], step
    return [*parts, tuple(part)] if part else parts


def refill(lease: Lease, reservation: Reservation) -> bytes | None:
    """Copy a leased block into a slot of another scope; None when the copy is not what the lease promised.

    The new checksum comes first: a copy that is right after it was taken was right when it was taken.
    """
    view = _slot(reservation)
    made = copy_digest(view, lease.view, _bound(reservation))
    return made if checksum(view, lease.digest, lease.epoch, lease.stamp) == lease.checksum else None


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Which KV heads of each layer a reader wants, and so the parts that blocks of a layout are split into."""

    layout: Layout
    heads: range | None = None
    """KV heads wanted of each layer; None: all of them, and parts are whole layers."""

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for heads that the layout has not."""
        if self.heads is not None:
            check_range("heads", self.heads, self.layout.kv_heads)

    @property
    def part_bytes(self) -> int:
        """Bytes of one part: a layer, or what a layer has of one head as K or V, or as both together."""
        parts = self.layout.layers * (1 if self.heads is None else self.layout.kv_parts * self.layout.kv_heads)
        return self.layout.block_bytes // parts

    @property
    def layer_bytes(self) -> int:
        """Bytes wanted of each layer of a block."""
        return self.part_bytes * (1 if self.heads is None else self.layout.kv_parts * len(self.heads))

    def parts(self, layers: range) -> Iterator[int]:
        """Numbers of the parts that make up layers, in the order of the block."""
        if self.heads is None:
            yield from layers
            return
        kv_parts = self.layout.kv_parts
        for number in range(kv_parts * layers.start, kv_parts * layers.stop):
            yield from (number * self.layout.kv_heads + head for head in self.heads)


def check_range(name: str, wanted: range, limit: int) -> None:
    """Raise `InvalidInputError` unless `wanted` is a range within 0 to `limit`, with something in it."""
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= limit:
        raise InvalidInputError(f"{name} {wanted.start} to {wanted.stop}: 0 <= start < stop <= {limit} wanted")


def copy_layers(leases: Sequence[Lease], heads: HeadRange, layers: range, into: Bytes2D) -> int:
    """Copy layers of leased blocks into rows of `into`: (blocks, `heads.layer_bytes` x layers) uint8, C-contiguous.

    Returns how many leading blocks' copies are what their leases promise; what follows in `into` is of no use.
    """
    parts, size = tuple(heads.parts(layers)), heads.part_bytes
    rows = into.reshape(len(leases), len(parts), size)
    copies = [
        (memoryview(row), lease.view[part * size : (part + 1) * size], bind_part(bound, part))
        for lease, block in zip(leases, rows, strict=True)
        for bound in (bind(lease.digest, lease.epoch, lease.stamp),)
        for part, row in zip(parts, block, strict=True)
    ]
    made = iter(copy_digest_each(copies, copy_threads))
    for number, lease in enumerate(leases):
        promised = [lease.parts[part * CHECKSUM_BYTES : (part + 1) * CHECKSUM_BYTES] for part in parts]
        if [next(made) for _ in parts] != promised:
            return number
    return len(leases)


def rows_for(blocks: int, heads: HeadRange, layers: range) -> Bytes2D:
    """Memory for `copy_layers`."""
    return np.empty((blocks, heads.layer_bytes * len(layers)), np.uint8)
