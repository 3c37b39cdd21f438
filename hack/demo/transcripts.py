"""Recorded agent sessions as prompts that grow turn by turn. Pure but for reading the files."""

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

VOCABULARY: Final = 8192

_PIECE: Final = re.compile(r"\w{1,6}|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Turn:
    """One call to the model: everything that it is given."""

    session: str
    number: int
    """From 1."""
    tokens: tuple[int, ...]
    bounds: tuple[int, ...]
    """Full-block ends of this prompt and of those before it, in tokens, strictly rising.

    The model always computes up to each of them in a step of its own, whatever was restored. So the same steps
    give the same bits in every run, and runs can be compared bit for bit.
    """

    @property
    def is_first(self) -> bool:
        """Whether nothing of the session can be cached yet."""
        return self.number == 1


def tokenize(text: str) -> list[int]:
    """Turn text into ids without a vocabulary file: pieces of up to six letters, spaces, signs; hashed.

    About four characters to a token, as real tokenizers have. Two pieces may share an id; nothing here minds.
    """
    return [zlib.crc32(piece.encode()) % VOCABULARY for piece in _PIECE.findall(text)]


def turns_of(session: str, appended: Sequence[str], block_tokens: int) -> list[Turn]:
    """Turns of a session, given what each prompt adds."""
    prompts = list(accumulate((tuple(tokenize(text)) for text in appended), lambda a, b: a + b))
    ends = [len(p) // block_tokens * block_tokens for p in prompts]
    return [
        Turn(session, n, prompt, tuple(sorted({e for e in ends[:n] if e}))) for n, prompt in enumerate(prompts, start=1)
    ]


def read_session(path: Path, block_tokens: int) -> list[Turn]:
    """Read one file of `examples/transcripts`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return turns_of(path.stem, [line["appended"] for line in lines], block_tokens)
