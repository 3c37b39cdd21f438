"""Planes in different forms, in NumPy: equal to the compiled kernels to the bit, errors included."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstrata_native.mixing import HEAD_BYTES, LADDER, ROTATED, Mixing, Rung
from kvstrata_native.python_packing import pack, unpack
from kvstrata_native.python_rotated import pack_rotated, unpack_rotated
from kvstrata_native.python_tops import narrow, widen
from kvstrata_native.tops import check, narrowed_bytes_max

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata_native.buffers import Buffer

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint16]

_LANES: Final = 32
"""Sums that run beside each other; those of neighbours are added up first, then halves onto each other."""
_PIECE: Final = 1024
"""Columns, or rows that have a scale each, that are measured together."""
_SINGLE_ROWS: Final = 16
"""Of so many rows at most squares are added in single precision."""
_NEAR: Final = (0x3000, 0x5000)
"""Largest magnitudes that are squared as they are, in bits: 2^-31 to 2^33."""
_PACKINGS: Final = LADDER.index(Rung.EXACT)
_HEAD: Final = struct.Struct("<I")
_LENGTH_BITS: Final = 24


def mix(into: Buffer, source: Buffer, rungs: Buffer, errors: Buffer, mixing: Mixing, /) -> int:
    """Fill `into` from its start; return the length. Raises `ValueError` for other sizes."""
    mixing = Mixing(*mixing)
    planes, taken = _planes(source, mixing), np.frombuffer(rungs, np.uint8)
    filled, measured = np.frombuffer(into, np.uint8), np.frombuffer(errors, np.float64)
    if filled.size < mixing.room_bytes() or not taken.size == measured.size == mixing.planes:
        raise ValueError(
            f"room for {filled.size} B, {mixing.room_bytes()} B may be needed; rungs {taken.nbytes} B, "
            f"errors {measured.nbytes} B"
        )
    at = HEAD_BYTES * mixing.planes
    for number, plane in enumerate(planes):
        rung, error, body = _mixed(plane, int(taken[number]), mixing)
        taken[number], measured[number] = rung, error
        _HEAD.pack_into(filled.data, HEAD_BYTES * number, rung << _LENGTH_BITS | len(body))
        padded = body + bytes(len(body) % 2)
        filled[at : at + len(padded)] = np.frombuffer(padded, np.uint8)
        at += len(padded)
    return at


def unmix(into: Buffer, stored: Buffer, mixing: Mixing, /) -> bool:
    """Undo `mix`; false for stored bytes that are none of it. Raises `ValueError` for other sizes."""
    mixing = Mixing(*mixing)
    planes, held = _planes(into, mixing), np.frombuffer(stored, np.uint8)
    at = HEAD_BYTES * mixing.planes
    if held.size < at:
        return False
    for number, plane in enumerate(planes):
        (head,) = _HEAD.unpack_from(held.data, HEAD_BYTES * number)
        size = head & ((1 << _LENGTH_BITS) - 1)
        body = held[at : at + size]
        at += size + size % 2
        if at > held.size or not _unmixed(plane, head >> _LENGTH_BITS, body, mixing):
            return False
    return at == held.size


def _planes(block: Buffer, mixing: Mixing) -> _Words:
    """Words of a block by plane. Raises `ValueError` for a block that has other planes."""
    raw = np.frombuffer(block, np.uint8)
    if not mixing.is_sound or raw.size != mixing.planes * mixing.plane_bytes:
        raise ValueError(f"{mixing.planes} planes of {mixing.rows} rows of {mixing.columns} columns of {raw.size} B")
    check(2, mixing.width)
    return raw.view(np.uint16).reshape(mixing.planes, -1)


def _mixed(plane: _Words, first: int, mixing: Mixing) -> tuple[Rung, float, bytes]:
    """Rung, error and body of one plane."""
    for rung in _tried(first, mixing):
        body = _packed(plane, rung, mixing)
        if body is None:
            continue
        back = np.empty_like(plane)
        _unmixed(back, rung, np.frombuffer(body, np.uint8), mixing)
        error = _relative_error(plane, back, mixing, rung)
        if error <= mixing.limit:
            return rung, error, body
    room = bytearray(narrowed_bytes_max(mixing.plane_bytes, 2))
    size = narrow(room, plane, 2, mixing.width)
    if size < mixing.plane_bytes:
        return Rung.EXACT, 0.0, bytes(room[:size])
    return Rung.AS_IT_IS, 0.0, plane.tobytes()


def _tried(first: int, mixing: Mixing) -> tuple[Rung, ...]:
    """The rung itself, if it is one that loses anything, and those behind it that the mixing asks for."""
    if first not in LADDER[:_PACKINGS]:
        return ()
    at = LADDER.index(Rung(first))
    return (LADDER[at], *(r for r in LADDER[at + 1 : _PACKINGS] if mixing.is_rotated or r not in ROTATED))


def _packed(plane: _Words, rung: Rung, mixing: Mixing) -> bytes | None:
    """Body of a plane; None where its numbers are none for this rung, or nothing becomes shorter."""
    if rung in ROTATED:
        rotation = mixing.rotation(rung)
        is_there = rotation is not None and rotation.size_bytes < mixing.plane_bytes
        return pack_rotated(plane, rotation) if rotation is not None and is_there else None
    if mixing.packed_bytes(rung) >= mixing.plane_bytes:
        return None
    packing = mixing.packing(rung)
    codes, scales = bytearray(packing.codes_bytes(mixing.rows)), bytearray(packing.scales_bytes(mixing.rows))
    return bytes(scales + codes) if pack(codes, scales, plane, packing) else None


def _unmixed(plane: _Words, rung: int, body: _Bytes, mixing: Mixing) -> bool:
    if rung == Rung.EXACT:
        return widen(plane, body, 2, mixing.width)
    if rung in ROTATED:
        rotation = mixing.rotation(Rung(rung))
        is_there = rotation is not None and body.size == rotation.size_bytes
        return rotation is not None and is_there and unpack_rotated(plane, body, rotation)
    if rung > Rung.EXACT:
        is_whole = rung == Rung.AS_IT_IS and body.size == mixing.plane_bytes
        if is_whole:
            plane[:] = body.view(np.uint16)
        return is_whole
    packing = mixing.packing(Rung(rung))
    scales_bytes = packing.scales_bytes(mixing.rows)
    if body.size != mixing.packed_bytes(Rung(rung)):
        return False
    unpack(plane, body[scales_bytes:], body[:scales_bytes], packing)
    return True


def _relative_error(x: _Words, y: _Words, mixing: Mixing, rung: Rung) -> float:
    """||x - y|| / ||x||: squares in single precision over some rows of a strip, in double over these."""
    lost, every = np.zeros(_LANES // 2), np.zeros(_LANES // 2)
    shape = (mixing.rows, mixing.columns)
    for strip in _strips(mixing, rung):
        was, came = (np.ascontiguousarray(words.reshape(shape)[strip]) for words in (x, y))
        largest = int((was & 0x7FFF).max())
        is_near = _NEAR[0] <= largest < _NEAR[1]
        by = np.float32(1) if is_near else np.uint32((254 - (largest >> 7)) << 23).view(np.float32)
        values = _floats(was)
        for sums, parts in ((lost, (values - _floats(came)) * by), (every, values * by)):
            _add_squares(sums, parts, 1.0 / (float(by) * float(by)))
    lost_sum, sum_of_all = _folded(lost), _folded(every)
    return 0.0 if lost_sum == 0.0 else math.sqrt(lost_sum / sum_of_all)


def _strips(mixing: Mixing, rung: Rung) -> Iterator[tuple[slice, slice]]:
    """Rows and columns that are measured together."""
    if rung in ROTATED:
        yield slice(None), slice(None)
        return
    is_by_column = mixing.packing(rung).is_by_column
    for start in range(0, mixing.columns if is_by_column else mixing.rows, _PIECE):
        part = slice(start, start + _PIECE)
        yield (slice(None), part) if is_by_column else (part, slice(None))


def _floats(words: _Words) -> npt.NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _add_squares(sums: npt.NDArray[np.float64], values: npt.NDArray[np.float32], by: float) -> None:
    """Add to each pair of lanes what stands in it. Pieces of rows start at the first lane."""
    for top in range(0, len(values), _SINGLE_ROWS):
        single = np.zeros(_LANES, np.float32)
        for row in values[top : top + _SINGLE_ROWS]:
            for left in range(0, row.size, _PIECE):
                piece = row[left : left + _PIECE]
                padded = np.pad(piece, (0, -piece.size % _LANES)).reshape(-1, _LANES)
                single = np.add.accumulate(np.concatenate((single[None], padded * padded)), dtype=np.float32)[-1]
        sums += (single[0::2] + single[1::2]).astype(np.float64) * by


def _folded(sums: npt.NDArray[np.float64]) -> float:
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return float(sums[0])
