"""The checksum of a block in memory, bound to its key and to the use of its slot. Pure."""

import struct
from collections.abc import Sequence
from typing import Final

import xxhash

from kvstrata_native import copy_sound, digest_pairs

CHECKSUM_BYTES: Final = 16

Use = tuple[int, int]
"""Epoch and stamp."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples of it are far apart (Knuth, The Art of Computer Programming 3, 6.4)."""
_MASK: Final = (1 << 64) - 1


def bind(digest: bytes, epoch: int, stamp: int) -> int:
    """64-bit seed that ties a checksum to one key in one use of one slot.

    A block that was copied from the right place at the wrong time, or from a neighbour, fails the check.
    """
    return xxhash.xxh3_64_intdigest(digest + struct.pack("<QQ", epoch, stamp))


def checksum(block: memoryview | bytes, digest: bytes, epoch: int, stamp: int) -> bytes:
    """XXH3-128 of `block` under the bound seed; 16 bytes. Releases the GIL for large blocks."""
    return xxhash.xxh3_128_digest(block, seed=bind(digest, epoch, stamp))


def rebound(blocks: Sequence[tuple[memoryview, bytes, Use, Use]]) -> list[tuple[bytes, bytes]]:
    """Checksums of each block of a digest for two uses, of the same bytes: whoever writes meanwhile spoils both.

    In one go for all, so that many small blocks cost as little as few large ones.
    """
    return digest_pairs([(block, bind(digest, *one), bind(digest, *other)) for block, digest, one, other in blocks])


def copied(blocks: Sequence[tuple[memoryview, memoryview, bytes, bytes, Use, Use]]) -> list[bytes]:
    """Fill the first memory of each block with the second one, where that is what a checksum was made of.

    A block is the two memories, the block's digest, the checksum, the use that this is bound to, and the one for which
    a checksum is returned; empty where nothing was copied. The second memories must be out of others' reach.
    """
    return copy_sound([
        (into, source, bind(digest, *theirs), bind(digest, *ours), wanted)
        for into, source, digest, wanted, theirs, ours in blocks
    ])  # fmt: skip


def bind_part(bound: int, index: int) -> int:
    """Seed for one part of a block whose own seed is `bound`: no part passes for another."""
    return (bound + (index + 1) * _GOLDEN) & _MASK
