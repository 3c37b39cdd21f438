"""Prefixes of prompts by digest: how a share names tokens without telling them, and which of them a prompt begins with.

The digest of a prefix is SHA-256 over its token ids, each as four bytes, least significant first, with nothing before,
between or after them. It names tokens and nothing else: no tokenizer, model or pool is part of it. Whoever can guess a
prefix can check the guess against its digest, so only what may be known anyway should be named like that. Pure.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstrata_api.blocks import token_ids
from kvstrata_api.scopes import NamedPrefix as NamedPrefix  # noqa: PLC0414  What digests are for.

TokenIds = Sequence[int] | npt.NDArray[np.uint32]


def prefix_digest(tokens: TokenIds) -> bytes:
    """Digest of all of `tokens`."""
    return hashlib.sha256(token_ids(tokens).tobytes()).digest()


def digests_at(tokens: TokenIds, lengths: Iterable[int]) -> dict[int, bytes]:
    """Digests of the leading tokens at several lengths, in one pass; lengths beyond the tokens are left out."""
    packed = token_ids(tokens).tobytes()
    running, at, found = hashlib.sha256(), 0, {}
    for length in sorted({n for n in lengths if 0 < n * 4 <= len(packed)}):
        running.update(packed[at * 4 : length * 4])
        found[length] = running.copy().digest()
        at = length
    return found


def matching(tokens: TokenIds, prefixes: Iterable[NamedPrefix]) -> set[NamedPrefix]:
    """Return those prefixes that `tokens` begin with."""
    listed = set(prefixes)
    found = digests_at(tokens, (p.token_count for p in listed)) if listed else {}
    return {p for p in listed if found.get(p.token_count) == p.digest}


def shared_blocks(token_count: int, block_tokens: int) -> int:
    """Whole blocks inside of a prefix. The block in which it ends holds private tokens as well, so it is private."""
    return token_count // block_tokens
