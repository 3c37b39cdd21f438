"""Pages of SGLang's HiCache as opaque objects: what has to agree, their keys, and the backend's configuration. Pure.

SGLang names a page by a hash of its tokens and those before it, with the request's cache salt and adapter in it. A page
is found under the same hash by whoever agrees in all of `PageFormat`, in the trust scope that the token is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstrata_api import __version__
from kvstrata_api.blocks import BlockKey, Layout, ScopeSecret
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.object_keys import blocks_of, fingerprint_of, object_keys
from kvstrata_client.target import Target, configured_token

KV: Final = "kv"
"""SGLang's name of the pool that holds attention's KV; others hold what belongs to the same pages."""

ELEMENT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of an element by a pool's `spec.compatibility.dtype`."""

SGLANGS_FIELDS: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""What SGLang itself reads of the extra configuration and leaves in it."""

SECONDS_MAX: Final = 60.0
WHERE: Final = "hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class Shard:
    """What part of the model's KV one scheduler has; 0 of 1 where a dimension is not split."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    """Context parallelism of attention."""
    dcp_rank: int = 0
    dcp_size: int = 1
    """Context parallelism of decoding."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What one page of a host pool is. Every field changes every key."""

    pool: str
    """SGLang's name of the pool, as `kv` or `mamba`."""
    model_name: str
    """SGLang's name of the model, with its tag for pools that have a byte format of their own."""
    order: str
    """Memory order: the host pool's layout, and whether pages come as they lie or flattened."""
    tokens: int
    """Tokens of a page."""
    pieces: tuple[int, ...]
    """Bytes of each piece that a page consists of, in order."""
    shard: Shard
    is_replicated: bool
    """True when all ranks of tensor parallelism have the same bytes, as with MLA; they then share keys."""
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    """Geometry of one rank's KV, where the pool has K and V of one shape; 0 where it has not."""

    @property
    def size_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.pieces)

    @property
    def own_shard(self) -> Shard:
        """The shard as far as its bytes are its own."""
        return replace(self.shard, tp_rank=0, tp_size=1) if self.is_replicated else self.shard


class PageNamer:
    """Makes the keys of the pages of one format (`object_keys.Namer`). A name is SGLang's hash of the page."""

    def __init__(self, layout: Layout, page: PageFormat) -> None:
        """Wrap hashes with the layout and the format."""
        self._block_bytes = layout.block_bytes
        split = [getattr(page.shard, f.name) for f in fields(Shard) if not page.is_replicated or f.name[:2] != "tp"]
        rest = [getattr(page, f.name) for f in fields(PageFormat) if f.name != "shard"]
        self._digest = fingerprint_of(
            (b"sglang", layout.layout_id(), *(str(part).encode() for part in (*split, *rest)))
        )

    def keys(self, secret: ScopeSecret, name: str, size_bytes: int) -> tuple[BlockKey, ...]:
        """Keys of a page's blocks. Raises `InvalidInputError` for a size that is not whole blocks."""
        return object_keys(secret, (self._digest, name.encode()), size_bytes, self.blocks_of(size_bytes))

    def blocks_of(self, size_bytes: int) -> int:
        """Blocks of a page. Raises `InvalidInputError` for a size that is not whole blocks, or too many."""
        return blocks_of(size_bytes, self._block_bytes)


def layout_of(identity: "Identity", page: PageFormat) -> Layout:
    """Layout of the blocks that pages of a pool are cut into: one for each `block_tokens` tokens of the page.

    Raises `InvalidInputError` for pages of KV that are not whole blocks, and for any that cannot be cut evenly.
    """
    blocks, rest = divmod(page.tokens, identity.block_tokens)
    if page.pool != KV and (
        rest or not blocks
    ):  # A state of its own, as Mamba's: its size has nothing to do with tokens.
        blocks, rest = 1, 0
    if rest or not blocks:
        raise InvalidInputError(f"page-size: {page.tokens}, a multiple of block_tokens {identity.block_tokens} wanted")
    element_bytes = ELEMENT_BYTES[identity.dtype]
    block_bytes, rest = divmod(page.size_bytes, blocks)
    per_element = 2 * identity.block_tokens * element_bytes
    if rest or block_bytes % per_element or not block_bytes:
        raise InvalidInputError(
            f"{page.pool}: pages of {page.size_bytes} B, {blocks} blocks of a multiple of {per_element} B wanted"
        )
    geometry = (page.layers, page.kv_heads, page.head_dim)
    if page.layers * page.kv_heads * page.head_dim * per_element != block_bytes:
        geometry = (1, 1, block_bytes // per_element)
    shard = page.own_shard
    return Layout(
        identity.model,
        identity.revision,
        identity.dtype,
        identity.block_tokens,
        *geometry,
        element_bytes,
        shard.tp_rank,
        shard.tp_size,
        identity.rope_theta,
        identity.rope_scaling,
        identity.quantization,
        identity.adapter,
        order=f"sglang:{page.pool}:{page.order}",
    )


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the administrator knows of the KV: `spec.compatibility` of the pool, and what that does not name."""

    model: str
    revision: str
    dtype: str
    block_tokens: int
    rope_theta: str = ""
    rope_scaling: str = ""
    quantization: str = ""
    """Scheme of KV quantization and the digest of its scales."""
    adapter: str = ""
    """Digest of an adapter that is merged into the weights; SGLang's hashes have those of requests."""


class Params(Identity, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Our fields of the extra configuration."""

    socket: str
    pool: str
    token_file: str = ""
    """None: the agent goes by the unix user (`kvstrata up`)."""
    lookup_timeout_s: float = 1.0
    """How long a lookup may take before it is a miss."""
    move_timeout_s: float = 10.0
    """How long pages of one call may take to be read or written before the rest of them are misses."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the backend is made of."""

    params: Params
    is_zero_copy: bool
    """True when SGLang calls with the host pool's indices (`interface_v1`) and not with copies of pages."""

    def target(self, layout: Layout) -> Target:
        """What a client of one host pool attaches to."""
        known = self.params
        at = (Path(known.socket), known.pool, configured_token(known.token_file))
        client = f"kvstrata-sglang/{__version__}"
        return Target(*at, layout, client, timeout_s=known.lookup_timeout_s, move_timeout_s=known.move_timeout_s)


def parse(extra: Mapping[str, Any]) -> Options:
    """Check the extra configuration. Raises `InvalidInputError` that names the field, the value and the limit."""
    ours = {name: value for name, value in extra.items() if name not in SGLANGS_FIELDS}
    try:
        known = msgspec.convert(ours, Params)
    except msgspec.ValidationError as e:
        raise InvalidInputError(f"{WHERE}: {e}") from e
    for name in ("socket", "pool", "model", "revision"):
        if not getattr(known, name):
            raise InvalidInputError(f"{WHERE}.{name}: is empty")
    if known.dtype not in ELEMENT_BYTES:
        raise InvalidInputError(f"{WHERE}.dtype: {known.dtype!r}, one of {', '.join(ELEMENT_BYTES)} wanted")
    if known.block_tokens < 1:
        raise InvalidInputError(f"{WHERE}.block_tokens: {known.block_tokens}, at least 1 wanted")
    for name in ("lookup_timeout_s", "move_timeout_s"):
        seconds = getattr(known, name)
        if not 0 < seconds <= SECONDS_MAX:
            raise InvalidInputError(f"{WHERE}.{name}: {seconds}, more than 0 to {SECONDS_MAX} wanted")
    return Options(known, bool(extra.get("interface_v1")))
