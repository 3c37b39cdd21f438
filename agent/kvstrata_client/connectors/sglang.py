"""SGLang: a HiCache storage backend, loaded as `dynamic`, over the node's agent.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvstrata", "module_path": "kvstrata_client.connectors.sglang", "class_name": "KvstrataStorage",
      "interface_v1": 1, "socket": ..., "pool": ..., "token_file": ..., "model": ..., "revision": ..., "dtype": ...,
      "block_tokens": 16}'

SGLang calls from threads of HiCache's, never from its scheduler's loop. While the agent is away, slow or refuses,
lookups and reads are misses and writes fail, each within its deadline. Pages are copied straight between the host pool
and the agent's memory. The only sglang import of the client.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.client import Client
from kvstrata_client.connectors import object_transfers as transfers
from kvstrata_client.connectors.object_transfers import Object
from kvstrata_client.connectors.object_workers import StateLog
from kvstrata_client.connectors.sglang_pages import (
    ELEMENT_BYTES,
    KV,
    Options,
    PageFormat,
    PageNamer,
    Shard,
    layout_of,
    parse,
)
from kvstrata_client.verbs.copying import Pieces

ATTACH_WAIT_S: Final = 5.0
"""How long a server that starts waits for its agent's answer; without one it goes on, and attaches later."""

SAMPLES_MAX: Final = 4096
"""Measurements kept until SGLang fetches them; the oldest go first."""

_log: Final = logging.getLogger(__name__)


class KvstrataStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types for us.
    """Stores, finds and loads pages of HiCache in the agent's pool. Thread-safe.

    Each of SGLang's host pools has a client of its own, because its pages have a size of their own. The pool evicts and
    erases by itself.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """Check the configuration. Raises `InvalidInputError` that names field, value and limit."""
        del kwargs  # Nothing that we need.
        self._config = storage_config
        self._options = parse(storage_config.extra_config or {})
        self._stores: dict[str, _PageStore | None] = {}
        """By SGLang's name of the pool; None where pages cannot be stored."""
        self._empty: set[str] = set()
        """Pools that hold no bytes, only the indices of other pools."""
        self._state = StateLog(_log, "pages are misses")
        self._samples = _Samples()

    # Registration, once at the start.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Attach for the host pool of attention's KV. Raises `InvalidInputError` when it does not fit the pool."""
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            self._empty.add(KV)
            return
        known, found = self._options.params, mem_pool_host.dtype
        if ELEMENT_BYTES[known.dtype] != found.itemsize:
            raise InvalidInputError(
                f"dtype: {known.dtype!r} has elements of {ELEMENT_BYTES[known.dtype]} B, SGLang's KV is {found}"
            )
        self._open(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Attach for a host pool of what belongs to the same pages. One that does not fit has misses alone."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == KV:  # Registered before, or without bytes of its own.
            return
        try:
            self._open(name, host_pool)
        except (InvalidInputError, NotImplementedError, ValueError, AttributeError) as e:
            self._stores[name] = None
            _log.warning("pages of pool %s of SGLang are not stored: %s", name, e)

    def _open(self, name: str, host_pool: Any) -> None:
        page = _format_of(name, host_pool, self._config, is_flat=name == KV and not self._options.is_zero_copy)
        self._stores[name] = _PageStore(self._options, page, host_pool, self._state)

    # Pages as they lie in the host pool.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Count leading pages that can be had."""
        return _leading(self._there(KV, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill the host pool's pages; where the answer is False a page holds nothing of use."""
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store the host pool's pages; True for each that can be had now."""
        return self._set(KV, keys, host_indices)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Count leading pages that can be had with all that belongs to them, and at which pages one may stop."""
        pages = _leading(self._there(KV, keys))
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            there = self._there(str(transfer.name), keys[:pages])
            stops = _stops(there, transfer)
            if stops:
                hits[transfer.name] = max(stops)
            restorable = [stop for stop in restorable if stop in stops]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill pages of several host pools."""
        return {t.name: self._get(str(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several host pools."""
        return {t.name: self._set(str(t.name), t.keys or [], t.host_indices) for t in transfers}

    # Copies of pages, which SGLang makes itself where `interface_v1` is not set.

    def exists(self, key: str) -> bool:
        """Return whether a page can be had."""
        return self._there(KV, [key]) == [True]

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Fill a flat page; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Any] | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Fill flat pages; None for each miss."""
        targets = list(target_locations or [None] * len(keys))
        store = self._flat_store(targets)
        if store is None:
            return [None] * len(keys)
        is_there = self._measured(store.load, keys, [_flat(t) for t in targets], self._samples.got)
        return [t if there else None for t, there in zip(targets, is_there, strict=True)]

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        """Store a flat page; True when it can be had now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store flat pages; True when all can be had now."""
        held = [v.contiguous() if isinstance(v, torch.Tensor) else None for v in values or [None] * len(keys)]
        store = self._flat_store(held)
        return store is not None and all(self._measured(store.store, keys, [_flat(v) for v in held], self._samples.put))

    def _flat_store(self, pages: Sequence[torch.Tensor | None]) -> "_PageStore | None":
        """Store of flat pages, if these are some."""
        store = self._stores.get(KV)
        if store is None or self._options.is_zero_copy:
            return None
        whole = store.page.size_bytes
        fits = all(p is not None and p.is_contiguous() and p.nbytes == whole and p.device.type == "cpu" for p in pages)
        return store if fits else None

    # The rest.

    def clear(self) -> None:
        """Remove nothing: the pool evicts by its own policy, and erases a tenant when its KVTenant has it so."""
        _log.warning("nothing is cleared: the pool evicts by itself, and erases a tenant when its KVTenant has it so")

    def get_stats(self) -> StorageMetrics:
        """Return pages and GB/s of each call since the last time."""
        metrics = StorageMetrics()
        got, put = self._samples.take()
        for pages, pages_per_s in got:
            metrics.prefetch_pgs.append(pages)
            metrics.prefetch_bandwidth.append(pages_per_s * self._page_gb)
        for pages, pages_per_s in put:
            metrics.backup_pgs.append(pages)
            metrics.backup_bandwidth.append(pages_per_s * self._page_gb)
        return metrics

    @property
    def _page_gb(self) -> float:
        store = self._stores.get(KV)
        return store.page.size_bytes / 1e9 if store is not None else 0.0

    def close(self) -> None:
        """Let go of everything held; calls are misses from then on. Idempotent."""
        for store in self._stores.values():
            if store is not None:
                store.client.close()

    def _there(self, name: str, keys: Sequence[str]) -> list[bool]:
        store = self._stores.get(name)
        if store is None:
            return [name in self._empty] * len(keys)
        return store.look_up(keys)

    def _get(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        store = self._stores.get(name)
        if store is None:
            return [name in self._empty] * len(keys)
        pages = store.pages_at(indices, len(keys))
        return self._measured(store.load, keys, pages, self._samples.got) if pages else [False] * len(keys)

    def _set(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        store = self._stores.get(name)
        if store is None:
            return [name in self._empty] * len(keys)
        pages = store.pages_at(indices, len(keys))
        return self._measured(store.store, keys, pages, self._samples.put) if pages else [False] * len(keys)

    def _measured(
        self,
        move: Callable[[Sequence[str], Sequence[Pieces]], list[bool]],
        keys: Sequence[str],
        pages: Sequence[Pieces],
        samples: "list[tuple[int, float]]",
    ) -> list[bool]:
        """Move pages, and keep how fast where SGLang wants to know."""
        started_s = time.perf_counter()
        done = move(keys, pages)
        if self._config.enable_storage_metrics and any(done):
            self._samples.add(samples, sum(done), time.perf_counter() - started_s)
        return done


class _PageStore:
    """Pages of one host pool in the agent's pool."""

    def __init__(self, options: Options, page: PageFormat, host_pool: Any, state: StateLog) -> None:
        """Attach; raises `InvalidInputError` for pages that cannot be cut into blocks."""
        self.page = page
        layout = layout_of(options.params, page)
        namer = PageNamer(layout, page)
        namer.blocks_of(page.size_bytes)
        target = options.target(layout)
        self.client = Client(target)
        self.client.wait_settled(ATTACH_WAIT_S)
        self._move_timeout_s = options.params.move_timeout_s
        # Of the time of a read the agent has what it may not need for its answer.
        answer_s = min(target.timeout_s, self._move_timeout_s / 2)
        bring_up_s = self._move_timeout_s - answer_s
        self._find = transfers.TransferJob(target, self.client, namer, time.monotonic, bring_up_s)
        self._move = replace(self._find, target=replace(target, timeout_s=answer_s))
        self._host_pool = host_pool
        self._state = state
        self._note_agent()

    def look_up(self, hashes: Sequence[str]) -> list[bool]:
        """Return which pages can be had; the leading ones are on their way into memory then."""
        objects = [Object(h, self.page.size_bytes) for h in hashes]
        found = self.client.run(transfers.look_up(self._find, objects))
        leading = _leading([bool(keys) for keys in found])
        wanted = [*found[:leading], *[()] * (len(found) - leading)]
        self.client.run(transfers.follow_up(self._find, objects, wanted))
        self._note_agent()
        return [bool(keys) for keys in found]

    def load(self, hashes: Sequence[str], pages: Sequence[Pieces]) -> list[bool]:
        """Fill pages; False for each that holds nothing of use."""
        is_loaded = self.client.run(transfers.load(self._move, self._objects(hashes, pages)))
        self._note_agent()
        return is_loaded

    def store(self, hashes: Sequence[str], pages: Sequence[Pieces]) -> list[bool]:
        """Store pages in order; True for the leading ones that can be had now."""
        objects = self._objects(hashes, pages)
        stored = self.client.run(transfers.store(self._move, objects, self._move_timeout_s))
        self._note_agent()
        if stored.is_whole or stored.error is not None:
            self._state.note(f"{self.page.pool}: stores", stored.error)
        return [i < stored.leading for i in range(len(hashes))]

    def pages_at(self, indices: Any, count: int) -> list[Pieces]:
        """Return memory of pages of the host pool; none where the indices are not those of `count` pages."""
        if indices is None or len(indices) != count * self.page.tokens:
            return []
        pointers, sizes = self._host_pool.get_page_buffer_meta(indices)
        memory = [_memory(p, s) for p, s in zip(pointers, sizes, strict=True)]
        step = len(self.page.pieces)
        return [tuple(memory[i * step : (i + 1) * step]) for i in range(count)]

    def _objects(self, hashes: Sequence[str], pages: Sequence[Pieces]) -> list[Object]:
        return [Object(h, self.page.size_bytes, p) for h, p in zip(hashes, pages, strict=True)]

    def _note_agent(self) -> None:
        self._state.note(f"{self.page.pool}: agent", None if self.client.is_attached else self.client.reason)


class _Samples:
    """Measurements for SGLang's metrics: pages of a call, and pages a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.got: list[tuple[int, float]] = []
        self.put: list[tuple[int, float]] = []

    def add(self, samples: list[tuple[int, float]], pages: int, took_s: float) -> None:
        """Add one call's."""
        with self._lock:
            samples.append((pages, pages / took_s))
            del samples[:-SAMPLES_MAX]

    def take(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return what was read and written since the last time."""
        with self._lock:
            taken = (self.got[:], self.put[:])
            self.got.clear()
            self.put.clear()
        return taken


def _format_of(name: str, host_pool: Any, config: HiCacheStorageConfig, *, is_flat: bool) -> PageFormat:
    """Format of a host pool's pages. Raises what the pool raises when its pages have no addresses."""
    tokens = int(host_pool.page_size)
    _, sizes = host_pool.get_page_buffer_meta(torch.arange(tokens, dtype=torch.int64))
    shard = Shard(
        config.tp_rank,
        config.tp_size,
        config.pp_rank,
        config.pp_size,
        config.attn_cp_rank,
        config.attn_cp_size,
        getattr(config, "dcp_rank", 0),  # Since 0.5.22.
        getattr(config, "dcp_size", 1),
    )
    is_split = isinstance(host_pool, MHATokenToKVPoolHost) or name == PoolName.MAMBA.value
    has_geometry = all(isinstance(getattr(host_pool, f, None), int) for f in ("layer_num", "head_num", "head_dim"))
    layers, heads, dim = (host_pool.layer_num, host_pool.head_num, host_pool.head_dim) if has_geometry else (0, 0, 0)
    return PageFormat(
        name,
        config.model_name or "",
        ":".join(filter(None, (host_pool.layout, getattr(host_pool, "storage_format_tag", None), "flat" * is_flat))),
        tokens,
        (sum(sizes),) if is_flat else tuple(sizes),
        shard,
        config.is_mla_model and not is_split,
        layers,
        heads,
        dim,
    )


def _stops(there: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Counts of leading pages at which one may stop, going by one pool alone."""
    leading = _leading(there)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, leading + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        return {stop for stop in range(1, len(there) + 1) if all(there[max(0, stop - window) : stop])}
    return set()  # A policy that is newer than we are: what it needs cannot be promised.


def _leading(there: Sequence[bool]) -> int:
    return next((i for i, is_there in enumerate(there) if not is_there), len(there))


def _memory(pointer: int, size_bytes: int) -> memoryview:
    """Memory of the host pool as unsigned bytes; SGLang keeps the pool for as long as it calls."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(pointer)).cast("B")


def _flat(page: torch.Tensor | None) -> Pieces:
    assert page is not None, "flat pages were checked"
    return (_memory(page.data_ptr(), page.nbytes),)
