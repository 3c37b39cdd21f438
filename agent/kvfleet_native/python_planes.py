"""Exponent planes in NumPy, in chunks that stay in the processor's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvfleet_native.buffers import Buffer

_Bytes = npt.NDArray[np.uint8]

_CHUNK: Final = 1 << 15
"""32 Ki elements: with their temporaries below 256 KiB, a small L2 cache."""

_WORDS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def split(top: Buffer, rest: Buffer, source: Buffer, /) -> None:
    """Fill the planes of `source`. Raises `ValueError` for sizes that are not of one block."""
    to_top, to_rest, raw = (np.frombuffer(b, np.uint8) for b in (top, rest, source))
    element_bytes = _element_bytes(raw.size, to_top.size, to_rest.size)
    words = raw.view(_WORDS[element_bytes])
    shaped = to_rest.reshape(-1, element_bytes - 1)
    shifted = np.empty(min(_CHUNK, words.size), words.dtype)
    rotated = np.empty_like(shifted)
    width = 8 * element_bytes
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK]
        a, b = shifted[: chunk.size], rotated[: chunk.size]
        np.left_shift(chunk, 1, out=a)
        np.right_shift(chunk, width - 1, out=b)
        np.bitwise_or(a, b, out=b)
        _put_rest(shaped[start : start + _CHUNK], b)
        np.right_shift(b, width - 8, out=a)
        np.copyto(to_top[start : start + _CHUNK], a, casting="unsafe")


def join(into: Buffer, top: Buffer, rest: Buffer, /) -> None:
    """Undo `split`. Raises `ValueError` for sizes that are not of one block."""
    raw, from_top, from_rest = (np.frombuffer(b, np.uint8) for b in (into, top, rest))
    element_bytes = _element_bytes(raw.size, from_top.size, from_rest.size)
    words = raw.view(_WORDS[element_bytes])
    shaped = from_rest.reshape(-1, element_bytes - 1)
    rotated = np.empty(min(_CHUNK, words.size), words.dtype)
    width = 8 * element_bytes
    for start in range(0, words.size, _CHUNK):
        out = words[start : start + _CHUNK]
        b = rotated[: out.size]
        np.copyto(b, from_top[start : start + _CHUNK])
        np.left_shift(b, width - 8, out=b)
        for byte in range(element_bytes - 1):
            low = shaped[start : start + _CHUNK, byte].astype(words.dtype)
            b |= low << (8 * byte) if byte else low
        np.right_shift(b, 1, out=out)
        np.left_shift(b, width - 1, out=b)
        np.bitwise_or(out, b, out=out)


def _put_rest(rest: _Bytes, rotated: npt.NDArray[Any]) -> None:
    if rest.shape[1] == 1:
        np.copyto(rest[:, 0], rotated, casting="unsafe")  # One byte is kept by truncation, several times faster.
    else:
        rest[:] = rotated.view(np.uint8).reshape(rest.shape[0], -1)[:, : rest.shape[1]]


def _element_bytes(whole_bytes: int, top_bytes: int, rest_bytes: int) -> int:
    for element_bytes in _WORDS:
        if whole_bytes == element_bytes * top_bytes == top_bytes + rest_bytes:
            return element_bytes
    raise ValueError(f"planes of {top_bytes} B and {rest_bytes} B of {whole_bytes} B: elements have 2 or 4 B")
