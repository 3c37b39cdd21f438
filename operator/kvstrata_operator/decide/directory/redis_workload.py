"""The StatefulSet of the directory's Redis, and its size: from the chart's template to what should run. Pure.

Its controller replaces the pod. The directory is lost with it and reported again by the agents, so one replica is all
there is, and nobody is replaced without a reason. Laws of the size: more blocks never ask for less; what a Redis holds
now is never more than it keeps while nothing else replaces it; a Redis is replaced for memory alone only when what
agents may hold does not fit into it any more, or its bounds moved.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.units import KIB, MIB
from kvstrata_operator.observe.kinds import CONFIG_MAP, REDIS_LABELS, STATEFUL_SET, Ref, owner_reference, sealed
from kvstrata_operator.observe.records import ConfigMapSeen, StatefulSetSeen

LOCATION_BYTES: Final = 75
"""Of one location among many of its scope and agent (this and the next three: metadata/README.md, Figures)."""

SCOPE_BYTES: Final = 8 * MIB
"""What the buckets of one scope take at most beside what is in them."""

STREAM_BYTES: Final = 512 * KIB
"""What the reverse index of one agent in one scope takes at most beside what is in it."""

SPARSE_LOCATION_BYTES: Final = 320
"""Of one location whose buckets hold nothing else."""

EMPTY_BYTES: Final = 32 * MIB
"""Redis itself, its scripts, the registry, and buffers of agents' connections."""

HEADROOM_PERCENT: Final = 25
"""Sessions, and counts that agents round down by an eighth."""

BLOCKS_KNOWN: Final = 1_000
"""From so many blocks on, their mean size is taken from what agents report."""

FILL_KNOWN: Final = 16
"""And from a fill of one part in so many: agents round what they use to 1 % of a tier."""

REQUEST_PERCENT: Final = 125
"""Memory that a pod asks for, of `maxmemory`: fragmentation was 1.09 to 1.55 of what is used (metadata/README.md)."""
LIMIT_PERCENT: Final = 150
"""Memory at which it is ended."""
_FIXED: Final = ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
"""Parts of a StatefulSet that the API server never changes."""
_AMOUNTS: Final = ("min", "max", "block")
"""Entries of the template's `memory`, all of them quantities."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The chart's values."""

    min_bytes: int
    max_bytes: int
    block_bytes: int
    """Of a block as it is stored, where agents hold too few to know."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What one pool may come to hold, and holds."""

    capacity_bytes: int
    """Of all tiers on all nodes."""
    used_bytes: int = 0
    blocks: int = 0
    """Copies that agents report now; each is a location."""
    agents: int = 0

    def locations(self, bounds: Bounds) -> int:
        """Locations when every tier is full; never fewer than there are."""
        is_known = self.blocks >= BLOCKS_KNOWN and self.used_bytes * FILL_KNOWN >= self.capacity_bytes
        block_bytes = max(1, self.used_bytes // self.blocks) if is_known else bounds.block_bytes
        return max(self.blocks, -(-self.capacity_bytes // block_bytes))


@dataclass(frozen=True, slots=True)
class Need:
    """What full tiers would take of Redis."""

    locations: int = 0
    scopes: int = 0
    agents: int = 0

    @property
    def size_bytes(self) -> int:
        """`used_memory` of a Redis that knows all of it, without headroom."""
        buckets_bytes = self.scopes * (SCOPE_BYTES + STREAM_BYTES * self.agents)
        filled_bytes = LOCATION_BYTES * self.locations + buckets_bytes
        return EMPTY_BYTES + min(filled_bytes, SPARSE_LOCATION_BYTES * self.locations)


def need(pools: Iterable[PoolLoad], scopes: int, bounds: Bounds) -> Need:
    """Add up what all pools of one Redis may come to hold."""
    loads = tuple(pools)
    return Need(sum(load.locations(bounds) for load in loads), scopes, sum(load.agents for load in loads))


def fresh_bytes(wanted: Need, bounds: Bounds) -> int:
    """`maxmemory` of a Redis that is made now: a step above the need, within the bounds."""
    with_headroom = wanted.size_bytes * (100 + HEADROOM_PERCENT) // 100
    return min(bounds.max_bytes, max(bounds.min_bytes, _step_above(with_headroom)))


def kept_bytes(held_bytes: int, wanted: Need, bounds: Bounds) -> int:
    """`maxmemory` of a Redis that has `held_bytes` and is not replaced for another reason.

    A restart loses the directory for as long as agents need to report it again, so nobody is restarted to save memory.
    """
    is_within = bounds.min_bytes <= held_bytes <= bounds.max_bytes
    is_enough = wanted.size_bytes <= held_bytes or held_bytes == bounds.max_bytes
    return held_bytes if is_within and is_enough else fresh_bytes(wanted, bounds)


def _step_above(size_bytes: int) -> int:
    """Round up to a power of two MiB or one and a half of one: few sizes, so few restarts."""
    size_mib = -(-size_bytes // MIB)
    power = 1 << max(0, size_mib - 1).bit_length()
    return (power * 3 // 4 if power > 2 and size_mib <= power * 3 // 4 else power) * MIB


_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS: Final = {"": Decimal(1), "m": Decimal("0.001")} | {
    suffix: Decimal(base) ** (power + 1)
    for base, suffixes in ((1000, ("k", "M", "G", "T", "P", "E")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, suffix in enumerate(suffixes)
}


def holds(wanted: Any, seen: Any) -> bool:
    """True when `seen` has all that `wanted` does.

    What the API server fills in beside it does not count, nor that it leaves empty values out and writes quantities in
    its own way (1024Mi is 1Gi). Lists are compared from end to end.
    """
    if isinstance(wanted, Mapping):
        inside = seen if isinstance(seen, Mapping) else {}
        return all(holds(value, inside.get(key)) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        inner = seen if isinstance(seen, Sequence) and not isinstance(seen, str) else ()
        return len(wanted) == len(inner) and all(map(holds, wanted, inner))
    if wanted == seen or (not wanted and seen is None):
        return True
    amount = _amount(wanted)
    return amount is not None and amount == _amount(seen)


def _amount(value: Any) -> Decimal | None:
    """Read a quantity; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    found = _QUANTITY.fullmatch(str(value))
    return Decimal(found[1]) * _FACTORS[found[2] or ""] if found else None


Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Template:
    """What the chart declares."""

    bounds: Bounds
    spec: Mapping[str, Any]
    """StatefulSetSpec without the memory."""


@dataclass(frozen=True, slots=True)
class RedisSet:
    """What should run."""

    body: Mapping[str, Any]
    memory_bytes: int
    is_new: bool
    """True when there is none, or one that cannot be changed into this one."""
    is_changed: bool
    """True when the one that is there is different."""


def ref(namespace: str) -> Ref:
    """Address of the StatefulSet."""
    return Ref(STATEFUL_SET, names.REDIS, namespace)


def parse_template(text: str) -> Template:
    """Read the entry of the ConfigMap. `InvalidInputError` states what is wrong with it."""
    entry = names.REDIS_TEMPLATE_ENTRY
    try:
        read = json.loads(text)
    except ValueError as e:
        raise InvalidInputError(f"{entry} is no JSON: {e}") from e
    memory, spec = (read.get(key) if isinstance(read, dict) else None for key in ("memory", "spec"))
    if not isinstance(memory, dict) or any(key not in memory for key in _AMOUNTS):
        raise InvalidInputError(f"{entry}: memory needs {', '.join(_AMOUNTS)}")
    if not isinstance(spec, dict) or not isinstance(_pod(spec).get("containers"), list):
        raise InvalidInputError(f"{entry}: spec is no StatefulSetSpec: template.spec.containers is missing")
    bounds = Bounds(*(units.parse_quantity(memory[key]) for key in _AMOUNTS))
    if bounds.min_bytes > bounds.max_bytes:
        raise InvalidInputError(f"{entry}: memory.min {memory['min']} is above memory.max {memory['max']}")
    _redis(spec)
    return Template(bounds, spec)


def redis_set(
    owner: ConfigMapSeen, template: Template, wanted: Need, seen: StatefulSetSeen | None, namespace: str
) -> RedisSet:
    """Return what should run, given what does. Memory is lowered only when the pod is replaced for another reason."""
    if seen is None or not seen.memory_bytes or _replaces(_body(owner, template, seen.memory_bytes, namespace), seen):
        size_bytes = fresh_bytes(wanted, template.bounds)
    else:
        size_bytes = kept_bytes(seen.memory_bytes, wanted, template.bounds)
    body = _body(owner, template, size_bytes, namespace)
    if seen is None:
        return RedisSet(body, size_bytes, is_new=True, is_changed=False)
    metadata = {k: body["metadata"][k] for k in ("labels", "annotations", "ownerReferences")}
    return RedisSet(
        body,
        size_bytes,
        is_new=not all(holds(body["spec"].get(part), _spec(seen).get(part)) for part in _FIXED),
        is_changed=not holds({"metadata": metadata, "spec": body["spec"]}, seen.body),
    )


def image_of(spec: Mapping[str, Any]) -> str:
    """Image of the container that is Redis; empty where there is none."""
    containers = _pod(spec).get("containers") or ()
    return next((str(c.get("image", "")) for c in containers if c.get("name") == names.REDIS_CONTAINER), "")


def _body(owner: ConfigMapSeen, template: Template, memory_bytes: int, namespace: str) -> Json:
    spec: Json = json.loads(json.dumps(template.spec))
    redis = _redis(spec)
    given = redis.get("resources") or {}
    redis["resources"] = {
        **given,
        "requests": {**given.get("requests", {}), "memory": _more(given, "requests", memory_bytes * REQUEST_PERCENT)},
        "limits": {**given.get("limits", {}), "memory": _more(given, "limits", memory_bytes * LIMIT_PERCENT)},
    }
    others = [v for v in redis.get("env", ()) if v.get("name") != names.REDIS_MEMORY_VARIABLE]
    redis["env"] = [*others, {"name": names.REDIS_MEMORY_VARIABLE, "value": str(memory_bytes)}]
    meta = spec["template"].setdefault("metadata", {})
    meta["labels"] = {**meta.get("labels", {}), **REDIS_LABELS}
    owners = [owner_reference(CONFIG_MAP, ObjectMeta(name=owner.key, uid=owner.uid))]
    return sealed(ref(namespace), {"labels": dict(REDIS_LABELS), "ownerReferences": owners}, spec=spec)


def _more(given: Mapping[str, Any], part: str, hundredths_bytes: int) -> str:
    own = given.get(part, {}).get("memory")
    size_bytes = hundredths_bytes // 100 + (units.parse_quantity(own) if own else 0)
    return units.format_quantity(-(-size_bytes // units.MIB) * units.MIB)


def _replaces(body: Mapping[str, Any], seen: StatefulSetSeen) -> bool:
    return not holds(body["spec"]["template"], _spec(seen).get("template"))


def _spec(seen: StatefulSetSeen) -> Mapping[str, Any]:
    spec = seen.body["spec"]
    assert isinstance(spec, Mapping)
    return spec


def _pod(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    template = spec.get("template")
    pod = template.get("spec") if isinstance(template, Mapping) else None
    return pod if isinstance(pod, Mapping) else {}


def _redis(spec: Mapping[str, Any]) -> Json:
    for container in _pod(spec)["containers"]:
        if isinstance(container, dict) and container.get("name") == names.REDIS_CONTAINER:
            return container
    raise InvalidInputError(f"{names.REDIS_TEMPLATE_ENTRY} has no container named {names.REDIS_CONTAINER}")
