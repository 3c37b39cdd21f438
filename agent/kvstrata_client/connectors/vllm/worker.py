"""A worker's half of the vLLM connector: brings blocks into its memory, from there into pages, and saves pages.

Fetches and stores run in threads of their own. What a forward pass waits for is a copy between memory of this process
and pages; on a device it is put on a stream of its own, in order with what uses the pages before and after.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.trace_context import passed_on
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.paged import (
    BITS,
    DeviceWork,
    PagedKv,
    TokenRows,
    Wait,
    batch_blocks,
    batches_of,
    work_of,
)
from kvstrata_client.connectors.vllm.engine import Geometry, Settings
from kvstrata_client.connectors.vllm.planner import Fetch, Fetched, FetchEnd, Load, Plan, Save, Saved, Tables

_log: Final = logging.getLogger(__name__)
NULL_PAGE: Final = 0
"""vLLM's page of tokens that a sliding window has left behind: it belongs to nobody."""
_NO_MEMORY: Final = (MemoryError, RuntimeError)
"""As torch refuses memory, its own errors of devices included."""


class CpuPagedKv(PagedKv):
    """Pages of vLLM's CPU attention, whose kernels order a page as their instructions like it.

    The order is found out by having the kernel write a page of numbers.
    """

    def __init__(self, tensors: Sequence[Any], layout: Layout, geometry: Geometry) -> None:
        """Bind tensors (pages, heads, tokens, 2 dim). Raises `InvalidInputError` for an order that cannot be had."""
        heads, dim = geometry.kv_heads, geometry.head_dim
        tokens = tensors[0].shape[2]
        views = [t.view(t.shape[0], heads, 2, tokens, dim) for t in tensors]
        super().__init__(views, layout, "page,head,kv,token,dim")
        self._flat = [t.view(BITS[geometry.element_bytes]).view(t.shape[0], heads, -1) for t in tensors]
        self._place = _cpu_order(tensors[0].dtype, tokens, dim)
        self._heads = torch.arange(heads)[None, None, :, None]

    def read_tokens(self, layer: int, rows: TokenRows) -> Any:
        """See `PagedKv`."""
        return self._flat[layer][self._index(rows)]

    def write_tokens(self, layer: int, rows: TokenRows, tokens: Any) -> None:
        """See `PagedKv`."""
        self._flat[layer][self._index(rows)] = tokens

    def _index(self, rows: TokenRows) -> tuple[Any, Any, Any]:
        return rows.pages[:, None, None, None], self._heads, self._place[rows.rows][:, :, None, :]


def _cpu_order(dtype: Any, tokens: int, dim: int) -> torch.Tensor:
    """Where elements lie in a head's part of a page: (tokens, 2, dim) int64."""
    try:
        from vllm import _custom_ops
        from vllm.v1.attention.backends import cpu_attn

        isa = cpu_attn._get_attn_isa(dtype, tokens, dim)  # noqa: SLF001  No public one; what is missing is a refusal.
        write = _custom_ops.cpu_attn_reshape_and_cache
    except (ImportError, AttributeError) as e:
        raise InvalidInputError(f"the order of vLLM's CPU pages is not known: {e}") from e
    size, slots = tokens * dim, torch.arange(tokens)
    held = torch.zeros(2 * size, dtype=torch.int64)
    for digit in range(4):  # Of base 128: whole numbers up to 256 are exact in every type.
        numbers = (torch.arange(size) // 128**digit % 128).view(tokens, 1, dim).to(dtype)
        page = torch.zeros((1, 1, 2 * tokens, dim), dtype=dtype)
        keys, values = page.chunk(2, dim=2)
        write(numbers, numbers, keys, values, slots, isa)
        held += page.flatten().to(torch.int64) * 128**digit
    place = torch.empty((2, size), dtype=torch.int64)
    for part in range(2):
        of_part = held[part * size : (part + 1) * size]
        if not torch.equal(of_part.sort().values, torch.arange(size)):
            raise InvalidInputError(f"vLLM's CPU pages ({isa}) hold something besides keys and values")
        place[part, of_part] = torch.arange(part * size, (part + 1) * size)
    return place.view(2, tokens, dim).permute(1, 0, 2).contiguous()


class Pages:
    """The KV tensors of a worker as blocks. They stay the engine's.

    What goes to a device and comes from it crosses memory there that was had at the start, a batch at a time: a refusal
    in the middle of a step would end that. Order on the stream that is current parts one batch from the next.
    """

    def __init__(self, tensors: Mapping[str, Any], geometry: Geometry, layout: Layout, work: DeviceWork | None) -> None:
        """Bind tensors by layer.

        Raises `InvalidInputError` for a shape that is not known, and without memory of the device for a batch.
        """
        self._geometry = geometry
        self._layout = layout
        self._groups = [
            _bound([tensors[name] for name in group.layers], geometry, replace(layout, layers=len(group.layers)))
            for group in geometry.groups
        ]
        self.device = self._groups[0].device
        self.work = work or work_of(self.device)
        self.layer_of = {n: p for g in geometry.groups for n, p in zip(g.layers, g.positions, strict=True)}
        """Position of each layer in a block, by its name."""
        self._at = {
            position: (number, within)
            for number, group in enumerate(geometry.groups)
            for within, position in enumerate(group.positions)
        }
        self._between = self._allocate(batch_blocks(layout.block_bytes))
        """Memory of the device that blocks cross: (blocks of a batch, block bytes) uint8; None where pages are here."""

    def _allocate(self, blocks: int) -> torch.Tensor | None:
        size_bytes = blocks * self._layout.block_bytes
        try:
            memory = self.work.allocate(size_bytes)
        except _NO_MEMORY as e:
            raise InvalidInputError(f"{size_bytes} B of {self.device} wanted for blocks on their way: {e}") from e
        return None if memory is None else memory.view(blocks, self._layout.block_bytes)

    def staging(self, blocks: int) -> torch.Tensor:
        """Memory of the host for so many blocks: (blocks, block bytes) uint8."""
        return self.work.staging(blocks * self._layout.block_bytes).view(blocks, self._layout.block_bytes)

    def layers_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The same memory as (blocks, layers, bytes of a layer)."""
        return rows.view(len(rows), self._layout.layers, -1)

    def saved(self, tables: Tables, blocks: range) -> range:
        """Those among the leading blocks that have pages in all groups."""
        first = max((self._first(table, blocks) for table in tables), default=blocks.stop)
        return range(first, blocks.stop) if first == blocks.start else range(blocks.start, blocks.start)

    def gather(self, tables: Tables, blocks: range, into: torch.Tensor) -> Wait:
        """Copy blocks, one or more, out of their pages into memory of the host; what is returned waits for it."""
        wait: Wait
        for part in batches_of(blocks, self._layout.block_bytes):
            rows = into[part.start - blocks.start : part.stop - blocks.start]
            wait = self.work.start(partial(self._bring_down, tables, part, rows))
        return wait

    def scatter(self, loads: Sequence[tuple[Load, torch.Tensor]]) -> dict[int, Wait]:
        """Copy blocks into their pages, some at a time; what is returned waits for each layer of all of them.

        To a device they cross the link as they lie in host memory and are taken apart there: layers by themselves would
        go through pageable memory, at 7 GB/s instead of 54 (H100).
        """
        waits: dict[int, Wait] = {}
        for load, staged in loads:
            for blocks in batches_of(range(load.first_block, load.stop_block), self._layout.block_bytes):
                part = staged[blocks.start - load.first_block : blocks.stop - load.first_block]
                there: list[torch.Tensor] = []
                self.work.start(partial(self._bring, part, there))
                for layer in self.layer_of.values():
                    waits[layer] = self.work.start(partial(self._scatter, load, blocks, there, layer))
        return waits

    def _bring(self, part: torch.Tensor, there: list[torch.Tensor]) -> None:
        between = self._between
        there.append(part if between is None else between[: len(part)].copy_(part, non_blocking=True))

    def _bring_down(self, tables: Tables, blocks: range, into: torch.Tensor) -> None:
        if self._between is None:
            self._gather(tables, blocks, into)
            return
        gathered = self._between[: len(blocks)]
        self._gather(tables, blocks, gathered)
        into.copy_(gathered, non_blocking=True)

    def _gather(self, tables: Tables, blocks: range, into: torch.Tensor) -> None:
        layers = self.layers_of(into)
        rows = [
            kv.rows(self._table(g, table), blocks)
            for g, (kv, table) in enumerate(zip(self._groups, tables, strict=True))
        ]
        for position, (group, within) in self._at.items():
            self._groups[group].gather(within, rows[group], layers[:, position])

    def _scatter(self, load: Load, blocks: range, there: Sequence[torch.Tensor], layer: int) -> None:
        group, within = self._at[layer]
        kv, table = self._groups[group], load.tables[group]
        first = max(blocks.start, self._first(table, range(load.first_block, load.stop_block)))
        if first < blocks.stop:
            rows = kv.rows(self._table(group, table), range(first, blocks.stop))
            kv.scatter(within, rows, self.layers_of(there[0])[first - blocks.start :, layer])

    def _first(self, table: Sequence[int], blocks: range) -> int:
        """The first of consecutive blocks from which on all have pages."""
        size = self._geometry.page_tokens // self._layout.block_tokens
        used = table[: -(-blocks.stop // size)]
        last_null = max((i for i, page in enumerate(used) if page == NULL_PAGE), default=-1)
        return min(max(blocks.start, (last_null + 1) * size), blocks.stop)

    def _table(self, group: int, table: Sequence[int]) -> Sequence[int]:
        """Pages as the tensors have them: kernels may split a page of the scheduler's into several."""
        split = self._geometry.page_tokens // self._groups[group].page_tokens
        return table if split == 1 else [page * split + part for page in table for part in range(split)]


def _bound(tensors: Sequence[Any], geometry: Geometry, layout: Layout) -> PagedKv:
    if tensors[0].element_size() != geometry.element_bytes:
        raise InvalidInputError(f"KV tensor of {tensors[0].dtype}: elements of {geometry.element_bytes} B wanted")
    if tensors[0].device.type == "cpu" and tensors[0].dim() == 4 and geometry.kv_parts == 2:
        return CpuPagedKv(tensors, layout, geometry)
    return PagedKv([_five_dimensions(tensor, geometry) for tensor in tensors], layout, "page,token,kv,head,dim")


def _five_dimensions(tensor: Any, geometry: Geometry) -> Any:
    """View of a layer's tensor as (pages, tokens, parts, heads, dim)."""
    heads, dim, parts = geometry.kv_heads, geometry.head_dim, geometry.kv_parts
    shape = tuple(tensor.shape)
    if parts == 1:
        if len(shape) == 3 and shape[2] == dim:
            return tensor[:, :, None, None, :]
        if len(shape) == 4 and shape[1] == 1 and shape[3] == dim:
            return tensor.permute(0, 2, 1, 3)[:, :, None]
    elif len(shape) == 4 and shape[1] == heads and shape[3] == 2 * dim:
        return tensor.unflatten(3, (2, dim)).permute(0, 2, 3, 1, 4)
    elif len(shape) == 5 and shape[3:] == (heads, dim) and 2 in shape[:2]:
        return tensor.permute(1, 2, 0, 3, 4) if shape[0] == 2 else tensor.permute(0, 2, 1, 3, 4)
    raise InvalidInputError(f"KV tensor {shape}: no order known of {parts} parts, {heads} heads and {dim} elements")


@dataclass(slots=True)
class _Staged:
    """Blocks of one fetch."""

    rows: torch.Tensor
    first_block: int


class Worker:
    """Carries out plans on one worker's pages. Calls come from the engine's thread."""

    def __init__(self, settings: Settings, pages: Pages, client: Client, *, saves: bool) -> None:
        """Start the threads. `saves` is false where another worker saves the same bytes."""
        self._settings = settings
        self._pages = pages
        self._client = client
        self._saves_here = saves
        self._fetching = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvstrata-fetch")
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._staged: dict[int, _Staged] = {}
        self._staged_bytes = 0
        self._ended: dict[int, FetchEnd] = {}
        self._saved: dict[int, tuple[int, bool]] = {}
        self._waits: dict[int, Wait] = {}
        self._saves: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saving_bytes = 0
        self.loaded_blocks = self.saved_blocks = self.dropped_blocks = 0
        self._storing = threading.Thread(target=self._store_all, name="kvstrata-store", daemon=True)
        self._storing.start()

    def start(self, plan: Plan) -> None:
        """Before the forward pass: begin fetches, put fetched blocks into pages, drop those that nobody wants."""
        for fetch in plan.fetches:
            self._begin(fetch)
        self._load(plan.loads)
        for number in plan.drops:
            self._drop(number)

    def wait_for_layer(self, name: str) -> None:
        """Before a layer's attention: its blocks are in their pages, or on their way before it on the device."""
        wait = self._waits.pop(self._pages.layer_of.get(name, -1), None)
        if wait is not None:
            wait()

    def save(self, plan: Plan) -> None:
        """After the forward pass: take blocks out of their pages, which may be written again at once; store them."""
        self._settle_loads()
        for save in plan.saves if self._saves_here else ():
            self._save(save)

    def ended(self) -> Fetched:
        """Fetches that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended

    def saved(self) -> Saved:
        """Saves that have ended since the last call: 1, and whether all their blocks are stored."""
        with self._lock:
            saved, self._saved = self._saved, {}
        return saved

    def close(self) -> None:
        """Store what was saved, as far as that is quick, and end the threads."""
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._saves.put(None)
        self._storing.join(self._settings.load_deadline_s)
        self._client.close()

    def _begin(self, fetch: Fetch) -> None:
        with self._lock:
            self._wanted.add(fetch.fetch)
        self._fetching.submit(self._fetch, fetch)

    def _fetch(self, fetch: Fetch) -> None:
        blocks, rows, wanted = 0, None, fetch.stop_block - fetch.first_block
        sources: tuple[str, ...] = ()
        is_attached = self._client.is_attached
        room = 0 if is_attached else wanted  # Of an agent that is away nothing is there, whatever the room.
        try:
            rows = self._room(fetch) if is_attached else None
            if rows is not None:
                room = len(rows)
                with passed_on(fetch.traceparent):
                    loaded = PrefixCache(self._client, variant=fetch.variant).load(
                        fetch.tokens,
                        rows.numpy(),
                        session=fetch.session,
                        deadline_s=fetch.deadline_s,
                        blocks_max=fetch.first_block + room,
                        first_block=fetch.first_block,
                    )
                blocks, sources = loaded.blocks, loaded.sources
        except Exception:  # noqa: BLE001  A thread's root: whatever it was, the engine goes on without.
            _log.exception("a fetch failed; the request is computed")
        with self._lock:
            if rows is not None:
                if fetch.fetch in self._wanted:
                    self._staged[fetch.fetch] = _Staged(rows, fetch.first_block)
                else:
                    self._staged_bytes -= rows.numel()
            had_room = blocks < room or room == wanted
            self._ended[fetch.fetch] = FetchEnd(1, blocks, tuple(sources), had_room)

    def _room(self, fetch: Fetch) -> torch.Tensor | None:
        """Memory for as many leading blocks as there is some left for, accounted for; None for none.

        None as well where nobody waits. Raises `_NO_MEMORY`.
        """
        block_bytes = self._client.target.layout.block_bytes
        with self._lock:
            left = (self._settings.staging_bytes - self._staged_bytes) // block_bytes
            blocks = min(fetch.stop_block - fetch.first_block, left)
            if fetch.fetch not in self._wanted or not blocks:
                return None
            size_bytes = blocks * block_bytes
            self._staged_bytes += size_bytes
        try:
            return self._pages.staging(blocks)
        except _NO_MEMORY:
            with self._lock:
                self._staged_bytes -= size_bytes
            raise

    def _drop(self, number: int) -> None:
        with self._lock:
            self._wanted.discard(number)
            staged = self._staged.pop(number, None)
            if staged is not None:
                self._staged_bytes -= staged.rows.numel()

    def _load(self, loads: Sequence[Load]) -> None:
        with self._lock:
            found = [(load, self._staged[load.fetch]) for load in loads]
        if not found:
            return
        rows = [(load, s.rows[load.first_block - s.first_block : load.stop_block - s.first_block]) for load, s in found]
        self._waits = self._pages.scatter(rows)
        self.loaded_blocks += sum(load.stop_block - load.first_block for load in loads)
        if not self._settings.layerwise:
            self._settle_loads()

    def _settle_loads(self) -> None:
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            wait()

    def _save(self, save: Save) -> None:
        blocks = self._pages.saved(save.tables, range(save.first_block, save.stop_block))
        if not blocks or not self._client.is_attached:
            self._dropped(save, save.stop_block - save.first_block)
            return
        block_bytes = self._client.target.layout.block_bytes
        with self._lock:
            room = min(len(blocks), (self._settings.staging_bytes - self._saving_bytes) // block_bytes)
            size_bytes = room * block_bytes
            self._saving_bytes += size_bytes
        if not room:
            self._dropped(save, len(blocks))
            return
        self.dropped_blocks += len(blocks) - room
        blocks = blocks[:room]
        try:
            rows = self._pages.staging(len(blocks))
            wait = self._pages.gather(save.tables, blocks, rows)
        except _NO_MEMORY:
            _log.exception("no memory for a save; its blocks are computed again when they are wanted")
            with self._lock:
                self._saving_bytes -= size_bytes
            self._dropped(save, len(blocks))
            return
        self._saves.put(partial(self._store, save, blocks, rows, wait))

    def _dropped(self, save: Save, blocks: int) -> None:
        self.dropped_blocks += blocks
        self._note_saved(save, is_whole=False)

    def _store(self, save: Save, blocks: range, rows: torch.Tensor, wait: Wait) -> None:
        is_whole = False
        try:
            wait()
            cache = PrefixCache(self._client, variant=save.variant)
            with passed_on(save.traceparent):
                stored = cache.store(save.tokens, rows.numpy(), first_block=blocks.start, session=save.session)
            self.saved_blocks += stored.published + stored.existed
            self.dropped_blocks += stored.refused
            is_whole = stored.reached_blocks >= save.stop_block
        finally:
            with self._lock:
                self._saving_bytes -= rows.numel()
            self._note_saved(save, is_whole=is_whole)

    def _note_saved(self, save: Save, *, is_whole: bool) -> None:
        with self._lock:
            self._saved[save.number] = (1, is_whole)

    def _store_all(self) -> None:
        while (store := self._saves.get()) is not None:
            try:
                store()
            except Exception:  # noqa: BLE001  A thread's root: whatever it was, the engine goes on without.
                _log.exception("a save failed; its blocks are computed again when they are wanted")
