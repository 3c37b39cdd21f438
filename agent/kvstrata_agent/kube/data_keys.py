"""Data keys of scopes, unwrapped on demand and forgotten with their Secret. The only place that holds them. No I/O."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvstrata_agent.kube.declared import ScopeKeys
from kvstrata_agent.kube.trust import TrustView
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId
from kvstrata_api.wrapping import Keks, data_entry, wrapped_by
from kvstrata_kube.typed_store import Known

_log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """One unwrapped key."""

    wrapped: str
    key: bytearray = field(repr=False)
    version: int
    """Of the trust view when the key was last seen to be good."""

    def wipe(self) -> None:
        """Overwrite the key. What Python copied while it was unwrapped is out of reach."""
        self.key[:] = bytes(len(self.key))


class Keyring:
    """Implements `sealing.DataKeys` from the watched scope Secrets and the KEKs. Call `changed` when either did."""

    def __init__(self, view: TrustView, secrets: Known[ScopeKeys], namespace: str, keks: Callable[[], Keks]) -> None:
        self._view = view
        self._secrets = secrets
        self._namespace = namespace
        self._keks = keks
        self._unwrapped_by = keks()
        self._held: dict[ScopeId, _Held] = {}
        self._tags: dict[bytes, ScopeId] | None = None
        self._missed: set[ScopeId] = set()
        """Scopes whose missing data key was logged."""

    def changed(self) -> None:
        """Forget at once what is not there any more."""
        self._tags = None
        self._missed.clear()
        are_keks_new, self._unwrapped_by = self._unwrapped_by != self._keks(), self._keks()
        for scope, held in tuple(self._held.items()):
            if are_keks_new or held.wrapped != self._wrapped(scope):
                self._forget(scope)

    def data_key(self, scope: ScopeId) -> bytearray | None:
        """Return the data key of a scope while its Secret, its entry and its KEK are there."""
        held, version = self._held.get(scope), self._view.version
        if held is not None and held.version == version:
            return held.key
        if self._view.secret(scope) is None:
            self._forget(scope)
            return None
        wrapped = self._wrapped(scope)
        if held is not None and held.wrapped == wrapped:
            held.version = version
            return held.key
        self._forget(scope)
        key = self._keks().unwrap(wrapped)
        if key is None:
            self._miss(scope, wrapped)
            return None
        held = self._held[scope] = _Held(wrapped, bytearray(key), version)
        return held.key

    def tag(self, scope: ScopeId) -> bytes | None:
        """Return what stands for a scope on the medium; needs no KEK."""
        secret = self._view.secret(scope)
        return None if secret is None else bytes.fromhex(secret.tag())

    def scope(self, tag: bytes) -> ScopeId | None:
        """Return the scope of a tag, among those whose Secret is there."""
        if self._tags is None:
            tags = ((self.tag(scope), scope) for keys in self._secrets for scope in keys.scopes())
            self._tags = {known: scope for known, scope in tags if known is not None}
        found = self._tags.get(tag)
        return found if found is not None and self._view.secret(found) is not None else None

    def _wrapped(self, scope: ScopeId) -> str:
        kind, name, uid, version = scope.split("/")
        keys = self._secrets.get(names.scope_secret_name(kind, name), self._namespace)
        return keys.wrapped(version) if keys is not None and keys.owner_uid == uid else ""

    def _miss(self, scope: ScopeId, wrapped: str) -> None:
        """Log once, until something changes, why the blocks of a scope can be neither stored nor read at rest."""
        if scope not in self._missed:
            self._missed.add(scope)
            kind, name, _, version = scope.split("/")
            why = f"KEK k{wrapped_by(wrapped)} does not open it, or is not there" if wrapped else "the entry is missing"
            facts = {"secret": names.scope_secret_name(kind, name), "entry": data_entry(version), "cause": why}
            _log.warning("no data key: blocks stay off encrypted tiers", extra=facts)

    def _forget(self, scope: ScopeId) -> None:
        held = self._held.pop(scope, None)
        if held is not None:
            held.wipe()
