"""Names of keys in Redis and how a scope is cut into shards. Pure."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstrata_api.blocks import ScopeSecret
from kvstrata_metadata.store.records import INCARNATION_BYTES, Incarnation

SHARDS: Final = 16
"""Shards of one scope, distinguished by the first hex digit of a digest. One hot scope can use 16 primaries."""

REVERSE_BUCKETS: Final = 256
"""Answer of the removing transitions when nothing is left; prelude.lua has the reason for 256."""

REGISTRY_KEY: Final = b"kf:{agents}"
"""Prefix of all keys of the registry of agents: one slot of a Redis Cluster."""

SESSION_DIGEST_BYTES: Final = 16

SESSION_TTL_S: Final = 7 * 24 * 3600
"""A session that nobody touches for a week is forgotten; its blocks live and die by policy."""

TOMBSTONE_S: Final = 3_600.0
"""How long a shard refuses a fenced incarnation by itself; a message cannot be late for longer than its connection."""


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One sixteenth of a scope: the unit of atomicity, of sequence numbers and of a Cluster slot."""

    tag: str
    """`ScopeSecret.tag()`: 16 hex digits that reveal nothing of names or members."""
    index: int

    @property
    def name(self) -> str:
        """`<tag>.<hex digit>`, as the registry notes it."""
        return f"{self.tag}.{self.index:x}"

    @property
    def key(self) -> bytes:
        """Prefix of all keys of the shard; the braces make it one slot of a Redis Cluster."""
        return f"kf:{{{self.name}}}".encode()


def bucket_key(tag: str, digest: bytes) -> bytes:
    """Key of the hash that holds a block's locations, as `prelude.lua` makes it."""
    return Shard(tag, shard_index(digest)).key + b"b" + digest[:2]


def mailbox_key(incarnation: Incarnation) -> bytes:
    """Key of the nominations for one incarnation: a slot of its own in a Redis Cluster."""
    return b"kf:{mail." + incarnation.hex().encode() + b"}"


def parse_shard(name: str) -> Shard | None:
    """Read `Shard.name`; None when it is not one."""
    tag, _, digit = name.partition(".")
    if len(digit) != 1 or digit not in "0123456789abcdef" or not tag:
        return None
    return Shard(tag, int(digit, 16))


def shard_index(digest: bytes) -> int:
    """Shard of a block within its scope: the first four bits of its digest."""
    return digest[0] >> 4


def by_shard(digests: Iterable[bytes]) -> dict[int, list[int]]:
    """Positions of the digests of each shard."""
    positions: dict[int, list[int]] = {}
    for i, digest in enumerate(digests):
        positions.setdefault(digest[0] >> 4, []).append(i)
    return positions


def session_digest(secret: ScopeSecret, session: str) -> bytes:
    """Name a session in Redis without revealing its name."""
    name, size = session.encode(), SESSION_DIGEST_BYTES
    return hashlib.blake2b(name, key=secret.secret, digest_size=size, person=b"kvstrata.session").digest()


def incarnation_text(incarnation: Incarnation) -> str:
    """Write an incarnation for logs and the fleet view."""
    assert len(incarnation) == INCARNATION_BYTES
    return incarnation.hex()
