"""Every name that crosses a process boundary: API group, labels, finalizers, objects, audiences, trust scopes."""

import hashlib
from typing import Final, NamedTuple, NewType

GROUP: Final = "kvstrata.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "kvstrata"

AUDIENCE: Final = "kvstrata"
"""Audience of the projected ServiceAccount tokens that engine pods and peer agents present to an agent."""

TOKEN_FILE: Final = "/var/run/secrets/kvstrata.io/token"  # noqa: S105  A path.
"""Where pods of engines and agents have that token mounted, unless configured otherwise."""

SYSTEM_NAMESPACE: Final = "kvstrata-system"
"""Default namespace of operator, metadata service, agents, scope Secrets and Leases."""

AGENT_SERVICE_ACCOUNT: Final = "kvstrata-agent"
"""Identity of every agent in the system namespace; agents accept each other by it."""

FIELD_MANAGER_OPERATOR: Final = "kvstrata-operator"
FIELD_MANAGER_AGENT: Final = "kvstrata-agent"
FIELD_MANAGER_NODE: Final = "kvstrata-node"
FIELD_MANAGER_METADATA: Final = "kvstrata-metadata"

FINALIZER: Final = f"{GROUP}/cleanup"

LABEL_POOL: Final = f"{GROUP}/pool"
"""On KVPoolNodes and Leases: the pool's name. On Nodes administrators commonly select by it."""
LABEL_NODE: Final = f"{GROUP}/node"
LABEL_SCOPE: Final = f"{GROUP}/scope"
"""On scope Secrets: `tenant`, `domain` or `share`; agents list Secrets by the presence of this label."""
LABEL_REVISION: Final = f"{GROUP}/revision"
"""On pods of agents: digest of the template that they were made from."""
LABEL_PAGES: Final = f"{GROUP}/pages"
"""On pods of agents whose memory tiers have small pages although their pool wants huge ones: `4Ki`."""
MODELS_FOLDER: Final = "kvstrata-models"
"""Below the directory of an NVMe tier: `<KVModelCache>/<revision>` with the files of each."""
LABEL_MODEL_PREFIX: Final = f"models.{GROUP}/"
"""On Nodes, with the name of a KVModelCache behind it: the revision of its weights that the node has."""
ANNOTATION_DIGEST: Final = f"{GROUP}/digest"
"""On what the operator makes: digest of it as it was made, for the API server fills in defaults."""
ANNOTATION_OWNER_UID: Final = f"{GROUP}/uid"
"""On scope Secrets: uid of the tenant or domain that the keys belong to; a successor of that name has another."""
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "kvstrata"

DESTROY_CONFIRMATION: Final = "destroy-all-kv-blocks"
"""What `spec.destroyConfirmation` of a KVPool must be before `deletionPolicy: Destroy` is accepted."""

REDIS_SECRET_AGENT: Final = "kvstrata-redis-agent"  # noqa: S105  The name of an object, not its content.
"""Secret with `url`, `username`, `password` and optionally `ca.crt` that agents use with an embedded Redis."""

SIGNER: Final = f"{GROUP}/peer"
"""`signerName` of the CertificateSigningRequests by which agents and the metadata service ask the operator."""

CA_NAMESPACE: Final = "kvstrata-ca"
"""Namespace of the certificate authority's key alone: agents may read every Secret of the system namespace."""

CA_SECRET: Final = "kvstrata-ca"  # noqa: S105  The name of an object, not its content.
"""Secret with `tls.crt` and `tls.key` of the certificate authority, laid out as cert-manager does."""

TRUST_CONFIG_MAP: Final = "kvstrata-trust"
"""ConfigMap whose `ca.crt` holds every certificate authority that is trusted now: two while one replaces the other."""

REDIS_SECRET_TLS: Final = "kvstrata-redis-tls"  # noqa: S105  The name of an object, not its content.
"""Secret with `tls.crt`, `tls.key` and `ca.crt` of a Redis that the chart runs."""

KEK_SECRET: Final = "kvstrata-kek"  # noqa: S105  The name of an object, not its content.
"""Secret with the key-encryption keys of the fleet, entries `k<n>`; made by the operator when it is absent."""

AGENT_TEMPLATE: Final = "kvstrata-agent-template"
"""ConfigMap with the pod template that the operator makes agents from."""
AGENT_TEMPLATE_ENTRY: Final = "template.json"
REDIS: Final = "kvstrata-redis"
"""StatefulSet of the directory's Redis, where kvstrata runs it; its Service has the same name."""

REDIS_TEMPLATE: Final = "kvstrata-redis-template"
"""ConfigMap with what the operator makes that StatefulSet from, and the bounds of its memory."""
REDIS_TEMPLATE_ENTRY: Final = "statefulset.json"
REDIS_CONTAINER: Final = "redis"
"""Container of that template that gets the memory."""
REDIS_MEMORY_VARIABLE: Final = "KVSTRATA_MAXMEMORY"
"""Environment variable with its `maxmemory`, in bytes."""

AGENT_CONTAINER: Final = "agent"
"""Container of the template that gets the directories and the memory of a pool's tiers."""

FOLDERS_CONTAINER: Final = "folders"
"""Init container of the template that gives folders which the kubelet has made to the agent's user."""

LABEL_CHARS_MAX: Final = 63
"""RFC 1123 labels and label values."""

NAME_CHARS_MAX: Final = 253
"""Kubernetes object names, RFC 1123 subdomain."""

KEY_VERSION: Final = 1
"""First version of a scope's key."""

ScopeId = NewType("ScopeId", str)
"""`<kind>/<name>/<uid>/v<key version>`: public name of a trust scope; the secret is elsewhere."""


class NamedPrefix(NamedTuple):
    """Leading tokens that a share speaks of. Travels to clients as it is."""

    digest: bytes
    """32 bytes, see `blocks.prefix_digest`."""
    token_count: int


def label_value(name: str) -> str:
    """Give `name`, or a digest of it where it is too long for a label."""
    if len(name) <= LABEL_CHARS_MAX:
        return name
    return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()


def pool_node_name(pool: str, node: str) -> str:
    """Name the KVPoolNode of `pool` on `node`; pool names hold no dot, so the pair is unambiguous."""
    return f"{pool}.{node}"


def agent_lease_name(pool: str, node: str) -> str:
    """Name the coordination Lease by which the agent of `pool` on `node` shows that it lives."""
    return f"kvstrata-agent.{pool}.{node}"


def socket_path(pool: str) -> str:
    """Return where engines of a node find the pool's agent, unless the chart's `agent.hostPaths.sockets` differs."""
    return f"/run/kvstrata/{pool}/agent.sock"


def agents_name(pool: str) -> str:
    """Name the DaemonSet of a pool's agents, and its PodDisruptionBudget."""
    return f"kvstrata-agent-{pool}"


def small_agents_name(pool: str) -> str:
    """Name the DaemonSet of a pool's agents on nodes that lack its huge pages; no other pool's has this name."""
    return f"kvstrata-agent4ki-{pool}"


def scope_secret_name(kind: str, name: str) -> str:
    """Name the Secret that holds the key material of a scope; `kind` is `tenant`, `domain` or `share`.

    The name of a share is `<namespace>.<name>`, both RFC 1123 labels.
    """
    return f"kvstrata-scope.{kind}.{name}"


def agent_uri(namespace: str, agent: str) -> str:
    """Name the agent `<pool>.<node>` of a fleet in its certificate."""
    return f"spiffe://kvstrata/{namespace}/agent/{agent}"


def service_uri(namespace: str, service: str) -> str:
    """Name another process of a fleet in its certificate; `service` is `metadata` or `redis`."""
    return f"spiffe://kvstrata/{namespace}/{service}"
