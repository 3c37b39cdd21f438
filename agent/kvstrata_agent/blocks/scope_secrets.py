"""Keys of the scopes that this agent has blocks of, remembered for a little longer than they exist.

The key of an erased scope is needed twice more: to withdraw our announcements, and to tell the directory which of its
scopes is gone.
"""

from collections.abc import Callable, Iterable
from typing import Final

from kvstrata_api.blocks import ScopeId, ScopeSecret

LOST_AFTER_S: Final = 5.0
"""A Secret that is replaced is absent for a moment; the same time as blocks are given."""

SCOPES_MAX: Final = 16_384
"""Scopes that are remembered; for those beyond, locations stay in the directory until it hears of it from others."""


class ScopeMemory:
    """Remembers what `secret_of` last said of each scope."""

    def __init__(self, secret_of: Callable[[ScopeId], ScopeSecret | None]) -> None:
        self._secret_of = secret_of
        self._known: dict[ScopeId, ScopeSecret] = {}
        self._lost_since_s: dict[ScopeId, float] = {}

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Key of a scope, a lost one included; None when it was never known."""
        secret = self._secret_of(scope)
        if secret is not None and (scope in self._known or len(self._known) < SCOPES_MAX):
            self._known[scope] = secret
        return secret or self._known.get(scope)

    def is_lost(self, scope: ScopeId) -> bool:
        """True when the scope has no key now."""
        return self._secret_of(scope) is None

    def by_tag(self, tag: str) -> ScopeId | None:
        """Scope of a tag, among those that are remembered."""
        return next((scope for scope, secret in self._known.items() if secret.tag() == tag), None)

    def lost(self, held: Iterable[ScopeId], now_s: float) -> list[ScopeSecret]:
        """Keys that have been gone for `LOST_AFTER_S`; call it now and then. `held`: scopes that have blocks here."""
        for scope in held:
            self.secret(scope)
        gone = []
        for scope, secret in self._known.items():
            if not self.is_lost(scope):
                self._lost_since_s.pop(scope, None)
            elif now_s - self._lost_since_s.setdefault(scope, now_s) >= LOST_AFTER_S:
                gone.append(secret)
        return gone

    def forget(self, scope: ScopeId) -> None:
        """Forget a lost scope."""
        self._known.pop(scope, None)
        self._lost_since_s.pop(scope, None)
