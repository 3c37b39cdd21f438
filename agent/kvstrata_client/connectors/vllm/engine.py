"""What vLLM's configuration makes of blocks: the layout of a worker's shard, its cache groups, variants of requests.

Reads plain attributes of vLLM's objects and imports nothing of it.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvstrata_api import __version__
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.units import GIB
from kvstrata_client.target import Target, configured_token

BLOCK_TOKENS: Final = 16
"""Tokens of a block of ours unless the configuration says what else the pool has."""
DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FP8: Final = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}

Seconds = Annotated[float, msgspec.Meta(gt=0, le=60)]


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What both the connector and the tier are told of the pool, and how long they may wait for it."""

    socket: Annotated[str, msgspec.Meta(min_length=1)]
    """Unix socket of the node's agent of the pool."""
    pool: Annotated[str, msgspec.Meta(min_length=1)]
    token_file: str = ""
    """Of the pod's projected token; its tenant is the only one that is ever read or written for. Empty where the agent
    knows callers by their unix user (`kvstrata up`)."""
    model: str = ""
    """As in the pool's `compatibility`; vLLM's model name when empty."""
    revision: str = ""
    """The same of the weights; vLLM's revision when empty."""
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)] = BLOCK_TOKENS
    load_deadline_s: Seconds = 2.0
    """How long a request waits for its blocks before it is computed."""
    miss_s: Seconds = 1.0
    """How long a block is a miss that could not be fetched."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """That fetch, in each process."""

    def target(self, layout: Layout, *, timeout_s: float) -> Target:
        """What to attach to."""
        return Target(
            Path(self.socket), self.pool, configured_token(self.token_file), layout, f"kvstrata-vllm/{__version__}",
            timeout_s=timeout_s, move_timeout_s=self.load_deadline_s, silence_s=min(2.0, self.load_deadline_s),
        )  # fmt: skip


class Settings(PoolSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_connector_extra_config`."""

    lookup_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.05
    """How long the scheduler waits for the agent's answer to a lookup, once for each request."""
    staging_bytes: Annotated[int, msgspec.Meta(ge=0)] = GIB
    """Memory of each worker for blocks on their way in, and as much for those on their way out."""
    layerwise: bool = False
    """Put each layer of a load on its way by itself, so that the first layers are computed meanwhile (devices)."""
    forgets_at_reset: bool = True
    """Whether weights may be other ones after vLLM has reset its caches, as when it sleeps or a trainer updates it."""


T = TypeVar("T")


def parse(extra: Mapping[str, Any]) -> Settings:
    """Check `kv_connector_extra_config`. Raises `InvalidInputError` that names field, value and limit."""
    return converted(extra, Settings, "kv_connector_extra_config")


def converted(given: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Check settings. Raises `InvalidInputError` that names field, value and limit."""
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as e:
        field = re.search(r"\$\.(\w+)", str(e))
        value = f" (given: {given.get(field[1])!r})" if field else ""
        raise InvalidInputError(f"{where}: {e}{value}") from e


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that have one table of pages."""

    layers: tuple[str, ...]
    """Names, in the order of the model."""
    positions: tuple[int, ...]
    """Of each in the model: its place in a block."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The pages of one worker."""

    groups: tuple[Group, ...]
    page_tokens: int
    kv_heads: int
    head_dim: int
    kv_parts: int
    """1 where keys and values are one latent vector."""
    element_bytes: int
    dtype: str
    """As in a pool's `compatibility`."""

    @property
    def layers(self) -> int:
        """All of them."""
        return sum(len(group.layers) for group in self.groups)


def geometry_of(kv_cache_config: Any, cache_dtype: str, block_tokens: int) -> Geometry:
    """Read the cache groups. Raises `InvalidInputError` that says what cannot be kept in blocks of ours."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not hasattr(spec, "num_kv_heads") or not hasattr(spec, "head_size"):
            raise InvalidInputError(f"layers of {type(spec).__name__}: attention alone can be kept")
        if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "state_content_bytes", None) is not None:
            raise InvalidInputError(f"layers of {type(spec).__name__}: packed or compressed pages cannot be kept")
        if getattr(spec, "non_causal", False):  # As in vLLM's engine core, which turns its own prefix cache off.
            raise InvalidInputError("non-causal attention (Prefix-LM): a block depends on the tokens behind it")
        is_latent = "MLA" in type(spec).__name__
        if not is_latent and getattr(spec, "head_size_v", None) not in {None, spec.head_size}:
            raise InvalidInputError(f"head_size {spec.head_size}, of values {spec.head_size_v}: equal ones wanted")
        dtype = str(spec.dtype).removeprefix("torch.")
        named = FP8.get(cache_dtype) if cache_dtype.startswith("fp8") else DTYPES.get(dtype)
        if named is None:
            raise InvalidInputError(f"kv_cache_dtype {cache_dtype} of {dtype}: bf16, fp16, fp32 and fp8 can be kept")
        size = {"bf16": 2, "fp16": 2, "fp32": 4}.get(named, 1)
        found.append((spec.block_size, spec.num_kv_heads, spec.head_size, 1 if is_latent else 2, size, named))
    if len(set(found)) != 1:
        raise InvalidInputError(
            f"cache groups (page tokens, heads, dim, parts, bytes, type) {found}: equal ones wanted"
        )
    page_tokens, heads, dim, parts, size, named = found[0]
    if page_tokens % block_tokens:
        raise InvalidInputError(f"block_size {page_tokens}: a multiple of the pool's {block_tokens} tokens wanted")
    names = sorted((n for g in kv_cache_config.kv_cache_groups for n in g.layer_names), key=_by_number)
    position = {name: i for i, name in enumerate(names)}
    groups = tuple(
        Group(tuple(ordered), tuple(position[n] for n in ordered))
        for ordered in (sorted(g.layer_names, key=_by_number) for g in kv_cache_config.kv_cache_groups)
    )
    return Geometry(groups, page_tokens, heads, dim, parts, size, named)


def layout_of(settings: Settings, vllm_config: Any, geometry: Geometry, rank: int) -> Layout:
    """Layout of the shard of the worker `rank` (of all that serve one replica).

    A latent vector is the same on all tensor ranks, which then share one shard for each stage of a pipeline.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise InvalidInputError("context parallelism: pages of a part of the tokens cannot be kept")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise InvalidInputError("calculate_kv_scales: scales that are made at each start cannot be kept with blocks")
    shard, shards = (rank // tensor, stages) if geometry.kv_parts == 1 else (rank, tensor * stages)
    text = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    theta = getattr(text, "rope_theta", None) or (rope.get("rope_theta") if isinstance(rope, dict) else None)
    weights = getattr(model, "quantization", None) or ""
    return Layout(
        model=settings.model or model.model,
        revision=settings.revision or model.revision or "",
        dtype=geometry.dtype,
        block_tokens=settings.block_tokens,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        element_bytes=geometry.element_bytes,
        tp_rank=shard,
        tp_size=shards,
        rope_theta="" if theta is None else repr(float(theta)),
        rope_scaling=json.dumps(rope, sort_keys=True, default=str) if rope else "",
        quantization=weights,
        kv_parts=geometry.kv_parts,
    )


class Adapters:
    """Digests of LoRA adapters by their files: a name says nothing of the weights behind it."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int, int], str] = {}
        self._loaded: dict[int, str | None] = {}
        """By vLLM's number of an adapter what its files were at its first request."""

    def digest_of(self, lora: Any) -> str | None:
        """SHA-256 of an adapter's configuration and weights; None when its files could not be read, or have changed.

        vLLM reads the files once for a number, so which weights it has is not known any more once they differ, also
        when they are as before again; with `load_inplace` it reads them for each request. Hashes new files whole.
        """
        found, number = self._digest_of_files(Path(lora.lora_path)), lora.lora_int_id
        if lora.load_inplace or number not in self._loaded:
            self._loaded[number] = found
        elif self._loaded[number] != found:
            self._loaded[number] = None
        return self._loaded[number]

    def _digest_of_files(self, folder: Path) -> str | None:
        hashed = hashlib.sha256()
        try:
            files = sorted(f for f in folder.iterdir() if f.suffix in {".json", ".safetensors", ".bin", ".pt"})
            if not files:
                return None
            for file in files:
                stat = file.stat()
                key = (os.fspath(file), stat.st_mtime_ns, stat.st_size)
                if key not in self._digests:
                    self._digests[key] = _digest_of_file(file)
                hashed.update(f"{file.name}\0{self._digests[key]}\n".encode())
        except OSError:
            return None
        return hashed.hexdigest()


def hashes_media(vllm_config: Any) -> bool:
    """Whether vLLM names media by their content; without either cache of its own by a count, from 1 in each process."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    return media is None or bool(vllm_config.cache_config.enable_prefix_caching) or media.mm_processor_cache_gb > 0


def variant_of(request: Any, adapters: Adapters, *, media_are_hashed: bool = True, generation: str = "") -> str | None:
    """What besides its tokens makes a request's blocks different; None for one whose blocks cannot be named.

    Media enter with all of their places: requests share blocks that have the same media at the same places. A salt
    parts a tenant's own blocks and opens nobody else's. A `generation` is of weights that are no longer those of the
    layout's revision.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    named: dict[str, Any] = {}
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        digest = adapters.digest_of(lora)
        if digest is None:
            return None
        named["adapter"] = digest
    if request.cache_salt:
        named["salt"] = request.cache_salt
    media = [_medium(feature) for feature in request.mm_features or ()]
    if (media and not media_are_hashed) or any(not identifier for identifier, _, _ in media):
        return None
    if media:
        named["media"] = media
    if generation:
        named["generation"] = generation
    return json.dumps(named, sort_keys=True) if named else ""


def _medium(feature: Any) -> tuple[str, int, int]:
    identifier = getattr(feature, "mm_hash", None) or getattr(feature, "identifier", None) or ""
    return identifier, feature.mm_position.offset, feature.mm_position.length


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    """Order of layers: numbers within their names count as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))
