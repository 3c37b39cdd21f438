"""Captured KV: bf16 blocks from a file that an engine, or a script beside one, has written.

The array is `(blocks, layers, 2, heads, tokens, dim)`, K before V, one rank's heads: what blocks of a pool are, in
their order. `.npy` holds bf16 as 16-bit integers, or float32 and float16, which are rounded; `.safetensors` holds BF16.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.errors import InvalidInputError

Words = npt.NDArray[np.uint16]

_DIMENSIONS: Final = 6
_HEADER_BYTES_MAX: Final = 16 << 20
_DTYPES: Final[dict[str, np.dtype[Any]]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


def read(path: Path, tensor: str = "") -> Words:
    """Read blocks; large files are mapped, not loaded. Raises `InvalidInputError` for what is no captured KV."""
    try:
        found = _safetensors(path, tensor) if path.suffix == ".safetensors" else np.load(path, mmap_mode="r")
    except (OSError, ValueError) as e:
        raise InvalidInputError(f"{path}: {e}") from e
    if found.ndim != _DIMENSIONS or found.shape[2] != 2 or not found.size:
        raise InvalidInputError(
            f"{path}: shape {found.shape}: (blocks, layers, 2, heads, tokens, dim) wanted, none of them 0"
        )
    if found.dtype.kind not in "iuf" or (found.dtype.kind in "iu" and found.dtype.itemsize != 2):
        raise InvalidInputError(f"{path}: numbers of {found.dtype}: int16 or uint16 (bf16's bits) or floats wanted")
    return found


def bf16(block: npt.NDArray[Any]) -> Words:
    """Bits of one block, contiguous; floats are rounded to the nearest, ties to even."""
    if block.dtype.kind in "iu":
        return np.ascontiguousarray(block).view(np.uint16)
    bits = np.ascontiguousarray(block, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)


def _safetensors(path: Path, tensor: str) -> npt.NDArray[Any]:
    """Map one tensor. Raises `InvalidInputError` for a file that does not say what it holds."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(_HEADER_BYTES_MAX, path.stat().st_size - 8):
            raise InvalidInputError(f"{path}: a header of {header_bytes} B: 2 to {_HEADER_BYTES_MAX} wanted")
        header = json.loads(file.read(header_bytes))
    if not isinstance(header, dict):
        raise InvalidInputError(f"{path}: the header is no object")
    names = sorted(set(header) - {"__metadata__"})
    name = tensor or (names[0] if len(names) == 1 else "")
    if name not in names:
        raise InvalidInputError(f"{path}: tensor {tensor!r}: must be one of {names[:20]}")
    return _mapped(path, header[name], 8 + header_bytes)


def _mapped(path: Path, entry: Mapping[str, Any], start: int) -> npt.NDArray[Any]:
    try:
        dtype: np.dtype[Any] = _DTYPES[entry["dtype"]]
        shape, (begin, end) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        size_bytes = math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError) as e:
        raise InvalidInputError(f"{path}: dtype of {sorted(_DTYPES)}, shape and data_offsets wanted: {e!r}") from e
    if min(shape, default=0) < 1 or begin < 0 or end - begin != size_bytes or path.stat().st_size < start + end:
        raise InvalidInputError(f"{path}: bytes {begin} to {end} for shape {shape} of {entry['dtype']}")
    found: npt.NDArray[Any] = np.memmap(path, dtype=dtype, mode="r", offset=start + int(begin), shape=shape)
    return found
