"""What runs the agents of a pool: DaemonSets and their PodDisruptionBudget, and the actions towards them. Pure.

There is one DaemonSet, and a second one while some nodes lack the huge pages that the pool's tiers want: its pods have
memory instead, for a pod that asks for pages is never scheduled there. Neither replaces a pod by itself (OnDelete):
`agents` decides when. A pod is the chart's template, in whose text `{pool}` stands for the pool's name. Of the pool
come: labels, nodes and tolerations, a directory of the host for each path that a tier names, huge pages and memory, and
time to stop.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.directories import directories_of, normal
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_operator.decide.plan.actions import Action, Apply, Delete, Note
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.pool_facts import page_resource
from kvstrata_operator.observe.kinds import (
    BUDGET,
    DAEMON_SET,
    POOL,
    WORKLOAD_LABELS,
    Ref,
    digest,
    owner_reference,
    sealed,
)
from kvstrata_operator.observe.parse import takes_node_memory
from kvstrata_operator.observe.parse_workloads import room_of
from kvstrata_operator.observe.records import Declared, MadeSeen, NodeSeen, Room, Selector

Json = dict[str, Any]

POOL_PLACE: Final = "{pool}"

STOP_S: Final = 30
"""Seconds that an agent has to stop beyond its drain: Kubernetes' own default."""

NAMED_NODES_MAX: Final = 500
"""Nodes that one DaemonSet names, of those on their way out and of one kind each: 70 KB of 1.5 MB (etcd), which are
written anew with each of them that has drained."""

BARRED_NODES_MAX: Final = 4000
"""Nodes that one DaemonSet leaves out by name: 480 KB for names of 63 letters, written when one comes or goes."""

_EVERY_NODE: Final = {"key": "kubernetes.io/hostname", "operator": "Exists"}
"""What a term asks for that asks for no label: one without any would pick no node. Each kubelet sets this label."""

_WHERE: Final = ("nodeSelector", "tolerations", "affinity", "terminationGracePeriodSeconds")
"""Parts of a pod that a running one need not be replaced for."""

_SMALL: Final = "4Ki"
"""Value of the label on pods that have small pages in place of huge ones."""

_MEMORY: Final = "memory"
"""Volume of the template that is a tmpfs of the host."""

_HUGEPAGES: Final = "hugepages"
"""Volume of the template that is a hugetlbfs of the host."""

_FOLDER_MODE: Final = "0750"
"""Of a tier's folder that is made: the agent's user alone writes there."""

HISTORY: Final = 10
"""ControllerRevisions that Kubernetes keeps of a DaemonSet; its own default, written so that it stays."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Nodes that the labels of the pool's selector do not imply. All sorted."""

    excluded: tuple[str, ...] = ()
    """Match, and must have no pod of this DaemonSet."""
    leaving: tuple[str, ...] = ()
    """No longer match, and have a pod of it that still drains."""
    only: tuple[str, ...] | None = None
    """Of those that match these alone; None for all but the excluded."""
    former: tuple[tuple[Selector, tuple[str, ...]], ...] = ()
    """Selectors of before by which nodes stay that are on their way out, more than can be named, each with the nodes
    that must have no pod of this DaemonSet all the same."""

    @property
    def are_none(self) -> bool:
        """True when no node is to have a pod of it."""
        return self.only == () and not self.leaving and not self.former


@dataclass(frozen=True, slots=True)
class AgentPods:
    """What the pods of one pool should be."""

    template: Json
    """PodTemplateSpec, but for the nodes that it goes to."""
    revision: str
    """Digest of all in it that a pod must be replaced for."""
    room: Room
    keeps_memory: bool
    """True when blocks in memory outlive a pod, so that nothing need be moved before it is replaced."""
    remark: str = ""
    """What an administrator should know of them although all is well."""


def agent_pods(pool: KVPool, tiers: Sequence[NodeTier], text: str, *, has_small_pages: bool = False) -> AgentPods:
    """Fill in the template, with memory in place of huge pages where there are none of these.

    Raises `InvalidInputError`, which states what is wrong with it.
    """
    template = _parse(text.replace(POOL_PLACE, pool.metadata.name))
    spec, agent = template["spec"], _agent(template)
    _mount(spec, agent, _folders(spec), tiers)
    agent["resources"] = _resources(agent.get("resources") or {}, tiers, has_small_pages=has_small_pages)
    spec["tolerations"] = [*spec.get("tolerations", ()), *(t.to_json() for t in pool.spec.tolerations)]
    drain_s = pool.spec.update_strategy.drain.timeout_seconds
    spec["terminationGracePeriodSeconds"] = max(spec.get("terminationGracePeriodSeconds", 0), drain_s + STOP_S)
    meta = template.setdefault("metadata", {})
    labels = {**meta.get("labels", {}), **WORKLOAD_LABELS, names.LABEL_POOL: pool.metadata.name}
    if has_small_pages:
        labels[names.LABEL_PAGES] = _SMALL
    meta["labels"] = labels
    revision = digest([meta, {key: part for key, part in spec.items() if key not in _WHERE}])
    meta["labels"] = labels | {names.LABEL_REVISION: revision}
    room = room_of(spec["volumes"], spec["containers"])
    return AgentPods(template, revision, room, _keeps_memory(agent, tiers), _remark(agent))


def _parse(text: str) -> Json:
    try:
        template = json.loads(text)
    except ValueError as e:
        raise InvalidInputError(f"{names.AGENT_TEMPLATE_ENTRY} is no JSON: {e}") from e
    containers = template.get("spec", {}).get("containers") if isinstance(template, dict) else None
    if not isinstance(containers, list) or not all(isinstance(c, dict) for c in containers):
        raise InvalidInputError(f"{names.AGENT_TEMPLATE_ENTRY} is no PodTemplateSpec: spec.containers is missing")
    return dict(template)


def _agent(template: Json) -> Json:
    for container in template["spec"]["containers"]:
        if container.get("name") == names.AGENT_CONTAINER:
            found: Json = container
            return found
    raise InvalidInputError(f"{names.AGENT_TEMPLATE_ENTRY} has no container {names.AGENT_CONTAINER}")


def _remark(agent: Json) -> str:
    image = str(agent.get("image", ""))
    if "@" in image:
        return ""
    return f"agents run {image}, which names no digest: nodes can run different images"


def _paths(tiers: Iterable[NodeTier]) -> list[PurePosixPath]:
    """Directories of the host that tiers name, without those that lie in another one; sorted."""
    found = sorted({normal(one.path) for tier in tiers for one in directories_of(tier)})
    return [path for path in found if not any(parent in found for parent in path.parents)]


def _folders(spec: Json) -> Json | None:
    """Container that gives folders to the agent's user before it starts; None where an administrator makes them."""
    return next((c for c in spec.get("initContainers", ()) if c.get("name") == names.FOLDERS_CONTAINER), None)


def _mount(spec: Json, agent: Json, folders: Json | None, tiers: Sequence[NodeTier]) -> None:
    """Mount each path where the agent expects it, unless a directory of the template holds it there.

    Where folders may be made they are, but for shared flash: a folder in place of a mount that is absent would hide it.
    """
    shared = _paths(tier for tier in tiers if tier.type == TierType.REMOTE_FLASH)
    volumes, mounts = spec.setdefault("volumes", []), agent.setdefault("volumeMounts", [])
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
    held = {PurePosixPath(m["mountPath"]) for m in mounts if hosts.get(m["name"]) == m["mountPath"]}
    for number, path in enumerate(p for p in _paths(tiers) if p not in held and not held.intersection(p.parents)):
        made_by = None if path in shared else folders
        type_ = "Directory" if made_by is None else "DirectoryOrCreate"
        volumes.append({"name": f"tier-{number}", "hostPath": {"path": str(path), "type": type_}})
        mount = {"name": f"tier-{number}", "mountPath": str(path)}
        mounts.append(mount)
        if made_by is not None:
            made_by.setdefault("volumeMounts", []).append(mount)
            made_by.setdefault("args", []).append(f"{path}={_FOLDER_MODE}")


def _resources(given: Mapping[str, Any], tiers: Iterable[NodeTier], *, has_small_pages: bool) -> Json:
    """Add what memory tiers take: huge pages by their size, all else to the memory that the template gives."""
    wanted = Counter[str]()
    for tier in tiers:
        resource = _resource(tier)
        wanted["memory" if has_small_pages and resource.startswith(_HUGEPAGES) else resource] += tier.capacity_bytes
    requests, limits = dict(given.get("requests") or {}), dict(given.get("limits") or {})
    memory_bytes = wanted["memory"]
    if memory_bytes:
        requests["memory"] = _more(requests.get("memory"), memory_bytes)
    if memory_bytes and "memory" in limits:
        limits["memory"] = _more(limits["memory"], memory_bytes)
    pages = {name: units.format_quantity(size) for name, size in sorted(wanted.items()) if name.startswith("hugepages")}
    return {**given, "requests": requests | pages, "limits": limits | pages}


def _resource(tier: NodeTier) -> str:
    """Name the resource of a node that a tier takes; empty for none that the kubelet counts."""
    pages = page_resource(tier)
    if pages is not None:
        return pages
    return "memory" if takes_node_memory(tier.type, tier.cxl.mode if tier.cxl else "") else ""


def _more(given: Any, more_bytes: int) -> str:
    own_bytes = units.parse_quantity(given) if given else 0
    return units.format_quantity(own_bytes + more_bytes)


def _node_affinity(selector: Mapping[str, str], where: Whereabouts) -> Json:
    """Pick the nodes of the selector but those left out, and those on their way out as long as they drain."""
    labels = _has(selector.items())
    others = [_name_is("NotIn", node) for node in where.excluded[:BARRED_NODES_MAX]]
    if where.only is None and not labels and not others:
        return {}
    if where.only is None:
        terms = [{k: v for k, v in (("matchExpressions", labels), ("matchFields", others)) if v}]
    else:
        terms = [{"matchFields": [_name_is("In", node)]} for node in where.only[:NAMED_NODES_MAX]]
    terms += [{"matchFields": [_name_is("In", node)]} for node in where.leaving[:NAMED_NODES_MAX]]
    for before, barred in where.former:
        fields = {"matchFields": [_name_is("NotIn", node) for node in barred]} if barred else {}
        terms.append({"matchExpressions": _has(before) or [_EVERY_NODE], **fields})
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _has(labels: Iterable[tuple[str, str]]) -> list[Json]:
    return [{"key": key, "operator": "In", "values": [value]} for key, value in sorted(labels)]


def _name_is(operator: str, node: str) -> Json:
    return {"key": "metadata.name", "operator": operator, "values": [node]}


def _keeps_memory(agent: Json, tiers: Iterable[NodeTier]) -> bool:
    """True when every tier in memory lies on a file system of the host and may last there (docs/memory.md)."""
    homes = {mount["name"] for mount in agent["volumeMounts"]} & {_MEMORY, _HUGEPAGES}
    return all(_needs(tier) <= homes for tier in tiers)


def _needs(tier: NodeTier) -> set[str]:
    """Volumes that keep a tier's blocks when its pod goes; one that no pod has where nothing does."""
    memory = tier.host_dram or tier.cxl
    if tier.type == TierType.HBM or (memory is not None and memory.persistence == "None"):
        return {""}
    if memory is None:
        return set()
    return {_MEMORY, _HUGEPAGES} if _resource(tier).startswith("hugepages") else {_MEMORY}


Body = Mapping[str, Any]
Made = Mapping[Ref, MadeSeen]


@dataclass(frozen=True, slots=True)
class PodsOfPool:
    """What the pods of one pool should be, on nodes that have its huge pages and on those that lack some."""

    pods: AgentPods
    small: AgentPods

    def on(self, *, has_small_pages: bool) -> AgentPods:
        """Those of one class of nodes."""
        return self.small if has_small_pages else self.pods


def pods_of(pool: KVPool, placement: Placement, template: str) -> PodsOfPool:
    """Fill in the template for both classes of nodes. Raises `InvalidInputError` for one that cannot be used."""
    pods = agent_pods(pool, placement.tiers, template)
    if not any(page_resource(tier) for tier in placement.tiers):
        return PodsOfPool(pods, pods)
    return PodsOfPool(pods, agent_pods(pool, placement.tiers, template, has_small_pages=True))


@dataclass(frozen=True, slots=True)
class NodeClasses:
    """Which nodes have pods of which kind now, those whose agents still have to be replaced as they are."""

    small: AbstractSet[str] = frozenset()
    """Of the placement: those whose pods have small pages in place of huge ones."""
    leaving: AbstractSet[str] = frozenset()
    """No longer match, and have an agent that still drains."""
    leaving_small: AbstractSet[str] = frozenset()
    """Of these, those whose pods have small pages."""
    seen: Mapping[str, NodeSeen] = field(default_factory=lambda: MappingProxyType({}))
    """Every Node, for its labels."""


def bodies(
    pool: Declared[KVPool], placement: Placement, pods: PodsOfPool, classes: NodeClasses, namespace: str, made: Made
) -> dict[Ref, Body]:
    """Return what should run the agents of an accepted pool; `made` has what does now."""
    assert pool.model is not None
    wanted: dict[Ref, Body] = {}
    for ref, has_small_pages in daemon_sets(pool.key, namespace).items():
        where = _whereabouts(placement, classes, has_small_pages=has_small_pages)
        if ref in made:
            own = tuple(sorted(pool.model.spec.node_selector.items()))
            before = sorted(made[ref].selectors - {own})
            where = _kept(where, before, placement, classes, has_small_pages=has_small_pages)
        if not where.are_none:
            wanted[ref] = _daemon_set(ref, pool, pods.on(has_small_pages=has_small_pages), where)
    budget = Ref(BUDGET, names.agents_name(pool.key), namespace)
    wanted[budget] = _budget(budget, pool.meta, pool.model, len(placement.nodes))
    return wanted


def small_nodes(nodes: AbstractSet[str], lacking: AbstractSet[str]) -> AbstractSet[str]:
    """Nodes whose pods should have small pages: those that lack huge ones, as far as the DaemonSets can name them.

    With more than `NAMED_NODES_MAX` nodes of both kinds, the rest are of the kind that there is more of.
    """
    others = len(nodes) - len(lacking)
    if min(len(lacking), others) <= NAMED_NODES_MAX:
        return lacking
    if len(lacking) <= others:
        return frozenset(sorted(lacking)[:NAMED_NODES_MAX])
    return nodes - frozenset(sorted(nodes - lacking)[:NAMED_NODES_MAX])


def _whereabouts(placement: Placement, classes: NodeClasses, *, has_small_pages: bool) -> Whereabouts:
    """Nodes of one DaemonSet. Of the two the one with fewer nodes names them, so that few names serve a large fleet."""
    small = classes.small
    leaving = classes.leaving_small if has_small_pages else classes.leaving - classes.leaving_small
    is_named = has_small_pages == (len(small) <= len(placement.nodes) - len(small))
    if not small:  # A pool without nodes has a DaemonSet all the same, by its labels.
        is_named = has_small_pages
    own = small if has_small_pages else placement.nodes - small
    others = (placement.nodes - small if has_small_pages else small) if not is_named else frozenset[str]()
    # One that is left out now has the labels: until it has drained there is no need to name it.
    matching = frozenset[str]() if is_named else leaving & placement.excluded.keys()
    return Whereabouts(
        excluded=tuple(sorted({*placement.excluded, *others} - matching)),
        leaving=tuple(sorted(leaving - matching)),
        only=tuple(sorted(own)) if is_named else None,
    )


def _kept(
    where: Whereabouts,
    before: Iterable[Selector],
    placement: Placement,
    classes: NodeClasses,
    *,
    has_small_pages: bool,
) -> Whereabouts:
    """Keep selectors `before` while more nodes are on their way out than can be named: those of a pool that moves.

    Nodes that have drained have an agent until then; of nodes that lost their labels, those too many are not covered.
    """
    if len(where.leaving) <= NAMED_NODES_MAX:
        return where
    leaving, former, room = set(where.leaving), [], BARRED_NODES_MAX
    own = classes.small if has_small_pages else placement.nodes - classes.small
    others = (placement.nodes - own) | (classes.leaving - leaving) | placement.excluded.keys()
    for selector in before:
        covered = {node for node in leaving if _carries(classes.seen.get(node), selector)}
        barred = {node for node in others - set(where.leaving) if _carries(classes.seen.get(node), selector)}
        if covered and len(barred) <= room:
            former.append((selector, tuple(sorted(barred))))
            leaving -= covered
            room -= len(barred)
    return replace(where, leaving=tuple(sorted(leaving)), former=tuple(former))


def _carries(node: NodeSeen | None, selector: Selector) -> bool:
    return node is not None and all(node.labels.get(key) == value for key, value in selector)


def daemon_sets(pool: str, namespace: str) -> dict[Ref, bool]:
    """Addresses of a pool's DaemonSets, and whether their pods have small pages in place of huge ones."""
    return {
        Ref(DAEMON_SET, names.agents_name(pool), namespace): False,
        Ref(DAEMON_SET, names.small_agents_name(pool), namespace): True,
    }


def refs(pool: str, namespace: str) -> tuple[Ref, ...]:
    """Addresses of all that runs a pool's agents."""
    return (*daemon_sets(pool, namespace), Ref(BUDGET, names.agents_name(pool), namespace))


def plan_workload(pool: Declared[KVPool], wanted: Mapping[Ref, Body], made: Made) -> tuple[Action, ...]:
    """Make what is absent, change what was made from something else, and remove what no node needs.

    The first two by server-side apply: what a `POST` had made would keep fields, such as a volume, that are no longer
    wanted.
    """
    applied = tuple(
        Apply(ref, pool.key, (_note(pool, ref, made),), body=body)
        for ref, body in wanted.items()
        if ref not in made or made[ref].content_digest != body["metadata"]["annotations"][names.ANNOTATION_DIGEST]
    )
    removed = tuple(Delete(ref, pool.key, uid=record.uid) for ref, record in made.items() if ref not in wanted)
    return applied + removed


def _note(pool: Declared[KVPool], ref: Ref, made: Made) -> Note:
    doing = "Changing" if ref in made else "Creating"
    return Note(pool.ref, pool.uid, f"{doing}{ref.kind.name}", f"{doing.lower()} {ref}")


def _selector(pool: ObjectMeta) -> dict[str, str]:
    return {**WORKLOAD_LABELS, names.LABEL_POOL: pool.name}


def _metadata(pool: ObjectMeta) -> dict[str, Any]:
    return {"labels": _selector(pool), "ownerReferences": [owner_reference(POOL, pool)]}


def _daemon_set(ref: Ref, pool: Declared[KVPool], pods: AgentPods, where: Whereabouts) -> Body:
    """Make one DaemonSet.

    Selectors cannot change: that of the first one, which is older, picks the pods of both. What another controller
    owns it leaves alone.
    """
    assert pool.model is not None
    labels = pods.template["metadata"]["labels"]
    selector = {**_selector(pool.meta), **{k: v for k, v in labels.items() if k == names.LABEL_PAGES}}
    spec = pods.template["spec"]
    affinity = {**spec.get("affinity", {}), **_node_affinity(pool.model.spec.node_selector, where)}
    content = {
        "selector": {"matchLabels": selector},
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": HISTORY,
        "template": {**pods.template, "spec": {**spec, "affinity": affinity}},
    }
    return sealed(ref, _metadata(pool.meta), spec=content)


def _budget(ref: Ref, pool: ObjectMeta, model: KVPool, nodes: int) -> Body:
    """Hold evictions to the pool's `maxUnavailable`.

    Written as `minAvailable`: the disruption controller takes `maxUnavailable` only where the owner of the pods has a
    scale, which a DaemonSet has not. Pods that are not ready may always go.
    """
    spec = {
        "minAvailable": max(0, nodes - model.spec.update_strategy.max_unavailable),
        "selector": {"matchLabels": _selector(pool)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return sealed(ref, _metadata(pool), spec=spec)
