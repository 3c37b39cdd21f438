"""The kernels in NumPy: what runs where nothing was compiled, and what the compiled ones are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvfleet_native.buffers import Buffer


def copy(into: Buffer, source: Buffer, /) -> None:
    """Fill `into` with `source`. Raises `ValueError` when their sizes differ."""
    to_array, from_array = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
    if to_array.size != from_array.size:
        raise ValueError(f"copy of {from_array.size} B into {to_array.size} B")
    np.copyto(to_array, from_array)
