"""Chunks of vLLM's offloading as opaque objects: what has to agree, their keys, and which lookups are under way. Pure.

A chunk is a row of vLLM's CPU tier: the pages of one or more of its blocks, of one cache group, of all workers. vLLM
names it by its hash of the tokens and those before them, with the request's cache salt, adapter and media in it.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from kvstrata_api.blocks import BlockKey, Layout, ScopeSecret
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.engine_events import connect_to
from kvstrata_client.connectors.object_keys import BLOCKS_MAX, blocks_of, fingerprint_of, object_keys
from kvstrata_client.connectors.vllm.engine import DTYPES, FP8, PoolSettings, Seconds, converted

GROUP_BYTES: Final = 4
"""Behind the hash in vLLM's key of a chunk: number of the cache group."""
HASH_BYTES_MIN: Final = 32
"""Of SHA-256. Whoever can find collisions of a shorter hash can have his KV taken for another prompt's."""
FAILED_MAX: Final = 65_536
"""Chunks remembered as misses; the oldest go first."""


class TierSettings(PoolSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Our fields of an entry of `secondary_tiers`."""

    revision: Annotated[str, msgspec.Meta(min_length=1)]
    """Of the weights, as in the pool's `compatibility`. vLLM does not tell a tier which one it serves."""
    lookup_timeout_s: Seconds = 0.5
    """How long a request waits for the agent's answer to a lookup. The scheduler never does."""
    store_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    """Share of vLLM's CPU tier that may wait to be stored; stores beyond it are refused."""
    quantization: str = ""
    """Scheme of KV quantization and the digest of its scales; FP8 needs it."""
    adapter: str = ""
    """Digest of an adapter that is merged into the weights; vLLM's hashes have the names of those of requests."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """What filters of requests and KV events of vLLM's say of the tier."""
    enable_kv_events: bool = False
    """Report stored chunks, where vLLM publishes KV events at all."""
    events: str = ""
    """`endpoint` of vLLM's `--kv-events-config`, which does not tell it to a tier: chunks learn sessions from what is
    published there. Empty: they have none."""
    events_replay: str = ""
    """`replay_endpoint` of the same, where there is one: what was missed is asked for there."""


def parse_tier(given: Mapping[str, Any]) -> TierSettings:
    """Check an entry of `secondary_tiers`. Raises `InvalidInputError` that names field, value and limit."""
    return converted(given, TierSettings, "kv_connector_extra_config.secondary_tiers")


def endpoints_of(settings: TierSettings, rank: int) -> tuple[str, str]:
    """Where KV events of the data-parallel `rank` are heard, and where missed ones are asked for; empty: nowhere.

    Raises `InvalidInputError` for what nobody can connect to, and for replays of nothing.
    """
    if settings.events_replay and not settings.events:
        raise InvalidInputError(f"secondary_tiers: events_replay: {settings.events_replay!r} without events")
    given = {"events": settings.events, "events_replay": settings.events_replay}
    heard, replayed = (connect_to(at, rank, f"secondary_tiers: {name}") if at else "" for name, at in given.items())
    return heard, replayed


def layout_of_chunks(settings: TierSettings, config: Any, chunk_bytes: int) -> Layout:
    """Layout of the blocks that a chunk is cut into: one for each `block_tokens` tokens, or fewer where that is uneven.

    `config` is vLLM's `OffloadingConfig`. Raises `InvalidInputError` for chunks that cannot be cut, and unknown types.
    """
    named = config.model.dtype
    dtype = DTYPES.get(named) or FP8.get(named)
    if dtype is None:
        raise InvalidInputError(f"KV of type {named}: bf16, fp16, fp32 and fp8 can be kept")
    if named in FP8 and not settings.quantization:
        raise InvalidInputError("quantization: is empty; KV in fp8 depends on scales, which it has to name")
    element_bytes = {"bf16": 2, "fp16": 2, "fp32": 4}.get(dtype, 1)
    smallest_bytes = 2 * settings.block_tokens * element_bytes
    wanted = min(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk
    most = min(max(1, wanted // settings.block_tokens), BLOCKS_MAX)
    blocks = next((n for n in range(most, 0, -1) if chunk_bytes % (n * smallest_bytes) == 0), 0)
    if not blocks or not chunk_bytes:
        raise InvalidInputError(f"chunks of {chunk_bytes} B: a multiple of {smallest_bytes} B wanted")
    return Layout(
        model=settings.model or config.model.name,
        revision=settings.revision,
        dtype=dtype,
        block_tokens=settings.block_tokens,
        layers=1,
        kv_heads=1,
        head_dim=chunk_bytes // blocks // smallest_bytes,
        element_bytes=element_bytes,
        quantization=settings.quantization,
        adapter=settings.adapter,
        order="vllm:chunk",
    )


class ChunkNamer:
    """Makes the keys of one engine's chunks (`object_keys.Namer`). A name is vLLM's key of the chunk."""

    def __init__(self, layout: Layout, config: Any, version: str) -> None:
        """Wrap vLLM's keys with the layout and all that decides what the bytes of a chunk mean.

        vLLM promises no byte format from one version to the next, so its version is part of it.
        """
        self._block_bytes = layout.block_bytes
        parallel = config.parallel
        parts = {
            "version": version,
            "order": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
            "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
            "cache": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk, config.worker_kv_bytes_per_block],
            "workers": [getattr(parallel, f"{kind}_size") for kind in ("world", "tp", "pp", "pcp", "dcp")],
            "dtype": config.model.dtype,
        }
        made_of = json.dumps(parts, sort_keys=True).encode()
        self._digest = fingerprint_of((b"vllm-chunk", layout.layout_id(), made_of))

    def keys(self, secret: ScopeSecret, name: bytes, size_bytes: int) -> tuple[BlockKey, ...]:
        """Keys of a chunk's blocks. Raises `InvalidInputError` for a size that is not whole blocks."""
        return object_keys(secret, (self._digest, name), size_bytes, self.blocks_of(size_bytes))

    def blocks_of(self, size_bytes: int) -> int:
        """Blocks of a chunk. Raises `InvalidInputError` for a size that is not whole blocks, or too many."""
        return blocks_of(size_bytes, self._block_bytes)


def has_safe_hash(key: bytes) -> bool:
    """Whether vLLM's key of a chunk is by a hash of which nobody can find collisions."""
    return len(key) - GROUP_BYTES >= HASH_BYTES_MIN


@dataclass(slots=True, eq=False)
class Probe:
    """A chunk that is asked for, perhaps by several requests."""

    key: bytes
    asked_s: float
    is_there: bool | None = None
    """None until it is answered. Any thread may answer."""


class Lookups:
    """What each request was told of each chunk. Called by the scheduler's thread alone.

    What a request was told is missing stays missing for it, and what could not be loaded is missing for everybody for
    `miss_s`: a request that asked again and again for what is found and never comes would wait for ever.
    """

    def __init__(self, settings: TierSettings, clock: Callable[[], float]) -> None:
        """Count by `clock`, in monotonic seconds."""
        self._timeout_s = settings.lookup_timeout_s
        self._miss_s = settings.miss_s
        self._clock = clock
        self._told: dict[str, dict[bytes, Probe | None]] = {}
        """By request; None: a miss."""
        self._open: dict[bytes, Probe] = {}
        """Not answered when they were last looked at."""
        self._new: list[Probe] = []
        self._failed: dict[bytes, float] = {}
        """When chunks stop to be misses that could not be loaded, oldest first."""
        self.late = 0
        """Lookups that were not answered in time."""

    def find(self, request: str, key: bytes) -> bool | None:
        """Return whether a chunk is there, as far as the request may know; None: ask again in a later step."""
        told, now_s = self._told.setdefault(request, {}), self._clock()
        if key in told and told[key] is None:
            return False
        if self._failed.get(key, now_s) > now_s:
            told[key] = None
            return False
        probe = told.get(key)
        if probe is None:
            probe = told[key] = self._probe(key, now_s)
        is_there = probe.is_there
        if is_there is None and now_s - probe.asked_s >= self._timeout_s:
            self.late += 1
            is_there = False
        if is_there is False:
            told[key] = None
        return is_there

    def take(self) -> list[Probe]:
        """Return what is to be asked, once."""
        self._open = {key: probe for key, probe in self._open.items() if probe.is_there is None}
        taken, self._new = self._new, []
        return taken

    @property
    def are_open(self) -> bool:
        """Whether some were asked and not answered when they were last taken."""
        return bool(self._open)

    def fail(self, request: str, keys: Iterable[bytes]) -> None:
        """Have chunks be misses that were found and could not be loaded."""
        told, ends_s = self._told.get(request), self._clock() + self._miss_s
        for key in keys:
            self._failed.pop(key, None)
            self._failed[key] = ends_s
            if told is not None:
                told[key] = None
        now_s = self._clock()
        ended = itertools.takewhile(lambda item: item[1] <= now_s, self._failed.items())
        for key in [key for key, _ in ended]:
            del self._failed[key]
        for key in list(itertools.islice(self._failed, max(0, len(self._failed) - FAILED_MAX))):
            del self._failed[key]

    def forget(self, request: str) -> None:
        """Let go of a request that has ended."""
        self._told.pop(request, None)

    def _probe(self, key: bytes, now_s: float) -> Probe:
        """Join a lookup that is under way, and not late, or begin one."""
        probe = self._open.get(key)
        if probe is None or probe.is_there is not None or now_s - probe.asked_s >= self._timeout_s:
            probe = self._open[key] = Probe(key, now_s)
            self._new.append(probe)
        return probe


def answer(probes: Sequence[Probe], is_there: Collection[bool]) -> None:
    """Give answers to lookups; any thread may."""
    for probe, found in zip(probes, is_there, strict=True):
        probe.is_there = found
