"""Names of LMCache's objects as block keys: opaque hashes, wrapped with the scope and all that must agree. Pure.

An engine's hash says nothing about the weights, scales and layout that its bytes depend on, nor about who may see them.
So a key is a MAC of all of these: whoever disagrees in one of them finds nothing. An object is cut into blocks of the
pool; its size enters every key, so that an object is found whole, with the size that it was stored with, or not at all.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final

from kvstrata_api.blocks import KEY_BYTES, BlockKey, Layout, ScopeSecret
from kvstrata_api.errors import InvalidInputError

BLOCKS_MAX: Final = 1024
"""Blocks of one object: 16 MiB in blocks of 16 KiB; whoever needs more wants larger blocks."""

ORDER: Final = "kv,layer,token,head,dim"
"""Memory order of LMCache's objects (KV_2LTD), unlike that of blocks of our own."""


@dataclass(frozen=True, slots=True)
class Name:
    """What LMCache calls one object: the fields of its `ObjectKey`."""

    model: str
    rank: int
    """Packed world size and rank; each shard has objects of its own."""
    group: int
    salt: str
    """Cache salt: users of one LMCache server that must not share."""
    chunk: bytes
    """Hash of the tokens up to the end of the chunk."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that makes objects of equal names different bytes. Every field changes every key."""

    layout: Layout
    """Weights revision, KV dtype, digest of the scales, digest of the adapter and the shard's geometry."""
    model_name: str
    """The only model whose objects are taken, as LMCache names it."""
    chunk_tokens: int
    hash_algorithm: str
    hash_seed: str

    @property
    def object_bytes(self) -> int:
        """Size of an object that nobody has told the size of."""
        return self.layout.block_bytes * (self.chunk_tokens // self.layout.block_tokens)

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for chunks that are not whole blocks, or too many of them."""
        block_tokens = self.layout.block_tokens
        if self.chunk_tokens < 1 or self.chunk_tokens % block_tokens:
            raise InvalidInputError(
                f"chunk_tokens: {self.chunk_tokens}, a multiple of block_tokens {block_tokens} wanted"
            )
        self.blocks_of(self.object_bytes)

    def blocks_of(self, size_bytes: int) -> int:
        """Blocks that an object takes. Raises `InvalidInputError` for a size that is not whole blocks, or too many."""
        blocks, rest = divmod(size_bytes, self.layout.block_bytes)
        if rest or not 0 < blocks <= BLOCKS_MAX:
            raise InvalidInputError(
                f"object of {size_bytes} B: 1 to {BLOCKS_MAX} whole blocks of {self.layout.block_bytes} B wanted"
            )
        return blocks

    def digest(self) -> bytes:
        """32 bytes that stand for all fields."""
        parts = [str(getattr(self, f.name)).encode() for f in fields(self) if f.name != "layout"]
        return hashlib.blake2b(_joined((self.layout.layout_id(), *parts)), digest_size=32).digest()


class Namer:
    """Makes the keys of objects."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        """Wrap names with `fingerprint`."""
        self.fingerprint = fingerprint
        self._digest = fingerprint.digest()

    def check(self, name: Name) -> None:
        """Raise `InvalidInputError` for an object of another model."""
        if name.model != self.fingerprint.model_name:
            raise InvalidInputError(f"object of model {name.model!r}: this adapter has {self.fingerprint.model_name!r}")

    def keys(self, secret: ScopeSecret, name: Name, size_bytes: int) -> tuple[BlockKey, ...]:
        """Keys of an object's blocks in one scope, in order.

        `BLAKE2b-160(scope secret, fingerprint || name || size || index of the block)`, every part with its length
        before it. Raises `InvalidInputError` for another model or a size that does not fit.
        """
        self.check(name)
        blocks = self.fingerprint.blocks_of(size_bytes)
        parts = (self._digest, _number(name.rank), _number(name.group), name.salt.encode(), name.chunk)
        seed: Any = hashlib.blake2b(
            _joined((*parts, _number(size_bytes))), key=secret.secret, digest_size=KEY_BYTES, person=b"kvstrata.object"
        )
        return tuple(BlockKey(secret.scope, _branch(seed, i)) for i in range(blocks))


def _branch(seed: Any, index: int) -> bytes:
    mac = seed.copy()
    mac.update(index.to_bytes(4, "big"))
    digest: bytes = mac.digest()
    return digest


def _number(value: int) -> bytes:
    return str(value).encode()


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(p).to_bytes(4, "big") + p for p in parts)
