"""Start here: how the operator decides. Pure, level-triggered: the whole view in, a plan out, nothing remembered.

`plan_orders` says what should be made, changed and removed; `plan_statuses` says what people should read. Both can be
asked at any time and as often as one likes; asked again after their actions were carried out, they ask for nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata_api.models.pool import KVPool
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.shares import is_open, share_end
from kvstrata_api.trust import ScopeKind
from kvstrata_operator.decide.agents.agents import agents_of, forget_agents, plan_agents
from kvstrata_operator.decide.directory import redis
from kvstrata_operator.decide.incremental import Census, Members
from kvstrata_operator.decide.operations import erase_operation, operations
from kvstrata_operator.decide.operations.operations import Operation
from kvstrata_operator.decide.plan import objects
from kvstrata_operator.decide.plan.actions import Action, Create, Delete, Merge
from kvstrata_operator.decide.pools import lifecycle, liveness
from kvstrata_operator.decide.pools.reconcile import Stands, Stays, Wants, drain_deadlines, reconcile
from kvstrata_operator.decide.trust import erasure, key_versions, scope_keys
from kvstrata_operator.decide.trust import identity_conflicts as claims
from kvstrata_operator.observe.digest import digest
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.records import Declared, PoolNodeSeen
from kvstrata_operator.observe.setting import Setting
from kvstrata_operator.observe.world import View, census_of


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to look again though nothing has happened."""

    actions: tuple[Action, ...]
    wake_at: datetime | None = None


def plan_orders(view: View, setting: Setting, now: datetime) -> Plan:
    """Plan everything but statuses."""
    census = census_of(view)
    wanted = operations.wants(view.operations.values(), operations_around(view, census, now))
    actions: list[Action] = list(liveness.mark_silent(view.pool_nodes, view.silent))
    for name, pool in sorted(view.pools.items()):
        its = _Its(pool, census.pools.get(name, Members()), wanted.get(name, {}))
        actions += _plan_pool(view, its, setting, now)
    actions += redis.plan_redis(view, census, setting)
    actions += _plan_keys(view, setting.namespace, now)
    actions += erase_operation.plan_requests(view.operations.values(), view.tenants)
    actions += _expired(view.operations.values(), now)
    return Plan(tuple(actions), _wake_at(view, census, now))


def operations_around(view: View, census: Census, now: datetime) -> dict[str, operations.Around]:
    """What KVOperations depend on, for each pool that one of them names."""
    named = {o.model.spec.pool_ref for o in view.operations.values() if o.model is not None and o.model.spec.pool_ref}
    tenants = {name for name, t in view.tenants.items() if t.model is not None and not t.is_deleting}
    return {
        pool: operations.Around(
            view.pools.get(pool),
            census.pools.get(pool, Members()).seen,
            view.nodes,
            view.alive,
            now,
            tenants,
            view.pools,
            lambda other: census.pools.get(other, Members()).seen,
        )
        for pool in named
    }


def _expired(seen: Iterable[Operation], now: datetime) -> Iterable[Action]:
    """Delete operations that are over for as long as they should be kept."""
    for operation in seen:
        end = operations.expires_at(operation)
        if end is not None and now >= end and not operation.is_deleting:
            yield Delete(operation.ref, uid=operation.uid)


@dataclass(frozen=True, slots=True)
class _Its:
    """A pool, its nodes, and what KVOperations want of nodes by their name."""

    pool: Declared[KVPool]
    members: Members
    wanted: Mapping[str, Wants]


def _plan_pool(view: View, its: _Its, setting: Setting, now: datetime) -> tuple[Action, ...]:
    def reachable(nodes: Iterable[PoolNodeSeen]) -> frozenset[str]:
        return liveness.answering((n for n in nodes if n.node in view.nodes), view.alive, view.silent)

    pool, placement, members = its.pool, its.members.placement, its.members
    # A pool that is deleted while it is paused goes all the same: a finalizer must never hang.
    if pool.is_deleting:
        stopped = () if members.seen else forget_agents(view, pool, setting)
        finish = lifecycle.finish(pool, members.seen, reachable(members.seen.values()), now)
        return finish + stopped + _forget_connection(view, pool, setting)
    if pool.model is None or placement is None or pool.model.spec.paused:
        return ()
    held = lifecycle.hold(pool)
    if held:
        return held
    agents = agents_of(view, pool, members, setting, now)
    stands = Stands(placement, members.seen, members.difference)
    return (
        *reconcile(pool, stands, reachable, now, Stays(its.wanted, agents.rollout.holds)),
        *plan_agents(view, pool, agents, members, setting, now),
        *_plan_connection(view, pool, pool.model, setting),
    )


def _plan_connection(view: View, pool: Declared[KVPool], model: KVPool, setting: Setting) -> tuple[Action, ...]:
    """Tell engine pods how to attach."""
    ref = objects.connection_ref(pool.key, setting.namespace)
    content = objects.connection_data(model, setting.socket_template)
    seen = view.config_maps.get(ref.name)
    body = objects.connection_body(ref, pool.meta, content)
    if seen is None:
        return (Create(ref, pool.key, body=body, adopts=True),)
    if seen.content_digest == digest(content):
        return ()
    strays = dict.fromkeys(seen.entries - content.keys())
    return (Merge(ref, pool.key, body={**body, "data": {**strays, **content}}),)


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


def _wake_at(view: View, census: Census, now: datetime) -> datetime | None:
    """Return the next moment at which time alone changes a plan."""
    draining = (members.seen[node] for members in census.pools.values() for node in members.draining)
    moments = drain_deadlines(draining)
    for operation in view.operations.values():
        is_over = operations.stored_end(operation) is not None
        moments.append(operations.expires_at(operation) if is_over else operations.deadline(operation))
    moments += [lifecycle.next_step(pool, now) for pool in view.pools.values() if pool.is_deleting]
    moments += [share_end(s.model) for s in view.shares.values() if s.model is not None]
    return min((m for m in moments if m is not None and m > now), default=None)
