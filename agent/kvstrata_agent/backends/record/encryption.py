"""Sealing of records at rest: AES-256-GCM under the data key of their scope.

Every record gets 32 random bytes and by them a key of its own (docs/format.md, "Sealed records"), so no nonce is ever
used twice under one key, whatever becomes of the disk, its counters and its clock.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.backends.base import PROBE_SCOPE, KeyAwayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata_agent.backends.record.cipher import RecordKey
    from kvstrata_api.blocks import ScopeId

SALT_BYTES: Final = 32
"""256 random bits for each record: after 2^80 records under one data key two are equal with a chance of 2^-97."""

TAG_BYTES: Final = 16
SCOPE_TAG_BYTES: Final = 8


class DataKeys(Protocol):
    """Keys of scopes as the cluster holds them now. Cheap: asked for every record, in the loop's thread alone."""

    def data_key(self, scope: ScopeId) -> bytes | bytearray | None:
        """Data key of a scope; None when it is not there yet or any more. Not to be kept: it is wiped when it goes."""

    def tag(self, scope: ScopeId) -> bytes | None:
        """8 bytes that stand for a scope on the medium; None when the scope does not exist."""

    def scope(self, tag: bytes) -> ScopeId | None:
        """Scope of a tag; None when no scope that exists has it."""


@dataclass(slots=True)
class Sealer:
    """Seals and opens under the keys of `keys`, and of the start-up probe, which has a key of this process."""

    keys: DataKeys
    _probe_key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def tag(self, scope: ScopeId) -> bytes:
        """Scope's tag. Raises `KeyAwayError`."""
        tag = bytes(SCOPE_TAG_BYTES) if scope == PROBE_SCOPE else self.keys.tag(scope)
        if tag is None:
            raise KeyAwayError(f"scope {scope}: no Secret")
        return tag

    def key(self, scope: ScopeId, salt: bytes) -> RecordKey:
        """Key of the record with this salt. Raises `KeyAwayError`."""
        return self.keys_of(scope)(salt)

    def keys_of(self, scope: ScopeId) -> Callable[[bytes], RecordKey]:
        """What makes keys from the salts of a scope's records, in any thread. Raises `KeyAwayError`.

        For the time of one transfer: it holds the data key itself and no copy, so that wiping that one ends it.
        """
        from kvstrata_agent.backends.record.cipher import RecordKey  # Tiers in the clear need no cipher.

        data_key = self._probe_key if scope == PROBE_SCOPE else self.keys.data_key(scope)
        if data_key is None:
            raise KeyAwayError(f"scope {scope}: its data key is not there, or its KEK is not")

        def derived(salt: bytes) -> RecordKey:
            return RecordKey(hashlib.blake2b(salt, key=data_key, digest_size=32, person=b"kvstrata.seal").digest())

        return derived

    def new_key(self, scope: ScopeId) -> tuple[bytes, RecordKey]:
        """Salt and key for something new. Raises `KeyAwayError`."""
        salt = os.urandom(SALT_BYTES)
        return salt, self.key(scope, salt)
