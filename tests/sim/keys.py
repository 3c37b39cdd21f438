"""Data keys of the simulated scopes: there while the scope is, gone with it."""

import hashlib

from kvstrata_api.blocks import ScopeId
from sim.tenancy import Tenancy, secret_of

SEALED_EVERY = 4
"""One seed in so many has disks that are encrypted."""


class SimKeys:
    """Keys of all scopes that exist now (`DataKeys`)."""

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy

    def data_key(self, scope: ScopeId) -> bytes | None:
        """Data key of a scope that exists."""
        if scope not in self._tenancy.scopes():
            return None
        return hashlib.blake2b(scope.encode(), digest_size=32, person=b"data key").digest()

    def tag(self, scope: ScopeId) -> bytes | None:
        """What stands for a scope that exists."""
        return bytes.fromhex(secret_of(scope).tag()) if scope in self._tenancy.scopes() else None

    def scope(self, tag: bytes) -> ScopeId | None:
        """Scope of a tag."""
        return next((s for s in self._tenancy.scopes() if self.tag(s) == tag), None)
