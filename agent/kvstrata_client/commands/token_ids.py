"""Token ids that commands are given. One reader for all: ids that are read otherwise name other blocks."""

import json
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.errors import InvalidInputError

_MOST: Final = (1 << 32) - 1


def read_text(source: str) -> str:
    """Text of a file, of standard input for `-`. Raises `InvalidInputError` for what cannot be read."""
    try:
        return _file(source).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInputError(f"{source}: {e}") from e


def read_ids(source: str) -> npt.NDArray[np.uint32]:
    """Read a JSON list of token ids. Raises `InvalidInputError` that names file and value."""
    try:
        ids = json.loads(_file(source).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidInputError(f"tokens {source}: a JSON list of token ids wanted: {e}") from e
    return checked(ids, f"tokens {source}: ")


def _file(source: str) -> Path:
    return Path("/dev/stdin" if source == "-" else source)


def checked(ids: object, where: str = "") -> npt.NDArray[np.uint32]:
    """Token ids as an array. Raises `InvalidInputError` for what is no list of them; `where` is said first."""
    wanted = f"{where}token ids are whole numbers from 0 to {_MOST}, in a list"
    if not isinstance(ids, list):
        raise InvalidInputError(f"{wanted}, not {ids!r:.40}")
    for at, found in enumerate(ids):
        if type(found) is not int or not 0 <= found <= _MOST:
            raise InvalidInputError(f"{wanted}; number {at} is {found!r:.40}")
    return np.asarray(ids, dtype=np.uint32)
