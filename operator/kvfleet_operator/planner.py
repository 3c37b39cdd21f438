"""Start here: how the operator decides. Pure, level-triggered: the whole view in, a plan out, nothing remembered.

`plan_orders` says what should be made, changed and removed; `plan_statuses` says what people should read. Both can be
asked at any time and as often as one likes; asked again after their actions were carried out, they ask for nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvfleet_api.models.pool import KVPool
from kvfleet_api.shares import is_open, share_end
from kvfleet_api.trust import KEY_VERSION, ScopeKind
from kvfleet_operator import claims, erasure, key_versions, lifecycle, liveness, objects, scope_keys
from kvfleet_operator.actions import Action, Apply, Create, Delete
from kvfleet_operator.digest import digest
from kvfleet_operator.kinds import Ref
from kvfleet_operator.placement import Placement, place
from kvfleet_operator.reconcile import next_deadline, reconcile
from kvfleet_operator.records import Declared, PoolNodeSeen
from kvfleet_operator.world import View


@dataclass(frozen=True, slots=True)
class Setting:
    """What the operator was started with."""

    namespace: str
    """Where Secrets, Leases and connection ConfigMaps live."""
    socket_template: str
    """Path of an agent's socket on its node; `{pool}` stands for the pool's name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to look again though nothing has happened."""

    actions: tuple[Action, ...]
    wake_at: datetime | None = None


def plan_orders(view: View, setting: Setting, now: datetime) -> Plan:
    """Plan everything but statuses."""
    placements = placements_of(view)
    by_pool = nodes_by_pool(view.pool_nodes.values())
    actions: list[Action] = list(liveness.mark_silent(view.pool_nodes, view.silent))
    for name, pool in sorted(view.pools.items()):
        actions += _plan_pool(view, pool, placements.get(name), by_pool[name], setting, now)
    actions += _plan_keys(view, setting.namespace, now)
    return Plan(tuple(actions), _wake_at(view, now))


def placements_of(view: View) -> dict[str, Placement]:
    """Place every pool whose spec is accepted, the oldest first."""
    return place((p for p in view.pools.values() if not p.error), view.nodes)


def nodes_by_pool(nodes: Iterable[PoolNodeSeen]) -> defaultdict[str, dict[str, PoolNodeSeen]]:
    """Index KVPoolNodes by pool, then by node name."""
    found: defaultdict[str, dict[str, PoolNodeSeen]] = defaultdict(dict)
    for node in nodes:
        found[node.pool][node.node] = node
    return found


def _plan_pool(
    view: View,
    pool: Declared[KVPool],
    placement: Placement | None,
    seen: Mapping[str, PoolNodeSeen],
    setting: Setting,
    now: datetime,
) -> tuple[Action, ...]:
    # A pool that is deleted while it is paused goes all the same: a finalizer must never hang.
    reachable = {n.key for n in seen.values() if n.key in view.alive and n.node in view.nodes}
    if pool.is_deleting:
        return lifecycle.finish(pool, seen, reachable, now) + _forget_connection(view, pool, setting)
    if pool.model is None or placement is None or pool.model.spec.paused:
        return ()
    held = lifecycle.hold(pool)
    if held:
        return held
    return reconcile(pool, placement, seen, reachable, now) + _plan_connection(view, pool, pool.model, setting)


def _plan_connection(view: View, pool: Declared[KVPool], model: KVPool, setting: Setting) -> tuple[Action, ...]:
    """Tell engine pods how to attach."""
    ref = objects.connection_ref(pool.key, setting.namespace)
    content = objects.connection_data(model, setting.socket_template)
    seen = view.config_maps.get(ref.name)
    body = objects.connection_body(ref, pool.meta, content)
    if seen is None:
        return (Create(ref, pool.key, body=body),)
    return () if seen.content_digest == digest(content) else (Apply(ref, pool.key, body=body),)


def _forget_connection(view: View, pool: Declared[KVPool], setting: Setting) -> tuple[Action, ...]:
    """Tell nobody any more how to attach; the garbage collector would need up to half a minute."""
    ref = objects.connection_ref(pool.key, setting.namespace)
    seen = view.config_maps.get(ref.name)
    return (Delete(ref, pool.key, uid=seen.uid),) if seen else ()


def _plan_keys(view: View, namespace: str, now: datetime) -> tuple[Action, ...]:
    """Make the keys of all scopes, and remove those that have had their time."""
    actions: list[Action] = []
    for scope, owner, version in scopes(view, namespace, now):
        secret = view.secrets.get(_scope_secret(scope, owner, namespace).name)
        actions += scope_keys.plan_key(owner, scope, version, secret, namespace)
        data_key = scope_keys.plan_data_key(owner, scope, version, secret, view.keks, namespace)
        actions += data_key or key_versions.plan_retirement(owner, scope, secret, namespace)
    open_shares = (s for s in view.shares.values() if s.model is not None and is_open(s.model, now))
    kept = {_scope_secret(ScopeKind.SHARE, share, namespace).name: share.uid for share in open_shares}
    actions += key_versions.plan_orphans(kept, view.secrets, namespace)
    actions += scope_keys.plan_kek(view.secrets.values(), view.keks, namespace)
    changing = {action.ref.name for action in actions}  # One write at a time: a second one would be refused.
    idle = (s for s in view.secrets.values() if s.key not in changing)
    actions += scope_keys.plan_rewrapping(idle, view.keks, namespace)
    return tuple(actions)


def _scope_secret(scope: ScopeKind, owner: Declared[Any], namespace: str) -> Ref:
    return objects.scope_secret_ref(scope, objects.scope_name(owner.meta), namespace)


def scopes(view: View, namespace: str, now: datetime) -> Iterable[tuple[ScopeKind, Declared[Any], int]]:
    """Every scope with its owner and the key version that it should have."""
    for _, tenant in sorted(view.tenants.items()):
        secret = view.secrets.get(_scope_secret(ScopeKind.TENANT, tenant, namespace).name)
        yield ScopeKind.TENANT, tenant, erasure.key_version(tenant, secret)
    tenants = claims.models_of(view.tenants)
    for _, domain in sorted(view.domains.items()):
        if domain.model is not None:
            members = key_versions.members(domain.model, tenants)
            yield ScopeKind.DOMAIN, domain, key_versions.domain_key_version(domain, members)
    declared = claims.declared_of(tenants, view)
    for _, share in sorted(view.shares.items()):
        is_wanted = share.model is not None and is_open(share.model, now)
        if is_wanted and claims.share_fault(share, declared, view.pools) is None:
            yield ScopeKind.SHARE, share, KEY_VERSION


def _wake_at(view: View, now: datetime) -> datetime | None:
    """Return the next moment at which time alone changes a plan."""
    moments = [next_deadline(n for n in view.pool_nodes.values() if n.drain.requested)]
    moments += [lifecycle.next_step(pool, now) for pool in view.pools.values() if pool.is_deleting]
    moments += [share_end(s.model) for s in view.shares.values() if s.model is not None]
    return min((m for m in moments if m is not None and m > now), default=None)
