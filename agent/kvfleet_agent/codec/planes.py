"""Splitting floating-point numbers into a plane that compresses and a plane that does not.

An element is rotated left by one bit, which brings the exponent to the top byte and the sign to the bottom:
bf16 `seeeeeee emmmmmmm` becomes `eeeeeeee mmmmmmms`. Exponents of KV tensors carry 2.5 to 3 bits of information
each, mantissas and signs are noise.
"""

import numpy as np
import numpy.typing as npt

import kvfleet_native

Bytes = npt.NDArray[np.uint8]


def can_split(element_bytes: int) -> bool:
    """True for element sizes with an exponent of their own byte after rotation; others compress as they are."""
    return element_bytes in {2, 4}


def split(raw: Bytes, element_bytes: int) -> tuple[Bytes, Bytes]:
    """Top bytes of the rotated elements, and their remaining bytes."""
    count = raw.size // element_bytes
    top, rest = np.empty(count, np.uint8), np.empty(raw.size - count, np.uint8)
    kvfleet_native.split(top, rest, raw)
    return top, rest


def join(top: Bytes, rest: Bytes, into: Bytes) -> None:
    """Undo `split` into a buffer of the raw size."""
    kvfleet_native.join(into, top, rest)
