"""Narrowing and packing in NumPy: independent of how the compiled kernels do it, and equal to them to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata_native.forms import (
    ROW,
    ROWS,
    STRIP,
    UNCODED,
    WIDER,
    WIDTH_LEAST,
    WIDTH_MOST,
    Kind,
    Packing,
    check_narrowing,
    narrowed_bytes_max,
)

if TYPE_CHECKING:
    from kvstrata_native.forms import Buffer

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]
_Words = npt.NDArray[np.uint16]
_Floats = npt.NDArray[np.float32]

_SAMPLED_STRIPS: Final = 8
_WORDS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


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


class _Form(NamedTuple):
    """How strips are coded, one element each."""

    base: _Bytes
    width: _Ints
    is_outside: _Flags
    """By strip and element: what is stored by position."""


def width_of(source: Buffer, element_bytes: int, /) -> int:
    """Return the width that makes a sample of the strips shortest. Raises `ValueError` for other elements."""
    check_narrowing(element_bytes, WIDTH_LEAST)
    raw = np.frombuffer(source, np.uint8)
    count = raw.size // (STRIP * element_bytes)
    sampled = min(count, _SAMPLED_STRIPS)
    strips = raw[: count * STRIP * element_bytes].reshape(count, STRIP * element_bytes)[
        [i * count // sampled for i in range(sampled)]
    ]
    tops, _ = _taken(strips, element_bytes)
    widths = range(WIDTH_LEAST, WIDTH_MOST + 1)
    return min(widths, key=lambda w: int(np.minimum(_coded_bytes(_best(tops, w)), STRIP).sum()))


def narrow(into: Buffer, source: Buffer, element_bytes: int, width: int, /) -> int:
    """Fill `into` from its start; return the length. Raises `ValueError` for too little room, or another form."""
    check_narrowing(element_bytes, width)
    raw, filled = np.frombuffer(source, np.uint8), np.frombuffer(into, np.uint8)
    if filled.size < narrowed_bytes_max(raw.size, element_bytes):
        need_bytes = narrowed_bytes_max(raw.size, element_bytes)
        raise ValueError(f"room for {filled.size} B, {need_bytes} B may be needed")
    count = raw.size // (STRIP * element_bytes)
    whole = count * STRIP * element_bytes
    tops, rest = _taken(raw[:whole].reshape(count, STRIP * element_bytes), element_bytes)
    heads, bodies = _coded(tops, width)
    stored = np.concatenate((heads.reshape(-1), rest.reshape(-1), bodies, raw[whole:]))
    filled[: stored.size] = stored
    return int(stored.size)


def widen(into: Buffer, stored: Buffer, element_bytes: int, width: int, /) -> bool:
    """Fill all of `into`; false for stored bytes that are none of `narrow`. Raises `ValueError` for another form."""
    check_narrowing(element_bytes, width)
    raw, held = np.frombuffer(into, np.uint8), np.frombuffer(stored, np.uint8)
    count = raw.size // (STRIP * element_bytes)
    whole, tail = count * STRIP * element_bytes, raw.size % (STRIP * element_bytes)
    bodies_at = whole - count * STRIP + 2 * count
    if held.size < bodies_at + tail:
        return False
    heads, bodies = held[: 2 * count].reshape(-1, 2), held[bodies_at : held.size - tail]
    is_whole, tops = _uncoded(heads, bodies, width)
    if is_whole:
        rest = held[2 * count : bodies_at].reshape(count, element_bytes - 1, STRIP)
        raw[:whole] = _joined(tops, rest, element_bytes).reshape(-1)
        raw[whole:] = held[held.size - tail :]
    return is_whole


def _taken(strips: _Bytes, element_bytes: int) -> tuple[_Bytes, _Bytes]:
    """Top bytes of the rotated elements by strip, and the others by strip and place."""
    words = np.ascontiguousarray(strips).view(_WORDS[element_bytes]).reshape(-1, STRIP)
    rotated = words << 1 | words >> (8 * element_bytes - 1)
    places = rotated.astype(_WORDS[element_bytes]).view(np.uint8).reshape(-1, STRIP, element_bytes)
    return places[:, :, -1], places[:, :, :-1].transpose(0, 2, 1)


def _joined(tops: _Bytes, rest: _Bytes, element_bytes: int) -> _Bytes:
    places = np.concatenate((rest.transpose(0, 2, 1), tops[:, :, None]), axis=2)
    words = np.ascontiguousarray(places).view(_WORDS[element_bytes])
    back: _Bytes = (words >> 1 | words << (8 * element_bytes - 1)).astype(_WORDS[element_bytes]).view(np.uint8)
    return back


def _best(tops: _Bytes, width: int) -> _Form:
    """The better one of two bases for each strip, the lower one where they are equal."""
    mean, step = (tops.sum(1, dtype=np.int64) + STRIP // 2) // STRIP, (1 << width) // 8
    low, high = ((mean + n * step).astype(np.uint8) for n in (2, 3))
    is_below, is_above = (base[:, None] - tops >= 1 << width for base in (low, high))
    is_low = is_below.sum(1) <= is_above.sum(1)
    widths = np.full(len(tops), width, np.int64)
    return _Form(np.where(is_low, low, high), widths, np.where(is_low[:, None], is_below, is_above))


def _coded_bytes(form: _Form) -> _Ints:
    sizes: _Ints = ROW * form.width + 2 * form.is_outside.sum(1)
    return sizes


def _coded(tops: _Bytes, width: int) -> tuple[_Bytes, _Bytes]:
    """Heads and bodies of all strips."""
    form = _best(tops, width)
    if width < WIDTH_MOST:
        wider = _best(tops, width + 1)
        form = _chosen(_coded_bytes(wider) < _coded_bytes(form), wider, form)
    counts = form.is_outside.sum(1)
    is_uncoded = _coded_bytes(form) >= STRIP
    kinds = np.where(is_uncoded, UNCODED, counts + WIDER * (form.width - width))
    heads = np.stack((np.where(is_uncoded, 0, form.base), kinds), axis=1).astype(np.uint8)
    bodies = [
        top if not_coded else np.concatenate((_pressed(base - top, int(wide)), *_outside(top, out)))
        for top, base, wide, out, not_coded in zip(
            tops, form.base, form.width, form.is_outside, is_uncoded, strict=True
        )
    ]
    return heads, np.concatenate(bodies) if bodies else np.empty(0, np.uint8)


def _chosen(is_first: _Flags, first: _Form, second: _Form) -> _Form:
    return _Form(
        np.where(is_first, first.base, second.base),
        np.where(is_first, first.width, second.width),
        np.where(is_first[:, None], first.is_outside, second.is_outside),
    )


def _outside(top: _Bytes, is_outside: _Flags) -> tuple[_Bytes, _Bytes]:
    positions = np.flatnonzero(is_outside)
    return positions.astype(np.uint8), top[positions]


def _pressed(codes: _Bytes, width: int) -> _Bytes:
    """Codes of one strip, row by row, as the bits of `width` rows of bytes."""
    rows = codes.reshape(ROWS, ROW)
    bits = np.unpackbits(rows[:, None, :], axis=1, bitorder="little", count=width)
    return np.packbits(bits.reshape(ROWS * width, ROW), axis=0, bitorder="little").reshape(-1)


def _unpressed(body: _Bytes, width: int) -> _Bytes:
    bits = np.unpackbits(body.reshape(width, ROW), axis=0, bitorder="little").reshape(ROWS, width, ROW)
    return np.packbits(bits, axis=1, bitorder="little").reshape(-1)


def _uncoded(heads: _Bytes, bodies: _Bytes, width: int) -> tuple[bool, _Bytes]:
    """Whether heads and bodies fit each other, and the top bytes by strip."""
    tops, at = np.empty((len(heads), STRIP), np.uint8), 0
    for top, (base, kind) in zip(tops, heads, strict=True):
        wide, count = width + int(kind) // WIDER, int(kind) % WIDER
        size = STRIP if kind == UNCODED else ROW * wide + 2 * count
        body = bodies[at : at + size]
        if body.size < size or (wide > WIDTH_MOST and kind != UNCODED):
            return False, tops
        if kind == UNCODED:
            top[:] = body
        else:
            top[:] = base - _unpressed(body[: ROW * wide], wide)
            for position, value in zip(body[ROW * wide : ROW * wide + count], body[size - count :], strict=True):
                top[position] = value
        at += size
    return at == bodies.size, tops


def pack(codes: Buffer, scales: Buffer, source: Buffer, packing: Packing, /) -> bool:
    """Fill codes and scales; false where a value is not finite or too large. Raises `ValueError` for other sizes."""
    x, to_codes, to_scales = _arrays(source, codes, scales, packing)
    if x.size and int((x & 0x7FFF).max()) >= _TOO_LARGE:
        return False
    singles, at, count = np.empty(x.size, np.uint8), 0, to_scales.size // packing.per_byte
    for start, stop in _bands(x.size, packing):
        coded, by, low = _quantized(x[start:stop].reshape(_shape(packing)), packing)
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
            x[start:stop] = _dequantized(shaped, by, packing.kind).reshape(-1)
        at += width


def _shape(packing: Packing) -> tuple[int, int]:
    return (-1, packing.columns) if packing.is_by_column else (-1, packing.group)


def _quantized(x: _Words, packing: Packing) -> tuple[_Bytes, _Words, _Words]:
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


def _fp8(values: _Floats) -> _Bytes:
    """Nearest codes of magnitudes; of two as near, the even one."""
    below, up_to = np.searchsorted(_MIDDLES, values, "left"), np.searchsorted(_MIDDLES, values, "right")
    return np.where(below == up_to, below, below + (below & 1)).astype(np.uint8)


def _dequantized(codes: _Bytes, numbers: _Floats, kind: Kind) -> _Words:
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


def _arrays(elements: Buffer, codes: Buffer, scales: Buffer, packing: Packing) -> tuple[_Words, _Bytes, _Words]:
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
