"""Scope Secrets and KEKs as an agent watches them, without the cluster: the real keyring over them."""

import base64
import json
import os
from dataclasses import dataclass, field

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.data_keys import Keyring
from kvstrata_agent.kube.trust import TrustStores, TrustView
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId
from kvstrata_api.wrapping import Keks, data_entry
from kvstrata_kube.typed_store import Known

SYSTEM = names.SYSTEM_NAMESPACE


def _unheard() -> None:
    """Changes are told to the keyring by hand."""


@dataclass(slots=True)
class ScopeSecrets:
    """Everything of the cluster that keys at rest hang from."""

    keks: Keks = field(default_factory=lambda: Keks({1: os.urandom(32)}))
    data_keys: dict[ScopeId, bytes] = field(default_factory=dict)
    """What was wrapped, for tests alone."""
    gone: bytes = b""
    """The first data key that was wrapped, for tests that see what it would still open."""
    keyring: Keyring = field(init=False)
    _secrets: Known[declared.ScopeKeys] = field(init=False)
    _entries: dict[ScopeId, dict[str, bytes]] = field(default_factory=dict)
    _version: int = 0

    def __post_init__(self) -> None:
        self._secrets = Known("Secret", declared.scope_keys, _unheard)
        stores = TrustStores(
            Known("KVTenant", declared.tenant, _unheard),
            Known("KVTrustDomain", declared.trust_domain, _unheard),
            Known("KVPrefixShare", declared.prefix_share, _unheard),
            Known("Namespace", declared.namespace_labels, _unheard),
            self._secrets,
        )
        self.keyring = Keyring(TrustView(stores, SYSTEM, "p"), self._secrets, SYSTEM, lambda: self.keks)

    def make(self, *scopes: ScopeId) -> None:
        """Mint key and data key of scopes, as the operator does."""
        for scope in scopes:
            version = scope.split("/")[3]
            data_key = self.data_keys[scope] = os.urandom(32)
            self.gone = self.gone or data_key
            self.write(scope, {version: os.urandom(32), data_entry(version): self.keks.wrap(data_key).encode()})

    def entries(self, scope: ScopeId) -> dict[str, bytes]:
        """Entries of a scope's Secret."""
        return dict(self._entries[scope])

    def left(self, scope: ScopeId) -> dict[str, bytes]:
        """Entries that the cluster still has; none of a Secret that was deleted."""
        kind, name, _, _ = scope.split("/")
        found = self._secrets.get(names.scope_secret_name(kind, name), SYSTEM)
        return {} if found is None else {e: base64.b64decode(said) for e, said in found.data.items()}

    def write(self, scope: ScopeId, entries: dict[str, bytes]) -> None:
        """Let the Secret of a scope have these entries."""
        self._entries[scope] = dict(entries)
        self._put(scope, deleted=False)

    def delete(self, scope: ScopeId) -> None:
        """Delete the Secret of a scope."""
        self._put(scope, deleted=True)

    def turn_keks(self, keks: Keks) -> None:
        """Let the fleet have other KEKs."""
        self.keks = keks
        self.keyring.changed()

    def _put(self, scope: ScopeId, *, deleted: bool) -> None:
        kind, name, uid, _ = scope.split("/")
        self._version += 1
        metadata = {
            "name": names.scope_secret_name(kind, name),
            "namespace": SYSTEM,
            "uid": f"secret of {scope}",
            "resourceVersion": str(self._version),
            "annotations": {names.ANNOTATION_OWNER_UID: uid},
        }
        coded = {entry: base64.b64encode(said).decode() for entry, said in self._entries[scope].items()}
        seen = self._secrets.read(json.dumps({"metadata": metadata, "data": coded}).encode())
        if deleted:
            self._secrets.remove(seen.key, "")
        else:
            self._secrets.put(seen)
        self.keyring.changed()
