"""The directory's Redis, where kvstrata runs it: what should be done to it, and what pools' statuses state. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_api import names, units
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import KVPool
from kvstrata_operator.decide.directory import redis_workload
from kvstrata_operator.decide.directory.redis_workload import Bounds, Need, PoolLoad, RedisSet, need, parse_template
from kvstrata_operator.decide.incremental import FleetFacts, Members
from kvstrata_operator.decide.plan.actions import Action, Apply, Delete, Note, Severity
from kvstrata_operator.decide.plan.conditions import Fault
from kvstrata_operator.observe.kinds import CONFIG_MAP, Ref
from kvstrata_operator.observe.parse_workloads import OUT_OF_MEMORY
from kvstrata_operator.observe.records import ConfigMapSeen, Declared, StatefulSetSeen
from kvstrata_operator.observe.world import ClusterSeen, Setting, View

_POD: Final = f"{names.REDIS}-0"
"""The StatefulSet's one pod, as its controller names it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What should run, and what that follows from."""

    owner: ConfigMapSeen
    bounds: Bounds
    need: Need
    made: RedisSet


@dataclass(frozen=True, slots=True)
class RedisState:
    """What there is to state to the pools of this release."""

    fault: Fault | None = None
    """Why no agent reaches the directory."""
    remark: str = ""
    """What an administrator should know although all is well."""


def plan_redis(view: View, fleet: FleetFacts, setting: Setting) -> tuple[Action, ...]:
    """Make the StatefulSet, change what is not as it should be, and make it again where it cannot be changed."""
    wanted = _wanted(view, fleet, setting)
    seen, ref = view.cluster.stateful_sets.get(names.REDIS), redis_workload.ref(setting.namespace)
    if not isinstance(wanted, Wanted) or (seen is not None and seen.is_deleting):
        return ()
    if seen is not None and wanted.made.is_new:
        why = "the API server changes no selector and no volume of one that is there"
        return (Delete(ref, str(ref), (Note(ref, seen.uid, "ReplacingStatefulSet", why),), uid=seen.uid),)
    if seen is not None and not wanted.made.is_changed:
        return ()
    return (Apply(ref, str(ref), tuple(_notes(wanted, seen, setting.namespace)), body=wanted.made.body),)


def redis_state(view: View, fleet: FleetFacts, setting: Setting) -> RedisState:
    """Judge the Redis that we run. Of one that others run nothing is stated: agents report whether they reach it."""
    wanted = _wanted(view, fleet, setting)
    if not isinstance(wanted, Wanted):
        return RedisState(wanted)
    failure = view.pools.failures.get(str(redis_workload.ref(setting.namespace)), "")
    fault = Fault("RedisApplyFailed", failure) if failure else _trouble(view.cluster)
    most_bytes = wanted.bounds.max_bytes
    if wanted.made.memory_bytes < most_bytes or wanted.need.size_bytes <= most_bytes:
        return RedisState(fault)
    most, full = map(units.format_rounded, (most_bytes, wanted.need.size_bytes))
    return RedisState(fault, f"redis.memory.max {most} is less than the {full} that full tiers would take")


def for_pool(state: RedisState, pool: Declared[KVPool], setting: Setting) -> RedisState:
    """What the status of one pool states."""
    if pool.model is None:
        return state
    wrong = _mode_fault(pool.model, setting)
    return RedisState(wrong) if wrong is not None else state


def _mode_fault(pool: KVPool, setting: Setting) -> Fault | None:
    """Return the fault of a pool that asks for another kind of Redis than this release has, and so would have none."""
    field, mode = "spec.metadata.redis.mode", pool.spec.metadata.redis.mode
    if not setting.redis_mode or mode == setting.redis_mode:
        return None
    way = "name its Secret in spec.metadata.redis.external" if mode == "Embedded" else "leave it out"
    message = (
        f"{field} is {mode}, and this release runs {setting.redis_mode}: set {field} to {setting.redis_mode} and {way}"
    )
    return Fault("RedisModeMismatch", f"{message}, or install the chart with the redis.mode that is meant")


def _wanted(view: View, fleet: FleetFacts, setting: Setting) -> Wanted | Fault | None:
    """Work out what should run; None where others run Redis."""
    if not setting.redis_template:
        return None
    owner = view.cluster.config_maps.get(setting.redis_template)
    if owner is None or not owner.template:
        where = f"ConfigMap {setting.namespace}/{setting.redis_template}"
        return Fault("RedisTemplateMissing", f"{where} with entry {names.REDIS_TEMPLATE_ENTRY} is not there")
    try:
        template = parse_template(owner.template)
        scopes = len(view.trust.tenants) + len(view.trust.domains) + len(view.trust.shares)
        wanted = need(_loads(view.pools.declared, fleet.pools), scopes, template.bounds)
        seen = view.cluster.stateful_sets.get(names.REDIS)
        made = redis_workload.redis_set(owner, template, wanted, seen, setting.namespace)
    except InvalidInputError as e:
        return Fault("RedisTemplateInvalid", str(e))
    return Wanted(owner, template.bounds, wanted, made)


def _loads(pools: Mapping[str, Declared[KVPool]], members: Mapping[str, Members]) -> Iterable[PoolLoad]:
    """What each pool may come to hold in this Redis; what one that goes or is refused still holds counts."""
    for name, its in members.items():
        pool = pools.get(name)
        if pool is not None and pool.model is not None and pool.model.spec.metadata.redis.mode == "External":
            continue
        placed = its.placement
        per_node_bytes = sum(tier.capacity_bytes for tier in placed.tiers) if placed else 0
        nodes = len(placed.nodes) if placed else 0
        agents = max(nodes, len(its.seen))
        yield PoolLoad(per_node_bytes * nodes, its.sums.used_bytes.total(), its.sums.blocks, agents)


def _trouble(cluster: ClusterSeen) -> Fault | None:
    """Return why Redis does not answer; None while its pod is ready."""
    seen, pod = cluster.stateful_sets.get(names.REDIS), cluster.pods.get(_POD)
    if seen is None or seen.is_deleting:
        return Fault("RedisStarting", "the StatefulSet of Redis is being made")
    if seen.ready:
        return None
    if pod is not None and pod.trouble:
        reason = "RedisOutOfMemory" if pod.trouble.startswith(OUT_OF_MEMORY) else "RedisNotRunning"
        return Fault(reason, f"pod {_POD}: {pod.trouble}")
    if not seen.is_observed or not seen.updated or (pod is not None and pod.is_deleting):
        return Fault("RedisRolling", f"pod {_POD} is replaced; agents report the directory again afterwards")
    if pod is None or not pod.ready_since:
        return Fault("RedisStarting", f"pod {_POD} is being made")
    return Fault("RedisNotReady", f"pod {_POD} runs and is not ready since {pod.ready_since}")


def _notes(wanted: Wanted, seen: StatefulSetSeen | None, namespace: str) -> Iterable[Note]:
    made, ref = wanted.made, redis_workload.ref(namespace)
    size = units.format_quantity(made.memory_bytes)
    why = f"{wanted.need.locations} locations when all tiers are full"
    if seen is None:
        about = Ref(CONFIG_MAP, wanted.owner.key, namespace)
        yield Note(about, wanted.owner.uid, "CreatingRedis", f"creating {ref} with maxmemory {size}: {why}")
        return
    before = seen.body["spec"]
    assert isinstance(before, Mapping)
    was, image = redis_workload.image_of(before), redis_workload.image_of(made.body["spec"])
    if was != image:
        yield Note(ref, seen.uid, "UpgradingRedis", f"image {was} becomes {image}; the pod is replaced")
    if seen.memory_bytes != made.memory_bytes:
        was = units.format_quantity(seen.memory_bytes)
        message = f"maxmemory {was} becomes {size}: {why}; the pod is replaced"
        yield Note(ref, seen.uid, "ResizingRedis", message)
    elif was == image:
        yield Note(ref, seen.uid, "RestoringRedis", f"{ref} is not as it should be", Severity.WARNING)
