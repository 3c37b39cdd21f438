"""Hugging Face transformers: saves a DynamicCache as blocks and makes one from blocks, bit for bit.

One prompt at a time (batch size 1), full attention in every layer.

Layers may arrive while the model computes with those that are there: a thread copies and verifies layer after layer,
and the attention of a layer waits for its own and no other. What cannot be had is raised in the forward pass as a
`KvStrataError`: the engine computes the prompt without it then. Layers may be handed over in the same way, while the
model computes the next ones.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError, KvStrataError, LeaseLostError, UnsupportedError
from kvstrata_api.units import MIB
from kvstrata_api.wire import Handover
from kvstrata_client.cache import PrefixCache
from kvstrata_client.connectors.paged import DeviceWork, added, batches_of, offloaded, work_of
from kvstrata_client.prompt.handover import HandoverWriter
from kvstrata_client.prompt.streaming import LayerStream
from kvstrata_client.verbs.leases import lost
from kvstrata_client.verbs.results import Bytes2D, Loaded, Stored

ARRIVE_S: Final = 30.0
"""A layer that is not copied by then never will be: copying takes milliseconds, and the blocks are in memory."""


BATCH_BYTES: Final = 256 * MIB
"""Of blocks that cross to the device or back together; twice that is pinned. Each costs a few round trips to the agent,
and 5 ms of an H100's link."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a restore and the computing went on side by side."""

    first_layer_s: float
    """From the start until the first layer was there."""
    all_layers_s: float
    """From the start until the last one was."""
    waited_s: float
    """What the computing spent waiting for layers; the rest of `all_layers_s` was hidden behind it."""


class ArrivingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed here.
    """A layer that knows how long it is before its bytes are there."""

    def __init__(self, arrival: "Future[tuple[Any, Any]]", tokens: int, note_wait: Callable[[float], None]) -> None:
        super().__init__()
        self._arrival: Future[tuple[Any, Any]] | None = arrival
        self._tokens = tokens
        self._note_wait = note_wait

    def settle(self) -> None:
        """Wait for the bytes. Raises the `KvStrataError` that kept them away."""
        if self._arrival is None:
            return
        begin_s = time.perf_counter()
        try:
            keys, values = self._arrival.result(ARRIVE_S)
        except FutureTimeoutError as e:
            raise LeaseLostError(f"a layer was not there after {ARRIVE_S:.0f} s") from e
        self._note_wait(time.perf_counter() - begin_s)
        self._arrival = None
        for states in (keys, values):
            if states.is_cuda:  # Made on another stream, whose next layer may have their memory once this one is done.
                states.record_stream(torch.cuda.current_stream(states.device))
        super().update(keys, values)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `DynamicLayer.update`; waits for what comes before."""
        self.settle()
        updated: tuple[Any, Any] = super().update(key_states, value_states, *args, **kwargs)
        return updated

    def get_seq_length(self) -> int:
        """Tokens that the layer holds, or will when it has arrived."""
        return self._tokens if self._arrival is not None else int(super().get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """See `DynamicLayer.crop`; waits for what is to be cropped."""
        self.settle()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, also what has not arrived."""
        self._arrival = None
        super().reset()


class Arrivals:
    """Reads a stream to its end in a thread, and ends it. One for each restore."""

    def __init__(self, stream: LayerStream, layout: Layout, device: Any, layers: int) -> None:
        """Start to read, for a model on `device`."""
        self._stream = stream
        self._layout = layout
        self._device = device
        self.layers: tuple[Future[tuple[Any, Any]], ...] = tuple(Future() for _ in range(layers))
        self._ended: Future[bool] = Future()
        self._begin_s = time.perf_counter()
        self._times_s: list[float] = []
        self._waited_s = 0.0
        threading.Thread(target=self._read, name="kvstrata-layers", daemon=True).start()

    def note_wait(self, waited_s: float) -> None:
        """Add what the engine has waited for a layer."""
        self._waited_s += waited_s

    def finish(self) -> Overlap:
        """Confirm what was read, when the engine has computed with it.

        Raises `LeaseLostError` when the leases did not live until the last copy or when that has not come, and what
        kept a layer away: whatever was computed is void then.
        """
        try:
            is_valid = self._ended.result(ARRIVE_S)
        except FutureTimeoutError as e:
            raise LeaseLostError(f"the last layer was not there after {ARRIVE_S:.0f} s") from e
        if not is_valid:
            raise lost(self._stream.blocks)
        for layer in self.layers:
            layer.result(0)
        first_s, last_s = (self._times_s[0], self._times_s[-1]) if self._times_s else (0.0, 0.0)
        return Overlap(first_s, last_s, self._waited_s)

    def _read(self) -> None:
        is_valid = False
        try:
            work = work_of(self._device, is_beside=True)
            size_bytes = self._stream.blocks * self._layout.block_bytes // self._layout.layers
            room = work.staging(size_bytes).view(self._stream.blocks, -1) if self.layers else None
            for number, layer in enumerate(self.layers):
                layer.set_result(self._bring(number, work, room))
                self._times_s.append(time.perf_counter() - self._begin_s)
        except KvStrataError as e:
            self._fail(e)
        finally:
            self._fail(LeaseLostError("the stream broke off"))
            try:
                is_valid = self._stream.close()
            finally:
                self._ended.set_result(is_valid)

    def _bring(self, number: int, work: DeviceWork, room: Any) -> tuple[Any, Any]:
        """Keys and values of a layer, when they are on the device; `room` may be filled again then."""
        self._stream.read(range(number, number + 1), room.numpy())
        made: list[tuple[Any, Any]] = []
        work.start(lambda: made.append(_states(room.to(self._device, non_blocking=True), self._layout)))()
        return made[0]

    def _fail(self, error: KvStrataError) -> None:
        for layer in self.layers:
            if not layer.done():
                layer.set_exception(error)


def arrived(stream: LayerStream, layout: Layout) -> Arrivals:
    """Arrivals of a cache that is whole already; `stream` was closed."""
    return Arrivals(stream, layout, torch.device("cpu"), 0)


PackLayer = Callable[[Any, Any, int, int], Bytes2D]
"""Makes the bytes of a layer of blocks from keys and values, the first block and how many."""


class HandoverLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed here.
    """A layer that is handed over once it holds every block of the hand-over; layers are computed in order."""

    def __init__(self, writer: HandoverWriter, rows: PackLayer) -> None:
        super().__init__()
        self._writer = writer
        self._rows = rows
        self._is_handed_over = False

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `DynamicLayer.update`."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        writer = self._writer
        stop = (writer.first_block + writer.blocks) * writer.layout.block_tokens
        if not self._is_handed_over and keys.shape[2] >= stop:
            self._is_handed_over = True
            writer.write(self._rows(keys, values, writer.first_block, writer.blocks))
        return keys, values


class SlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is not typed here.
    """A layer that holds its window, and while it `is_recording` the columns beside it that `trim` has not let go."""

    keys: Any
    values: Any

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.is_recording = False
        self._recent: tuple[Any, Any] | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `DynamicSlidingWindowLayer.update`."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if not self.is_recording:
            self._recent = None
            return keys, values
        held = 0 if self._recent is None else int(self._recent[0].shape[2])
        count = held + key_states.shape[2]
        if self._recent is None or keys.shape[2] >= count:  # What the model computes with has them all: no copy.
            self._recent = keys[:, :, -count:], values[:, :, -count:]
        else:
            old = self._recent
            self._recent = torch.cat([old[0], key_states], 2), torch.cat([old[1], value_states], 2)
        return keys, values

    @property
    def first_column(self) -> int:
        """The first column that can be saved."""
        held = 0 if self._recent is None else int(self._recent[0].shape[2])
        return int(self.get_seq_length()) - held

    def columns(self, start: int, stop: int) -> tuple[Any, Any]:
        """Keys and values of columns from `first_column` on, (rows, heads, columns, dim)."""
        assert self._recent is not None, "only what is held is asked for"
        first = self.first_column
        keys, values = self._recent
        return keys[:, :, start - first : stop - first], values[:, :, start - first : stop - first]

    def trim(self, column: int) -> None:
        """Let go of what stands before `column`, and of all memory but that of the window and what is left."""
        cut, self._recent = column - self.first_column, self._recent
        if self._recent is not None and cut > 0:
            keys, values = (states[:, :, cut:] for states in self._recent)
            self._recent = (keys.clone(), values.clone()) if keys.shape[2] else None
        if self.is_initialized and self.keys.untyped_storage().nbytes() > 2 * self.keys.nbytes:
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def crop(self, tokens_to_remove: int) -> None:
        """See `DynamicSlidingWindowLayer.crop`."""
        first, before = self.first_column, int(self.get_seq_length())
        super().crop(tokens_to_remove)
        left = int(self.get_seq_length()) - first
        if self._recent is not None and self.get_seq_length() < before:
            self._recent = (self._recent[0][:, :, :left], self._recent[1][:, :, :left]) if left > 0 else None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._recent = None

    def reorder_cache(self, beam_idx: Any) -> None:
        """See `DynamicLayer.reorder_cache`."""
        super().reorder_cache(beam_idx)
        self.batch_recent(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `DynamicLayer.batch_repeat_interleave`."""
        super().batch_repeat_interleave(repeats)
        self.batch_recent(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Any) -> None:
        """See `DynamicLayer.batch_select_indices`."""
        super().batch_select_indices(indices)
        self.batch_recent(lambda states: states[indices, ...])

    def batch_recent(self, chosen: Callable[[Any], Any]) -> None:
        """Choose rows of what is not saved yet."""
        if self._recent is not None:
            self._recent = (chosen(self._recent[0]), chosen(self._recent[1]))


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that is computed here and may be read on another node meanwhile."""

    cache: DynamicCache
    """For the forward pass over the prompt."""
    writer: HandoverWriter
    save: Callable[[DynamicCache], Stored]
    """Stores the prompt as usual."""

    @property
    def handover(self) -> Handover | None:
        """What the reader must name; None when nothing is handed over, and the prompt is there when it is finished."""
        return self.writer.handover

    def finish(self) -> Stored:
        """Make ordinary blocks of everything. Call it after the forward pass."""
        self.writer.finish()
        return self.save(self.cache)

    def abandon(self) -> None:
        """Give up: the reader computes the prompt itself."""
        self.writer.abandon()


_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""KV element types of `spec.compatibility.dtype` that transformers computes with."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A cache to resume from."""

    cache: DynamicCache
    """Holds the KV of the first `tokens` tokens; empty when nothing was found."""
    tokens: int
    """A multiple of the block size; less than the prompt, whose last token must still be computed for its logits."""
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Restoring:
    """A cache to resume from at once, whose layers arrive while the model computes."""

    cache: DynamicCache
    """As in `Restored`; its layers raise a `KvStrataError` in the forward pass when they cannot be had."""
    tokens: int
    """As in `Restored`."""
    sources: tuple[str, ...]
    """For each block where it was: a tier name, or `remote`."""
    shared_blocks: int
    """How many of them came from a scope that the tenant shares."""
    arrivals: Arrivals
    """Ask it to `finish` when the forward pass is done: what was computed counts only then."""


class CacheConnector:
    """Saves and restores the KV of prompts of one model."""

    def __init__(
        self, cache: PrefixCache, config: PretrainedConfig, layout: Layout, device: torch.device | str = "cpu"
    ) -> None:
        """Bind a prefix cache to a model's configuration, and to the device that it computes on.

        Raises `InvalidInputError` when the layout is another model's.
        """
        self._cache = cache
        self._config = config
        self._layout = layout
        self._device = torch.device(device)
        check_layout(config, layout)

    def restore(self, tokens: Sequence[int], *, session: str = "") -> Restored:
        """Make a cache of the longest prefix that can be had. Never raises for an agent's sake."""
        return self._loaded(tokens, session, self._usable(tokens))

    def _usable(self, tokens: Sequence[int]) -> int:
        return max(0, len(tokens) - 1) // self._layout.block_tokens

    def _loaded(self, tokens: Sequence[int], session: str, blocks_max: int) -> Restored:
        loaded = self._cache.load(tokens, session=session, blocks_max=blocks_max)
        cache = unpack(loaded.data[: loaded.blocks], self._config, self._layout, self._device)
        return Restored(cache, loaded.blocks * self._layout.block_tokens, loaded)

    def restore_layerwise(
        self,
        tokens: Sequence[int],
        *,
        session: str = "",
        blocks_max: int | None = None,
        handover: Handover | None = None,
    ) -> Restoring:
        """Like `restore`, but returns as soon as the blocks are leased: a layer's attention waits for that layer alone.

        `blocks_max` bounds the blocks that are wanted. A prefix that memory cannot hold at a time comes whole, in
        batches, before this returns. With `handover` it goes on with what another node is still computing (`prefill`):
        a layer that does not come raises a `KvStrataError` in the forward pass, and the prompt is to be computed.
        """
        usable = self._usable(tokens)
        usable = usable if blocks_max is None else min(usable, blocks_max)
        stream = self._cache.stream(tokens, session=session, blocks_max=usable, handover=handover)
        if not stream.is_whole:
            stream.close()
            whole = self._loaded(tokens, session, usable)
            return Restoring(
                whole.cache,
                whole.tokens,
                whole.loaded.sources,
                whole.loaded.shared_blocks,
                arrived(stream, self._layout),
            )
        count, sources = stream.blocks * self._layout.block_tokens, stream.sources
        cache = DynamicCache(config=self._config)
        arrivals = Arrivals(stream, self._layout, self._device, self._layout.layers if count else 0)
        for number, arrival in enumerate(arrivals.layers):
            cache.layers[number] = ArrivingLayer(arrival, count, arrivals.note_wait)
        return Restoring(cache, count, sources, stream.shared_blocks, arrivals)

    def prefill(self, tokens: Sequence[int], *, session: str = "") -> Prefill:
        """Make an empty cache for computing `tokens` whose layers are handed over as they are computed.

        `finish` it after the forward pass, with which everything is stored that was not handed over.
        """
        writer = self._cache.hand_over(tokens, session=session)
        cache = DynamicCache(config=self._config)
        for number in range(self._layout.layers if writer.blocks else 0):
            cache.layers[number] = HandoverLayer(writer, partial(_rows, layout=self._layout))
        return Prefill(cache, writer, partial(self.save, tokens, session=session))

    def save(self, tokens: Sequence[int], cache: DynamicCache, *, first_block: int = 0, session: str = "") -> Stored:
        """Store the full blocks of `tokens` from `first_block` on; `cache` must hold all of `tokens`."""
        stored = Stored()
        blocks = range(first_block, len(tokens) // self._layout.block_tokens)
        for part, made in packed(cache, self._layout, blocks):
            one = self._cache.store(tokens, made, first_block=part.start, session=session)
            stored = added(stored, one)
        return stored


def layout_of(config: PretrainedConfig, model: str, revision: str, dtype: str, block_tokens: int = 16) -> Layout:
    """Layout of a model's KV; `model`, `revision`, `dtype` and `block_tokens` as in the pool's `compatibility`."""
    config = config.get_text_config(decoder=True)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return Layout(
        model,
        revision,
        dtype,
        block_tokens,
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        element_bytes=_DTYPES[dtype].itemsize,
        rope_theta=str(rope.pop("rope_theta", "")),
        rope_scaling=json.dumps(rope, sort_keys=True, separators=(",", ":")),
    )


def check_layout(config: PretrainedConfig, layout: Layout) -> None:
    """Raise `InvalidInputError` when blocks of `layout` cannot hold this model's KV."""
    ours = (config.num_hidden_layers, config.num_key_value_heads, _head_dim(config))
    theirs = (layout.layers, layout.kv_heads, layout.head_dim)
    if ours != theirs:
        raise InvalidInputError(f"model has (layers, KV heads, head dim) {ours}, the layout {theirs}")
    if layout.dtype not in _DTYPES:
        raise InvalidInputError(f"dtype {layout.dtype}: must be one of {sorted(_DTYPES)}")


def pack(cache: DynamicCache, layout: Layout, blocks: range) -> Bytes2D:
    """Bytes of blocks, (blocks, block bytes) in the layout's order. Raises as `packed` does."""
    rows = np.empty((len(blocks), layout.block_bytes), np.uint8)
    for part, made in packed(cache, layout, blocks):
        rows[part.start - blocks.start : part.stop - blocks.start] = made
    return rows


def packed(
    cache: DynamicCache, layout: Layout, blocks: range, *, row: int = 0, pad: int = 0
) -> Iterator[tuple[range, Bytes2D]]:
    """Bytes of blocks of a row, (blocks, block bytes) in the layout's order, some at a time.

    What is yielded is good until the next is asked for. The row's first token stands in column `pad`. Raises
    `InvalidInputError` for columns that are not held.
    """
    if not blocks:
        return iter(())
    start, stop = (pad + n * layout.block_tokens for n in (blocks.start, blocks.stop))
    states = [_columns(layer, start, stop) for layer in cache.layers]
    device = states[0][0].device
    gather = partial(_gather, [tuple(part[row] for part in pair) for pair in states], layout, blocks.start)
    batches = batches_of(blocks, layout.block_bytes, BATCH_BYTES)
    return offloaded(gather, work_of(device), layout.block_bytes, batches, device)


def _gather(states: Sequence[tuple[Any, ...]], layout: Layout, first: int, blocks: range, into: Any) -> None:
    """Fill `into`, bytes of blocks, from layers of keys and values (heads, tokens from block `first` on, dim)."""
    shaped, size = _shaped(into, layout), layout.block_tokens
    for index, pair in enumerate(states):
        for kv, part in enumerate(pair):
            tokens = part[:, (blocks.start - first) * size : (blocks.stop - first) * size]
            shaped[:, index, kv].copy_(tokens.unflatten(1, (len(blocks), size)).transpose(0, 1))


def unpack(blocks: Bytes2D, config: PretrainedConfig, layout: Layout, device: Any) -> DynamicCache:
    """Make a cache on a device from the bytes of leading blocks, with tensors that are contiguous as computed ones."""
    cache = DynamicCache(config=config)
    if not len(blocks):
        return cache
    there = torch.from_numpy(blocks).to(device)
    for index in range(layout.layers):
        keys, values = unpacked(there, layout, index)
        cache.update(keys.contiguous(), values.contiguous(), index)
    return cache


def unpacked(blocks: Any, layout: Layout, index: int) -> tuple[Any, Any]:
    """Keys and values of layer `index`, (1, heads, tokens, dim), from the bytes of consecutive blocks."""
    return _joined(_shaped(blocks, layout)[:, index])


def element_type(layout: Layout) -> Any:
    """The torch type of a layout's elements."""
    return _DTYPES[layout.dtype]


def _rows(keys: Any, values: Any, first_block: int, blocks: int, layout: Layout) -> Bytes2D:
    """Bytes of one layer of blocks, (blocks, bytes of a layer), from its states (1, heads, tokens, dim)."""
    alone = replace(layout, layers=1)
    gather = partial(_gather, [(keys[0], values[0])], alone, 0)
    wanted = range(first_block, first_block + blocks)
    ((_, rows),) = offloaded(gather, work_of(keys.device), alone.block_bytes, [wanted], keys.device)
    return rows


def _states(rows: Any, layout: Layout) -> tuple[Any, Any]:
    """Keys and values of one layer, (1, heads, tokens, dim), contiguous copies, from its bytes of all blocks."""
    keys, values = (states.contiguous() for states in unpacked(rows, replace(layout, layers=1), 0))
    if len(rows) == 1:  # One block is contiguous where it lies.
        return keys.clone(), values.clone()
    return keys, values


def _joined(shaped: Any) -> tuple[Any, Any]:
    """Keys and values of one layer, (1, heads, tokens, dim), from (blocks, 2, heads, tokens, dim)."""
    keys, values = (shaped[:, kv].transpose(0, 1).flatten(1, 2).unsqueeze(0) for kv in (0, 1))
    return keys, values


def _shaped(blocks: Any, layout: Layout) -> Any:
    """View of blocks, (blocks, block bytes) uint8, as (blocks, layers, 2, heads, tokens, dim) elements."""
    shape = (len(blocks), layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    return blocks.view(_DTYPES[layout.dtype]).view(shape)


def _columns(layer: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Keys and values of columns of a layer, (rows, heads, columns, dim)."""
    if isinstance(layer, ArrivingLayer):
        layer.settle()
    elif type(layer) not in {DynamicLayer, HandoverLayer, SlidingLayer}:
        raise UnsupportedError(
            f"cache layer {type(layer).__name__}: only full attention (DynamicLayer), and sliding windows of a"
            " KvstrataCache, can be saved"
        )
    if not layer.is_initialized or layer.get_seq_length() < stop:
        raise InvalidInputError(f"cache holds {layer.get_seq_length()} tokens, {stop} are to be saved")
    if not isinstance(layer, SlidingLayer):
        return layer.keys[:, :, start:stop], layer.values[:, :, start:stop]
    if start < layer.first_column:
        raise InvalidInputError(f"cache holds tokens from {layer.first_column} on, those from {start} are to be saved")
    return layer.columns(start, stop)


def _head_dim(config: PretrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim
