"""What engines ask for: a few branching conversations in each scope, and the bytes that belong to each block."""

from functools import cache
from typing import Final

import numpy as np

from kvstrata_api.blocks import BlockKey, ScopeId
from kvstrata_client.prompt.chain import Prompt, Tokens
from sim.tenancy import secret_of
from support.agent.doubles import BLOCK_BYTES, LAYOUT

CHAINS = 6
BLOCKS = 8
BRANCH_AT = (8, 5, 3, 6, 2, 7)
"""Chain n shares so many blocks with the chain before it."""
KNOWN: Final[set[bytes]] = set()
"""Digests whose `content` is what any slot that holds them must hold."""


@cache
def tokens(chain: int) -> Tokens:
    """Tokens of one conversation."""
    block_tokens = LAYOUT.block_tokens
    if chain == 0:
        return np.arange(BLOCKS * block_tokens, dtype=np.uint32)
    shared = BRANCH_AT[chain] * block_tokens
    own = np.arange(BLOCKS * block_tokens - shared, dtype=np.uint32) + chain * 10_000
    return np.concatenate([tokens(chain - 1)[:shared], own])


@cache
def keys(scope: ScopeId, chain: int) -> tuple[BlockKey, ...]:
    """Keys of one conversation in a scope."""
    made = Prompt(LAYOUT.layout_id(), tokens(chain), LAYOUT.block_tokens).chain(secret_of(scope)).keys
    KNOWN.update(key.digest for key in made)
    return made


@cache
def content(digest: bytes) -> bytes:
    """The bytes of a block: nobody else's, because the digest is nobody else's."""
    return (digest * (BLOCK_BYTES // len(digest) + 1))[:BLOCK_BYTES]


WHOLE_CHAINS = 3
"""Conversations of the high-level interface: keys and scopes are its own affair; each tenant writes its own bytes."""
WHOLE_BLOCKS = 6


@cache
def whole_tokens(chain: int) -> Tokens:
    """Tokens of a conversation that only the high-level interface stores."""
    return np.arange(WHOLE_BLOCKS * LAYOUT.block_tokens, dtype=np.uint32) + 1_000_000 * (chain + 1)


@cache
def whole_rows(tenant: str, chain: int) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """Its blocks as one tenant computes them."""
    names = (f"{tenant}{chain}.{i}".encode().ljust(20, b".") for i in range(WHOLE_BLOCKS))
    return np.frombuffer(b"".join(map(content, names)), np.uint8).reshape(WHOLE_BLOCKS, BLOCK_BYTES)


def last_prompt(name: str, blocks: int) -> "tuple[Tokens, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]":
    """Tokens and bytes of a prompt that nobody else asks for."""
    digests = (f"{name}.last.{i}".encode().ljust(20, b".") for i in range(blocks))
    rows = np.frombuffer(b"".join(map(content, digests)), np.uint8).reshape(blocks, BLOCK_BYTES)
    return np.arange(blocks * LAYOUT.block_tokens, dtype=np.uint32) + 50_000_000, rows
