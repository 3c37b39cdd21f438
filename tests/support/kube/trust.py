"""Tenants, Secrets of scopes and a trust view over stores that a test fills."""

import base64
import json
from datetime import UTC, datetime
from typing import Any, TypeVar

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.trust import TrustStores, TrustView
from kvstrata_api import names
from kvstrata_api.trust import Identity
from kvstrata_kube.typed_store import Known

Json = dict[str, Any]
T = TypeVar("T")
SYSTEM = names.SYSTEM_NAMESPACE
ENGINE = Identity("team", "engine", "pod-1")


def tenant(name: str = "a", uid: str = "u1", **spec: Any) -> Json:
    spec = spec or {"serviceAccounts": [{"namespace": "team", "name": "engine"}]}
    return {"metadata": {"name": name, "uid": uid}, "spec": spec}


def secret(kind: str = "tenant", name: str = "a", uid: str = "u1", **data: bytes) -> Json:
    metadata: Json = {"name": names.scope_secret_name(kind, name), "namespace": SYSTEM}
    metadata["annotations"] = {names.ANNOTATION_OWNER_UID: uid}
    return {"metadata": metadata, "data": {k: base64.b64encode(v).decode() for k, v in data.items()}}


KEY, KEY2 = b"k" * 32, b"l" * 32


class Trust:
    """A trust view over stores that a test fills; `objects` are listed at the start."""

    def __init__(
        self, tenants: Any = (), domains: Any = (), namespaces: Any = (), secrets: Any = (), shares: Any = ()
    ) -> None:
        def changed() -> None:
            self.view.invalidate()

        self.stores = TrustStores(
            Known("KVTenant", declared.tenant, changed),
            Known("KVTrustDomain", declared.trust_domain, changed),
            Known("KVPrefixShare", declared.prefix_share, changed),
            Known("Namespace", declared.namespace_labels, changed),
            Known("Secret", declared.scope_keys, changed),
        )
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.view = TrustView(self.stores, SYSTEM, "p", lambda: self.now)
        _fill(self.stores.tenants, tenants)
        _fill(self.stores.domains, domains)
        _fill(self.stores.shares, shares)
        _fill(self.stores.namespaces, namespaces)
        _fill(self.stores.secrets, secrets)


def _fill(store: Known[T], objects: list[Json]) -> None:
    store.take([store.read(json.dumps(o).encode()) for o in objects], "")
