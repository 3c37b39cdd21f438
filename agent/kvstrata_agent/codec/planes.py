"""Floating-point numbers from a plane of top bytes and a plane of all others, as the form `lossless` stores them.

An element was rotated left by one bit, which brings the exponent to the top byte and the sign to the bottom:
bf16 `seeeeeee emmmmmmm` becomes `eeeeeeee mmmmmmms`.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
