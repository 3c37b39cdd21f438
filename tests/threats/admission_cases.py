"""Requests to the API server, each with what must come of it: refused in these words, or admitted.

Every policy has requests of both kinds, which differ in the one thing that the policy is about.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import bad_manifests

from kvfleet_api import names
from rights import IDENTITIES, SYSTEM, TEAM

Json = dict[str, Any]
GROUP: Final = f"/apis/{names.API_VERSION}"
OPERATOR: Final = IDENTITIES["operator"]
AGENT: Final = IDENTITIES["agent"]
METADATA: Final = IDENTITIES["metadata"]
EDITOR: Final = IDENTITIES["edit"]
ADMINISTRATOR: Final = IDENTITIES["administrator"]
TENANT_EDITOR: Final = IDENTITIES["tenant-editor"]
ROOT: Final = "root-of-the-cluster"
"""May do everything by RBAC, and is not a member of system:masters."""
SHARER: Final = "sharer"
"""Edits team-a and may share with team-b."""
CREATOR: Final = "creator"
"""May write tenants and domains, and does not administer them."""
PLAIN: Final = "plain"
"""A namespace of no tenant."""
DIGEST: Final = "registry.example.org/kvfleet/agent@sha256:" + "1" * 64
FORBIDDEN: Final = "is forbidden: User"
"""What RBAC says, before any policy is asked."""
DRY_DELETE: Final = {"apiVersion": "v1", "kind": "DeleteOptions", "dryRun": ["All"]}
"""A body of options makes the API server overlook those of the query."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    who: str
    method: str
    path: str
    body: Json
    words: str = ""
    """In the refusal; empty: admitted."""
    content_type: str = field(default="application/json")


def cases() -> list[Case]:
    """Every request, dry runs all."""
    made = [
        *_shares(), *_tenancy(), *_observations(), *_scope_keys(), *_storage(), *_tenant_pods(), *_system_pods(),
        *_images(),
    ]  # fmt: skip
    return [Case(c.name, c.who, c.method, f"{c.path}?dryRun=All", c.body, c.words, c.content_type) for c in made]


def custom(kind: str, name: str, spec: Json, **metadata: Any) -> Json:
    """An object of ours."""
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def share(*to: Json, namespace: str = TEAM, name: str = "s") -> Json:
    """A share of one prefix."""
    spec = {"poolRef": "llama-70b", "prefixes": [{"digest": "a" * 64, "tokenCount": 16}], "to": list(to)}
    return custom("KVPrefixShare", name, spec, namespace=namespace)


def _patch(name: str, who: str, path: str, body: Json, words: str = "") -> Case:
    return Case(name, who, "PATCH", path, body, words, "application/merge-patch+json")


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
    yield _patch("share: readers added later", EDITOR, stored, {"spec": {"to": [own, other]}}, beyond)
    longer = {"spec": {"expiresAt": "2099-01-01T00:00:00Z"}}
    yield _patch("share: prolonged", EDITOR, stored, longer)
    consented = f"{GROUP}/namespaces/{TEAM}/kvprefixshares/consented"
    yield _patch("share: prolonged without consent", EDITOR, consented, longer, beyond)
    yield _patch("share: labelled", EDITOR, stored, {"metadata": {"labels": {"a": "b"}}})
    foreign = f"{GROUP}/namespaces/team-b/kvprefixshares/theirs"
    yield _patch("share: of another team changed", EDITOR, foreign, {"spec": {"to": [own]}}, FORBIDDEN)
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
        yield _patch(f"tenant: {name} by an editor", TENANT_EDITOR, path, {"spec": {name: value}}, denied)
    for name, value in PROTECTED.items():
        yield _patch(f"tenant: {name} by the administrator", ADMINISTRATOR, path, {"spec": {name: value}})
    for name, value in (("retention", {"idleSeconds": 60}), ("eraseRequested", "now")):
        yield _patch(f"tenant: {name} by an editor", TENANT_EDITOR, path, {"spec": {name: value}})
    made = custom("KVTenant", "new", {"serviceAccounts": [{"namespace": "x", "name": "y"}]})
    domain = custom("KVTrustDomain", "new", {"tenants": [TEAM], "sharing": "All"})
    for who, words in ((CREATOR, denied), (ADMINISTRATOR, "")):
        yield Case(f"tenant: made by {who}", who, "POST", f"{GROUP}/kvtenants", made, words)
        yield Case(f"domain: made by {who}", who, "POST", f"{GROUP}/kvtrustdomains", domain, words)
        change = {"spec": {"tenants": [TEAM, "team-b"], "sharing": "All"}}
        yield _patch(f"domain: changed by {who}", who, f"{GROUP}/kvtrustdomains/research", change, words)
    for who in (EDITOR, AGENT, METADATA):
        yield _patch(f"tenant: changed by {who}", who, path, {"spec": {"weight": 2}}, FORBIDDEN)


def _observations() -> Iterator[Case]:
    denied = "written by the operator"
    objects = {"kvpools": "llama-70b", "kvtenants": TEAM, "kvtrustdomains": "research"}
    for plural, name in objects.items():
        path = f"{GROUP}/{plural}/{name}/status"
        yield _patch(f"status of {plural} by an administrator", ROOT, path, {"status": {"conditions": []}}, denied)
        yield _patch(f"status of {plural} by the operator", OPERATOR, path, {"status": {"conditions": []}})
        yield _patch(f"status of {plural} by an agent", AGENT, path, {"status": {"conditions": []}}, FORBIDDEN)
    path = f"{GROUP}/kvpoolnodes/llama-70b.worker-1"
    yield _patch("status of a pool node by its agent", AGENT, f"{path}/status", {"status": {"epoch": 2}})
    yield _patch("status of a pool node by somebody", ROOT, f"{path}/status", {"status": {"epoch": 2}}, denied)
    yield _patch("pool node changed by somebody", ROOT, path, {"spec": {"revision": "x"}}, denied)
    yield _patch("pool node changed by the operator", OPERATOR, path, {"spec": {"revision": "x"}})
    yield _patch("pool node changed by its agent", AGENT, path, {"spec": {"revision": "x"}}, FORBIDDEN)
    yield Case("pool node deleted by somebody", ROOT, "DELETE", path, DRY_DELETE, denied)
    share_status = f"{GROUP}/namespaces/{TEAM}/kvprefixshares/stored/status"
    yield _patch("status of a share by its owner", EDITOR, share_status, {"status": {"hits": 9}}, FORBIDDEN)
    yield _patch("status of a share by an administrator", ROOT, share_status, {"status": {"hits": 9}}, denied)


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
    generated = {"apiVersion": "v1", "kind": "Secret", "metadata": {"generateName": "kvfleet-scope.tenant.x"}}
    yield Case("scope key by a generated name", ROOT, "POST", secrets, generated, denied)
    kept = f"{secrets}/{names.scope_secret_name('tenant', TEAM)}"
    version = {"stringData": {"v2": "0" * 32}}
    yield _patch("version of a scope key by somebody", ROOT, kept, version, denied)
    yield _patch("version of a scope key by the operator", OPERATOR, kept, version)
    yield _patch("label taken off", ROOT, kept, {"metadata": {"labels": {names.LABEL_SCOPE: None}}}, denied)
    yield _patch("label put on", ROOT, f"{secrets}/plain", {"metadata": {"labels": {names.LABEL_SCOPE: "x"}}}, denied)
    yield Case("scope key deleted by somebody", ROOT, "DELETE", kept, DRY_DELETE, denied)
    yield Case("scope key deleted by the operator", OPERATOR, "DELETE", kept, DRY_DELETE)
    collector = "system:serviceaccount:kube-system:generic-garbage-collector"
    yield Case("scope key collected with its owner", collector, "DELETE", kept, DRY_DELETE)


ESCAPES: Final = (
    "/etc/kubernetes", "/", "/var/lib/kvfleet", "/var/lib/kvfleet-evil/x", "/var/lib/kvfleet/../../../etc",
    "/var/lib/kvfleet/a/..", "/var/lib/kvfleet/./a", "//var/lib/kvfleet/a", "/var/lib/kvfleet//a", "/proc/1/root/etc",
    "/root/.ssh", "/var/lib/kubelet/pods", "/dev/mem", "/var/lib/kvfleet/%2e%2e/etc",
)  # fmt: skip
"""Directories in which no tier may lie."""


def _storage() -> Iterator[Case]:
    good = copy.deepcopy(bad_manifests.examples()["kvpool-minimal"])
    good["metadata"]["name"] = "new"

    def pool(tier: Json) -> Json:
        return good | {"spec": good["spec"] | {"tiers": [tier]}}

    def tiers(path: str) -> Iterator[tuple[str, Json]]:
        yield "NVMe", {"name": "t", "type": "NVMe", "capacityPerNode": "1Gi", "nvme": {"path": path}}
        many = {"paths": ["/var/lib/kvfleet/demo/other", path]}
        yield "NVMe devices", {"name": "t", "type": "NVMe", "capacityPerNode": "1Gi", "nvme": many}
        yield "flash", {"name": "t", "type": "RemoteFlash", "capacity": "1Gi", "remoteFlash": {"path": path}}
        emulated = {"mode": "Emulated", "emulated": {"path": path}}
        yield "CXL", {"name": "t", "type": "CXL", "capacityPerNode": "1Gi", "cxl": emulated}
        yield "object", {"name": "t", "type": "Object", "capacity": "1Gi", "object": {"url": f"file://{path}"}}

    for kind, tier in tiers("/var/lib/kvfleet/demo/tier"):
        yield Case(f"pool: {kind} where it may be", ADMINISTRATOR, "POST", f"{GROUP}/kvpools", pool(tier))
    for path in ESCAPES:
        for kind, tier in tiers(path):
            # A path of one character is refused by the schema as well, but for that of an object's url.
            words = "Invalid" if path == "/" and kind != "object" else "paths of tiers"
            yield Case(f"pool: {kind} at {path}", ADMINISTRATOR, "POST", f"{GROUP}/kvpools", pool(tier), words)
    s3 = {"name": "t", "type": "Object", "capacity": "1Gi", "object": {"url": "s3://bucket/prefix"}}
    yield Case("pool: a bucket", ADMINISTRATOR, "POST", f"{GROUP}/kvpools", pool(s3))


def engine(**changes: Any) -> Json:
    """A good engine's pod, with fields of its spec replaced."""
    container = {
        "name": "engine",
        "image": "vllm",
        "volumeMounts": [{"name": "kvfleet", "mountPath": "/run/kvfleet", "readOnly": True}],
    }
    spec = {
        "serviceAccountName": "engine",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
        "containers": [container],
        "volumes": [{"name": "kvfleet", "hostPath": {"path": "/run/kvfleet/llama-70b"}}],
    }
    metadata = {"name": "engine", "labels": {"kvfleet.io/pool": "llama-70b"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | changes}


def _host(path: str) -> Json:
    return {"volumes": [{"name": "kvfleet", "hostPath": {"path": path}}]}


def _contained(**security: Any) -> Json:
    container = copy.deepcopy(engine()["spec"]["containers"][0])
    return {"containers": [container | {"securityContext": security}]}


def _tenant_pods() -> Iterator[Case]:
    def make(name: str, words: str, pod: Json, who: str = EDITOR) -> Case:
        return Case(f"engine: {name}", who, "POST", f"/api/v1/namespaces/{TEAM}/pods", pod, words)

    yield make("its pool's socket", "", engine())
    yield make("without any", "", engine(volumes=[{"name": "kvfleet", "emptyDir": {}}]))
    own = "an engine sees the socket of its own pool"
    yield make("another pool's socket", own, engine(**_host("/run/kvfleet/other")))
    unlabelled = engine()
    unlabelled["metadata"]["labels"] = {}
    yield make("a socket of no declared pool", own, unlabelled)
    withheld = engine(**_host("/run/kvfleet/withheld"))
    withheld["metadata"]["labels"]["kvfleet.io/pool"] = "withheld"
    yield make("a pool that its namespace may not use", own, withheld)
    shortest = "written in its shortest form"
    yield make("the sockets of all pools", own, engine(**_host("/run/kvfleet/")))
    for path in ("/run/kvfleet//llama-70b", "/run/./kvfleet/llama-70b", "/run/kvfleet/other/."):
        yield make(f"directory {path}", shortest, engine(**_host(path)))
    of_host = "of the host, a pod of a tenant sees"
    for path in (
        "/", "/run", "/run/kvfleet", "/var", "/var/lib", "/var/lib/kvfleet", "/var/lib/kvfleet/llama-70b", "/mnt/flash",
        "/var/run/kvfleet/other", "/proc", "/proc/1/root", "/var/lib/kubelet/pods", "/dev/shm", "/etc",
        "/run/kvfleet-memory/llama-70b", "/models-of-others",
    ):  # fmt: skip
        yield make(f"directory {path}", of_host, engine(**_host(path)))
    yield make("models", "", engine(**_host("/models/llama")))
    writable = engine()
    writable["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] = False
    yield make("a socket's directory that it may write", "mounted read-only", writable)
    beside = "beside agents"
    yield make("processes of the host", beside, engine(hostPID=True))
    yield make("shared memory of the host", beside, engine(hostIPC=True))
    yield make("privileged", beside, engine(**_contained(privileged=True)))
    as_agent = "user 65532 is the agents'"
    yield make("as the agents' user", as_agent, engine(securityContext={"runAsUser": 65532}))
    yield make("a container as the agents' user", as_agent, engine(**_contained(runAsUser=65532)))
    aside = copy.deepcopy(engine()["spec"]["containers"][0]) | {"name": "init", "securityContext": {"privileged": True}}
    yield make("a privileged init container", beside, engine(initContainers=[aside]))
    yield make("by a cluster administrator", of_host, engine(**_host("/")), ROOT)


def agent_pod(**changes: Any) -> Json:
    """A good agent's pod, with fields of its spec replaced."""
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    spec = {
        "serviceAccountName": "kvfleet-agent",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "agent", "image": DIGEST, "securityContext": security}],
        "volumes": [{"name": "state", "hostPath": {"path": "/var/lib/kvfleet/llama-70b"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"}, "spec": spec | changes}


def _agent_container(**changes: Any) -> Json:
    return {"containers": [agent_pod()["spec"]["containers"][0] | changes]}


def _agent_security(**changes: Any) -> Json:
    security = agent_pod()["spec"]["containers"][0]["securityContext"]
    return _agent_container(securityContext=security | changes)


def _system_pods() -> Iterator[Case]:
    def make(name: str, words: str, pod: Json) -> Case:
        return Case(f"agent: {name}", ROOT, "POST", f"/api/v1/namespaces/{SYSTEM}/pods", pod, words)

    yield make("as the chart writes it", "", agent_pod())
    by_digest = "named by its digest"
    for image in ("kvfleet/agent", "kvfleet/agent:1.0", "kvfleet/agent@sha256:abc", f"{DIGEST}0"):
        yield make(f"image {image[-30:]}", by_digest, agent_pod(**_agent_container(image=image)))
    sidecar = agent_pod()["spec"]["containers"][0] | {"name": "init", "image": "busybox"}
    yield make("an init container without digest", by_digest, agent_pod(initContainers=[sidecar]))
    labelled = agent_pod(serviceAccountName="default", **_agent_container(image="kvfleet/agent:1"))
    labelled["metadata"]["labels"] = {"app.kubernetes.io/component": "agent"}
    yield make("under another account", by_digest, labelled)
    below = "directories of the host lie below"
    for path in ("/", "/etc", "/var/lib", "/var/lib/kvfleet-evil", "/var/lib/kvfleet//x", "/proc", "/var/lib/kubelet"):
        volumes = [{"name": "state", "hostPath": {"path": path}}]
        yield make(f"directory {path}", below, agent_pod(volumes=volumes))
    for path in ("/run/kvfleet/llama-70b", "/mnt/flash"):
        yield make(f"directory {path}", "", agent_pod(volumes=[{"name": "state", "hostPath": {"path": path}}]))
    for setting in ("hostNetwork", "hostPID", "hostIPC"):
        yield make(setting, "no namespaces of the host", agent_pod(**{setting: True}))
    bare = "run without privileges"
    yield make("privileged", bare, agent_pod(**_agent_security(privileged=True, allowPrivilegeEscalation=True)))
    yield make("escalation", bare, agent_pod(**_agent_security(allowPrivilegeEscalation=True)))
    yield make("escalation by default", bare, agent_pod(**_agent_container(securityContext={})))
    yield make("writable root", bare, agent_pod(**_agent_security(readOnlyRootFilesystem=False)))
    yield make("capabilities kept", bare, agent_pod(**_agent_security(capabilities={})))
    added = {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    yield make("capabilities added", bare, agent_pod(**_agent_security(capabilities=added)))
    root = "do not run as root"
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    yield make("root allowed", root, agent_pod(securityContext=seccomp))
    yield make("root", root, agent_pod(**_agent_security(runAsUser=0)))
    loose = agent_pod(securityContext={"runAsNonRoot": True, "runAsUser": 65532})
    yield make("no seccomp profile", "seccomp profile", loose)
    yield make("seccomp off", "seccomp profile", agent_pod(**_agent_security(seccompProfile={"type": "Unconfined"})))
    other = agent_pod(serviceAccountName="kvfleet-operator")
    yield make("a directory for the operator", "no directories of the host but for agents", other)


def _images() -> Iterator[Case]:
    for image, words in ((DIGEST, ""), ("kvfleet/agent:1.0", "named by its digest")):
        template = {"metadata": {"labels": {"a": "b"}}, "spec": agent_pod(**_agent_container(image=image))["spec"]}
        spec = {"selector": {"matchLabels": {"a": "b"}}, "template": template}
        body = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "agents"}, "spec": spec}
        path = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets"
        yield Case(f"DaemonSet of agents: image {image[-30:]}", ROOT, "POST", path, body, words)
