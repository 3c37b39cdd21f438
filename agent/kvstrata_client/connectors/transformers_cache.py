"""A transformers `Cache` that restores, saves and lets go of KV by itself, for `model.generate(past_key_values=...)`.

It sees tokens through forward hooks of the model: before a forward pass it appends what the agent has of the prompts
and cuts that off the input, after it the blocks that are full now are handed to the agent. A call whose KV does not
follow from its tokens alone (embeddings, pictures, positions or masks of its own) is computed as with a `DynamicCache`
and leaves no trace; so is everything while the agent is away.
"""

import copy
import inspect
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstrata_api.errors import InvalidInputError, KvStrataError, UnsupportedError
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.device_blocks import reads_in_place, rows_of
from kvstrata_client.connectors.paged import Wait, batches_of, work_of
from kvstrata_client.connectors.transformers import (
    BATCH_BYTES,
    SlidingLayer,
    check_layout,
    element_type,
    packed,
    unpacked,
)
from kvstrata_client.connectors.transformers_rows import (
    Row,
    Rows,
    blocks_touching,
    blocks_within,
    columns_of,
    cropped,
    follow,
    reach,
    unsaved_from,
)
from kvstrata_client.verbs.results import Bytes2D

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

DEADLINE_S: Final = 2.0
"""How long a prompt waits for a batch of its blocks before they are a miss, unless said otherwise."""
_HARMLESS: Final = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids", "cache_position"})
"""Tensors among a model's arguments that say no more than the tokens do, or are looked at."""

_hooked: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()
"""Models that have the hooks of this module; they live as long as the model."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Arguments of one forward pass."""

    kwargs: dict[str, Any]
    ids: Any
    """(rows, new columns)."""
    pads: tuple[int, ...]
    columns: int
    """Of the batch when it has been computed, padding included."""
    keep: int
    """Last columns whose logits the caller wants: these are computed."""

    @property
    def before(self) -> int:
        """Columns that the caller takes for computed."""
        return int(self.columns - self.ids.shape[1])


class KvstrataCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed here.
    """KV of one batch of conversations; give it to every `generate` that goes on with them.

    Full attention and sliding windows, in any order. Not for threads at a time.
    """

    layers: list[Any]

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client,
        *,
        session: str = "",
        priority: str = "",
        variant: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Keep KV of `model` with `client`, whose target's layout is the model's (`layout_of`).

        `session` names the conversation to the agent; `variant` as for `PrefixCache`: whoever merges or activates an
        adapter names it there. Raises `InvalidInputError` when model and layout do not fit, and `UnsupportedError` for
        a model whose layers keep something else than keys and values of tokens.
        """
        config, layout = model.config.get_text_config(decoder=True), client.target.layout
        check_layout(config, layout)
        if model.dtype != element_type(layout):
            raise InvalidInputError(f"model computes in {model.dtype}, the layout has {layout.dtype}")
        if model.config.is_encoder_decoder:
            raise UnsupportedError(f"{type(model).__name__}: an encoder's KV does not follow from the tokens")
        if changing := [t for t in _rope_types(config) if t == "longrope" or "dynamic" in t]:
            raise UnsupportedError(f"rope_type {', '.join(changing)}: keys of tokens depend on how many follow them")
        super().__init__(config=config)
        self.layers = [_layer(layer) for layer in self.layers]
        self.hit_tokens: Counter[str] = Counter()
        """Tokens of prompts that were restored and not computed, by tier; `remote` for another node's."""
        self._client = client
        self._prefixes = PrefixCache(client, variant=variant)
        self._layout = layout
        self._session, self._priority, self._parent = session, priority, ""
        self._urgency = 0
        self._deadline_s = deadline_s
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._rows: Rows = ()
        self._pending: Rows | None = None
        """What a forward pass that is under way makes of the rows."""
        self._given_up = ""
        """Why nothing is restored and saved until `reset`; empty while something is."""
        _hook(model)

    def fork(self, session: str = "") -> Self:
        """Another continuation of what there is so far: it shares the memory, and goes on by itself.

        `session` names it to the agent, as a fork of this one's.
        """
        twin = copy.copy(self)
        layers = [copy.copy(layer) for layer in self.layers]  # They replace tensors and never write into them.
        twin.__dict__.update(layers=layers, hit_tokens=Counter(), _pending=None)
        if session:
            twin.__dict__.update(_session=session, _parent=self._session)
            self._report(lambda: self._client.fork_session(session, self._session, priority=self._priority))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Like `fork` without a session of its own: what transformers' documentation does with a cached prompt."""
        return self.fork()

    def hint(self, state: str = "idle", *, urgency: int = 0, expected_return_s: float = 0.0) -> None:
        """Report what the session does next: `decoding`, `idle` or `tool`, and when its next turn is expected."""
        if not self._session:
            raise InvalidInputError("session is empty: only a named session can be hinted about")
        self._urgency = urgency
        client, name = self._client, self._session
        if state == "tool":
            self._report(lambda: client.tool_wait(name, expected_return_s, urgency=urgency))
        else:
            self._report(
                lambda: client.touch_session(name, state, urgency=urgency, expected_return_s=expected_return_s)
            )

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:  # noqa: FBT001, FBT002  The base's signature.
        """Let the KV leave memory; the tokens are remembered, and the next use restores their blocks or computes them.

        With `layer_idx` it is the method of `Cache`.
        """
        if layer_idx is not None:
            super().offload(layer_idx, only_non_sliding)
        elif self._given_up or (self._held() and not self._rows):
            _log.warning("a cache stays in memory: %s", self._given_up or "its tokens are not known")
        else:
            self._drop()
            if self._session:
                self.hint("idle", urgency=self._urgency)

    def reset(self) -> None:
        """Forget everything, for other prompts."""
        self._drop()
        self._rows, self._given_up = (), ""

    def reorder_cache(self, beam_idx: Any) -> None:
        """See `Cache.reorder_cache`."""
        super().reorder_cache(beam_idx)
        self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `Cache.batch_repeat_interleave`."""
        super().batch_repeat_interleave(repeats)
        self._choose([i for i in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """See `Cache.batch_select_indices`."""
        super().batch_select_indices(indices)
        self._choose(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def _choose(self, indices: Sequence[int]) -> None:
        if self._rows:
            self._rows = tuple(self._rows[i] for i in indices)

    # Before a forward pass.

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Restore what can be had of the tokens of a forward pass; returns its arguments without these."""
        if self._pending is not None or len({layer.get_seq_length() for layer in self.layers}) > 1:
            self._break_off()
        if self._given_up:
            return None
        held = self._held()
        try:
            given = self._inputs(args, kwargs, held)
            rows, left = self._rows, held or given.before
            if 0 < left < columns_of(rows):
                rows = cropped(rows, left, self._layout.block_tokens)
            rows = follow(rows, held, given.ids.tolist(), given.pads, given.columns)
        except UnsupportedError as e:
            if self._rows and not held:
                _refuse_gap(e, args, kwargs)
            self._give_up(str(e))
            return None
        self._record(is_on=True)
        if given.ids.shape[1] > 1 or held < given.before:
            rows = self._restored(rows, held, given)
        self._pending = rows
        return (), self._from(self._held(), rows, given)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], held: int) -> _Inputs:
        """What a forward pass is given. Raises `UnsupportedError` where KV does not follow from tokens alone."""
        kwargs = {**kwargs, "input_ids": args[0]} if args else kwargs
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if len(args) > 1 or not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.shape[1]:
            raise UnsupportedError("a forward pass without input_ids of two dimensions")
        foreign = [name for name, value in kwargs.items() if name not in _HARMLESS and _has_tensor(value)]
        types = kwargs.get("token_type_ids")
        if foreign or (types is not None and bool((types != 0).any())):
            raise UnsupportedError(f"KV that depends on {foreign or 'token_type_ids'} besides tokens")
        pads, columns = _padding(ids, mask, held)
        keep = kwargs.get("logits_to_keep") or (ids.shape[1] if self._keeps_logits else 1)
        if kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
            keep = ids.shape[1]
        given = _Inputs(kwargs, ids, pads, columns, int(keep))
        _check_positions(given)
        return given

    def _restored(self, rows: Rows, held: int, given: _Inputs) -> Rows:
        """Append what the agent has of the rows behind `held` columns, as far as all rows have something."""
        block_tokens, limit = self._layout.block_tokens, given.columns - max(1, given.keep)
        wanted = blocks_within(rows, limit, block_tokens)
        if self._session:
            self._report(self._open_session)
        if reach(rows, wanted, block_tokens) - held < block_tokens:
            return rows
        try:
            if len(rows) > 1:  # One row that has little would have the others loaded for nothing.
                wanted = _each(rows, wanted, self._lookup)
            stop = reach(rows, wanted, block_tokens)
            if stop <= held:
                return rows
            device = given.ids.device
            loads = _each(rows, [stop] * len(rows), lambda row, _: self._load(row, held, stop, device))
        except KvStrataError as e:  # Of a strict client alone.
            _log.warning("nothing is restored: %s", e)
            return rows
        stop = min(stop, reach(rows, [load.stop_block for load in loads], block_tokens))
        if stop <= held:
            return rows
        self._append(rows, held, stop, loads, device)
        for row, load in zip(rows, loads, strict=True):
            self.hit_tokens.update(load.hits(row, range(held, stop), block_tokens))
        rows = tuple(load.noted(row) for row, load in zip(rows, loads, strict=True))
        self._trim(unsaved_from(rows, block_tokens))
        return rows

    def _lookup(self, row: Row, blocks_max: int) -> int:
        return self._prefixes.lookup(row.tokens, session=self._session, blocks_max=blocks_max).blocks

    def _load(self, row: Row, held: int, stop: int, device: Any) -> "_Load":
        """Blocks of a row that hold its tokens from column `held` to `stop`, on the device."""
        layout = self._layout
        first, wanted = max(0, held - row.pad) // layout.block_tokens, blocks_touching(row, stop, layout.block_tokens)
        load, work, waits = _Load(first, [], []), work_of(device), deque[Wait]()
        batches = batches_of(range(first, wanted), layout.block_bytes, BATCH_BYTES)
        if reads_in_place(self._prefixes, device):
            return self._load_in_place(row, load, batches, device)
        rooms = [work.staging(len(batches[0]) * layout.block_bytes) for _ in batches[:2]]
        for number, blocks in enumerate(batches):
            if len(waits) == len(rooms):
                waits.popleft()()
            room = rooms[number % 2].view(-1, layout.block_bytes)[: len(blocks)]
            loaded = self._prefixes.load(
                row.tokens,
                room.numpy(),
                session=self._session,
                deadline_s=self._deadline_s,
                blocks_max=blocks.stop,
                first_block=blocks.start,
            )
            waits.append(work.start(partial(load.add, room[: loaded.blocks], loaded.sources, device)))
            if loaded.blocks < len(blocks):
                break
        for wait in waits:
            wait()
        return load

    def _load_in_place(self, row: Row, load: "_Load", batches: Sequence[range], device: Any) -> "_Load":
        """Do the same, copying on the device what lies there."""
        for blocks in batches:
            room = torch.empty((len(blocks), self._layout.block_bytes), dtype=torch.uint8, device=device)
            loaded = self._prefixes.load_rows(
                row.tokens,
                rows_of(room),
                session=self._session,
                deadline_s=self._deadline_s,
                blocks_max=blocks.stop,
                first_block=blocks.start,
            )
            load.batches.append(room[: loaded.blocks])
            load.sources.extend(loaded.sources)
            if loaded.blocks < len(blocks):
                break
        return load

    def _append(self, rows: Rows, held: int, stop: int, loads: Sequence["_Load"], device: Any) -> None:
        """Give every layer columns `held` to `stop`, as a forward pass would; what is padding is masked, and zero."""
        layout = self._layout
        shape = (len(rows), layout.kv_heads, stop - held, layout.head_dim)
        for index, layer in enumerate(self.layers):
            states = [torch.zeros(shape, dtype=element_type(layout), device=device) for _ in range(2)]
            for number, (row, load) in enumerate(zip(rows, loads, strict=True)):
                block = load.first_block
                for blocks in load.batches:
                    first, block = row.column_of(block, layout.block_tokens), block + len(blocks)
                    start, end = max(held, row.pad, first), min(stop, row.column_of(block, layout.block_tokens))
                    if start >= end:
                        continue
                    for made, part in zip(states, unpacked(blocks, layout, index), strict=True):
                        made[number, :, start - held : end - held] = part[0, :, start - first : end - first]
            layer.update(*states)

    def _from(self, start: int, rows: Rows, given: _Inputs) -> dict[str, Any]:
        """Arguments of the forward pass for the columns from `start` on: fewer than were given, or more."""
        skipped, kwargs = start - given.before, {**given.kwargs}
        if not skipped:
            return kwargs
        if kwargs.get("cache_position") is not None:
            kwargs["cache_position"] = torch.arange(start, given.columns, device=given.ids.device)
        if skipped > 0:
            for name in ("input_ids", "position_ids", "token_type_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][:, skipped:]
            return kwargs
        columns = range(start, given.before)
        ids = [[row.tokens[c - row.pad] if c >= row.pad else 0 for c in columns] for row in rows]
        kwargs["input_ids"] = torch.cat([given.ids.new_tensor(ids), given.ids], 1)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = _positions(given, start)
        if kwargs.get("token_type_ids") is not None:
            kwargs["token_type_ids"] = torch.zeros_like(kwargs["input_ids"])
        if self._keeps_logits:
            kwargs["logits_to_keep"] = given.keep
        return kwargs

    # After a forward pass.

    def finish(self, *, is_whole: bool) -> None:
        """Save the blocks that are full now."""
        self._record(is_on=False)
        if self._pending is None:
            return
        if not is_whole:
            self._break_off()
            return
        rows, self._pending = self._pending, None
        if {layer.get_seq_length() for layer in self.layers} != {columns_of(rows)}:
            self._give_up(f"layers do not hold the {columns_of(rows)} columns that the model was given")
        elif (wrong := self._wrong_states()) is not None:
            self._give_up(wrong)
        else:
            new = columns_of(rows) - columns_of(self._rows)
            self._rows = self._saved(rows, is_prefill=new > 1)
            self._trim(unsaved_from(self._rows, self._layout.block_tokens))

    def _wrong_states(self) -> str | None:
        """What keeps the layers' KV from being blocks of the layout."""
        layout = self._layout
        wanted = (layout.kv_heads, layout.head_dim, element_type(layout))
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                found = (states.shape[1], states.shape[3], states.dtype)
                if found != wanted:
                    return f"a layer has (KV heads, head dim, type) {found}, the layout {wanted}"
        return None

    def _saved(self, rows: Rows, *, is_prefill: bool) -> Rows:
        done: dict[Row, Row] = {}
        saved = []
        for number, row in enumerate(rows):
            is_due = row.full_blocks(self._layout.block_tokens) > row.saved_blocks
            if is_due and row not in done:  # Beams of one prompt are alike.
                done[row] = self._save(number, replace(row, is_open=row.is_open or is_prefill))
            saved.append(done[row] if is_due else row)
        return tuple(saved)

    def _save(self, number: int, row: Row) -> Row:
        """Hand the agent the blocks of a row that are full, until it does not take one."""
        size = self._layout.block_tokens
        first_column = max([layer.first_column for layer in self.layers if isinstance(layer, SlidingLayer)], default=0)
        if row.column_of(row.saved_blocks, size) < first_column:
            return replace(row, is_open=False)
        blocks = range(row.saved_blocks, row.full_blocks(size) if row.is_open else row.saved_blocks)
        for part, made in packed(self, self._layout, blocks, row=number, pad=row.pad):
            taken = self._store(row, part.start, made)
            row = replace(row, saved_blocks=part.start + taken, is_open=taken == len(part))
            if not row.is_open:
                break
        return row

    def _store(self, row: Row, first_block: int, blocks: Bytes2D) -> int:
        """Hand over blocks of a row; returns how many of them there are now."""
        try:
            stored = self._prefixes.store(
                row.tokens, blocks, first_block=first_block, session=self._session, deadline_s=self._deadline_s
            )
        except KvStrataError as e:  # Of a strict client alone.
            _log.warning("blocks are not saved: %s", e)
            return 0
        return stored.published + stored.existed

    # What it holds.

    def _held(self) -> int:
        """Columns that have KV."""
        return int(self.layers[0].get_seq_length())

    def _drop(self) -> None:
        self._pending = None
        super().reset()

    def _break_off(self) -> None:
        """Drop what layers hold of a pass that ended amid them. Its tokens are known, and are computed again."""
        if self._pending is not None:
            self._rows = self._pending
        self._drop()

    def _record(self, *, is_on: bool) -> None:
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.is_recording = is_on

    def _trim(self, column: int) -> None:
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.trim(column)

    def _give_up(self, reason: str) -> None:
        self._given_up, self._rows = reason, ()
        self._record(is_on=False)
        self._trim(self._held())
        _log.warning("a cache is neither restored nor saved until its reset: %s", reason)

    def _open_session(self) -> None:
        self._client.open_session(self._session, parent=self._parent, priority=self._priority)
        self._client.touch_session(self._session, "decoding", urgency=self._urgency)

    def _report(self, report: Callable[[], object]) -> None:
        try:
            report()
        except KvStrataError as e:  # Of a strict client alone.
            _log.warning("session %s: %s", self._session, e)


@dataclass(frozen=True, slots=True)
class _Load:
    """Blocks of one row that were loaded."""

    first_block: int
    batches: list[Any]
    """Their bytes from `first_block` on, (blocks, block bytes) uint8 of the model's device each."""
    sources: list[str]

    def add(self, blocks: Any, sources: Sequence[str], device: Any) -> None:
        """Take blocks that follow; their memory on the host may be used again when the device is done."""
        self.batches.append(blocks.to(device, non_blocking=True, copy=True))
        self.sources.extend(sources)

    @property
    def stop_block(self) -> int:
        return self.first_block + len(self.sources)

    def noted(self, row: Row) -> Row:
        """The row, with what the agent has of it by this."""
        return replace(row, saved_blocks=max(row.saved_blocks, self.stop_block)) if self.sources else row

    def hits(self, row: Row, columns: range, block_tokens: int) -> Counter[str]:
        """Tokens of the row in `columns`, by where they came from."""
        hits: Counter[str] = Counter()
        for block, source in enumerate(self.sources, self.first_block):
            start = row.column_of(block, block_tokens)
            hits[source] += max(0, min(columns.stop, start + block_tokens) - max(columns.start, start))
        return hits


def _rope_types(config: Any) -> set[str]:
    """Rope types of a model: one, or one for each type of layers.

    Those with `dynamic` in their name, and `longrope`, rotate by the length so far (`modeling_rope_utils` of 5.23).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return {str(r["rope_type"]) for r in (rope, *rope.values()) if isinstance(r, Mapping) and "rope_type" in r}


def _layer(layer: Any) -> Any:
    """The layer that takes the place of one of a `DynamicCache`."""
    if type(layer) is DynamicSlidingWindowLayer:
        return SlidingLayer(layer.sliding_window)
    if type(layer) is not DynamicLayer:
        raise UnsupportedError(f"cache layer {type(layer).__name__}: only full attention and sliding windows are kept")
    return layer


def _each(rows: Rows, numbers: Sequence[int], ask: Callable[[Row, int], T]) -> list[T]:
    """Ask for each row, once for those that are alike."""
    asked = dict(zip(rows, numbers, strict=True))
    answers = {row: ask(row, number) for row, number in asked.items()}
    return [answers[row] for row in rows]


def _refuse_gap(error: UnsupportedError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise when the caller counts on KV that left memory and cannot be computed either."""
    new = (
        args[0]
        if args
        else next((kwargs[n] for n in ("input_ids", "inputs_embeds") if kwargs.get(n) is not None), None)
    )
    mask = kwargs.get("attention_mask")
    if new is not None and isinstance(mask, torch.Tensor) and mask.shape[-1] > new.shape[1]:
        raise InvalidInputError(f"the KV before these {new.shape[1]} columns left memory: {error}") from error


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)


def _padding(ids: Any, mask: Any, held: int) -> tuple[tuple[int, ...], int]:
    """Padding of each row, and columns of the batch. Raises `UnsupportedError` for a mask that says something else."""
    if mask is None:
        return (0,) * ids.shape[0], held + ids.shape[1]
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[0] != ids.shape[0]:
        raise UnsupportedError("an attention_mask that is not (rows, columns)")
    seen = mask != 0
    if mask.shape[1] < ids.shape[1] or not bool((seen[:, 1:] >= seen[:, :-1]).all() & seen[:, -1].all()):
        raise UnsupportedError("an attention_mask that is not padding on the left")
    return tuple((~seen).sum(1).tolist()), int(mask.shape[1])


def _positions(given: _Inputs, start: int) -> Any:
    """Positions of the tokens in columns from `start` on, (rows, columns); 0 of padding."""
    columns = torch.arange(start, given.columns, device=given.ids.device)
    return (columns - torch.tensor(given.pads, device=given.ids.device)[:, None]).clamp(min=0)


def _check_positions(given: _Inputs) -> None:
    """Raise `UnsupportedError` where tokens stand elsewhere than one behind the other."""
    found = given.kwargs.get("position_ids")
    if found is None and any(given.pads):
        raise UnsupportedError("padding without position_ids")
    if found is None:
        return
    if found.ndim != 2 or found.shape[1] != given.ids.shape[1]:
        raise UnsupportedError(f"position_ids of shape {tuple(found.shape)} for input_ids of {tuple(given.ids.shape)}")
    columns = torch.arange(given.before, given.columns, device=found.device)
    is_token = columns >= torch.tensor(given.pads, device=found.device)[:, None]
    if bool(((found != _positions(given, given.before).to(found.device)) & is_token).any()):
        raise UnsupportedError("position_ids that do not count the tokens of each row from 0")


def _hook(model: Any) -> None:
    """Have forward passes of a model begun and finished by the cache that they are given."""
    if model not in _hooked:
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True, always_call=True)
        _hooked.add(model)


def _before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get("past_key_values")
    with torch.no_grad():
        return cache.begin(args, kwargs) if isinstance(cache, KvstrataCache) else None


def _after(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, KvstrataCache):
        with torch.no_grad():
            cache.finish(is_whole=output is not None)
