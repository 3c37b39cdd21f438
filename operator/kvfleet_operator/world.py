"""Everything that the operator has seen, and whether that calls for a new plan or only for new statuses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kvfleet_api.models.pool import KVPool
from kvfleet_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvfleet_kube.store import Store
from kvfleet_operator import kinds
from kvfleet_operator.kinds import Kind
from kvfleet_operator.records import ConfigMapSeen, Declared, KeksSeen, NodeSeen, PoolNodeSeen, ScopeSecretSeen

FOLLOWED: Final = (kinds.NODE, kinds.NAMESPACE, kinds.POOL_NODE, kinds.SECRET, kinds.CONFIG_MAP)
"""Kinds that `watch` follows; the administrator's kinds come through the handlers and the resync."""

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class View:
    """The world as a decision sees it. Read only; valid until the next await."""

    pools: Mapping[str, Declared[KVPool]] = field(default_factory=lambda: _NOTHING)
    tenants: Mapping[str, Declared[KVTenant]] = field(default_factory=lambda: _NOTHING)
    domains: Mapping[str, Declared[KVTrustDomain]] = field(default_factory=lambda: _NOTHING)
    shares: Mapping[str, Declared[KVPrefixShare]] = field(default_factory=lambda: _NOTHING)
    nodes: Mapping[str, NodeSeen] = field(default_factory=lambda: _NOTHING)
    namespaces: Mapping[str, NodeSeen] = field(default_factory=lambda: _NOTHING)
    pool_nodes: Mapping[str, PoolNodeSeen] = field(default_factory=lambda: _NOTHING)
    secrets: Mapping[str, ScopeSecretSeen] = field(default_factory=lambda: _NOTHING)
    config_maps: Mapping[str, ConfigMapSeen] = field(default_factory=lambda: _NOTHING)
    alive: frozenset[str] = frozenset()
    """KVPoolNodes whose agent's Lease is current."""
    silent: frozenset[str] = frozenset()
    """KVPoolNodes whose agent's Lease has run out or is gone."""
    keks: KeksSeen = field(default_factory=KeksSeen)
    """Key-encryption keys; none while they were not looked at."""
    failures: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Last error of what was tried for a pool, by pool."""


class World:
    """One store for each kind."""

    def __init__(self, plan_again: Callable[[], None], status_again: Callable[[], None]) -> None:
        """Call `plan_again` for every change but a mere status of a KVPoolNode, which calls `status_again`."""

        def told(old: Any, new: Any) -> None:
            only_status = isinstance(old, PoolNodeSeen) and isinstance(new, PoolNodeSeen) and _same_orders(old, new)
            (status_again if only_status else plan_again)()

        self.stores: dict[Kind, Store[Any]] = {kind: Store(told) for kind in (*kinds.ADMINISTRATOR_KINDS, *FOLLOWED)}

    @property
    def unsynced(self) -> tuple[Kind, ...]:
        """Kinds that no complete list has come in of; nothing may be decided before this is empty."""
        return tuple(kind for kind, store in self.stores.items() if not store.is_synced)

    def view(self, alive: frozenset[str], silent: frozenset[str], keks: KeksSeen, failures: Mapping[str, str]) -> View:
        """Give the present to a decision, without copying it."""
        by_kind = {kind: store.items for kind, store in self.stores.items()}
        return View(
            pools=by_kind[kinds.POOL],
            tenants=by_kind[kinds.TENANT],
            domains=by_kind[kinds.DOMAIN],
            shares=by_kind[kinds.SHARE],
            nodes=by_kind[kinds.NODE],
            namespaces=by_kind[kinds.NAMESPACE],
            pool_nodes=by_kind[kinds.POOL_NODE],
            secrets=by_kind[kinds.SECRET],
            config_maps=by_kind[kinds.CONFIG_MAP],
            alive=alive,
            silent=silent,
            keks=keks,
            failures=failures,
        )


def _same_orders(old: PoolNodeSeen, new: PoolNodeSeen) -> bool:
    """True when what the operator ordered is unchanged, and no order waits for the agent's answer."""
    return not new.drain.requested and _orders(old) == _orders(new)


def _orders(seen: PoolNodeSeen) -> tuple[object, ...]:
    return (seen.uid, seen.pool, seen.node, seen.revision, seen.tiers_digest, seen.drain, seen.is_deleting)
