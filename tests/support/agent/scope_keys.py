"""Data keys of scopes for tests: what a cluster's Secrets hold, without the cluster."""

import hashlib
import os
from dataclasses import dataclass, field

from kvstrata_api.blocks import ScopeId


@dataclass(slots=True)
class _Keys:
    tag: bytes
    data_key: bytes | None


@dataclass(slots=True)
class KeyRing:
    """Keys (`DataKeys`) that come and go. `lose` takes a data key away, `shred` the whole scope."""

    known: dict[ScopeId, _Keys] = field(default_factory=dict)

    def __init__(self, *scopes: ScopeId) -> None:
        self.known = {}
        for scope in scopes:
            self.mint(scope)

    def mint(self, scope: ScopeId) -> None:
        self.known[scope] = _Keys(os.urandom(8), os.urandom(32))

    def lose(self, scope: ScopeId) -> _Keys:
        before = self.known[scope]
        self.known[scope] = _Keys(before.tag, None)
        return before

    def shred(self, scope: ScopeId) -> _Keys:
        return self.known.pop(scope)

    def data_key(self, scope: ScopeId) -> bytes | None:
        keys = self.known.get(scope)
        return None if keys is None else keys.data_key

    def tag(self, scope: ScopeId) -> bytes | None:
        keys = self.known.get(scope)
        return None if keys is None else keys.tag

    def scope(self, tag: bytes) -> ScopeId | None:
        return next((scope for scope, keys in self.known.items() if keys.tag == tag), None)


class NamedKeys(KeyRing):
    """Keys that follow from the scope's name, so that several processes have the same."""

    def mint(self, scope: ScopeId) -> None:
        made = hashlib.blake2b(scope.encode(), digest_size=40).digest()
        self.known[scope] = _Keys(made[:8], made[8:])
