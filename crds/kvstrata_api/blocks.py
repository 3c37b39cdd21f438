"""Blocks and their keys: layout id, scope secret, salted chain; and prefixes of prompts by their digests. Pure.

There is one `BlockKey` type and no way to make one without a scope, because the commonest real failure of
prefix sharing is a salt that was lost in an outer tier (LMCache#2878, #4825, llm-d-router#1389).

A share names prefixes without their tokens. The digest of a prefix is SHA-256 over its token ids, each as four bytes,
least significant first, with nothing before, between or after them. It names tokens and nothing else: no tokenizer,
model or pool is part of it. Whoever can guess a prefix can check the guess against its digest, so only what may be
known anyway should be named like that.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NewType

import msgspec
import numpy as np
import numpy.typing as npt

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.names import NamedPrefix
from kvstrata_api.names import ScopeId as ScopeId  # noqa: PLC0414  Blocks are addressed by it.

KEY_BYTES: Final = 20
"""160-bit MAC: 2^80 work for a collision, and that only inside a scope whose secret one holds."""

_DIGEST: Final = np.dtype(f"V{KEY_BYTES}")

LAYOUT_ID_BYTES: Final = 16

_TOKEN_MAX: Final = (1 << 32) - 1

TokenIds = Sequence[int] | npt.NDArray[np.uint32]

LayoutId = NewType("LayoutId", bytes)
"""16-byte digest of everything that makes two blocks of equal tokens different bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry and identity of one shard's KV blocks. Every field changes the layout id."""

    model: str
    revision: str
    dtype: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    tp_rank: int = 0
    tp_size: int = 1
    rope_theta: str = ""
    """Decimal text, because floats do not compare across languages."""
    rope_scaling: str = ""
    """Canonical JSON of the scaling parameters."""
    quantization: str = ""
    """Scheme and digest of its scales, which live outside the page (FP8)."""
    adapter: str = ""
    """Digest of the LoRA adapter."""
    order: str = "layer,kv,head,token,dim"
    """Memory order of one block, slowest first."""
    kv_parts: int = 2
    """2: keys and values; 1: one latent vector for both (multi-head latent attention), of one head."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers."""
        return self.layers * self.kv_parts * self.kv_heads * self.block_tokens * self.head_dim * self.element_bytes

    def layout_id(self) -> LayoutId:
        """Digest of all fields, length-prefixed with their names so that no two layouts collide by shifting.

        Keys and values apart are what all layouts had before `kv_parts`: blocks of that time keep their ids.
        """
        digest = hashlib.blake2b(digest_size=LAYOUT_ID_BYTES, person=b"kvstrata.layout")
        for f in fields(self):
            if f.name == "kv_parts" and self.kv_parts == 2:
                continue
            for part in (f.name, str(getattr(self, f.name))):
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(4, "big") + encoded)
        return LayoutId(digest.digest())


def variant_of(layout_id: LayoutId, variant: str) -> LayoutId:
    """Id of blocks that have a layout's geometry and differ in what `variant` names, so that none is another's."""
    return LayoutId(
        hashlib.blake2b(
            variant.encode(), key=layout_id, digest_size=LAYOUT_ID_BYTES, person=b"kvstrata.variant"
        ).digest()
    )


@dataclass(frozen=True, slots=True)
class ScopeSecret:
    """Key material of one trust scope. Handed only to identities that may read the scope."""

    scope: ScopeId
    secret: bytes = field(repr=False)
    """32 random bytes."""

    def __post_init__(self) -> None:
        assert len(self.secret) == 32, "scope secrets have 32 bytes"

    def tag(self) -> str:
        """16 hex digits that stand for the scope in Redis and reveal nothing about names or members."""
        return hashlib.blake2b(b"tag", key=self.secret, digest_size=8, person=b"kvstrata.scope").hexdigest()


class BlockKey(msgspec.Struct, frozen=True, gc=False):
    """Name of one block: the scope it belongs to and its chained MAC."""

    scope: ScopeId
    digest: bytes

    def __post_init__(self) -> None:
        assert len(self.digest) == KEY_BYTES, f"key of {len(self.digest)} bytes, {KEY_BYTES} wanted"

    def __str__(self) -> str:
        """First 8 hex digits; enough for logs, too little to look up."""
        return self.digest[:4].hex()


def token_ids(tokens: TokenIds) -> npt.NDArray[np.uint32]:
    """Tokens as 32-bit words, little-endian.

    Raises `InvalidInputError` for anything but whole numbers from 0 to 2^32 - 1: cut to size silently, two prompts
    would have the keys of one.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32:
        return tokens.astype("<u4", copy=False)
    found = np.asarray(tokens)
    if not found.size:
        return np.empty(found.shape, "<u4")
    if found.dtype.kind not in "iu" or int(found.min()) < 0 or int(found.max()) > _TOKEN_MAX:
        raise InvalidInputError(f"tokens of {found.dtype}: whole numbers from 0 to {_TOKEN_MAX} wanted")
    return found.astype("<u4")


def chain_keys(
    secret: ScopeSecret,
    layout_id: LayoutId,
    tokens: TokenIds,
    block_tokens: int,
    *,
    parent: bytes = b"",
    extras: Iterable[bytes] = (),
) -> list[BlockKey]:
    """Keys of all full blocks of `tokens`, in order; a tail shorter than a block has no key.

    `key_i = BLAKE2b-160(scope secret, layout || key_{i-1} || len || tokens || len-prefixed extras)`. `parent` is
    the key that the first block continues (empty for a root); `extras` are digests of whatever else the block
    depends on (multimodal inputs). The secret comes first, so equal prompts of scopes that do not share it
    never name the same block.
    """
    packed = token_ids(tokens).tobytes()
    step = block_tokens * 4
    tail = b"".join(len(e).to_bytes(4, "big") + e for e in extras)
    prefix = step.to_bytes(4, "big")
    seed = hashlib.blake2b(layout_id, key=secret.secret, digest_size=KEY_BYTES, person=b"kvstrata.block")
    digest = parent
    keys: list[BlockKey] = []
    for start in range(0, len(packed) - step + 1, step):
        mac = seed.copy()
        mac.update(len(digest).to_bytes(1, "big") + digest + prefix + packed[start : start + step] + tail)
        digest = mac.digest()
        keys.append(BlockKey(secret.scope, digest))
    return keys


def pack_digests(keys: Iterable[BlockKey]) -> bytes:
    """Join the digests of keys of one scope, for the wire."""
    return b"".join([k.digest for k in keys])


def unpack_digests(packed: bytes) -> list[bytes]:
    """Split what `pack_digests` joined; the caller has checked the length."""
    digests: list[bytes] = np.frombuffer(packed, _DIGEST).tolist()
    return digests


def prefix_digest(tokens: TokenIds) -> bytes:
    """Digest of all of `tokens`."""
    return hashlib.sha256(token_ids(tokens).tobytes()).digest()


def digests_at(tokens: TokenIds, lengths: Iterable[int]) -> dict[int, bytes]:
    """Digests of the leading tokens at several lengths, in one pass; lengths beyond the tokens are left out."""
    packed = token_ids(tokens).tobytes()
    running, at, found = hashlib.sha256(), 0, {}
    for length in sorted({n for n in lengths if 0 < n * 4 <= len(packed)}):
        running.update(packed[at * 4 : length * 4])
        found[length] = running.copy().digest()
        at = length
    return found


def matching(tokens: TokenIds, prefixes: Iterable[NamedPrefix]) -> set[NamedPrefix]:
    """Return those prefixes that `tokens` begin with."""
    listed = set(prefixes)
    found = digests_at(tokens, (p.token_count for p in listed)) if listed else {}
    return {p for p in listed if found.get(p.token_count) == p.digest}


def shared_blocks(token_count: int, block_tokens: int) -> int:
    """Whole blocks inside of a prefix. The block in which it ends holds private tokens as well, so it is private."""
    return token_count // block_tokens
