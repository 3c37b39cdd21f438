"""A small transformer of the Llama family over characters: RMSNorm, rotary positions, grouped queries, SiLU.

Keys and values are rounded to bf16 where an engine would put them into its cache, keys after their rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 256
    """Tokens of one window."""


class Cached(NamedTuple):
    """Keys and values of one layer: (batch, KV heads, tokens, head dim), values of bf16 in fp32."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):  # type: ignore[misc]  # torch has no types for us.
    """Causal attention that can go on from cached keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.queries = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.keys = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.values = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def project(self, x: Tensor, start: int) -> tuple[Tensor, Cached]:
        """Queries and what goes into the cache, of tokens that begin at position `start`."""
        split = (*x.shape[:2], -1, self.shape.head_dim)
        queries, keys, values = (f(x).view(split).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        return rotated(queries, start), Cached(stored(rotated(keys, start)), stored(values))

    def attend(self, queries: Tensor, cached: Cached) -> Tensor:
        """Outputs of all heads before their projection: (batch, heads, tokens, head dim)."""
        repeats = self.shape.heads // self.shape.kv_heads
        keys, values = (t.repeat_interleave(repeats, 1) for t in cached)
        tokens, known = queries.shape[2], keys.shape[2]
        mask = torch.ones(tokens, known, dtype=torch.bool).tril(known - tokens)
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    def join(self, outputs: Tensor) -> Tensor:
        """Project the outputs of all heads."""
        projected: Tensor = self.out(outputs.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):  # type: ignore[misc]  # torch has no types for us.
    """Attention and a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.between = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 8 * shape.width // 3 * 2, bias=False)
        self.down = nn.Linear(8 * shape.width // 3, shape.width, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        """Add the MLP."""
        gate, value = self.up(self.between(x)).chunk(2, -1)
        mixed: Tensor = x + self.down(functional.silu(gate) * value)
        return mixed


class Model(nn.Module):  # type: ignore[misc]  # torch has no types for us.
    """Characters in, logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # It makes the logits as well; at 1 they start 100 nats off.
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.last = nn.RMSNorm(shape.width)

    def forward(self, tokens: Tensor, past: Sequence[Cached] = ()) -> tuple[Tensor, list[Cached]]:
        """Logits of `tokens`, which continue `past`, and the whole cache of each layer."""
        start = past[0].keys.shape[2] if past else 0
        x, caches = self.embedding(tokens), []
        for i, layer in enumerate(self.blocks()):
            queries, own = layer.attention.project(layer.before(x), start)
            caches.append(joined(past[i], own) if past else own)
            x = layer.mix(x + layer.attention.join(layer.attention.attend(queries, caches[-1])))
        return functional.linear(self.last(x), self.embedding.weight), caches

    def blocks(self) -> list[Layer]:
        """Layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def joined(past: Cached, own: Cached) -> Cached:
    """Cache of what was and what came."""
    return Cached(*(torch.cat(pair, 2) for pair in zip(past, own, strict=True)))


def stored(states: Tensor) -> Tensor:
    """Round to bf16, as a cache of bf16 does; gradients pass."""
    return states + (states.to(torch.bfloat16).float() - states).detach()


def rotated(states: Tensor, start: int) -> Tensor:
    """Rotate pairs of dimensions by position."""
    half = states.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(start, start + states.shape[2], dtype=torch.float32)[:, None] * rates
    first, second = states[..., :half], states[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)
