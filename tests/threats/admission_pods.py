"""Requests for pods and workloads: what tenants, the system namespace and its images may be."""

import copy
from collections.abc import Iterator
from typing import Any

from checks.rights import NODE_PREPARATION, SYSTEM, TEAM
from kvstrata_api import names
from threats.admission_request import DIGEST, EDITOR, FORBIDDEN, GROUP, NODE, OPERATOR, ROOT, Case, Json, patch


def engine(**changes: Any) -> Json:
    """A good engine's pod, with fields of its spec replaced."""
    container = {
        "name": "engine",
        "image": "vllm",
        "volumeMounts": [{"name": "kvstrata", "mountPath": "/run/kvstrata", "readOnly": True}],
    }
    spec = {
        "serviceAccountName": "engine",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
        "containers": [container],
        "volumes": [{"name": "kvstrata", "hostPath": {"path": "/run/kvstrata/llama-70b"}}],
    }
    metadata = {"name": "engine", "labels": {"kvstrata.io/pool": "llama-70b"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | changes}


def _host(path: str) -> Json:
    return {"volumes": [{"name": "kvstrata", "hostPath": {"path": path}}]}


def _contained(**security: Any) -> Json:
    container = copy.deepcopy(engine()["spec"]["containers"][0])
    return {"containers": [container | {"securityContext": security}]}


def tenant_pods() -> Iterator[Case]:
    """Pods in a tenant's namespace."""

    def make(name: str, words: str, pod: Json, who: str = EDITOR) -> Case:
        return Case(f"engine: {name}", who, "POST", f"/api/v1/namespaces/{TEAM}/pods", pod, words)

    yield make("its pool's socket", "", engine())
    yield make("without any", "", engine(volumes=[{"name": "kvstrata", "emptyDir": {}}]))
    own = "an engine sees the socket of its own pool"
    yield make("another pool's socket", own, engine(**_host("/run/kvstrata/other")))
    unlabelled = engine()
    unlabelled["metadata"]["labels"] = {}
    yield make("a socket of no declared pool", own, unlabelled)
    withheld = engine(**_host("/run/kvstrata/withheld"))
    withheld["metadata"]["labels"]["kvstrata.io/pool"] = "withheld"
    yield make("a pool that its namespace may not use", own, withheld)
    shortest = "written in its shortest form"
    yield make("the sockets of all pools", own, engine(**_host("/run/kvstrata/")))
    for path in ("/run/kvstrata//llama-70b", "/run/./kvstrata/llama-70b", "/run/kvstrata/other/."):
        yield make(f"directory {path}", shortest, engine(**_host(path)))
    of_host = "of the host, a pod of a tenant sees"
    for path in (
        "/", "/run", "/run/kvstrata", "/var", "/var/lib", "/var/lib/kvstrata", "/var/lib/kvstrata/llama-70b",
        "/mnt/flash", "/var/run/kvstrata/other", "/proc", "/proc/1/root", "/var/lib/kubelet/pods", "/dev/shm", "/etc",
        "/run/kvstrata-memory/llama-70b", "/models-of-others",
    ):  # fmt: skip
        yield make(f"directory {path}", of_host, engine(**_host(path)))
    yield make("models", "", engine(**_host("/models/llama")))
    weights = "/models/kvstrata-models/llama/v1"
    yield make("weights", "", engine(**_host(weights)))
    for path in (weights, "/models/kvstrata-models"):
        written = engine(**_host(path))
        written["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] = False
        yield make(f"weights that it may write at {path}", "weights are mounted read-only", written)
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
        "serviceAccountName": "kvstrata-agent",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "agent", "image": DIGEST, "securityContext": security}],
        "volumes": [{"name": "state", "hostPath": {"path": "/var/lib/kvstrata/llama-70b"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"}, "spec": spec | changes}


def _agent_container(**changes: Any) -> Json:
    return {"containers": [agent_pod()["spec"]["containers"][0] | changes]}


def _agent_security(**changes: Any) -> Json:
    security = agent_pod()["spec"]["containers"][0]["securityContext"]
    return _agent_container(securityContext=security | changes)


def system_pods() -> Iterator[Case]:
    """Pods in the system namespace."""

    def make(name: str, words: str, pod: Json) -> Case:
        return Case(f"agent: {name}", ROOT, "POST", f"/api/v1/namespaces/{SYSTEM}/pods", pod, words)

    yield make("as the chart writes it", "", agent_pod())
    by_digest = "named by its digest"
    for image in ("kvstrata/agent", "kvstrata/agent:1.0", "kvstrata/agent@sha256:abc", f"{DIGEST}0"):
        yield make(f"image {image[-30:]}", by_digest, agent_pod(**_agent_container(image=image)))
    sidecar = agent_pod()["spec"]["containers"][0] | {"name": "init", "image": "busybox"}
    yield make("an init container without digest", by_digest, agent_pod(initContainers=[sidecar]))
    labelled = agent_pod(serviceAccountName="default", **_agent_container(image="kvstrata/agent:1"))
    labelled["metadata"]["labels"] = {"app.kubernetes.io/component": "agent"}
    yield make("under another account", by_digest, labelled)
    below = "directories of the host lie below"
    for path in (
        "/",
        "/etc",
        "/var/lib",
        "/var/lib/kvstrata-evil",
        "/var/lib/kvstrata//x",
        "/proc",
        "/var/lib/kubelet",
    ):
        volumes = [{"name": "state", "hostPath": {"path": path}}]
        yield make(f"directory {path}", below, agent_pod(volumes=volumes))
    for path in ("/run/kvstrata/llama-70b", "/mnt/flash"):
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
    other = agent_pod(serviceAccountName="kvstrata-operator")
    yield make("a directory for the operator", "no directories of the host but for agents", other)


def images() -> Iterator[Case]:
    """Workloads of images by digest and by tag."""
    for image, words in ((DIGEST, ""), ("kvstrata/agent:1.0", "named by its digest")):
        yield _daemon_set(f"image {image[-30:]}", ROOT, image, {"a": "b"}, words)
    managed = {names.LABEL_MANAGED_BY: names.MANAGED_BY, "app.kubernetes.io/component": "agent"}
    for who, labels, words in (
        (OPERATOR, managed, ""),
        (ROOT, managed, "made by the operator from KVPools"),
        (OPERATOR, {"a": "b"}, "it makes nothing else"),
    ):
        yield _daemon_set(f"by {who} with {len(labels)} labels", who, DIGEST, labels, words)


def _daemon_set(name: str, who: str, image: str, labels: dict[str, str], words: str) -> Case:
    template = {"metadata": {"labels": labels}, "spec": agent_pod(**_agent_container(image=image))["spec"]}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "agents", "labels": labels}
    body = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec}
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets"
    return Case(f"DaemonSet of agents: {name}", who, "POST", path, body, words)


def node_preparation() -> Iterator[Case]:
    """Pods that prepare nodes."""
    """Pods of node preparation; what it may write with a token of its own node is tried with the process itself."""
    path = f"{GROUP}/kvpoolnodes/llama-70b.worker-1"
    found = {"status": {"node": {"memoryBytes": 1}}}
    yield patch("node preparation: without a node", NODE, f"{path}/status", found, "of its own node alone")
    yield patch("node preparation: a pool node", NODE, path, {"spec": {"revision": "x"}}, FORBIDDEN)
    node = "/api/v1/nodes/worker-1"
    yield patch("node preparation: a label on a node", NODE, node, {"metadata": {"labels": {"a": "b"}}}, FORBIDDEN)

    def make(name: str, words: str, pod: Json) -> Case:
        return Case(f"node preparation: {name}", ROOT, "POST", f"/api/v1/namespaces/{SYSTEM}/pods", pod, words)

    yield make("as the chart writes it", "", _node_pod())
    for directory in ("/", "/sys", "/var/lib/kvstrata", "/sys/devices/system/node/node0", "/sys/devices/system/memory"):
        volumes = [{"name": "pages", "hostPath": {"path": directory}}]
        yield make(f"directory {directory}", "node preparation sees of the host", _node_pod(volumes=volumes))
    image = "of the image that the chart names"
    yield make("another image", image, _node_pod(container={"image": DIGEST}))
    init = _node_pod()["spec"]["containers"][0] | {"name": "init"}
    yield make("an init container of another image", image, _node_pod(initContainers=[init | {"image": DIGEST}]))
    bare = "run without privileges"
    for security in ({"privileged": True, "allowPrivilegeEscalation": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}):
        own = _node_pod()["spec"]["containers"][0]["securityContext"] | security
        yield make(f"with {next(iter(security))}", bare, _node_pod(container={"securityContext": own}))
    yield make("host network", "no namespaces of the host", _node_pod(hostNetwork=True))


def _node_pod(container: Json | None = None, **spec: Any) -> Json:
    pod = copy.deepcopy(agent_pod())
    security = pod["spec"]["containers"][0]["securityContext"] | {"runAsUser": 0, "runAsNonRoot": False}
    image = f"kvstrata/agent@{NODE_PREPARATION['nodePreparation.image.digest']}"
    own = pod["spec"]["containers"][0] | {"image": image, "securityContext": security}
    pod["metadata"]["labels"] = {"app.kubernetes.io/component": "node"}
    volumes = [{"name": "pages", "hostPath": {"path": "/sys/devices/system/node"}}]
    pod["spec"] |= {"serviceAccountName": "kvstrata-node", "containers": [own | (container or {})], "volumes": volumes}
    pod["spec"] |= spec
    return pod
