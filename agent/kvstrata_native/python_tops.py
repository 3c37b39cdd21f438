"""Top bytes in fewer bits, in NumPy: equal to the compiled kernels to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata_native.tops import ROW, ROWS, STRIP, UNCODED, WIDER, WIDTH_LEAST, WIDTH_MOST, check, narrowed_bytes_max

if TYPE_CHECKING:
    from kvstrata_native.buffers import Buffer

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_SAMPLED_STRIPS: Final = 8
_WORDS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class _Form(NamedTuple):
    """How strips are coded, one element each."""

    base: _Bytes
    width: _Ints
    is_outside: _Flags
    """By strip and element: what is stored by position."""


def width_of(source: Buffer, element_bytes: int, /) -> int:
    """Return the width that makes a sample of the strips shortest. Raises `ValueError` for other elements."""
    check(element_bytes, WIDTH_LEAST)
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
    check(element_bytes, width)
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
    check(element_bytes, width)
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
