"""Addresses of the Kubernetes objects that the operator touches. Pure."""

from dataclasses import dataclass
from typing import Final

from kvstrata_api import names


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource type."""

    name: str
    """As in `kind:`."""
    api_version: str
    plural: str
    is_namespaced: bool = False

    def path(self, namespace: str = "") -> str:
        """URL path of the collection; of all namespaces when `namespace` is empty."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{namespace}" if self.is_namespaced and namespace else ""
        return f"{root}{inside}/{self.plural}"


@dataclass(frozen=True, slots=True)
class Ref:
    """One object."""

    kind: Kind
    name: str
    namespace: str = ""

    @property
    def path(self) -> str:
        """URL path of the object."""
        return f"{self.kind.path(self.namespace)}/{self.name}"

    def __str__(self) -> str:
        inside = f"{self.namespace}/" if self.namespace else ""
        return f"{self.kind.name} {inside}{self.name}"


POOL: Final = Kind("KVPool", names.API_VERSION, "kvpools")
POOL_NODE: Final = Kind("KVPoolNode", names.API_VERSION, "kvpoolnodes")
TENANT: Final = Kind("KVTenant", names.API_VERSION, "kvtenants")
DOMAIN: Final = Kind("KVTrustDomain", names.API_VERSION, "kvtrustdomains")
SHARE: Final = Kind("KVPrefixShare", names.API_VERSION, "kvprefixshares", is_namespaced=True)
OPERATION: Final = Kind("KVOperation", names.API_VERSION, "kvoperations")
NODE: Final = Kind("Node", "v1", "nodes")
NAMESPACE: Final = Kind("Namespace", "v1", "namespaces")
SECRET: Final = Kind("Secret", "v1", "secrets", is_namespaced=True)
CONFIG_MAP: Final = Kind("ConfigMap", "v1", "configmaps", is_namespaced=True)
POD: Final = Kind("Pod", "v1", "pods", is_namespaced=True)
DAEMON_SET: Final = Kind("DaemonSet", "apps/v1", "daemonsets", is_namespaced=True)
STATEFUL_SET: Final = Kind("StatefulSet", "apps/v1", "statefulsets", is_namespaced=True)
BUDGET: Final = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets", is_namespaced=True)
SIGNING_REQUEST: Final = Kind("CertificateSigningRequest", "certificates.k8s.io/v1", "certificatesigningrequests")
EVENT: Final = Kind("Event", "v1", "events", is_namespaced=True)

ADMINISTRATOR_KINDS: Final = (POOL, TENANT, DOMAIN, SHARE, OPERATION)
"""Few objects, written by people: watched by kopf and listed now and then by ourselves."""
