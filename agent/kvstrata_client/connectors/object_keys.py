"""Keys of opaque objects: an engine's own names, wrapped with the scope and all that must agree. Pure.

An engine's hash does not cover the weights, scales and layout that its bytes depend on, nor who may see them.
So a key is a MAC of all of these: whoever disagrees in one of them finds nothing. An object is cut into blocks of the
pool; its size enters every key, so that an object is found whole, with the size that it was stored with, or not at all.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final, Protocol

from kvstrata_api.blocks import KEY_BYTES, BlockKey, ScopeSecret
from kvstrata_api.errors import InvalidInputError

BLOCKS_MAX: Final = 1024
"""Blocks of one object: 16 MiB in blocks of 16 KiB; whoever needs more wants larger blocks."""


class Namer(Protocol):
    """Makes the keys of one engine's objects."""

    def keys(self, secret: ScopeSecret, name: Any, size_bytes: int, /) -> tuple[BlockKey, ...]:
        """Keys of an object's blocks in one scope, in order. Raises `InvalidInputError` for what cannot be stored."""

    def blocks_of(self, size_bytes: int, /) -> int:
        """Blocks that an object takes. Raises `InvalidInputError` for a size that is not whole blocks, or too many."""


def blocks_of(size_bytes: int, block_bytes: int) -> int:
    """Blocks that an object takes. Raises `InvalidInputError` for a size that is not whole blocks, or too many."""
    blocks, rest = divmod(size_bytes, block_bytes)
    if rest or not 0 < blocks <= BLOCKS_MAX:
        raise InvalidInputError(f"object of {size_bytes} B: 1 to {BLOCKS_MAX} whole blocks of {block_bytes} B wanted")
    return blocks


def fingerprint_of(parts: Iterable[bytes]) -> bytes:
    """32 bytes that stand for all that makes objects of equal names different bytes."""
    return hashlib.blake2b(_joined(parts), digest_size=32).digest()


def object_keys(secret: ScopeSecret, parts: Iterable[bytes], size_bytes: int, blocks: int) -> tuple[BlockKey, ...]:
    """Keys of an object's blocks in one scope, in order.

    `BLAKE2b-160(scope secret, parts || size || index of the block)`, every part with its length before it. `parts` are
    the fingerprint and whatever names the object.
    """
    seed: Any = hashlib.blake2b(
        _joined((*parts, number(size_bytes))), key=secret.secret, digest_size=KEY_BYTES, person=b"kvstrata.object"
    )
    return tuple(BlockKey(secret.scope, _branch(seed, i)) for i in range(blocks))


def number(value: int) -> bytes:
    """Decimal text of a number, as a part of a name."""
    return str(value).encode()


def _branch(seed: Any, index: int) -> bytes:
    mac = seed.copy()
    mac.update(index.to_bytes(4, "big"))
    digest: bytes = mac.digest()
    return digest


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(p).to_bytes(4, "big") + p for p in parts)
