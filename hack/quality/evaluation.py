"""Reads held-out text on from a cache that was packed and unpacked, as an engine does that resumes from restored KV.

The first tokens of every window are computed exactly and go through the codec; only the tokens behind them are judged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from quality.codecs import Codec, Way, Words
from quality.corpus import Corpus
from quality.model import Cached, Model, joined

PREFIX_TOKENS: Final = 192
"""Twelve blocks; the rest of a window is judged."""
BATCH: Final = 32

Errors = npt.NDArray[np.float64]
"""(layers, KV heads, 2): K and V."""


@dataclass(slots=True)
class Measured:
    """What one codec does."""

    losses: list[float] = field(default_factory=list)
    """Mean nats per character, one for each window."""
    stored_bytes: int = 0
    raw_bytes: int = 0
    errors: list[Errors] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """Of all characters judged."""
        return float(np.exp(np.mean(self.losses)))

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored one."""
        return self.raw_bytes / self.stored_bytes

    @property
    def error(self) -> Errors:
        """Relative error of attention outputs by layer, KV head, and whether K or V was packed: root mean square."""
        squares: Errors = np.mean(np.square(self.errors), axis=0)
        return np.sqrt(squares)


def evaluate(model: Model, corpus: Corpus, codecs: Sequence[Codec], windows: int, seed: int) -> dict[str, Measured]:
    """Measure all codecs on the same windows."""
    measured = {codec.name: Measured() for codec in codecs}
    with torch.no_grad():
        for batch in _batches(model, corpus, windows, seed):
            prefix, rest = batch[:, :PREFIX_TOKENS], batch[:, PREFIX_TOKENS:]
            _, exact = model(prefix)
            traces = _traces(model, rest[:, :-1], exact)
            for codec in codecs:
                found = measured[codec.name]
                restored = [_through(cached, codec, found) for cached in exact]
                logits, _ = model(rest[:, :-1], restored)
                losses = functional.cross_entropy(logits.flatten(0, 1), rest[:, 1:].flatten(), reduction="none")
                found.losses += losses.view(len(rest), -1).mean(1).tolist()
                found.errors.append(_attention_errors(model, traces, exact, restored))
    return measured


def _batches(model: Model, corpus: Corpus, windows: int, seed: int) -> Iterator[Tensor]:
    """Windows of held-out text, each one character longer than the context."""
    length = model.shape.context + 1
    starts = np.random.default_rng(seed).integers(0, len(corpus.held_out) - length, windows)
    for at in range(0, windows, BATCH):
        yield torch.from_numpy(np.stack([corpus.held_out[s : s + length] for s in starts[at : at + BATCH]]))


def _through(cached: Cached, codec: Codec, found: Measured) -> Cached:
    """Pack and unpack a layer, head by head; each head's tokens of all windows are rows behind each other."""
    kept: list[Tensor] = []
    for states, way in ((cached.keys, codec.keys), (cached.values, codec.values)):
        heads = [_through_one(states[:, head], way, found) for head in range(states.shape[1])]
        kept.append(torch.stack(heads, 1))
    return Cached(*kept)


def _through_one(states: Tensor, way: Way, found: Measured) -> Tensor:
    words = words_of(states)
    back, stored_bytes = way(words)
    found.stored_bytes += stored_bytes
    found.raw_bytes += words.nbytes
    return torch.from_numpy(back.view(np.int16)).view(torch.bfloat16).float().view(states.shape)


def words_of(states: Tensor) -> Words:
    """(rows, head dim) bf16 of states that have no more bits than that."""
    flat = states.reshape(-1, states.shape[-1]).to(torch.bfloat16).contiguous()
    words: Words = flat.view(torch.int16).numpy().view(np.uint16)
    return words


@dataclass(frozen=True, slots=True)
class Trace:
    """What one layer computed without any error before it."""

    queries: Tensor
    own: Cached


def _traces(model: Model, tokens: Tensor, past: Sequence[Cached]) -> list[Trace]:
    """Queries and own cache of each layer for the tokens behind an exact prefix."""
    x, traces = model.embedding(tokens), []
    for i, layer in enumerate(model.blocks()):
        queries, own = layer.attention.project(layer.before(x), PREFIX_TOKENS)
        traces.append(Trace(queries, own))
        x = layer.mix(x + layer.attention.join(layer.attention.attend(queries, joined(past[i], own))))
    return traces


def _attention_errors(
    model: Model, traces: Sequence[Trace], exact: Sequence[Cached], restored: Sequence[Cached]
) -> Errors:
    """Relative error of attention outputs where only the keys, and only the values, of one layer were packed."""
    shape = model.shape
    errors = np.zeros((shape.layers, shape.kv_heads, 2))
    for i, (layer, trace) in enumerate(zip(model.blocks(), traces, strict=True)):
        right = layer.attention.attend(trace.queries, joined(exact[i], trace.own))
        for kv in (0, 1):
            mixed = Cached(restored[i].keys, exact[i].values) if kv == 0 else Cached(exact[i].keys, restored[i].values)
            wrong = layer.attention.attend(trace.queries, joined(mixed, trace.own))
            by_head = [_norms(t).unflatten(0, (shape.kv_heads, -1)).sum(1) for t in (wrong - right, right)]
            errors[i, :, kv] = (by_head[0] / by_head[1]).sqrt().numpy()
    return errors


def _norms(outputs: Tensor) -> Tensor:
    """Sum of squares by head."""
    return outputs.square().sum((0, 2, 3))
