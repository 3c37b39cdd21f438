"""Everything that the operator has seen, and whether that calls for a new plan or only for new statuses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from kvstrata_api.models.operation import KVOperation
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_kube.store import Store
from kvstrata_operator.decide.incremental import Census
from kvstrata_operator.observe import kinds
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

FOLLOWED: Final = (
    kinds.NODE,
    kinds.NAMESPACE,
    kinds.POOL_NODE,
    kinds.SECRET,
    kinds.CONFIG_MAP,
    kinds.DAEMON_SET,
    kinds.STATEFUL_SET,
    kinds.BUDGET,
    kinds.POD,
)
"""Kinds that `watch` follows; the administrator's kinds come through the handlers and the resync."""

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class View:
    """The world as a decision sees it. Read only; valid until the next await."""

    pools: Mapping[str, Declared[KVPool]] = field(default_factory=lambda: _NOTHING)
    tenants: Mapping[str, Declared[KVTenant]] = field(default_factory=lambda: _NOTHING)
    domains: Mapping[str, Declared[KVTrustDomain]] = field(default_factory=lambda: _NOTHING)
    shares: Mapping[str, Declared[KVPrefixShare]] = field(default_factory=lambda: _NOTHING)
    operations: Mapping[str, Declared[KVOperation]] = field(default_factory=lambda: _NOTHING)
    nodes: Mapping[str, NodeSeen] = field(default_factory=lambda: _NOTHING)
    namespaces: Mapping[str, NodeSeen] = field(default_factory=lambda: _NOTHING)
    pool_nodes: Mapping[str, PoolNodeSeen] = field(default_factory=lambda: _NOTHING)
    secrets: Mapping[str, ScopeSecretSeen] = field(default_factory=lambda: _NOTHING)
    config_maps: Mapping[str, ConfigMapSeen] = field(default_factory=lambda: _NOTHING)
    daemon_sets: Mapping[str, MadeSeen] = field(default_factory=lambda: _NOTHING)
    budgets: Mapping[str, MadeSeen] = field(default_factory=lambda: _NOTHING)
    pods: Mapping[str, AgentPodSeen] = field(default_factory=lambda: _NOTHING)
    """Pods of agents, and that of Redis."""
    stateful_sets: Mapping[str, StatefulSetSeen] = field(default_factory=lambda: _NOTHING)
    """That of Redis alone."""
    alive: frozenset[str] = frozenset()
    """KVPoolNodes whose agent's Lease is current."""
    silent: frozenset[str] = frozenset()
    """KVPoolNodes whose agent's Lease has run out or is gone."""
    keks: KeksSeen = field(default_factory=KeksSeen)
    """Key-encryption keys; none while they were not looked at."""
    failures: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Last error of what was tried for a pool, by pool."""
    census: Census | None = field(default=None, compare=False)
    """What follows from pools and nodes, where somebody keeps it up to date; see `census_of`."""


def census_of(view: View) -> Census:
    """Give the census that the view brings along, or take one."""
    if view.census is not None:
        return view.census
    taken = Census(view.pools, view.nodes, view.pool_nodes, view.pods)
    taken.bring_up_to_date(view.alive, view.silent)
    return taken


class World:
    """One store for each kind."""

    def __init__(self, plan_again: Callable[[], None], status_again: Callable[[], None]) -> None:
        """Call `plan_again` for every change but a mere status of a KVPoolNode, which calls `status_again`."""

        def told(kind: Kind, old: Any, new: Any) -> None:
            counting = self._counting.get(kind)
            if counting is not None:
                counting(old, new)
            only_status = isinstance(old, PoolNodeSeen) and isinstance(new, PoolNodeSeen) and _same_orders(old, new)
            (status_again if only_status else plan_again)()

        every = (*kinds.ADMINISTRATOR_KINDS, *FOLLOWED)
        self.stores: dict[Kind, Store[Any]] = {kind: Store(partial(told, kind)) for kind in every}
        items = {kind: store.items for kind, store in self.stores.items()}
        self._census = Census(items[kinds.POOL], items[kinds.NODE], items[kinds.POOL_NODE], items[kinds.POD])
        self._counting: dict[Kind, Callable[[Any, Any], None]] = {
            kinds.POOL: self._census.pool_changed,
            kinds.NODE: self._census.node_changed,
            kinds.POOL_NODE: self._census.pool_node_changed,
            kinds.POD: self._census.pod_changed,
        }

    @property
    def unsynced(self) -> tuple[Kind, ...]:
        """Kinds that no complete list has come in of; nothing may be decided before this is empty."""
        return tuple(kind for kind, store in self.stores.items() if not store.is_synced)

    def view(self, alive: frozenset[str], silent: frozenset[str], keks: KeksSeen, failures: Mapping[str, str]) -> View:
        """Give the present to a decision, without copying it."""
        by_kind = {kind: store.items for kind, store in self.stores.items()}
        self._census.bring_up_to_date(alive, silent)
        return View(
            pools=by_kind[kinds.POOL],
            tenants=by_kind[kinds.TENANT],
            domains=by_kind[kinds.DOMAIN],
            shares=by_kind[kinds.SHARE],
            operations=by_kind[kinds.OPERATION],
            nodes=by_kind[kinds.NODE],
            namespaces=by_kind[kinds.NAMESPACE],
            pool_nodes=by_kind[kinds.POOL_NODE],
            secrets=by_kind[kinds.SECRET],
            config_maps=by_kind[kinds.CONFIG_MAP],
            daemon_sets=by_kind[kinds.DAEMON_SET],
            stateful_sets=by_kind[kinds.STATEFUL_SET],
            budgets=by_kind[kinds.BUDGET],
            pods=by_kind[kinds.POD],
            alive=alive,
            silent=silent,
            keks=keks,
            failures=failures,
            census=self._census,
        )


def _same_orders(old: PoolNodeSeen, new: PoolNodeSeen) -> bool:
    """True when what the operator ordered is unchanged, and no order waits for the agent's answer."""
    return not new.drain.requested and _orders(old) == _orders(new)


def _orders(seen: PoolNodeSeen) -> tuple[object, ...]:
    orders = (seen.uid, seen.pool, seen.node, seen.revision, seen.tiers_digest, seen.drain)
    return (*orders, seen.orders, seen.is_marked, seen.is_deleting)
