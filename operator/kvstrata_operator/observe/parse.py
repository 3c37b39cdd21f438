"""API server's JSON to records. Pure. The only place that knows the wire names of what the operator watches.

Unknown fields are skipped while decoding, so managedFields and the like never become Python objects.
"""

import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from kvstrata_api import names, units
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.base import ApiModel, ObjectMeta
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.model_cache import KVModelCache
from kvstrata_api.models.operation import KVOperation
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.tiers import CxlMode, TierType
from kvstrata_api.validate import parse_as, validate
from kvstrata_api.validate_structure import Problem
from kvstrata_api.wrapping import DATA_SUFFIX
from kvstrata_kube.store import version_of
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Kind, digest
from kvstrata_operator.observe.records import (
    AnswerSeen,
    ConditionSeen,
    ConfigMapSeen,
    Declared,
    DemandSeen,
    DrainSeen,
    ModelSeen,
    NodeSeen,
    PoolNodeSeen,
    ScopeSecretSeen,
    TenantAsked,
    TenantSeen,
    TierSeen,
)

MODELS: Final[Mapping[Kind, type[ApiModel]]] = {
    kinds.POOL: KVPool,
    kinds.TENANT: KVTenant,
    kinds.DOMAIN: KVTrustDomain,
    kinds.SHARE: KVPrefixShare,
    kinds.OPERATION: KVOperation,
    kinds.MODEL_CACHE: KVModelCache,
}

_ERRORS_MAX: Final = 4
"""Errors of one object that are written into its condition; the first few are what people fix first."""


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    owner_references: list[msgspec.Raw] = []
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    generation: int = 0


class _Labelled(msgspec.Struct):
    metadata: _Meta


class _NodeStatus(msgspec.Struct):
    allocatable: dict[str, str] = {}


class _Node(msgspec.Struct):
    metadata: _Meta
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _Drain(msgspec.Struct):
    requested: bool = False
    mode: str = "Demote"
    deadline: str = ""


class _SpecTier(msgspec.Struct, rename="camel"):
    type: str
    capacity_bytes: int = 0
    cxl: dict[str, Any] = {}


class _Order(msgspec.Struct):
    uid: str


class _PoolNodeSpec(msgspec.Struct, rename="camel"):
    pool_ref: str
    node_name: str
    tiers: msgspec.Raw = msgspec.Raw(b"[]")
    revision: str = ""
    drain: _Drain = msgspec.field(default_factory=_Drain)
    orders: list[_Order] = []
    models: msgspec.Raw = msgspec.Raw(b"[]")


class _Condition(msgspec.Struct):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _Demand(msgspec.Struct, rename="camel"):
    gain_permille: int = 0
    loss_permille: int = 0
    held_bytes: int = 0


class _StatusTier(msgspec.Struct, rename="camel"):
    name: str
    type: str = ""
    phase: str = "Pending"
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    last_error: str = ""
    demand: _Demand | None = None


class _Lookups(msgspec.Struct):
    queried: int = 0
    hit: int = 0


class _ShareHits(msgspec.Struct):
    uid: str
    hits: int = 0


class _TenantBytes(msgspec.Struct, rename="camel"):
    tenant: str
    tier: str = ""
    used_bytes: int = 0
    over_hard: bool = False


class _TenantLookups(msgspec.Struct):
    tenant: str
    queried: int = 0
    hit: int = 0
    denied: int = 0


class _TenantErased(msgspec.Struct, rename="camel"):
    uid: str
    key_version: int = 0


class _Answer(msgspec.Struct, rename="camel"):
    uid: str
    phase: str = ""
    reason: str = ""
    message: str = ""
    blocks_done: int = 0
    blocks_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    blocks_missing: int = 0


class _Weights(msgspec.Struct, rename="camel"):
    uid: str
    generation: int = 0
    revision: str = ""
    digest: str = ""
    state: str = ""
    size_bytes: int = 0
    staged_bytes: int = 0
    in_use: bool = False
    reason: str = ""
    message: str = ""


class _PoolNodeStatus(msgspec.Struct, rename="camel"):
    observed_generation: int = 0
    observed_revision: str = ""
    conditions: list[_Condition] = []
    tiers: list[_StatusTier] = []
    lookups: _Lookups = msgspec.field(default_factory=_Lookups)
    memory_bytes: int = 0
    shares: list[_ShareHits] = []
    tenants: list[_TenantBytes] = []
    tenant_lookups: list[_TenantLookups] = []
    evicted_per_minute: int = 0
    directory_backlog: int = 0
    erased: list[_TenantErased] = []
    orders: list[_Answer] = []
    models: list[_Weights] = []


class _PoolNode(msgspec.Struct):
    metadata: _Meta
    spec: _PoolNodeSpec
    status: _PoolNodeStatus = msgspec.field(default_factory=_PoolNodeStatus)


class _Keyed(msgspec.Struct):
    metadata: _Meta
    data: dict[str, str] = {}


def parse_labelled(raw: bytes) -> NodeSeen:
    """Read the metadata of a Namespace."""
    return _labelled(msgspec.json.decode(raw, type=_Labelled).metadata)


def parse_node(raw: bytes) -> NodeSeen:
    """Read a Node: its labels and the huge pages that its kubelet offers."""
    seen = msgspec.json.decode(raw, type=_Node)
    offered = seen.status.allocatable
    if not offered:
        return _labelled(seen.metadata)
    return _labelled(seen.metadata, {intern(n): _bytes(q) for n, q in offered.items() if n.startswith("hugepages-")})


def _labelled(meta: _Meta, pages_bytes: Mapping[str, int] | None = None) -> NodeSeen:
    labels = {intern(k): intern(v) for k, v in meta.labels.items()}
    return NodeSeen(meta.name, meta.uid, version_of(meta.resource_version), labels, pages_bytes)


def _bytes(quantity: str) -> int:
    """Return none for a quantity that is no whole number of bytes; it must not end the watch of Nodes."""
    try:
        return units.parse_quantity(quantity) if quantity != "0" else 0
    except InvalidInputError:
        return 0


def parse_pool_node(raw: bytes) -> PoolNodeSeen:
    """Read a KVPoolNode."""
    seen = msgspec.json.decode(raw, type=_PoolNode)
    meta, spec, status = seen.metadata, seen.spec, seen.status
    tiers_digest, memory_tier_bytes = _spec_tiers(bytes(spec.tiers))
    return PoolNodeSeen(
        key=meta.name,
        uid=meta.uid,
        version=version_of(meta.resource_version),
        pool=intern(spec.pool_ref),
        node=spec.node_name,
        is_marked=bool(meta.owner_references)
        and kinds.pool_node_labels(spec.pool_ref, spec.node_name).items() <= meta.labels.items(),
        revision=intern(spec.revision),
        tiers_digest=tiers_digest,
        memory_tier_bytes=memory_tier_bytes,
        drain=DrainSeen(spec.drain.requested, intern(spec.drain.mode), spec.drain.deadline),
        is_deleting=meta.deletion_timestamp is not None,
        observed_revision=intern(status.observed_revision),
        conditions=_conditions(tuple((c.type, c.status, c.reason, c.message) for c in status.conditions)),
        tiers=tuple(_tier(t) for t in status.tiers),
        queried_blocks=status.lookups.queried,
        hit_blocks=status.lookups.hit,
        memory_bytes=status.memory_bytes,
        share_hits=tuple((intern(s.uid), s.hits) for s in status.shares),
        tenants=tuple(TenantSeen(intern(t.tenant), intern(t.tier), t.used_bytes, t.over_hard) for t in status.tenants),
        tenant_lookups=tuple(TenantAsked(intern(t.tenant), t.queried, t.hit, t.denied) for t in status.tenant_lookups),
        evicted_per_minute=status.evicted_per_minute,
        directory_backlog=status.directory_backlog,
        orders=tuple(intern(o.uid) for o in spec.orders),
        answers={intern(a.uid): _answer(a) for a in status.orders},
        models=_spec_models(bytes(spec.models)),
        weights=tuple(_weights(w) for w in status.models),
        is_heard=status.observed_generation >= meta.generation,
        erased={intern(e.uid): e.key_version for e in status.erased} or _NONE,
        created=meta.creation_timestamp,
    )


def _answer(answer: _Answer) -> AnswerSeen:
    counts = (answer.blocks_done, answer.blocks_total, answer.bytes_done, answer.bytes_total, answer.blocks_missing)
    return AnswerSeen(intern(answer.phase), intern(answer.reason), answer.message, *counts)


def _weights(seen: _Weights) -> ModelSeen:
    return ModelSeen(
        uid=intern(seen.uid),
        generation=seen.generation,
        revision=intern(seen.revision),
        digest=intern(seen.digest),
        state=intern(seen.state),
        size_bytes=seen.size_bytes,
        staged_bytes=seen.staged_bytes,
        in_use=seen.in_use,
        reason=intern(seen.reason),
        message=seen.message,
    )


def parse_scope_secret(raw: bytes) -> ScopeSecretSeen:
    """Read which keys a scope Secret has; the bytes of those that are not wrapped are dropped here."""
    seen = msgspec.json.decode(raw, type=_Keyed)
    meta = seen.metadata
    owner = meta.annotations.get(names.ANNOTATION_OWNER_UID, "")
    version = version_of(meta.resource_version)
    wrapped = {entry: _decoded(text) for entry, text in seen.data.items() if entry.endswith(DATA_SUFFIX)}
    return ScopeSecretSeen(meta.name, meta.uid, version, meta.resource_version, owner, frozenset(seen.data), wrapped)


def _decoded(text: str) -> str:
    """Text of a Secret's entry; empty when it is none."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError:
        return ""


def parse_config_map(raw: bytes) -> ConfigMapSeen:
    """Read what a ConfigMap holds: its digest, its entries, and the template of agents or of Redis."""
    seen = msgspec.json.decode(raw, type=_Keyed)
    meta, data = seen.metadata, seen.data
    template = data.get(names.AGENT_TEMPLATE_ENTRY) or data.get(names.REDIS_TEMPLATE_ENTRY, "")
    return ConfigMapSeen(
        meta.name, meta.uid, version_of(meta.resource_version), digest(data), frozenset(data), template
    )


def parse_declared(kind: Kind, body: Mapping[str, Any]) -> Declared[Any]:
    """Read an administrator's object; one that is not valid is kept with the reason, so that its status can state it.

    The API server has checked it by the rules of the day on which it was written; today's may be stricter.
    """
    meta = ObjectMeta.model_validate(body["metadata"])
    status = body.get("status") or {}
    manifest = {
        "kind": kind.name,
        "apiVersion": kind.api_version,
        "metadata": body["metadata"],
        "spec": body.get("spec") or {},
    }
    error = _explain(validate(manifest))
    try:
        model = parse_as(MODELS[kind], manifest)
    except InvalidInputError as e:
        return Declared(kind, meta, None, status, stored_conditions(status), error or str(e))
    return Declared(kind, meta, model, status, stored_conditions(status), error)


def parse_declared_raw(kind: Kind, raw: bytes) -> Declared[Any]:
    """Read an administrator's object from the bytes of an answer."""
    return parse_declared(kind, msgspec.json.decode(raw))


def stored_conditions(status: Mapping[str, Any]) -> tuple[Condition, ...]:
    """Conditions as stored; unreadable ones are left out and so written again."""
    found = []
    for raw in status.get("conditions") or ():
        try:
            found.append(Condition.model_validate(raw))
        except ValidationError:
            continue
    return tuple(found)


def _explain(problems: Sequence[Problem]) -> str:
    """Fields and reasons in one line; empty when there are none."""
    listed = [str(problem) for problem in problems[:_ERRORS_MAX]]
    more = [f"and {len(problems) - _ERRORS_MAX} more"] if len(problems) > _ERRORS_MAX else []
    return "; ".join(listed + more)


_NONE: Final[Mapping[str, int]] = MappingProxyType({})


@lru_cache(maxsize=1024)  # Most agents report the same.
def _conditions(reported: tuple[tuple[str, str, str, str], ...]) -> Mapping[str, ConditionSeen]:
    """Type, status, reason and message of each, as one value for all agents that report it."""
    return MappingProxyType(
        {intern(type_): ConditionSeen(intern(status), intern(reason), text) for type_, status, reason, text in reported}
    )


def _tier(tier: _StatusTier) -> TierSeen:
    demand = tier.demand
    return _shared(
        TierSeen(
            name=intern(tier.name),
            type=intern(tier.type),
            phase=intern(tier.phase),
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            last_error=tier.last_error,
            demand=None
            if demand is None
            else DemandSeen(demand.gain_permille, demand.loss_permille, demand.held_bytes),
            blocks=units.coarse(tier.blocks),
        )
    )


@lru_cache(maxsize=4096)  # Empty tiers are alike, and figures are rounded.
def _shared(tier: TierSeen) -> TierSeen:
    """Keep equal tiers once."""
    return tier


@lru_cache(maxsize=256)  # All nodes of a pool have the same tiers.
def _spec_tiers(raw: bytes) -> tuple[str, int]:
    """Digest of a KVPoolNode's tiers, and the sum of those that take the node's memory."""
    tiers = msgspec.json.decode(raw, type=list[_SpecTier])
    memory_bytes = sum(t.capacity_bytes for t in tiers if takes_node_memory(t.type, str(t.cxl.get("mode", ""))))
    return digest(msgspec.json.decode(raw)), memory_bytes


@lru_cache(maxsize=256)  # Nodes of a pool mostly have the same weights.
def _spec_models(raw: bytes) -> Mapping[str, str]:
    """Digests of a KVPoolNode's orders for weights, by uid of the KVModelCache."""
    found = msgspec.json.decode(raw, type=list[dict[str, Any]])
    return MappingProxyType({order["uid"]: model_digest(order) for order in found if "uid" in order})


def model_digest(order: Mapping[str, Any]) -> str:
    """Name an order for weights by all but its peers: those change with every node that has got them."""
    return digest({key: value for key, value in order.items() if key != "peers"})


def takes_node_memory(type_: str, cxl_mode: str) -> bool:
    """True for tiers that are part of what the kernel counts as the node's memory."""
    return type_ == TierType.HOST_DRAM or (type_ == TierType.CXL and cxl_mode == CxlMode.NUMA_NODE)
