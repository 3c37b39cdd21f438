"""Hugging Face transformers: saves a DynamicCache as blocks and makes one from blocks, bit for bit.

One prompt at a time (batch size 1), full attention in every layer. The only torch import of the client.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError, UnsupportedError
from kvstrata_api.wire_handover import Handover
from kvstrata_client.cache import PrefixCache
from kvstrata_client.connectors.growing import GrowingLayer, Prefill
from kvstrata_client.connectors.layerwise import Arrivals, ArrivingLayer, arrived
from kvstrata_client.verbs.results import Bytes2D, Loaded, Stored

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

    def __init__(self, cache: PrefixCache, config: PretrainedConfig, layout: Layout) -> None:
        """Bind a prefix cache to a model's configuration. Raises `InvalidInputError` when the layout is another's."""
        self._cache = cache
        self._config = config
        self._layout = layout
        check_layout(config, layout)

    def restore(self, tokens: Sequence[int], *, session: str = "") -> Restored:
        """Make a cache of the longest prefix that can be had. Never raises for an agent's sake."""
        return self._loaded(tokens, session, self._usable(tokens))

    def _usable(self, tokens: Sequence[int]) -> int:
        return max(0, len(tokens) - 1) // self._layout.block_tokens

    def _loaded(self, tokens: Sequence[int], session: str, blocks_max: int) -> Restored:
        loaded = self._cache.load(tokens, session=session, blocks_max=blocks_max)
        cache = unpack(loaded.data[: loaded.blocks], self._config, self._layout)
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
        helpings, before this returns. With `handover` it goes on with what another node is still computing (`prefill`):
        a layer that does not come raises a `KvStrataError` in the forward pass, and the prompt is to be computed.
        """
        usable = self._usable(tokens)
        usable = usable if blocks_max is None else min(usable, blocks_max)
        stream = self._cache.stream(tokens, session=session, blocks_max=usable, handover=handover)
        if not stream.is_whole:
            stream.close()
            whole = self._loaded(tokens, session, usable)
            return Restoring(
                whole.cache, whole.tokens, whole.loaded.sources, whole.loaded.shared_blocks, arrived(stream)
            )
        count, sources = stream.blocks * self._layout.block_tokens, stream.sources
        cache = DynamicCache(config=self._config)
        arrivals = Arrivals(stream, self._layout.layers if count else 0, partial(_states, layout=self._layout))
        for number, arrival in enumerate(arrivals.layers):
            cache.layers[number] = ArrivingLayer(arrival, count, arrivals.note_wait)
        return Restoring(cache, count, sources, stream.shared_blocks, arrivals)

    def prefill(self, tokens: Sequence[int], *, session: str = "") -> Prefill:
        """Make an empty cache for computing `tokens` whose layers are handed over as they are computed.

        `finish` it after the forward pass, with which everything is stored that was not handed over.
        """
        growing = self._cache.grow(tokens, session=session)
        cache = DynamicCache(config=self._config)
        for number in range(self._layout.layers if growing.blocks else 0):
            cache.layers[number] = GrowingLayer(growing, partial(_rows, layout=self._layout))
        return Prefill(cache, growing, partial(self.save, tokens, session=session))

    def save(self, tokens: Sequence[int], cache: DynamicCache, *, first_block: int = 0, session: str = "") -> Stored:
        """Store the full blocks of `tokens` from `first_block` on; `cache` must hold all of `tokens`."""
        blocks = pack(cache, self._layout, first_block, len(tokens) // self._layout.block_tokens)
        return self._cache.store(tokens, blocks, first_block=first_block, session=session)


def layout_of(config: PretrainedConfig, model: str, revision: str, dtype: str, block_tokens: int = 16) -> Layout:
    """Layout of a model's KV; `model`, `revision`, `dtype` and `block_tokens` as in the pool's `compatibility`."""
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


def pack(cache: DynamicCache, layout: Layout, first_block: int, stop_block: int) -> Bytes2D:
    """Bytes of blocks `first_block` to `stop_block`: (blocks, block bytes), in the layout's order."""
    count = max(0, stop_block - first_block)
    blocks = np.empty((count, layout.block_bytes), np.uint8)
    if not count:
        return blocks
    shaped = _shaped(blocks, layout)
    tokens = slice(first_block * layout.block_tokens, (first_block + count) * layout.block_tokens)
    for index, layer in enumerate(cache.layers):
        _check_layer(layer, tokens.stop)
        for kv, states in enumerate((layer.keys, layer.values)):
            cut = states[0, :, tokens].unflatten(1, (count, layout.block_tokens))  # (heads, blocks, tokens, dim)
            shaped[:, index, kv].copy_(cut.transpose(0, 1))
    return blocks


def unpack(blocks: Bytes2D, config: PretrainedConfig, layout: Layout) -> DynamicCache:
    """Make a cache from the bytes of leading blocks; the tensors are copies and contiguous, as computed ones are."""
    cache = DynamicCache(config=config)
    if not len(blocks):
        return cache
    shaped = _shaped(blocks, layout)
    for index in range(layout.layers):
        keys, values = (shaped[:, index, kv].transpose(0, 1).flatten(1, 2).unsqueeze(0) for kv in (0, 1))
        cache.update(keys.contiguous(), values.contiguous(), index)
    return cache


def _rows(keys: Any, values: Any, first_block: int, blocks: int, layout: Layout) -> Bytes2D:
    """Bytes of one layer of blocks, (blocks, bytes of a layer), from its states (1, heads, tokens, dim)."""
    rows = np.empty((blocks, layout.block_bytes // layout.layers), np.uint8)
    shape = (blocks, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    shaped = torch.from_numpy(rows).view(_DTYPES[layout.dtype]).view(shape)
    tokens = slice(first_block * layout.block_tokens, (first_block + blocks) * layout.block_tokens)
    for kv, states in enumerate((keys, values)):
        cut = states[0, :, tokens].unflatten(1, (blocks, layout.block_tokens))  # (heads, blocks, tokens, dim)
        shaped[:, kv].copy_(cut.transpose(0, 1))
    return rows


def _states(rows: Bytes2D, layout: Layout) -> tuple[Any, Any]:
    """Keys and values of one layer, (1, heads, tokens, dim), contiguous, from its bytes of all blocks."""
    shape = (len(rows), 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    shaped = torch.from_numpy(rows).view(_DTYPES[layout.dtype]).view(shape)
    keys, values = (shaped[:, kv].transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous() for kv in (0, 1))
    return keys, values


def _shaped(blocks: Bytes2D, layout: Layout) -> Any:
    """View of blocks as (blocks, layers, 2, heads, tokens, dim) elements."""
    shape = (len(blocks), layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    return torch.from_numpy(blocks).view(_DTYPES[layout.dtype]).view(shape)


def _check_layer(layer: Any, tokens: int) -> None:
    if isinstance(layer, ArrivingLayer):
        layer.settle()
    elif type(layer) not in {DynamicLayer, GrowingLayer}:
        raise UnsupportedError(f"cache layer {type(layer).__name__}: only full attention (DynamicLayer) can be saved")
    if not layer.is_initialized or layer.get_seq_length() < tokens:
        raise InvalidInputError(f"cache holds {layer.get_seq_length()} tokens, {tokens} are to be saved")


def _head_dim(config: PretrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim
