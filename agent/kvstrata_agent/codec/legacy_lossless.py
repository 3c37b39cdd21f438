"""Reads the exact form that agents wrote up to 0.1: entropy-coded exponents, everything else as it is.

`packed` took its place (docs/decisions.md, 2026-11-22). Stored form, all little-endian: `version u8 |
element bytes u8 | zero u16 | coded bytes u32 | raw bytes u64`, then the coded top plane (a zstd frame), then the rest
plane. Element bytes 0 with coded bytes 0: the raw bytes follow.

Floating-point numbers from a plane of top bytes and a plane of all others, as the form `lossless` stores them.

An element was rotated left by one bit, which brings the exponent to the top byte and the sign to the bottom:
bf16 `seeeeeee emmmmmmm` becomes `eeeeeeee mmmmmmms`.
"""

import struct
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvstrata_api.errors import BlockCorruptError

Bytes = npt.NDArray[np.uint8]

_WORDS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def can_split(element_bytes: int) -> bool:
    """True for element sizes that have planes."""
    return element_bytes in _WORDS


def join(top: Bytes, rest: Bytes, into: Bytes) -> None:
    """Fill a buffer of the raw size from its planes."""
    element_bytes = into.size // max(1, top.size)
    places = np.concatenate((rest.reshape(top.size, -1), top[:, None]), axis=1)
    words = places.view(_WORDS[element_bytes]).reshape(-1)
    np.copyto(into, (words >> 1 | words << (8 * element_bytes - 1)).view(np.uint8))


NAME: Final = "lossless"

_HEADER: Final = struct.Struct("<BBHIQ")
_VERSION: Final = 1
_AS_IT_IS: Final = 0

_local = threading.local()


class LosslessCodec:
    """Planes of bf16, fp16 and fp32; plain entropy coding for one-byte elements. A `Decoder`."""

    name = NAME

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Fill `into`, of exactly the raw size. Raises `BlockCorruptError` on stored bytes that do not fit."""
        element_bytes, coded_bytes = _parse(stored, len(into))
        body = np.frombuffer(stored, dtype=np.uint8)[_HEADER.size :]
        target = np.frombuffer(into, dtype=np.uint8)
        coded, rest = body[:coded_bytes], body[coded_bytes:]
        if element_bytes == _AS_IT_IS:
            np.copyto(target, rest)
            return
        top = _expanded(coded, len(into) // element_bytes)
        if element_bytes == 1:
            np.copyto(target, top)
        else:
            join(top, rest, target)


def _parse(stored: memoryview, raw_bytes: int) -> tuple[int, int]:
    """Element bytes and coded bytes of a stored form, checked against all sizes."""
    if len(stored) < _HEADER.size:
        raise BlockCorruptError(f"lossless block of {len(stored)} B is shorter than its header")
    version, element_bytes, _, coded_bytes, size_bytes = _HEADER.unpack(stored[: _HEADER.size])
    rest_bytes = raw_bytes - raw_bytes // element_bytes if element_bytes else raw_bytes
    is_sound = version == _VERSION and (element_bytes in {_AS_IT_IS, 1} or can_split(element_bytes))
    if not is_sound or size_bytes != raw_bytes or len(stored) != _HEADER.size + coded_bytes + rest_bytes:
        raise BlockCorruptError(
            f"lossless block: version {version}, elements of {element_bytes} B, {coded_bytes} B coded, "
            f"{size_bytes} B raw in {len(stored)} B stored, {raw_bytes} B wanted"
        )
    return element_bytes, coded_bytes


def _expanded(coded: Bytes, size_bytes: int) -> Bytes:
    try:
        # The library allocates what a frame says of itself, and a damaged one may say anything.
        plane_bytes = zstandard.frame_content_size(coded.data)
        if plane_bytes <= size_bytes:
            plane = np.frombuffer(_decompressor().decompress(coded.data, max_output_size=size_bytes), dtype=np.uint8)
            plane_bytes = plane.size
    except zstandard.ZstdError as e:
        raise BlockCorruptError(f"lossless block: {e}") from e
    if plane_bytes != size_bytes:
        raise BlockCorruptError(f"lossless block: plane of {plane_bytes} B, {size_bytes} B wanted")
    return plane


def _decompressor() -> zstandard.ZstdDecompressor:
    """One for each thread: the objects hold working memory and are not for two threads at a time."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found
