"""What Kubernetes objects have in common: kinds, addresses, labels, times, digests, the frame of a body. Pure."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.models.base import ObjectMeta

LABEL_COMPONENT: Final = "app.kubernetes.io/component"
CONNECTION: Final = "connection"
"""Value of `LABEL_COMPONENT` on connection ConfigMaps."""
AGENT_TEMPLATE: Final = "agent-template"
"""Value of `LABEL_COMPONENT` on the ConfigMap with the pod template of agents."""
REDIS_TEMPLATE: Final = "redis-template"
"""Value of `LABEL_COMPONENT` on the ConfigMap with the StatefulSet of Redis."""
CONFIG_MAPS: Final = (CONNECTION, AGENT_TEMPLATE, REDIS_TEMPLATE)
"""Values of `LABEL_COMPONENT` by which ConfigMaps are followed."""
_DIGEST_BYTES: Final = 8
"""64 bits: compared among the few revisions of one object, not a security boundary."""


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
MODEL_CACHE: Final = Kind("KVModelCache", names.API_VERSION, "kvmodelcaches")
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

ADMINISTRATOR_KINDS: Final = (POOL, TENANT, DOMAIN, SHARE, OPERATION, MODEL_CACHE)
"""Few objects, written by people: watched by kopf and listed now and then by ourselves."""


CONNECTION_LABELS: Final = {names.LABEL_MANAGED_BY: names.MANAGED_BY, LABEL_COMPONENT: CONNECTION}


REDIS_LABELS: Final = {names.LABEL_MANAGED_BY: names.MANAGED_BY, LABEL_COMPONENT: "redis"}
"""On the StatefulSet of Redis and its pod."""

WORKLOAD_LABELS: Final = {names.LABEL_MANAGED_BY: names.MANAGED_BY, LABEL_COMPONENT: "agent"}
"""On DaemonSets of agents, their budgets and their pods."""


PODS: Final = (WORKLOAD_LABELS[LABEL_COMPONENT], REDIS_LABELS[LABEL_COMPONENT])
"""The same of pods."""


def pool_node_ref(pool: str, node: str) -> Ref:
    """Address of the KVPoolNode of one pool on one node."""
    return Ref(POOL_NODE, names.pool_node_name(pool, node))


def pool_node_labels(pool: str, node: str) -> dict[str, str]:
    """Labels of the KVPoolNode of one pool on one node."""
    return {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_POOL: pool,
        names.LABEL_NODE: names.label_value(node),
    }


def connection_ref(pool: str, namespace: str) -> Ref:
    """Address of the ConfigMap that engine pods read to attach."""
    return Ref(CONFIG_MAP, f"{pool}-connection", namespace)


def digest(value: object) -> str:
    """Name a JSON value by 16 hexadecimal digits; key order and white space do not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def format_time(moment: datetime) -> str:
    """Write whole seconds of UTC: `2026-01-31T12:00:00Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime | None:
    """Read a time into UTC; None for an empty or unreadable one. A time without a zone is taken for UTC."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def body_of(ref: Ref, metadata: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Put an object together; its name and namespace come from `ref`."""
    place = {"namespace": ref.namespace} if ref.namespace else {}
    return {
        "apiVersion": ref.kind.api_version,
        "kind": ref.kind.name,
        "metadata": {"name": ref.name, **place, **metadata},
        **parts,
    }


def sealed(ref: Ref, metadata: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Put an object together whose content its annotation names: the API server fills in more than we write."""
    annotations = {names.ANNOTATION_DIGEST: digest([metadata, parts])}
    return body_of(ref, {**metadata, "annotations": annotations}, **parts)


def owner_reference(kind: Kind, meta: ObjectMeta) -> dict[str, Any]:
    """Let the garbage collector delete what outlives its owner, also when the operator is away."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
