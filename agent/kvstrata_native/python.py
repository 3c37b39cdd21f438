"""The kernels in NumPy: what runs where nothing was compiled, and what the compiled ones are compared with.

Results are equal to theirs to the bit, but for errors of planes: these are measured, which others may bound (`forms`).
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata_native.forms import HEAD_BYTES, LADDER, ROTATED, Mixing, Rung, check_narrowing, narrowed_bytes_max
from kvstrata_native.python_forms import narrow, pack, unpack, widen, width_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata_native.forms import Buffer, Rotation


__all__ = (
    "copy", "copy_digest", "copy_digest_each", "copy_digests", "copy_sound", "digest_pairs", "flush", "mix", "narrow",
    "pack", "unmix", "unpack", "widen", "width_of", "xxh3_128",
)  # fmt: skip

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint16]
_Floats = npt.NDArray[np.float32]

_DIGEST_BYTES: Final = 16
_STAGE_BYTES: Final = 256 << 10
"""Copied and hashed in turn, so that the hash reads from the processor's cache: at 2 MiB per block 16.1 GB/s against
14.4 for a copy and then a hash, of 17.8 for the copy alone (AMD EPYC, 1 MiB of L2 per core)."""
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
    check_narrowing(2, mixing.width)
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
        values = _widened(was)
        for sums, parts in ((lost, (values - _widened(came)) * by), (every, values * by)):
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


def copy(into: Buffer, source: Buffer, /) -> None:
    """Fill `into` with `source`. Raises `ValueError` when their sizes differ."""
    to_array, from_array = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
    if to_array.size != from_array.size:
        raise ValueError(f"copy of {from_array.size} B into {to_array.size} B")
    np.copyto(to_array, from_array)


def flush(memory: Buffer, /) -> None:
    """Do nothing: an interpreter reaches no cache lines."""


def xxh3_128(source: Buffer, seed: int = 0, /) -> bytes:
    """Return the digest of `source`."""
    return xxhash.xxh3_128_digest(np.frombuffer(source, np.uint8).data, seed)


def digest_pairs(blocks: Sequence[tuple[Buffer, int, int]], /) -> list[tuple[bytes, bytes]]:
    """Hash what each stage read by way of memory that nobody else can write to."""
    return [_pair(_digests(np.frombuffer(source, np.uint8), seeds)) for source, *seeds in blocks]


def copy_sound(blocks: Sequence[tuple[Buffer, Buffer, int, int, bytes]], /) -> list[bytes]:
    """Hash each source twice, and copy those that are sound."""
    for into, source, _, _, wanted in blocks:
        _checked_pair(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8), "copy")
        if len(wanted) != _DIGEST_BYTES:
            raise ValueError(f"digest of {len(wanted)} B, not of {_DIGEST_BYTES} B")
    pairs = digest_pairs([(source, seed, other) for _, source, seed, other, _ in blocks])
    for (into, source, _, _, wanted), (theirs, _) in zip(blocks, pairs, strict=True):
        if theirs == wanted:
            copy(into, source)
    return [ours if theirs == block[-1] else b"" for block, (theirs, ours) in zip(blocks, pairs, strict=True)]


def copy_digest(into: Buffer, source: Buffer, seed: int = 0, /) -> bytes:
    """Copy and hash by way of memory that nobody else can write to."""
    return _copy_digests(into, source, (seed,))[0]


def copy_digest_each(blocks: Sequence[tuple[Buffer, Buffer, int]], threads: int = 1, /) -> list[bytes]:
    """Copy and hash each, likewise; in one thread."""
    del threads
    for into, source, _ in blocks:
        _checked_pair(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8), "copy and digest")
    return [copy_digest(into, source, seed) for into, source, seed in blocks]


def copy_digests(into: Buffer, source: Buffer, seed: int, other: int, /) -> tuple[bytes, bytes]:
    """Copy and hash twice, likewise."""
    return _pair(_copy_digests(into, source, (seed, other)))


def _pair(digests: list[bytes]) -> tuple[bytes, bytes]:
    first, second = digests
    return first, second


def _copy_digests(into: Buffer, source: Buffer, seeds: Sequence[int]) -> list[bytes]:
    to_array, from_array = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
    _checked_pair(to_array, from_array, "copy and digest")
    return _digests(from_array, seeds, to_array)


def _checked_pair(into: _Bytes, source: _Bytes, what: str) -> None:
    if np.may_share_memory(into, source):
        raise ValueError(f"{what} within one memory")
    if into.size != source.size:
        raise ValueError(f"copy of {source.size} B into {into.size} B")


def _digests(source: _Bytes, seeds: Sequence[int], into: _Bytes | None = None) -> list[bytes]:
    """Digests of what was read once, and written where `into` is given."""
    running = [xxhash.xxh3_128(seed=seed) for seed in seeds]
    stage = np.empty(min(_STAGE_BYTES, source.size), np.uint8)
    for start in range(0, source.size, _STAGE_BYTES):
        staged = stage[: source.size - start]
        np.copyto(staged, source[start : start + _STAGE_BYTES])
        if into is not None:
            np.copyto(into[start : start + _STAGE_BYTES], staged)
        for digest in running:
            digest.update(staged.data)
    return [bytes(digest.digest()) for digest in running]
