"""Pods of agents and what makes them, from the API server's JSON to records. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import intern
from typing import Any, Final

import msgspec

from kvstrata_api import names, units
from kvstrata_api.errors import InvalidInputError
from kvstrata_kube.store import version_of
from kvstrata_operator.observe.records import AgentPodSeen, MadeSeen, Room, Selector, StatefulSetSeen

_TROUBLES: Final = frozenset(
    {"CrashLoopBackOff", "CreateContainerConfigError", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"}
)
"""Reasons of a waiting container that do not pass by themselves within seconds."""

_UNPLACED: Final = "Unschedulable"

OUT_OF_MEMORY: Final = "OOMKilled"
"""Reason of a container that the kernel ended for want of memory."""


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    generation: int = 0
    owner_references: list[dict[str, Any]] = []


class _Made(msgspec.Struct):
    metadata: _Meta


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class _Waiting(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _Terminated(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct):
    waiting: _Waiting | None = None
    terminated: _Terminated | None = None


class _Container(msgspec.Struct, rename="camel"):
    state: _State = msgspec.field(default_factory=_State)
    last_state: _State = msgspec.field(default_factory=_State)


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    affinity: dict[str, Any] = {}
    volumes: list[dict[str, Any]] = []
    containers: list[dict[str, Any]] = []


class _PodStatus(msgspec.Struct, rename="camel"):
    conditions: list[_Condition] = []
    init_container_statuses: list[_Container] = []
    container_statuses: list[_Container] = []


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _DaemonSetTemplate(msgspec.Struct):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _DaemonSetSpec(msgspec.Struct):
    template: _DaemonSetTemplate = msgspec.field(default_factory=_DaemonSetTemplate)


class _DaemonSet(msgspec.Struct):
    metadata: _Meta
    spec: _DaemonSetSpec = msgspec.field(default_factory=_DaemonSetSpec)


class _StatefulSetStatus(msgspec.Struct, rename="camel"):
    observed_generation: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0


class _StatefulSet(msgspec.Struct):
    metadata: _Meta
    spec: dict[str, Any] = {}
    status: _StatefulSetStatus = msgspec.field(default_factory=_StatefulSetStatus)


def parse_made(raw: bytes) -> MadeSeen:
    """Read which content a PodDisruptionBudget was made with."""
    return _made(msgspec.json.decode(raw, type=_Made).metadata)


def parse_daemon_set(raw: bytes) -> MadeSeen:
    """Read which content a DaemonSet was made with, and by which labels it picks nodes."""
    seen = msgspec.json.decode(raw, type=_DaemonSet)
    terms = _terms(seen.spec.template.spec.affinity)
    by_labels = [t for t in terms if not any(f.get("operator") == "In" for f in t.get("matchFields", ()))]
    selectors = frozenset(_selector(term.get("matchExpressions", ())) for term in by_labels)
    return _made(seen.metadata, selectors if terms else frozenset({()}))


def _made(meta: _Meta, selectors: frozenset[Selector] = frozenset()) -> MadeSeen:
    content = meta.annotations.get(names.ANNOTATION_DIGEST, "")
    return MadeSeen(meta.name, meta.uid, version_of(meta.resource_version), content, selectors)


def _selector(expressions: Iterable[Mapping[str, Any]]) -> Selector:
    """Labels that a term of ours asks for; what it asks for besides, every node has."""
    return tuple(sorted((e["key"], e["values"][0]) for e in expressions if e.get("operator") == "In"))


def parse_agent_pod(raw: bytes) -> AgentPodSeen:
    """Read a pod of a pool's DaemonSet."""
    seen = msgspec.json.decode(raw, type=_Pod)
    meta, conditions = seen.metadata, {c.type: c for c in seen.status.conditions}
    unstarted_since = _unstarted_since(conditions, meta.creation_timestamp)
    ready = conditions.get("Ready", _Condition("Ready"))
    return AgentPodSeen(
        key=meta.name,
        uid=meta.uid,
        version=version_of(meta.resource_version),
        pool=intern(meta.labels.get(names.LABEL_POOL, "")),
        node=seen.spec.node_name or _meant_for(seen.spec.affinity),
        revision=intern(meta.labels.get(names.LABEL_REVISION, "")),
        created=meta.creation_timestamp,
        is_deleting=meta.deletion_timestamp is not None,
        is_ready=ready.status == "True",
        ready_since=ready.last_transition_time,
        trouble=_trouble(seen.status, conditions.get("PodScheduled")),
        room=_room(seen.spec),
        has_small_pages=names.LABEL_PAGES in meta.labels,
        unstarted_since=unstarted_since,
        awaited=_awaited(seen.spec.volumes) if unstarted_since else (),
    )


def _unstarted_since(conditions: Mapping[str, _Condition], created: str) -> str:
    """`PodReadyToStartContainers` is reported by kubelets from 1.29 on."""
    scheduled, started = conditions.get("PodScheduled"), conditions.get("PodReadyToStartContainers")
    if scheduled is None or scheduled.status != "True" or started is None or started.status != "False":
        return ""
    return started.last_transition_time or created


def _awaited(volumes: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    hosts = (volume["hostPath"] for volume in volumes if "hostPath" in volume)
    return tuple(sorted(host["path"] for host in hosts if host.get("type") == "Directory"))


def _room(spec: _PodSpec) -> Room:
    """Return none for a pod that we cannot have made; it must not end the watch of those that we have."""
    try:
        return room_of(spec.volumes, spec.containers)
    except InvalidInputError:
        return Room()


def room_of(volumes: Iterable[Mapping[str, Any]], containers: Iterable[Mapping[str, Any]]) -> Room:
    """Return what a pod, or a template of one, has for tiers. `InvalidInputError` for quantities that are not whole."""
    paths = frozenset(volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume)
    agent = next((c for c in containers if c.get("name") == names.AGENT_CONTAINER), {})
    limits = agent.get("resources", {}).get("limits") or {}
    sizes = {n: units.parse_quantity(size) for n, size in limits.items() if n.startswith(("memory", "hugepages-"))}
    return Room(paths, sizes)


def _terms(affinity: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Terms of which a node has to meet one."""
    required = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms: Sequence[Mapping[str, Any]] = required.get("nodeSelectorTerms", ())
    return terms


def _meant_for(affinity: dict[str, Any]) -> str:
    """Return the node that the DaemonSet controller made a pod for; it states it by an affinity to one name."""
    for term in _terms(affinity):
        for wanted in term.get("matchFields", ()):
            if wanted.get("key") == "metadata.name" and wanted.get("operator") == "In":
                return str(wanted["values"][0])
    return ""


def _trouble(status: _PodStatus, scheduled: _Condition | None) -> str:
    if scheduled is not None and scheduled.status == "False" and scheduled.reason == _UNPLACED:
        return f"{_UNPLACED}: {scheduled.message}"
    if any(s.terminated is not None and s.terminated.reason == OUT_OF_MEMORY for s in _ends(status)):
        return f"{OUT_OF_MEMORY}: a container was ended because it took more memory than its limit"
    containers = (*status.init_container_statuses, *status.container_statuses)
    return next(
        (_waits(c) for c in containers if c.state.waiting is not None and c.state.waiting.reason in _TROUBLES), ""
    )


def _waits(container: _Container) -> str:
    """Why a container waits: the last line that it said itself before it ended, where the kubelet has kept that."""
    assert container.state.waiting is not None
    ended = container.last_state.terminated
    own = (ended.message.strip() if ended is not None else "").rpartition("\n")[2]
    return f"{container.state.waiting.reason}: {own or container.state.waiting.message}"


def _ends(status: _PodStatus) -> Iterator[_State]:
    """How containers that do not run ended; of those that run again nothing."""
    for container in status.container_statuses:
        if container.state.waiting is not None:
            yield container.last_state
        yield container.state


def parse_stateful_set(raw: bytes) -> StatefulSetSeen:
    """Read the StatefulSet of Redis."""
    seen = msgspec.json.decode(raw, type=_StatefulSet)
    meta, status = seen.metadata, seen.status
    metadata = {"labels": meta.labels, "annotations": meta.annotations, "ownerReferences": meta.owner_references}
    return StatefulSetSeen(
        key=meta.name,
        uid=meta.uid,
        version=version_of(meta.resource_version),
        body={"metadata": metadata, "spec": seen.spec},
        memory_bytes=_redis_memory_bytes(seen.spec),
        is_deleting=meta.deletion_timestamp is not None,
        is_observed=status.observed_generation >= meta.generation,
        ready=status.ready_replicas,
        updated=status.updated_replicas,
    )


def _redis_memory_bytes(spec: Mapping[str, Any]) -> int:
    """Return the `maxmemory` that Redis is given; 0 from a StatefulSet that we cannot have made."""
    containers = spec.get("template", {}).get("spec", {}).get("containers", ())
    redis: Mapping[str, Any] = next((c for c in containers if c.get("name") == names.REDIS_CONTAINER), {})
    given = {v["name"]: v.get("value", "") for v in redis.get("env", ())}
    text = given.get(names.REDIS_MEMORY_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() else 0
