"""What the kit and the program that it drives agree on: prompts as ranges, blocks made from a seed. Pure."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.verbs.results import Bytes2D

Ranges = Sequence[Sequence[int]]
"""First token and count of each run of consecutive token ids."""

TOKENS_MAX: Final = 1 << 24
_CHUNK_BYTES: Final = 32


def tokens_of(ranges: Ranges) -> npt.NDArray[np.uint32]:
    """Tokens of a prompt. Raises `InvalidInputError` for more than `TOKENS_MAX`."""
    count = sum(count for _, count in ranges)
    if count > TOKENS_MAX:
        raise InvalidInputError(f"tokens of {count}, limit {TOKENS_MAX}")
    runs = [np.arange(first, first + count, dtype=np.uint32) for first, count in ranges]
    return np.concatenate(runs) if runs else np.empty(0, np.uint32)


def block_of(seed: int, index: int, size_bytes: int) -> bytes:
    """Content of a prompt's block: SHA-256 over seed, index and a running number, eight bytes each, little-endian."""
    chunks = range(-(-size_bytes // _CHUNK_BYTES))
    return b"".join(hashlib.sha256(struct.pack("<QQQ", seed, index, i)).digest() for i in chunks)[:size_bytes]


def blocks_of(seed: int, indices: Iterable[int], size_bytes: int) -> Bytes2D:
    """Content of several blocks: (blocks, bytes) uint8."""
    rows = [np.frombuffer(block_of(seed, i, size_bytes), np.uint8) for i in indices]
    return np.array(rows, np.uint8).reshape(len(rows), size_bytes)


def digests_of(blocks: Bytes2D) -> list[str]:
    """SHA-256 of each block, in hex: how a program says what it has read."""
    return [hashlib.sha256(memoryview(row)).hexdigest() for row in blocks]
