"""Everything that the operator has seen, and whether that calls for a new plan or only for new statuses."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.models.model_cache import KVModelCache
from kvstrata_api.models.operation import KVOperation
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_kube.store import Store
from kvstrata_kube.watch import Source
from kvstrata_operator.observe import kinds, parse, parse_workloads
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.records import (
    AgentPodSeen,
    ConfigMapSeen,
    Declared,
    KeksSeen,
    MadeSeen,
    NodeSeen,
    PoolNodeSeen,
    ScopeSecretSeen,
    StatefulSetSeen,
)

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Change(Enum):
    """What parts of the operator report to each other."""

    ORDERS = auto()
    """Something that a plan depends on is not what it was."""
    STATUSES = auto()
    """Something that only statuses depend on is not what it was."""
    STALE = auto()
    """What was seen may be older than the API server."""


class ChangeBus:
    """Carries changes from whoever sees them to whoever acts on them. Listeners are called at once, in order."""

    def __init__(self) -> None:
        self._listeners: dict[Change, list[Callable[[], None]]] = {change: [] for change in Change}

    def listen(self, change: Change, listener: Callable[[], None]) -> None:
        """Call `listener` on every such change from now on."""
        self._listeners[change].append(listener)

    def orders_changed(self) -> None:
        """Report that a new plan is needed."""
        self._publish(Change.ORDERS)

    def statuses_changed(self) -> None:
        """Report that only statuses need be compared again."""
        self._publish(Change.STATUSES)

    def stale(self) -> None:
        """Report that what was seen may be out of date."""
        self._publish(Change.STALE)

    def _publish(self, change: Change) -> None:
        for listener in self._listeners[change]:
            listener()


@dataclass(frozen=True, slots=True)
class Setting:
    """What decisions need of the command line."""

    namespace: str
    """Where Secrets, Leases, connection ConfigMaps and agents live."""
    socket_template: str
    """Path of an agent's socket on its node; `{pool}` stands for the pool's name."""
    agent_template: str = ""
    """ConfigMap with the pod template of agents; empty where others run them."""
    redis_template: str = ""
    """ConfigMap with the StatefulSet of Redis; empty where somebody else runs it."""
    redis_mode: str = ""
    """`Embedded` or `External`, as the release runs Redis; empty where it is not declared."""


@dataclass(frozen=True, slots=True)
class PoolsSeen:
    """Pools, what is asked of them, and their nodes."""

    declared: Mapping[str, Declared[KVPool]] = field(default_factory=lambda: _NOTHING)
    operations: Mapping[str, Declared[KVOperation]] = field(default_factory=lambda: _NOTHING)
    model_caches: Mapping[str, Declared[KVModelCache]] = field(default_factory=lambda: _NOTHING)
    nodes: Mapping[str, NodeSeen] = field(default_factory=lambda: _NOTHING)
    pool_nodes: Mapping[str, PoolNodeSeen] = field(default_factory=lambda: _NOTHING)
    alive: frozenset[str] = frozenset()
    """KVPoolNodes whose agent's Lease is current."""
    silent: frozenset[str] = frozenset()
    """KVPoolNodes whose agent's Lease has run out or is gone."""
    failures: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Last error of what was tried for a pool, by pool."""


@dataclass(frozen=True, slots=True)
class TrustSeen:
    """Who may read what, and the keys for it."""

    tenants: Mapping[str, Declared[KVTenant]] = field(default_factory=lambda: _NOTHING)
    domains: Mapping[str, Declared[KVTrustDomain]] = field(default_factory=lambda: _NOTHING)
    shares: Mapping[str, Declared[KVPrefixShare]] = field(default_factory=lambda: _NOTHING)
    namespaces: Mapping[str, NodeSeen] = field(default_factory=lambda: _NOTHING)
    secrets: Mapping[str, ScopeSecretSeen] = field(default_factory=lambda: _NOTHING)
    keks: KeksSeen = field(default_factory=KeksSeen)
    """Key-encryption keys; none before they were read."""


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """What runs agents and Redis, and the ConfigMaps that they and engines read."""

    config_maps: Mapping[str, ConfigMapSeen] = field(default_factory=lambda: _NOTHING)
    daemon_sets: Mapping[str, MadeSeen] = field(default_factory=lambda: _NOTHING)
    budgets: Mapping[str, MadeSeen] = field(default_factory=lambda: _NOTHING)
    pods: Mapping[str, AgentPodSeen] = field(default_factory=lambda: _NOTHING)
    """Pods of agents, and that of Redis."""
    stateful_sets: Mapping[str, StatefulSetSeen] = field(default_factory=lambda: _NOTHING)
    """That of Redis alone."""


@dataclass(frozen=True, slots=True)
class View:
    """The world as a decision sees it. Read only; valid until the next await."""

    pools: PoolsSeen = field(default_factory=PoolsSeen)
    trust: TrustSeen = field(default_factory=TrustSeen)
    cluster: ClusterSeen = field(default_factory=ClusterSeen)


class World:
    """One store for each kind."""

    def __init__(self, changes: ChangeBus) -> None:
        self._changes = changes
        self._followers: dict[Kind, Callable[[Any, Any], None]] = {}
        every = (*kinds.ADMINISTRATOR_KINDS, *PARSERS)
        self.stores: dict[Kind, Store[Any]] = {kind: Store(partial(self._changed, kind)) for kind in every}

    def follow(self, kind: Kind, follower: Callable[[Any, Any], None]) -> None:
        """Call `follower` with the record of a kind before and after each change, ahead of the bus."""
        self._followers[kind] = follower

    def put_raw(self, kind: Kind, raw: bytes) -> None:
        """Take in what a write of ours made, before any event brings it; kinds that nobody reads are left out."""
        if kind in PARSERS:
            self.stores[kind].put(PARSERS[kind](raw))
        elif kind in kinds.ADMINISTRATOR_KINDS:
            self.stores[kind].put(parse.parse_declared_raw(kind, raw))

    @property
    def unsynced(self) -> tuple[Kind, ...]:
        """Kinds that no complete list has come in of; nothing may be decided before this is empty."""
        return tuple(kind for kind, store in self.stores.items() if not store.is_synced)

    def view(self, alive: frozenset[str], silent: frozenset[str], keks: KeksSeen, failures: Mapping[str, str]) -> View:
        """Give the present to a decision, without copying it."""
        of = {kind: store.items for kind, store in self.stores.items()}
        return View(
            PoolsSeen(
                declared=of[kinds.POOL],
                operations=of[kinds.OPERATION],
                model_caches=of[kinds.MODEL_CACHE],
                nodes=of[kinds.NODE],
                pool_nodes=of[kinds.POOL_NODE],
                alive=alive,
                silent=silent,
                failures=failures,
            ),
            TrustSeen(
                tenants=of[kinds.TENANT],
                domains=of[kinds.DOMAIN],
                shares=of[kinds.SHARE],
                namespaces=of[kinds.NAMESPACE],
                secrets=of[kinds.SECRET],
                keks=keks,
            ),
            ClusterSeen(
                config_maps=of[kinds.CONFIG_MAP],
                daemon_sets=of[kinds.DAEMON_SET],
                budgets=of[kinds.BUDGET],
                pods=of[kinds.POD],
                stateful_sets=of[kinds.STATEFUL_SET],
            ),
        )

    def _changed(self, kind: Kind, old: Any, new: Any) -> None:
        """Publish every change for a new plan, but a mere status of a KVPoolNode for new statuses alone."""
        if kind in self._followers:
            self._followers[kind](old, new)
        is_status = isinstance(old, PoolNodeSeen) and isinstance(new, PoolNodeSeen) and _has_same_orders(old, new)
        (self._changes.statuses_changed if is_status else self._changes.orders_changed)()


def _has_same_orders(old: PoolNodeSeen, new: PoolNodeSeen) -> bool:
    """True when what the operator ordered is unchanged, no order waits for an answer, and Nodes keep their labels."""
    return not new.drain.requested and _orders(old) == _orders(new)


def _orders(seen: PoolNodeSeen) -> tuple[object, ...]:
    orders = (seen.uid, seen.pool, seen.node, seen.revision, seen.tiers_digest, seen.drain)
    return (*orders, seen.orders, seen.models, seen.staged, seen.is_marked, seen.is_deleting)


PARSERS: Final[Mapping[Kind, Callable[[bytes], Any]]] = {
    kinds.NODE: parse.parse_node,
    kinds.NAMESPACE: parse.parse_labelled,
    kinds.POOL_NODE: parse.parse_pool_node,
    kinds.SECRET: parse.parse_scope_secret,
    kinds.CONFIG_MAP: parse.parse_config_map,
    kinds.DAEMON_SET: parse_workloads.parse_daemon_set,
    kinds.STATEFUL_SET: parse_workloads.parse_stateful_set,
    kinds.BUDGET: parse_workloads.parse_made,
    kinds.POD: parse_workloads.parse_agent_pod,
}
"""Kinds that are watched; the administrator's kinds come through the handlers and the resync."""

_METADATA_ONLY: Final = frozenset({kinds.NAMESPACE, kinds.DAEMON_SET, kinds.BUDGET})
"""Of these names, labels and annotations are all that a decision reads."""


def sources(namespace: str) -> dict[Kind, Source[Any]]:
    """What is watched: Nodes for their labels and huge pages, labels of Namespaces, and what we made ourselves."""
    selectors = {
        kinds.POOL_NODE: names.LABEL_POOL,
        kinds.SECRET: names.LABEL_SCOPE,
        kinds.CONFIG_MAP: _component_in(kinds.CONFIG_MAPS),
        kinds.DAEMON_SET: _labelled(kinds.WORKLOAD_LABELS),
        kinds.BUDGET: _labelled(kinds.WORKLOAD_LABELS),
        kinds.POD: f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{_component_in(kinds.PODS)}",
    }
    # By name, which is all that the chart lets us see of StatefulSets.
    fields = {kinds.STATEFUL_SET: f"metadata.name={names.REDIS}"}
    return {
        kind: Source(
            kind.path(namespace),
            parser,
            {
                **({"labelSelector": selectors[kind]} if kind in selectors else {}),
                **({"fieldSelector": fields[kind]} if kind in fields else {}),
            },
            is_metadata_only=kind in _METADATA_ONLY,
        )
        for kind, parser in PARSERS.items()
    }


def _labelled(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _component_in(values: Iterable[str]) -> str:
    return f"{kinds.LABEL_COMPONENT} in ({','.join(values)})"
