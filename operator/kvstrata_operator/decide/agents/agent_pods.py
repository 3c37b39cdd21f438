"""The pod of a pool's agents: the chart's template, and what the pool's tiers ask of it. Pure.

In the template's text `{pool}` stands for the pool's name. Of the pool come: labels, nodes and tolerations, a directory
of the host for each path that a tier names, huge pages and memory, and time to stop.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.directories import directories_of
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_operator.decide.plan.objects import WORKLOAD_LABELS
from kvstrata_operator.decide.pools.directories import normal
from kvstrata_operator.observe.digest import digest
from kvstrata_operator.observe.parse import takes_node_memory
from kvstrata_operator.observe.parse_workloads import room_of
from kvstrata_operator.observe.records import Room

Json = dict[str, Any]

POOL_PLACE: Final = "{pool}"

STOP_S: Final = 30
"""Seconds that an agent has to stop beyond its drain: Kubernetes' own default."""

NAMED_NODES_MAX: Final = 500
"""Nodes that one DaemonSet names, of those left out and of those on their way out each: 50 KB of 1.5 MB (etcd)."""

_WHERE: Final = ("nodeSelector", "tolerations", "affinity", "terminationGracePeriodSeconds")
"""Parts of a pod that a running one need not be replaced for."""

_MEMORY: Final = "memory"
"""Volume of the template that is a tmpfs of the host."""

_HUGEPAGES: Final = "hugepages"
"""Volume of the template that is a hugetlbfs of the host."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Nodes that the labels of the pool's selector do not tell of. All sorted."""

    excluded: tuple[str, ...] = ()
    """Match, and must have no agent."""
    leaving: tuple[str, ...] = ()
    """Match no more, and have an agent that still drains."""


@dataclass(frozen=True, slots=True)
class AgentPods:
    """What the pods of one pool should be."""

    template: Json
    """PodTemplateSpec."""
    revision: str
    """Digest of all in it that a pod must be replaced for."""
    room: Room
    keeps_memory: bool
    """True when blocks in memory outlive a pod, so that nothing need be moved before it is replaced."""


def agent_pods(pool: KVPool, tiers: Sequence[NodeTier], text: str, where: Whereabouts) -> AgentPods:
    """Fill in the template. `InvalidInputError` says what is wrong with it."""
    template = _parse(text.replace(POOL_PLACE, pool.metadata.name))
    spec, agent = template["spec"], _agent(template)
    _mount(spec, agent, _paths(tiers))
    agent["resources"] = _resources(agent.get("resources") or {}, tiers)
    spec["tolerations"] = [*spec.get("tolerations", ()), *(t.to_json() for t in pool.spec.tolerations)]
    spec["affinity"] = {**spec.get("affinity", {}), **_node_affinity(pool.spec.node_selector, where)}
    drain_s = pool.spec.update_strategy.drain.timeout_seconds
    spec["terminationGracePeriodSeconds"] = max(spec.get("terminationGracePeriodSeconds", 0), drain_s + STOP_S)
    meta = template.setdefault("metadata", {})
    labels = {**meta.get("labels", {}), **WORKLOAD_LABELS, names.LABEL_POOL: pool.metadata.name}
    meta["labels"] = labels
    revision = digest([meta, {key: part for key, part in spec.items() if key not in _WHERE}])
    meta["labels"] = labels | {names.LABEL_REVISION: revision}
    return AgentPods(template, revision, room_of(spec["volumes"], spec["containers"]), _keeps_memory(agent, tiers))


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


def _paths(tiers: Iterable[NodeTier]) -> list[PurePosixPath]:
    """Directories of the host that tiers name, without those that lie in another one; sorted."""
    found = sorted({normal(one.path) for tier in tiers for one in directories_of(tier)})
    return [path for path in found if not any(parent in found for parent in path.parents)]


def _mount(spec: Json, agent: Json, paths: Iterable[PurePosixPath]) -> None:
    """Mount each path where the agent looks for it, unless a directory of the template holds it there."""
    volumes, mounts = spec.setdefault("volumes", []), agent.setdefault("volumeMounts", [])
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
    held = {PurePosixPath(m["mountPath"]) for m in mounts if hosts.get(m["name"]) == m["mountPath"]}
    for number, path in enumerate(p for p in paths if p not in held and not held.intersection(p.parents)):
        volumes.append({"name": f"tier-{number}", "hostPath": {"path": str(path), "type": "Directory"}})
        mounts.append({"name": f"tier-{number}", "mountPath": str(path)})


def _resources(given: Mapping[str, Any], tiers: Iterable[NodeTier]) -> Json:
    """Add what memory tiers take: huge pages by their size, all else to the memory that the template gives."""
    wanted = Counter[str]()
    for tier in tiers:
        wanted[_resource(tier)] += tier.capacity_bytes
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
    if tier.type == TierType.HOST_DRAM and tier.host_dram is not None and tier.host_dram.page_size != "4Ki":
        return f"hugepages-{tier.host_dram.page_size}"
    return "memory" if takes_node_memory(tier.type, tier.cxl.mode if tier.cxl else "") else ""


def _more(given: Any, more_bytes: int) -> str:
    own_bytes = units.parse_quantity(given) if given else 0
    return units.format_quantity(own_bytes + more_bytes)


def _node_affinity(selector: Mapping[str, str], where: Whereabouts) -> Json:
    """Pick the nodes of the selector but those left out, and those on their way out as long as they drain."""
    labels = [{"key": key, "operator": "In", "values": [value]} for key, value in sorted(selector.items())]
    others = [_name_is("NotIn", node) for node in where.excluded[:NAMED_NODES_MAX]]
    if not labels and not others:
        return {}
    terms = [{k: v for k, v in (("matchExpressions", labels), ("matchFields", others)) if v}]
    terms += [{"matchFields": [_name_is("In", node)]} for node in where.leaving[:NAMED_NODES_MAX]]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


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
