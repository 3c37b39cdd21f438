"""Ways to keep keys and values of one head, by the kernels of `kvstrata_native`: what comes back and how small."""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata_agent.codec.base import Shape, room_bytes
from kvstrata_agent.codec.exact import PackedCodec
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_native import pack, unpack
from kvstrata_native.forms import Kind, Packing

Words = npt.NDArray[np.uint16]
"""(tokens, head dim) bf16, C-contiguous."""

BLOCK_TOKENS: Final = 16
"""Tokens of one block of a pool; groups of columns do not reach beyond one, but where they say so."""


class Way(Protocol):
    """One way to keep keys or values."""

    def __call__(self, states: Words) -> tuple[Words, int]:
        """What comes back, and how many bytes it took."""


def kept(states: Words) -> tuple[Words, int]:
    """As they are."""
    return states, states.nbytes


def forgotten(states: Words) -> tuple[Words, int]:
    """Nothing comes back: the control that tells whether the prefix matters at all."""
    return np.zeros_like(states), states.nbytes


def lossless(states: Words) -> tuple[Words, int]:
    """The agent's exact codec, for all of a head at once."""
    raw = states.data.cast("B")
    room = memoryview(bytearray(room_bytes(states.nbytes)))
    encoded = PackedCodec().encode(raw, Shape(element_bytes=2), room)
    back = np.empty_like(states)
    CodecRegistry().named(encoded.codec).decode(room[: encoded.stored_bytes], back.data.cast("B"))
    return back, encoded.stored_bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes and scales."""

    kind: Kind
    is_by_column: bool
    group: int = 0
    """Elements that share a scale; 0: a row of one head, or the tokens of a block."""

    def __call__(self, states: Words) -> tuple[Words, int]:
        """What comes back, and how many bytes it took."""
        rows, columns = states.shape
        group = self.group or (BLOCK_TOKENS if self.is_by_column else columns)
        packing = Packing(self.kind, columns, group, self.is_by_column)
        codes, scales = (np.empty(n, np.uint8) for n in (packing.codes_bytes(rows), packing.scales_bytes(rows)))
        assert pack(codes, scales, states, packing), "the model has no values that are not finite"
        back = np.empty_like(states)
        unpack(back, codes, scales, packing)
        return back, codes.nbytes + scales.nbytes


@dataclass(frozen=True, slots=True)
class Codec:
    """What to do with keys and with values."""

    name: str
    keys: Way
    values: Way


def _by_channel(kind: Kind, group: int = 0) -> Packed:
    return Packed(kind, is_by_column=True, group=group)


def _by_token(kind: Kind) -> Packed:
    return Packed(kind, is_by_column=False)


CODECS: Final = (
    Codec("exact", kept, kept),
    Codec("lossless", lossless, lossless),
    Codec("control: prefix of zeros", forgotten, forgotten),
    *(Codec(f"{k.name.lower()} K channel, V token", _by_channel(k), _by_token(k)) for k in Kind),
    *(Codec(f"{k.name.lower()} K token, V token", _by_token(k), _by_token(k)) for k in Kind),
    Codec("int4 K channel of 64 tokens, V token", _by_channel(Kind.INT4, 64), _by_token(Kind.INT4)),
    Codec("K int8 channel, V int4 token", _by_channel(Kind.INT8), _by_token(Kind.INT4)),
    Codec("K int4 channel, V int8 token", _by_channel(Kind.INT4), _by_token(Kind.INT8)),
)
"""The exact one first: the others are compared with it."""
