"""What administrators and tenants do in every run of the kill points and faults, step by step, and its undoing."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from controlplane import ApiError, ControlPlane
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_api.schema_kinds import BY_NAME, KINDS
from support.operator.fleet import pool_spec, tier

KVSTRATA: Final = f"/apis/{names.API_VERSION}"
NODES: Final = ("a", "b", "c")
TEAM: Final = "team-1"
_MADE_ONCE: Final = (
    f"{names.CA_NAMESPACE}/secrets/{names.CA_SECRET}",
    f"{names.SYSTEM_NAMESPACE}/configmaps/{names.TRUST_CONFIG_MAP}",
    f"{names.SYSTEM_NAMESPACE}/secrets/{names.KEK_SECRET}",
)
"""What the operator makes for itself when it starts first."""
_PREFIX: Final = {"digest": "0" * 64, "tokenCount": 16}
_QUICK: Final[dict[str, Any]] = {"updateStrategy": {"drain": {"timeoutSeconds": 2}}}


class Admin:
    """Hands of whoever writes to the cluster; they go to the API server directly."""

    def __init__(self, plane: ControlPlane) -> None:
        self._api = plane.api

    def make(self, kind: str, name: str, spec: Any, namespace: str = "") -> None:
        """Create an object."""
        body = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self._api.post(_path(kind, "", namespace), body)

    def change(self, kind: str, name: str, spec: Any, namespace: str = "") -> None:
        """Merge into a spec."""
        self._api.patch(_path(kind, name, namespace), {"spec": spec})

    def replace(self, kind: str, name: str, spec: Any, namespace: str = "") -> None:
        """Put a whole spec in place of another."""
        path = _path(kind, name, namespace)
        self._api.put(path, {**self._api.get(path), "spec": spec})

    def get(self, kind: str) -> list[Any]:
        """Every object of a kind."""
        return self._left(BY_NAME[kind].plural)

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete an object; its finalizers go on."""
        self._api.delete(_path(kind, name, namespace))

    def label(self, node: str, value: str | None) -> None:
        """Let pools select a node, or not any more."""
        self._api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"pool": value}}})

    def set_up(self) -> None:
        """Make what stays over all runs: nodes and a namespace."""
        for node in NODES:
            self._api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        meta = {"name": TEAM, "labels": {"team": "1"}}
        self._api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})

    def make_homes(self, marks: Iterable[str]) -> None:
        """Make a node and a namespace of its own for each mark; what is there stays."""
        for mark in marks:
            node = {"name": f"{mark}-n", "labels": {mark: "yes"}}
            self._make_once("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": node})
            home = {"name": f"{mark}-0"}
            self._make_once("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": home})

    def _make_once(self, path: str, body: Any) -> None:
        try:
            self._api.post(path, body)
        except ApiError as e:
            if e.status != 409:
                raise

    def clear(self) -> None:
        """Take everything away at once, as if nobody had ever done anything. The operator does not run meanwhile."""
        for node in NODES:
            self.label(node, None)
        for kind in KINDS:
            self._clear(kind.plural, is_namespaced=kind.is_namespaced)
        inside = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}"
        self._api.delete(f"{inside}/secrets?labelSelector={names.LABEL_SCOPE}")
        self._api.delete(f"{inside}/configmaps?labelSelector=app.kubernetes.io/component=connection")
        self._api.delete(f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases")
        for place in _MADE_ONCE:
            self._try(lambda place=place: self._api.delete(f"/api/v1/namespaces/{place}"))  # type: ignore[misc]
        assert wait_until(lambda: not any(self._left(kind.plural) for kind in KINDS), 30.0)

    def _clear(self, plural: str, *, is_namespaced: bool) -> None:
        for body in self._left(plural):
            inside = f"/namespaces/{body['metadata']['namespace']}" if is_namespaced else ""
            path = f"{KVSTRATA}{inside}/{plural}/{body['metadata']['name']}"
            self._try(lambda path=path: self._api.delete(path))  # type: ignore[misc]
            if body["metadata"].get("finalizers"):
                self._try(lambda path=path: self._api.patch(path, {"metadata": {"finalizers": None}}))  # type: ignore[misc]

    def _left(self, plural: str) -> list[Any]:
        found: list[Any] = self._api.get(f"{KVSTRATA}/{plural}")["items"]
        return found

    def _try(self, deed: Callable[[], Any]) -> None:
        """Do it; what is gone already is as good."""
        try:
            deed()
        except ApiError as e:
            if e.status != 404:
                raise


def _path(kind: str, name: str, namespace: str) -> str:
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{KVSTRATA}{inside}/{BY_NAME[kind].plural}" + (f"/{name}" if name else "")


def _tenant(number: int, **more: Any) -> dict[str, Any]:
    return {"serviceAccounts": [{"namespace": f"team-{number}", "name": "engine"}], **more}


def declare(admin: Admin) -> None:
    """Declare a fleet while the operator is not there yet."""
    for node in NODES[:2]:
        admin.label(node, "yes")
    admin.make("KVPool", "p", pool_spec(**_QUICK))
    admin.make("KVTenant", "one", _tenant(1, trustDomain="d"))
    admin.make("KVTenant", "two", _tenant(2, trustDomain="d"))
    admin.make("KVTrustDomain", "d", {"tenants": ["one", "two"], "sharing": "All"})
    admin.make("KVPrefixShare", "s", {"poolRef": "p", "prefixes": [_PREFIX], "to": [{"tenant": "two"}]}, TEAM)


def resize(admin: Admin) -> None:
    """Change everything that can be changed while all is in use, and declare a second pool."""
    admin.change("KVPool", "p", {"tiers": [tier(size="2Gi")]})
    admin.label(NODES[2], "yes")
    admin.change("KVTenant", "two", {"trustDomain": None})
    admin.change("KVTenant", "one", {"quotas": [{"poolRef": "p", "tier": "dram", "hard": "1Gi"}]})
    admin.make("KVPool", "q", pool_spec([tier(), tier("nvme", "NVMe")], **_QUICK))


def withdraw(admin: Admin) -> None:
    """Take a node away and erase a tenant. What witnesses the erasure is there already, or its words would differ."""
    admin.label(NODES[1], None)
    admin.change("KVTenant", "two", {"eraseRequested": "now"})


def delete(admin: Admin) -> None:
    """Delete a pool, a share and a tenant, and make a tenant of the same name again."""
    admin.delete("KVPool", "p")
    admin.delete("KVPrefixShare", "s", TEAM)
    admin.delete("KVTenant", "one")
    admin.make("KVTenant", "one", _tenant(1))


STEPS: Final = (declare, resize, withdraw, delete)
