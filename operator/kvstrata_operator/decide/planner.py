"""Start here: how the operator decides. Pure, level-triggered: the whole view in, a plan out, nothing remembered.

`plan_orders` returns what should be made, changed and removed; `plan_statuses` what people should read. Both can be
asked at any time and as often as one likes; asked again after their actions were carried out, they ask for nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata_api import names
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import ModelOrder
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.shares import is_open, share_end
from kvstrata_api.trust import ScopeKind
from kvstrata_operator.decide.agents.agents import agents_of, forget_agents, plan_agents
from kvstrata_operator.decide.directory import redis
from kvstrata_operator.decide.incremental import FleetFacts, Members
from kvstrata_operator.decide.models import model_caches
from kvstrata_operator.decide.operations import erase_operation, operations
from kvstrata_operator.decide.operations.operations import Operation
from kvstrata_operator.decide.plan.actions import Action, Create, Delete, Merge
from kvstrata_operator.decide.pools import lifecycle
from kvstrata_operator.decide.pools.reconcile import Stands, Stays, Wants, drain_deadlines, reconcile
from kvstrata_operator.decide.trust import erasure, scope_keys
from kvstrata_operator.decide.trust import identity_conflicts as claims
from kvstrata_operator.observe.kinds import (
    CONNECTION_LABELS,
    NODE,
    POOL,
    Ref,
    body_of,
    connection_ref,
    digest,
    owner_reference,
)
from kvstrata_operator.observe.records import Declared, PoolNodeSeen
from kvstrata_operator.observe.world import ClusterSeen, Setting, TrustSeen, View


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to plan again though nothing has happened."""

    actions: tuple[Action, ...]
    wake_at: datetime | None = None


def plan_orders(view: View, fleet: FleetFacts, setting: Setting, now: datetime) -> Plan:
    """Plan everything but statuses; `fleet` is what follows from the view, refreshed for it."""
    pools, trust = view.pools, view.trust
    wanted = operations.wants(pools.operations.values(), operations.arounds(pools, trust.tenants, fleet.seen_of, now))
    actions: list[Action] = list(lifecycle.mark_silent(pools.pool_nodes, pools.silent))
    for name, pool in sorted(pools.declared.items()):
        its = _Its(pool, fleet.pools.get(name, Members()), wanted.get(name, {}), fleet.model_peers)
        actions += _plan_pool(view, its, setting, now)
    actions += _plan_labels(fleet)
    actions += redis.plan_redis(view, fleet, setting)
    actions += _plan_keys(trust, pools.declared, setting.namespace, now)
    actions += erase_operation.plan_requests(pools.operations.values(), trust.tenants)
    actions += _expired(pools.operations.values(), now)
    return Plan(tuple(actions), _wake_at(view, fleet, now))


def _plan_labels(fleet: FleetFacts) -> Iterable[Action]:
    """Let the labels of Nodes state the weights that they have."""
    for node, labels in sorted(fleet.mislabelled.items()):
        yield Merge(Ref(NODE, node), body={"metadata": {"labels": labels}})


def _expired(seen: Iterable[Operation], now: datetime) -> Iterable[Action]:
    """Delete operations that are over for as long as they should be kept."""
    for operation in seen:
        end = operations.expires_at(operation)
        if end is not None and now >= end and not operation.is_deleting:
            yield Delete(operation.ref, uid=operation.uid)


@dataclass(frozen=True, slots=True)
class _Its:
    """A pool, its nodes, what KVOperations want of nodes by their name, and whom agents ask for weights."""

    pool: Declared[KVPool]
    members: Members
    wanted: Mapping[str, Wants]
    peers: Callable[[ModelOrder, str], tuple[str, ...]]


def _plan_pool(view: View, its: _Its, setting: Setting, now: datetime) -> tuple[Action, ...]:
    def reachable(nodes: Iterable[PoolNodeSeen]) -> frozenset[str]:
        return lifecycle.answering((n for n in nodes if n.node in seen.nodes), seen.alive, seen.silent)

    seen, pool, placement, members = view.pools, its.pool, its.members.placement, its.members
    # A pool that is deleted while it is paused goes all the same: a finalizer must never hang.
    if pool.is_deleting:
        stopped = () if members.seen else forget_agents(view.cluster, pool, setting)
        finish = lifecycle.finish(pool, members.seen, reachable(members.seen.values()), now)
        return finish + stopped + _forget_connection(view.cluster, pool, setting)
    if pool.model is None or placement is None or pool.model.spec.paused:
        return ()
    held = lifecycle.hold(pool)
    if held:
        return held
    agents = agents_of(view, pool, members, setting, now)
    stands = Stands(placement, members.seen, members.difference, members.models, its.peers)
    return (
        *reconcile(pool, stands, reachable, now, Stays(its.wanted, agents.rollout.holds)),
        *plan_agents(view, pool, agents, members, setting, now),
        *_plan_connection(view.cluster, pool, pool.model, setting),
    )


def _plan_connection(
    cluster: ClusterSeen, pool: Declared[KVPool], model: KVPool, setting: Setting
) -> tuple[Action, ...]:
    """Publish how engine pods attach."""
    ref = connection_ref(pool.key, setting.namespace)
    content = _connection_data(model, setting.socket_template)
    seen = cluster.config_maps.get(ref.name)
    body = _connection_body(ref, pool.meta, content)
    if seen is None:
        return (Create(ref, pool.key, body=body, adopts=True),)
    if seen.content_digest == digest(content):
        return ()
    strays = dict.fromkeys(seen.entries - content.keys())
    return (Merge(ref, pool.key, body={**body, "data": {**strays, **content}}),)


def _connection_data(pool: KVPool, socket_template: str) -> dict[str, str]:
    """Return what an engine pod needs to know of a pool; all values are text."""
    compatibility = pool.spec.compatibility
    return {
        "pool": pool.metadata.name,
        "audience": names.AUDIENCE,
        "socket": socket_template.format(pool=pool.metadata.name),
        "model": compatibility.model,
        "revision": compatibility.revision,
        "dtype": compatibility.dtype,
        "blockTokens": str(compatibility.block_tokens),
    }


def _connection_body(ref: Ref, pool: ObjectMeta, content: dict[str, str]) -> dict[str, Any]:
    """Return the connection ConfigMap."""
    labels = {**CONNECTION_LABELS, names.LABEL_POOL: pool.name}
    return body_of(ref, {"labels": labels, "ownerReferences": [owner_reference(POOL, pool)]}, data=content)


def _forget_connection(cluster: ClusterSeen, pool: Declared[KVPool], setting: Setting) -> tuple[Action, ...]:
    """Withdraw how engine pods attach; the garbage collector would need up to half a minute."""
    ref = connection_ref(pool.key, setting.namespace)
    seen = cluster.config_maps.get(ref.name)
    return (Delete(ref, pool.key, uid=seen.uid),) if seen else ()


def _plan_keys(
    trust: TrustSeen, pools: Mapping[str, Declared[KVPool]], namespace: str, now: datetime
) -> tuple[Action, ...]:
    """Make the keys of all scopes, and remove those that have had their time."""
    actions: list[Action] = []
    for scope, owner, version in scopes(trust, pools, namespace, now):
        secret = trust.secrets.get(_scope_secret(scope, owner, namespace).name)
        actions += scope_keys.plan_key(owner, scope, version, secret, namespace)
        data_key = scope_keys.plan_data_key(owner, scope, version, secret, trust.keks, namespace)
        actions += data_key or scope_keys.plan_retirement(owner, scope, secret, namespace)
    open_shares = (s for s in trust.shares.values() if s.model is not None and is_open(s.model, now))
    kept = {_scope_secret(ScopeKind.SHARE, share, namespace).name: share.uid for share in open_shares}
    actions += scope_keys.plan_orphans(kept, trust.secrets, namespace)
    actions += scope_keys.plan_kek(trust.secrets.values(), trust.keks, namespace)
    changing = {action.ref.name for action in actions}  # One write at a time: a second one would be refused.
    idle = (s for s in trust.secrets.values() if s.key not in changing)
    actions += scope_keys.plan_rewrapping(idle, trust.keks, namespace)
    return tuple(actions)


def _scope_secret(scope: ScopeKind, owner: Declared[Any], namespace: str) -> Ref:
    return scope_keys.scope_secret_ref(scope, scope_keys.scope_name(owner.meta), namespace)


def scopes(
    trust: TrustSeen, pools: Mapping[str, Declared[KVPool]], namespace: str, now: datetime
) -> Iterable[tuple[ScopeKind, Declared[Any], int]]:
    """Every scope with its owner and the key version that it should have."""
    for _, tenant in sorted(trust.tenants.items()):
        secret = trust.secrets.get(_scope_secret(ScopeKind.TENANT, tenant, namespace).name)
        yield ScopeKind.TENANT, tenant, erasure.key_version(tenant, secret)
    tenants = claims.models_of(trust.tenants)
    for _, domain in sorted(trust.domains.items()):
        if domain.model is not None:
            members = scope_keys.members(domain.model, tenants)
            yield ScopeKind.DOMAIN, domain, scope_keys.domain_key_version(domain, members)
    declared = claims.declared_of(tenants, trust)
    for _, share in sorted(trust.shares.items()):
        is_wanted = share.model is not None and is_open(share.model, now)
        if is_wanted and claims.share_fault(share, declared, pools) is None:
            yield ScopeKind.SHARE, share, KEY_VERSION


def _wake_at(view: View, fleet: FleetFacts, now: datetime) -> datetime | None:
    """Return the next moment at which time alone changes a plan."""
    draining = (members.seen[node] for members in fleet.pools.values() for node in members.draining)
    moments = drain_deadlines(draining)
    moments += [members.pods.next_late(now) for members in fleet.pools.values()]
    for operation in view.pools.operations.values():
        is_over = operations.stored_end(operation) is not None
        moments.append(operations.expires_at(operation) if is_over else operations.deadline(operation))
    moments += [model_caches.deadline(cache) for cache in view.pools.model_caches.values()]
    moments += [lifecycle.next_step(pool, now) for pool in view.pools.declared.values() if pool.is_deleting]
    moments += [share_end(s.model) for s in view.trust.shares.values() if s.model is not None]
    return min((m for m in moments if m is not None and m > now), default=None)
