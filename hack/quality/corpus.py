"""Text that is on every machine with Python: the sources of its own standard library, as ASCII characters."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

VOCABULARY: Final = 128
CHARACTERS_MAX: Final = 4 << 20
HELD_OUT_OF: Final = 10
"""Every tenth file is held out: by file, because two halves of one file share names and idioms."""

Characters = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Characters to learn from and characters that were held out."""

    training: Characters
    held_out: Characters
    digest: str
    """SHA-256 of all the text; of another version of Python it is another."""
    files: int


def load(directory: Path | None = None) -> Corpus:
    """Read the top-level modules of the standard library in the order of their names; those that are not ASCII not."""
    paths = sorted((directory or Path(sysconfig.get_path("stdlib"))).glob("*.py"))
    texts = [t for t in (p.read_bytes() for p in paths) if t.isascii()]
    learnt = [t for i, t in enumerate(texts) if i % HELD_OUT_OF]
    held_out = [t for i, t in enumerate(texts) if not i % HELD_OUT_OF]
    digest = hashlib.sha256(b"".join(len(t).to_bytes(8, "big") + t for t in texts)).hexdigest()
    return Corpus(_numbers(learnt), _numbers(held_out), digest, len(texts))


def _numbers(texts: list[bytes]) -> Characters:
    return np.frombuffer(b"\n".join(texts)[:CHARACTERS_MAX], np.uint8).astype(np.int64)
