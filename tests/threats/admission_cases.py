"""Requests to the API server, each with what must come of it: refused in these words, or admitted.

Every policy has requests of both kinds, which differ in the one thing that the policy is about.
"""

import copy
from collections.abc import Iterator
from typing import Any, Final

from checks.rights import SYSTEM, TEAM
from kvstrata_api import names
from support.kube import bad_manifests
from threats.admission_pods import images, node_preparation, system_pods, tenant_pods
from threats.admission_request import (
    ADMINISTRATOR,
    AGENT,
    COLLECTOR,
    CREATOR,
    DRY_DELETE,
    EDITOR,
    FORBIDDEN,
    GROUP,
    METADATA,
    OPERATIVE,
    OPERATOR,
    PLAIN,
    ROOT,
    SHARER,
    TENANT_EDITOR,
    Case,
    Json,
    custom,
    patch,
    share,
)


def cases() -> list[Case]:
    """Every request, dry runs all."""
    made = [
        *_shares(), *_tenancy(), *_observations(), *_scope_keys(), *_storage(), *tenant_pods(), *system_pods(),
        *images(), *_operations(), *_model_caches(), *_node_labels(), *_leadership(), *node_preparation(),
    ]  # fmt: skip
    return [Case(c.name, c.who, c.method, f"{c.path}?dryRun=All", c.body, c.words, c.content_type) for c in made]


def _shares() -> Iterator[Case]:
    def make(name: str, who: str, words: str, *to: Json, namespace: str = TEAM) -> Case:
        path = f"{GROUP}/namespaces/{namespace}/kvprefixshares"
        return Case(f"share: {name}", who, "POST", path, share(*to, namespace=namespace), words)

    own, other = {"domain": "research"}, {"tenant": "team-b"}
    beyond = "a share beyond the own trust domain"
    yield make("with the own domain", EDITOR, "", own)
    yield make("with itself", EDITOR, "", {"tenant": TEAM})
    yield make("with another tenant", EDITOR, beyond, other)
    yield make("with another domain", EDITOR, beyond, {"domain": "elsewhere"})
    yield make("one good and one bad reader", EDITOR, beyond, own, other)
    yield make("with the consent of the reader", SHARER, "", other)
    yield make("with consent for somebody else", SHARER, beyond, {"tenant": "team-c"})
    yield make("by the administrator", ADMINISTRATOR, "", other)
    yield make("from a namespace of nobody", ROOT, "shares are made in namespaces of tenants", own, namespace=PLAIN)
    yield make("from the namespace of another team", EDITOR, FORBIDDEN, own, namespace="team-b")
    stored = f"{GROUP}/namespaces/{TEAM}/kvprefixshares/stored"
    yield patch("share: readers added later", EDITOR, stored, {"spec": {"to": [own, other]}}, beyond)
    longer = {"spec": {"expiresAt": "2099-01-01T00:00:00Z"}}
    yield patch("share: prolonged", EDITOR, stored, longer)
    consented = f"{GROUP}/namespaces/{TEAM}/kvprefixshares/consented"
    yield patch("share: prolonged without consent", EDITOR, consented, longer, beyond)
    yield patch("share: labelled", EDITOR, stored, {"metadata": {"labels": {"a": "b"}}})
    foreign = f"{GROUP}/namespaces/team-b/kvprefixshares/theirs"
    yield patch("share: of another team changed", EDITOR, foreign, {"spec": {"to": [own]}}, FORBIDDEN)
    yield Case("share: of another team deleted", EDITOR, "DELETE", foreign, DRY_DELETE, FORBIDDEN)


PROTECTED: Final[dict[str, Any]] = {
    "trustDomain": "research",
    "acceptSharesFrom": ["team-b"],
    "quotas": [{"poolRef": "llama-70b", "tier": "dram", "hard": "1Ti"}],
    "weight": 10_000,
    "overQuota": "Reject",
    "serviceAccounts": [{"namespace": "team-b", "name": "engine"}],
    "namespaceSelector": {"matchLabels": {"a": "b"}},
    "priorityClasses": ["high"],
}
"""Fields of a tenant that its editors may not change."""


def _tenancy() -> Iterator[Case]:
    path, denied = f"{GROUP}/kvtenants/{TEAM}", "are changed by those who may `administer` them"
    for name, value in PROTECTED.items():
        yield patch(f"tenant: {name} by an editor", TENANT_EDITOR, path, {"spec": {name: value}}, denied)
    for name, value in PROTECTED.items():
        yield patch(f"tenant: {name} by the administrator", ADMINISTRATOR, path, {"spec": {name: value}})
    for name, value in (("retention", {"idleSeconds": 60}), ("eraseRequested", "now")):
        yield patch(f"tenant: {name} by an editor", TENANT_EDITOR, path, {"spec": {name: value}})
    made = custom("KVTenant", "new", {"serviceAccounts": [{"namespace": "x", "name": "y"}]})
    domain = custom("KVTrustDomain", "new", {"tenants": [TEAM], "sharing": "All"})
    for who, words in ((CREATOR, denied), (ADMINISTRATOR, "")):
        yield Case(f"tenant: made by {who}", who, "POST", f"{GROUP}/kvtenants", made, words)
        yield Case(f"domain: made by {who}", who, "POST", f"{GROUP}/kvtrustdomains", domain, words)
        change = {"spec": {"tenants": [TEAM, "team-b"], "sharing": "All"}}
        yield patch(f"domain: changed by {who}", who, f"{GROUP}/kvtrustdomains/research", change, words)
    for who in (EDITOR, AGENT, METADATA):
        yield patch(f"tenant: changed by {who}", who, path, {"spec": {"weight": 2}}, FORBIDDEN)


def _observations() -> Iterator[Case]:
    denied = "written by the operator"
    objects = {"kvpools": "llama-70b", "kvtenants": TEAM, "kvtrustdomains": "research"}
    for plural, name in objects.items():
        path = f"{GROUP}/{plural}/{name}/status"
        yield patch(f"status of {plural} by an administrator", ROOT, path, {"status": {"conditions": []}}, denied)
        yield patch(f"status of {plural} by the operator", OPERATOR, path, {"status": {"conditions": []}})
        yield patch(f"status of {plural} by an agent", AGENT, path, {"status": {"conditions": []}}, FORBIDDEN)
    path = f"{GROUP}/kvpoolnodes/llama-70b.worker-1"
    yield patch("status of a pool node by its agent", AGENT, f"{path}/status", {"status": {"epoch": 2}})
    yield patch("status of a pool node by somebody", ROOT, f"{path}/status", {"status": {"epoch": 2}}, denied)
    yield patch("pool node changed by somebody", ROOT, path, {"spec": {"revision": "x"}}, denied)
    yield patch("pool node changed by the operator", OPERATOR, path, {"spec": {"revision": "x"}})
    yield patch("pool node changed by its agent", AGENT, path, {"spec": {"revision": "x"}}, FORBIDDEN)
    yield Case("pool node deleted by somebody", ROOT, "DELETE", path, DRY_DELETE, denied)
    share_status = f"{GROUP}/namespaces/{TEAM}/kvprefixshares/stored/status"
    yield patch("status of a share by its owner", EDITOR, share_status, {"status": {"hits": 9}}, FORBIDDEN)
    yield patch("status of a share by an administrator", ROOT, share_status, {"status": {"hits": 9}}, denied)


def _operations() -> Iterator[Case]:
    path = f"{GROUP}/kvoperations"
    flush = custom("KVOperation", "flush", {"type": "Flush", "poolRef": "llama-70b", "flush": {}})
    yield Case("operation: by the administrator", ADMINISTRATOR, "POST", path, flush)
    yield Case(
        "operation: on a pool that one may not operate", CREATOR, "POST", path, flush, "who may `operate` the pool"
    )
    warm = custom(
        "KVOperation",
        "warm",
        {"type": "Warm", "poolRef": "llama-70b", "warm": {"tenant": TEAM, "archivedSessions": True}},
    )
    yield Case("operation: warming by the administrator", ADMINISTRATOR, "POST", path, warm)
    yield Case(
        "operation: warming of a pool that one may not operate",
        CREATOR,
        "POST",
        path,
        warm,
        "who may `operate` the pool",
    )
    block = {"to": "elsewhere"}
    migrate = custom("KVOperation", "migrate", {"type": "Migrate", "poolRef": "llama-70b", "migrate": block})
    yield Case("operation: migration by the administrator", ADMINISTRATOR, "POST", path, migrate)
    yield Case("operation: on a pool that one may operate", OPERATIVE, "POST", path, flush)
    yield Case(
        "operation: migration to a pool that one may not operate",
        OPERATIVE,
        "POST",
        path,
        migrate,
        "the pool that gets the blocks",
    )
    yield Case("operation: without the right to make any", EDITOR, "POST", path, flush, FORBIDDEN)
    erase = custom("KVOperation", "erase", {"type": "Erase", "erase": {"tenant": TEAM}})
    yield Case("operation: erasure by the administrator", ADMINISTRATOR, "POST", path, erase)
    yield Case("operation: erasure by who may patch the tenant", CREATOR, "POST", path, erase)
    yield Case(
        "operation: erasure of a tenant that one may not patch",
        OPERATIVE,
        "POST",
        path,
        erase,
        "who may patch the tenant",
    )
    stored = f"{path}/stored"
    yield patch("operation: cancelled", CREATOR, stored, {"spec": {"cancel": True}})
    yield patch(
        "operation: said to be over", ROOT, f"{stored}/status", {"status": {"state": "Complete"}}, "the operator"
    )


def _model_caches() -> Iterator[Case]:
    path, denied = f"{GROUP}/kvmodelcaches", "who may `operate` the pool"
    made = custom("KVModelCache", "m", {"poolRef": "llama-70b", "source": {"url": "s3://m"}, "revision": "v1"})
    for who, words in ((ADMINISTRATOR, ""), (OPERATIVE, ""), (CREATOR, denied), (EDITOR, FORBIDDEN)):
        yield Case(f"weights: by {who}", who, "POST", path, made, words)
    moved = {"spec": {"poolRef": "llama-70b"}}
    yield patch("weights: moved to a pool that one may operate", OPERATIVE, f"{path}/stored", moved)
    yield patch(
        "weights: of a pool that one may not operate", OPERATIVE, f"{path}/stored", {"spec": {"weight": 5}}, denied
    )
    # Deleted in the foreground, the object goes when the garbage collector has taken its finalizer off.
    unheld = {"metadata": {"finalizers": None}}
    yield patch("weights: collected in the foreground", COLLECTOR, f"{path}/stored", unheld)
    yield patch("weights: labelled", CREATOR, f"{path}/stored", {"metadata": {"labels": {"a": "b"}}})
    said = {"status": {"nodesStaged": 9}}
    yield patch("weights: said to be there", ROOT, f"{path}/stored/status", said, "the operator")


def _node_labels() -> Iterator[Case]:
    node, denied = "/api/v1/nodes/worker-1", "labels of models.kvstrata.io alone"
    ours = {f"{names.LABEL_MODEL_PREFIX}m": "v1"}
    yield patch("node: label of weights by the operator", OPERATOR, node, {"metadata": {"labels": ours}})
    yield patch("node: anything by an administrator", ROOT, node, {"metadata": {"labels": {"zone": "b"}}})
    for name, change in (
        ("another label", {"metadata": {"labels": ours | {"zone": "b"}}}),
        ("a new label", {"metadata": {"labels": {"kvstrata.io/tenant": "x"}}}),
        ("a label removed", {"metadata": {"labels": {"zone": None}}}),
        ("a taint", {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}),
        ("cordoned", {"spec": {"unschedulable": True}}),
        ("an annotation", {"metadata": {"annotations": {"a": "b"}}}),
    ):
        yield patch(f"node: {name} by the operator", OPERATOR, node, change, denied)
    yield patch("node: label by an agent", AGENT, node, {"metadata": {"labels": ours}}, FORBIDDEN)


def _leadership() -> Iterator[Case]:
    path, denied = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases", "written by its own account alone"

    def make(name: str) -> Json:
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}

    for who in (OPERATOR, METADATA, AGENT, ROOT):
        words = "" if who == METADATA else denied
        yield Case(f"leadership: begun by {who}", who, "POST", path, make(names.FIELD_MANAGER_METADATA), words)
    held, stored = {"spec": {"holderIdentity": "nobody"}}, f"{path}/{names.FIELD_MANAGER_OPERATOR}"
    for who in (AGENT, ROOT):
        yield patch(f"leadership: taken by {who}", who, stored, held, denied)
    beat = names.agent_lease_name("llama-70b", "worker-1")
    yield Case("heartbeat: begun by an agent", AGENT, "POST", path, make(beat))
    yield patch("leadership: deleted in the foreground", COLLECTOR, stored, {"metadata": {"finalizers": None}})


def secret(name: str, *, scope: str = "") -> Json:
    """A Secret, perhaps of a scope."""
    labels = {names.LABEL_SCOPE: scope} if scope else {}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": labels}}


def _scope_keys() -> Iterator[Case]:
    secrets, denied = f"/api/v1/namespaces/{SYSTEM}/secrets", "keys of scopes are made"
    for who, words in ((ROOT, denied), (METADATA, denied), (OPERATOR, ""), (AGENT, FORBIDDEN)):
        yield Case(f"scope key by its label: {who}", who, "POST", secrets, secret("x", scope="tenant"), words)
        named = secret(names.scope_secret_name("tenant", "new"))
        yield Case(f"scope key by its name: {who}", who, "POST", secrets, named, words)
    yield Case("another Secret", ROOT, "POST", secrets, secret("other"))
    generated = {"apiVersion": "v1", "kind": "Secret", "metadata": {"generateName": "kvstrata-scope.tenant.x"}}
    yield Case("scope key by a generated name", ROOT, "POST", secrets, generated, denied)
    kept = f"{secrets}/{names.scope_secret_name('tenant', TEAM)}"
    version = {"stringData": {"v2": "0" * 32}}
    yield patch("version of a scope key by somebody", ROOT, kept, version, denied)
    yield patch("version of a scope key by the operator", OPERATOR, kept, version)
    yield patch("label taken off", ROOT, kept, {"metadata": {"labels": {names.LABEL_SCOPE: None}}}, denied)
    yield patch("label put on", ROOT, f"{secrets}/plain", {"metadata": {"labels": {names.LABEL_SCOPE: "x"}}}, denied)
    yield Case("scope key deleted by somebody", ROOT, "DELETE", kept, DRY_DELETE, denied)
    yield Case("scope key deleted by the operator", OPERATOR, "DELETE", kept, DRY_DELETE)
    yield Case("scope key collected with its owner", COLLECTOR, "DELETE", kept, DRY_DELETE)


ESCAPES: Final = (
    "/etc/kubernetes", "/", "/var/lib/kvstrata", "/var/lib/kvstrata-evil/x", "/var/lib/kvstrata/../../../etc",
    "/var/lib/kvstrata/a/..", "/var/lib/kvstrata/./a", "//var/lib/kvstrata/a", "/var/lib/kvstrata//a",
    "/proc/1/root/etc", "/root/.ssh", "/var/lib/kubelet/pods", "/dev/mem", "/var/lib/kvstrata/%2e%2e/etc",
)  # fmt: skip
"""Directories in which no tier may lie."""


def _storage() -> Iterator[Case]:
    good = copy.deepcopy(bad_manifests.examples()["kvpool-minimal"])
    good["metadata"]["name"] = "new"

    def pool(tier: Json) -> Json:
        return good | {"spec": good["spec"] | {"tiers": [tier]}}

    def tiers(path: str) -> Iterator[tuple[str, Json]]:
        yield "NVMe", {"name": "t", "type": "NVMe", "capacityPerNode": "1Gi", "nvme": {"path": path}}
        many = {"paths": ["/var/lib/kvstrata/demo/other", path]}
        yield "NVMe devices", {"name": "t", "type": "NVMe", "capacityPerNode": "1Gi", "nvme": many}
        yield "flash", {"name": "t", "type": "RemoteFlash", "capacity": "1Gi", "remoteFlash": {"path": path}}
        emulated = {"mode": "Emulated", "emulated": {"path": path}}
        yield "CXL", {"name": "t", "type": "CXL", "capacityPerNode": "1Gi", "cxl": emulated}
        yield "object", {"name": "t", "type": "Object", "capacity": "1Gi", "object": {"url": f"file://{path}"}}

    for kind, tier in tiers("/var/lib/kvstrata/demo/tier"):
        yield Case(f"pool: {kind} where it may be", ADMINISTRATOR, "POST", f"{GROUP}/kvpools", pool(tier))
    for path in ESCAPES:
        for kind, tier in tiers(path):
            # A path of one character is refused by the schema as well, but for that of an object's url.
            words = "Invalid" if path == "/" and kind != "object" else "paths of tiers"
            yield Case(f"pool: {kind} at {path}", ADMINISTRATOR, "POST", f"{GROUP}/kvpools", pool(tier), words)
    s3 = {"name": "t", "type": "Object", "capacity": "1Gi", "object": {"url": "s3://bucket/prefix"}}
    yield Case("pool: a bucket", ADMINISTRATOR, "POST", f"{GROUP}/kvpools", pool(s3))
