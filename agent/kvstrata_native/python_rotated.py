"""Rotated planes in NumPy: equal to the compiled kernels to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstrata_native.mixing import Rotation

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint16]
_Floats = npt.NDArray[np.float32]

_SCALE_MIN: Final = np.float32(2.0**-100)
_ROTATED_BELOW: Final = 0x6D80
"""bf16 of 2^92: sums over the longest run, there and back, stay numbers."""
_SHARE_BELOW: Final = 0x7380
"""bf16 of 2^104."""
_NIBBLE: Final = 4


def pack_rotated(x: _Words, rotation: Rotation) -> bytes | None:
    """Scales, least values and codes of a plane; None where its numbers are not finite or too large."""
    if int((x & 0x7FFF).max()) >= _ROTATED_BELOW:
        return None
    values = _rotated(_widened(x).reshape(rotation.rows, rotation.columns), rotation.run)
    low = _rounded_down(values.min(axis=1))
    amount = ((values.max(axis=1) - _widened(low)) / np.float32((1 << rotation.bits) - 1)).astype(np.float32)
    amount = np.where(amount > 0, np.maximum(amount, _SCALE_MIN), np.float32(0))
    scale = ((amount.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    divisor = np.where(amount > 0, _widened(scale), np.float32(1))
    inverse = np.where(amount > 0, np.float32(1) / divisor, np.float32(0)).astype(np.float32)
    codes = np.rint((values - _widened(low)[:, None]) * inverse[:, None]).astype(np.uint8)
    return scale.tobytes() + low.tobytes() + _stored(codes.reshape(-1), rotation.bits)


def unpack_rotated(x: _Words, body: _Bytes, rotation: Rotation) -> bool:
    """Undo `pack_rotated`, as far as it can be; false for scales that it does not make."""
    rows = rotation.rows
    shares = np.frombuffer(body[: 4 * rows].tobytes(), np.uint16)
    if int((shares & 0x7FFF).max()) >= _SHARE_BELOW:
        return False
    codes = _loaded(body[4 * rows :], rotation.bits, x.size).reshape(rows, rotation.columns).astype(np.float32)
    by, low = (_widened(part)[:, None] for part in (shares[:rows], shares[rows:]))
    values = _rotated(codes * by + low, rotation.run) * np.float32(1 / rotation.run)
    x[:] = _rounded(values).reshape(-1)
    return True


def _rotated(values: _Floats, run: int) -> _Floats:
    """Runs of rows times the Hadamard matrix: butterflies of neighbours first."""
    turned, h = values.reshape(-1, run), 1
    while h < run:
        halves = turned.reshape(len(turned), -1, 2, h)
        turned = np.stack((halves[:, :, 0] + halves[:, :, 1], halves[:, :, 0] - halves[:, :, 1]), axis=2)
        turned, h = turned.reshape(-1, run), 2 * h
    return turned.reshape(values.shape)


def _stored(codes: _Bytes, bits: int) -> bytes:
    if bits == 8:
        return codes.tobytes()
    halves = codes & 0xF
    parts: list[_Bytes] = [(halves[0::2] | halves[1::2] << _NIBBLE).astype(np.uint8)]
    parts += [np.packbits(codes >> at & 1, bitorder="little") for at in range(_NIBBLE, bits)]
    return np.concatenate(parts).tobytes()


def _loaded(stored: _Bytes, bits: int, count: int) -> _Bytes:
    if bits == 8:
        return stored
    both = stored[: count // 2]
    codes = np.stack((both & 0xF, both >> _NIBBLE), axis=1).reshape(-1)
    for at in range(_NIBBLE, bits):
        start = count // 2 + (at - _NIBBLE) * (count // 8)
        codes |= np.unpackbits(stored[start : start + count // 8], bitorder="little") << at
    return codes


def _widened(words: _Words) -> _Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: _Floats) -> _Words:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _rounded_down(values: _Floats) -> _Words:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    found = ((bits + (bits >> 31) * np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return np.where(found == 0x8000, np.uint16(0), found)
