"""What the plugin's `adapter_params` say, parsed and checked once. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstrata_api import __version__
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.lmcache_names import ORDER, Fingerprint
from kvstrata_client.target import Target

CHUNK_TOKENS: Final = 256
"""LMCache's own default."""
WORKERS_MAX: Final = 16
SECONDS_MAX: Final = 60.0
_LAYOUT_FIELDS: Final = frozenset(f.name for f in fields(Layout))


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `adapter_params`."""

    socket: str
    pool: str
    token_file: str
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
    at = (Path(known.socket), known.pool, Path(known.token_file))
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
    for name in ("socket", "pool", "token_file"):
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
