"""Splitting floating-point numbers into a plane that compresses and a plane that does not. NumPy only.

An element is rotated left by one bit, which brings the exponent to the top byte and the sign to the bottom:
bf16 `seeeeeee emmmmmmm` becomes `eeeeeeee mmmmmmms`. Exponents of KV tensors carry 2.5 to 3 bits of information
each, mantissas and signs are noise. Work goes in chunks that stay in the processor's cache.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_CHUNK: Final = 1 << 15
"""32 Ki elements: with their temporaries below 256 KiB, a small L2 cache."""

_WORDS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def can_split(element_bytes: int) -> bool:
    """True for element sizes with an exponent of their own byte after rotation; others compress as they are."""
    return element_bytes in _WORDS


def split(raw: Bytes, element_bytes: int) -> tuple[Bytes, Bytes]:
    """Top bytes of the rotated elements, and their remaining bytes."""
    words = raw.view(_WORDS[element_bytes])
    top = np.empty(words.size, np.uint8)
    rest = np.empty((words.size, element_bytes - 1), np.uint8)
    shifted = np.empty(min(_CHUNK, words.size), words.dtype)
    rotated = np.empty_like(shifted)
    width = 8 * element_bytes
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK]
        a, b = shifted[: chunk.size], rotated[: chunk.size]
        np.left_shift(chunk, 1, out=a)
        np.right_shift(chunk, width - 1, out=b)
        np.bitwise_or(a, b, out=b)
        _put_rest(rest[start : start + _CHUNK], b)
        np.right_shift(b, width - 8, out=a)
        np.copyto(top[start : start + _CHUNK], a, casting="unsafe")
    return top, rest.reshape(-1)


def _put_rest(rest: Bytes, rotated: npt.NDArray[Any]) -> None:
    if rest.shape[1] == 1:
        np.copyto(rest[:, 0], rotated, casting="unsafe")  # One byte is kept by truncation, several times faster.
    else:
        rest[:] = rotated.view(np.uint8).reshape(rest.shape[0], -1)[:, : rest.shape[1]]


def join(top: Bytes, rest: Bytes, into: Bytes, element_bytes: int) -> None:
    """Undo `split` into a buffer of the raw size."""
    words = into.view(_WORDS[element_bytes])
    shaped = rest.reshape(-1, element_bytes - 1)
    rotated = np.empty(min(_CHUNK, words.size), words.dtype)
    width = 8 * element_bytes
    for start in range(0, words.size, _CHUNK):
        out = words[start : start + _CHUNK]
        b = rotated[: out.size]
        np.copyto(b, top[start : start + _CHUNK])
        np.left_shift(b, width - 8, out=b)
        for byte in range(element_bytes - 1):
            low = shaped[start : start + _CHUNK, byte].astype(words.dtype)
            b |= low << (8 * byte) if byte else low
        np.right_shift(b, 1, out=out)
        np.left_shift(b, width - 1, out=b)
        np.bitwise_or(out, b, out=out)
