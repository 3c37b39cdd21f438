"""Packing in NumPy: independent of how the compiled kernels do it, and equal to them to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstrata_native.packing import Kind, Packing

if TYPE_CHECKING:
    from kvstrata_native.buffers import Buffer

_Words = npt.NDArray[np.uint16]
_Codes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_STEPS: Final = {Kind.FP8: np.float32(448), Kind.INT8: np.float32(127), Kind.INT4: np.float32(15)}
_SCALE_MIN: Final = np.float32(2.0**-100)
"""Of a group that is not all zeros: its inverse and its products stay normal numbers."""
_TOO_LARGE: Final = 0x7B80
"""bf16 of 2^120: from there on a decoded value could overflow."""

_MAGNITUDES: Final = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(128)], np.float32
)
"""Of the e4m3 codes in their order; the last one, which is not packed to, goes on like the others."""
_MIDDLES: Final = ((_MAGNITUDES[:126] + _MAGNITUDES[1:127]) / 2).astype(np.float32)


def pack(codes: Buffer, scales: Buffer, source: Buffer, packing: Packing, /) -> bool:
    """Fill codes and scales; false where a value is not finite or too large. Raises `ValueError` for other sizes."""
    x, to_codes, to_scales = _arrays(source, codes, scales, packing)
    if x.size and int((x & 0x7FFF).max()) >= _TOO_LARGE:
        return False
    singles, at, count = np.empty(x.size, np.uint8), 0, to_scales.size // packing.per_byte
    for start, stop in _bands(x.size, packing):
        coded, by, low = _coded(x[start:stop].reshape(_shape(packing)), packing)
        singles[start:stop] = coded.reshape(-1)
        to_scales[at : at + by.size] = by
        to_scales[count + at : count + at + by.size] = low[: to_scales.size - count]
        at += by.size
    to_codes[:] = singles[0::2] | singles[1::2] << 4 if packing.kind == Kind.INT4 else singles
    return True


def unpack(into: Buffer, codes: Buffer, scales: Buffer, packing: Packing, /) -> None:
    """Undo `pack`, as far as it can be undone. Raises `ValueError` for other sizes."""
    x, singles, from_scales = _arrays(into, codes, scales, packing)
    if packing.kind == Kind.INT4:
        singles = np.stack((singles & 0xF, singles >> 4), axis=1).reshape(-1)
    numbers, at = _widened(from_scales).reshape(packing.per_byte, -1), 0
    for start, stop in _bands(x.size, packing):
        shaped = singles[start:stop].reshape(_shape(packing))
        width = shaped.shape[1 if packing.is_by_column else 0]
        by = numbers[:, at : at + width].reshape(-1, *((1, width) if packing.is_by_column else (width, 1)))
        with np.errstate(over="ignore", invalid="ignore"):  # Of scales that nobody packed.
            x[start:stop] = _decoded(shaped, by, packing.kind).reshape(-1)
        at += width


def _shape(packing: Packing) -> tuple[int, int]:
    return (-1, packing.columns) if packing.is_by_column else (-1, packing.group)


def _coded(x: _Words, packing: Packing) -> tuple[_Codes, _Words, _Words]:
    """Codes of groups, with their scales and least values."""
    kind, axis = packing.kind, 0 if packing.is_by_column else 1
    values = _widened(x)
    low_words = np.take_along_axis(x, np.expand_dims(_ordered(x).argmin(axis), axis), axis)
    low = _widened(low_words)
    span = values.max(axis, keepdims=True) - low if kind == Kind.INT4 else np.abs(values).max(axis, keepdims=True)
    amount = (span / _STEPS[kind]).astype(np.float32)
    amount = np.where((amount > 0) & (amount < _SCALE_MIN), _SCALE_MIN, amount)
    scale = ((amount.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    divisor = np.where(amount > 0, _widened(scale), np.float32(1))
    inverse = np.where(amount > 0, np.float32(1) / divisor, np.float32(0)).astype(np.float32)
    if kind == Kind.FP8:
        coded = _fp8(np.abs(values) * inverse) | (x >> 8 & 0x80).astype(np.uint8)
    elif kind == Kind.INT8:
        coded = np.rint(values * inverse).astype(np.int8).view(np.uint8)
    else:
        coded = np.rint((values - low) * inverse).astype(np.uint8)
    return coded, scale.reshape(-1), low_words.reshape(-1)


def _fp8(values: _Floats) -> _Codes:
    """Nearest codes of magnitudes; of two as near, the even one."""
    below, up_to = np.searchsorted(_MIDDLES, values, "left"), np.searchsorted(_MIDDLES, values, "right")
    return np.where(below == up_to, below, below + (below & 1)).astype(np.uint8)


def _decoded(codes: _Codes, numbers: _Floats, kind: Kind) -> _Words:
    """Values of codes; the groups' scales come first in `numbers`, then their least values."""
    if kind == Kind.FP8:
        signs = (codes & np.uint8(0x80)).astype(np.uint16) << np.uint16(8)
        return _rounded(_MAGNITUDES[codes & 0x7F] * numbers[0]) | signs
    if kind == Kind.INT8:
        return _rounded(codes.view(np.int8).astype(np.float32) * numbers[0])
    return _rounded(codes.astype(np.float32) * numbers[0] + numbers[1])


def _widened(words: _Words) -> _Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: _Floats) -> _Words:
    """To bf16, to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _ordered(words: _Words) -> npt.NDArray[np.int16]:
    """Integers in the order of the values, -0 before 0."""
    flipped: _Words = words ^ np.where(words & 0x8000, 0x7FFF, 0).astype(np.uint16)
    return flipped.view(np.int16)


def _bands(size: int, packing: Packing) -> list[tuple[int, int]]:
    """Where the elements begin and end that are handled in one go: a group of rows, or everything."""
    step = packing.columns * packing.group if packing.is_by_column else max(1, size)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _arrays(elements: Buffer, codes: Buffer, scales: Buffer, packing: Packing) -> tuple[_Words, _Codes, _Words]:
    x, coded, numbers = np.frombuffer(elements, "<u2"), np.frombuffer(codes, np.uint8), np.frombuffer(scales, "<u2")
    kind, columns, group, is_by_column = packing
    checked = Packing(Kind(kind), columns, group, is_by_column) if kind in list(Kind) else None
    if checked is None or not checked.is_sound or x.size % columns:
        raise ValueError(f"grid of {x.size} elements, kind {int(kind)}, {columns} columns, groups of {group}")
    rows = x.size // columns
    expected = (checked.codes_bytes(rows), checked.scales_bytes(rows))
    if (coded.size, numbers.nbytes) != expected:
        raise ValueError(f"{coded.size} B of codes and {numbers.nbytes} B of scales: must be {expected}")
    return x, coded, numbers
