"""Names of LMCache's objects as block keys (`object_keys`), with all that must agree. Pure.

What has to agree is configured in the plugin's `adapter_params`, which are parsed and checked here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstrata_api import __version__
from kvstrata_api.blocks import BlockKey, Layout, ScopeSecret
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.object_keys import blocks_of, fingerprint_of, number, object_keys
from kvstrata_client.target import Target, configured_token

ORDER: Final = "kv,layer,token,head,dim"
"""Memory order of LMCache's objects (KV_2LTD), unlike that of blocks of our own."""

CHUNK_TOKENS: Final = 256
"""LMCache's own default."""
WORKERS_MAX: Final = 16
SECONDS_MAX: Final = 60.0
_LAYOUT_FIELDS: Final = frozenset(f.name for f in fields(Layout))


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
        """Size of an object whose size is not given."""
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
        return blocks_of(size_bytes, self.layout.block_bytes)

    def digest(self) -> bytes:
        """32 bytes that stand for all fields."""
        parts = [str(getattr(self, f.name)).encode() for f in fields(self) if f.name != "layout"]
        return fingerprint_of((self.layout.layout_id(), *parts))


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
        """Keys of an object's blocks. Raises `InvalidInputError` for another model or a size that does not fit."""
        self.check(name)
        parts = (self._digest, number(name.rank), number(name.group), name.salt.encode(), name.chunk)
        return object_keys(secret, parts, size_bytes, self.blocks_of(size_bytes))

    def blocks_of(self, size_bytes: int) -> int:
        """Blocks that an object takes. Raises `InvalidInputError` for a size that is not whole blocks, or too many."""
        return self.fingerprint.blocks_of(size_bytes)


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `adapter_params`."""

    socket: str
    pool: str
    token_file: str = ""
    """None: the agent goes by the unix user (`kvstrata up`)."""
    layout: Layout
    """Fields of `kvstrata_api.blocks.Layout`, for one shard; `order` is LMCache's unless it is given."""
    model_name: str = ""
    """What LMCache calls the model; the layout's model when empty."""
    chunk_tokens: int = CHUNK_TOKENS
    """LMCache's chunk size: a multiple of the pool's block size."""
    hash_algorithm: str = "blake3"
    hash_seed: str = ""
    """PYTHONHASHSEED, for hashes that depend on it."""
    workers: int = 2
    """Threads that copy."""
    load_deadline_s: float = 10.0
    """How long one load may take to be brought up into memory."""
    lookup_timeout_s: float = 0.5
    """How long a lookup waits for its agent before it is a miss: a request waits for it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the adapter is made of."""

    target: Target
    fingerprint: Fingerprint
    workers: int
    load_deadline_s: float


def parse(params: Mapping[str, Any]) -> Options:
    """Check `adapter_params`. Raises `InvalidInputError` that names the field, the value and the limit."""
    known = _parsed(params)
    _check(known)
    model_name = known.model_name or known.layout.model
    fingerprint = Fingerprint(known.layout, model_name, known.chunk_tokens, known.hash_algorithm, known.hash_seed)
    client = f"kvstrata-lmcache/{__version__}"
    at = (Path(known.socket), known.pool, configured_token(known.token_file))
    target = Target(*at, known.layout, client, timeout_s=known.lookup_timeout_s)
    return Options(target, fingerprint, known.workers, known.load_deadline_s)


def _parsed(params: Mapping[str, Any]) -> Params:
    layout = params.get("layout")
    if isinstance(layout, Mapping):
        if unknown := sorted(set(layout) - _LAYOUT_FIELDS):  # One that is overlooked would not be in the fingerprint.
            raise InvalidInputError(f"adapter_params.layout: no such fields: {', '.join(map(str, unknown))}")
        params = {**params, "layout": {"order": ORDER, **layout}}
    try:
        return msgspec.convert(dict(params), Params)
    except msgspec.ValidationError as e:
        raise InvalidInputError(f"adapter_params: {e}") from e


def _check(known: Params) -> None:
    for name in ("socket", "pool"):
        if not getattr(known, name):
            raise InvalidInputError(f"adapter_params.{name}: is empty")
    for name in ("block_tokens", "layers", "kv_heads", "head_dim", "element_bytes"):
        if getattr(known.layout, name) < 1:
            raise InvalidInputError(f"adapter_params.layout.{name}: {getattr(known.layout, name)}, at least 1 wanted")
    if not 1 <= known.workers <= WORKERS_MAX:
        raise InvalidInputError(f"adapter_params.workers: {known.workers}, 1 to {WORKERS_MAX} wanted")
    for name in ("load_deadline_s", "lookup_timeout_s"):
        if not 0 < getattr(known, name) <= SECONDS_MAX:
            seconds = getattr(known, name)
            raise InvalidInputError(f"adapter_params.{name}: {seconds}, more than 0 to {SECONDS_MAX} wanted")
