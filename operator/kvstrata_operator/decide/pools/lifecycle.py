"""Agents that fell silent, and the finalizer of a KVPool: drain, then delete, then let go, each within a bound. Pure.

Laws: agents drain, then give their memory back, and are stopped when they have reported so, or when their time is up:
`deletionTimestamp` + the drain's timeout + `RELEASE_S`; the pool is let go at the latest `GRACE_S` after the timeout,
whatever the API server or the agents do; a pool without KVPoolNodes is let go at once.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from kvstrata_api import names
from kvstrata_api.models.pool import KVPool
from kvstrata_operator.decide.plan.actions import Action, DeleteMany, MarkSilent, Note, SetFinalizers, Severity
from kvstrata_operator.decide.pools.reconcile import DrainOrder, drain_order, is_done, must_drain, order_drains
from kvstrata_operator.observe.kinds import POOL_NODE, Ref, parse_time
from kvstrata_operator.observe.records import Declared, PoolNodeSeen

GRACE_S: Final = 60.0
"""Time for the deletes themselves. What is left then has the pool as its owner and goes with it."""


_NAMED_MAX: Final = 8
"""Nodes that one Event names; an Event has 1,024 characters."""


def answering(nodes: Iterable[PoolNodeSeen], alive: Collection[str], silent: Collection[str]) -> frozenset[str]:
    """Names of the KVPoolNodes whose agents may still do what they are asked.

    Besides the living these are agents that reported that they are connected and whose Leases were not read yet, as
    after a start of this process: taken for gone they would be deleted undrained, and what they hold called erased.
    """
    return frozenset(n.key for n in nodes if n.key in alive or (n.key not in silent and n.is_true("AgentConnected")))


def mark_silent(nodes: Mapping[str, PoolNodeSeen], silent: Iterable[str]) -> tuple[MarkSilent, ...]:
    """Mark on each silent agent's KVPoolNode that it is gone, once; agents that never reported are left alone."""
    return tuple(
        MarkSilent(
            Ref(POOL_NODE, key),
            nodes[key].pool,
            message=f"Lease {names.agent_lease_name(nodes[key].pool, nodes[key].node)} is not renewed",
        )
        for key in sorted(silent)
        if key in nodes and nodes[key].has_reported and not _is_marked(nodes[key])
    )


def hold(pool: Declared[KVPool]) -> tuple[Action, ...]:
    """Put our finalizer on a pool that lacks it, before anything is made for it."""
    if names.FINALIZER in pool.meta.finalizers:
        return ()
    finalizers = (*pool.meta.finalizers, names.FINALIZER)
    version = pool.meta.resource_version
    return (SetFinalizers(pool.ref, pool.key, finalizers=finalizers, resource_version=version),)


def finish(
    pool: Declared[KVPool], seen: Mapping[str, PoolNodeSeen], alive: Collection[str], now: datetime
) -> tuple[Action, ...]:
    """Plan the next step of a pool that is being deleted. `seen` maps node names to its KVPoolNodes."""
    assert pool.is_deleting
    if names.FINALIZER not in pool.meta.finalizers:
        return ()
    if not seen:
        return (_release(pool, "all KVPoolNodes are gone"),)
    since = parse_time(pool.meta.deletion_timestamp or "") or now
    order = drain_order(pool)
    if now >= since + timedelta(seconds=order.timeout_s + GRACE_S):
        late = _note(
            pool, "CleanupLate", f"{len(seen)} KVPoolNodes are left to the garbage collector", Severity.WARNING
        )
        return (_delete_nodes(pool, (late,)), _release(pool, "its time is up"))
    if any(must_drain(node, order, alive, since=since, now=now) for node in seen.values()):
        ordered = (node for _, node in sorted(seen.items()))
        return order_drains(ordered, order, alive, since=since, now=now)
    if all(node.is_deleting for node in seen.values()):
        return ()
    return (_delete_nodes(pool, _deletion_events(pool, seen, order)),)


def next_step(pool: Declared[KVPool], now: datetime) -> datetime | None:
    """Return when time alone moves a deletion on: the ends of the drain, of the wait for agents and of the grace."""
    since = parse_time(pool.meta.deletion_timestamp or "")
    if since is None:
        return None
    order = drain_order(pool)
    moments = (since + timedelta(seconds=s) for s in (order.timeout_s, order.wait_s, order.timeout_s + GRACE_S))
    return next((t for t in moments if t > now), None)


def _is_marked(node: PoolNodeSeen) -> bool:
    return node.is_false("AgentConnected") and node.is_false("Ready")


def _deletion_events(pool: Declared[KVPool], seen: Mapping[str, PoolNodeSeen], order: DrainOrder) -> tuple[Note, ...]:
    """State what is deleted, and on which nodes no agent has confirmed that what was to go is gone.

    Where files stay, nodes that never had an agent have nothing to give back.
    """
    deleting = _note(pool, "DeletingNodes", f"deleting {len(seen)} KVPoolNodes")
    open_ = sorted(name for name, node in seen.items() if not is_done(node, order))
    if not order.is_destruction:
        open_ = [name for name in open_ if seen[name].observed_revision and seen[name].memory_tier_bytes]
    if not open_:
        done = _note(pool, "Destroyed", f"all {len(seen)} nodes have destroyed the pool's blocks")
        return (deleting, done) if order.is_destruction else (deleting,)
    first = ", ".join(open_[:_NAMED_MAX]) + (", ..." if len(open_) > _NAMED_MAX else "")
    reason, fact = ("NotDestroyed", "nothing is left") if order.is_destruction else ("NotReleased", "memory is back")
    message = f"{len(open_)} of {len(seen)} nodes have not confirmed that {fact}: {first}"
    return (deleting, _note(pool, reason, message, Severity.WARNING))


def _delete_nodes(pool: Declared[KVPool], notes: tuple[Note, ...]) -> DeleteMany:
    return DeleteMany(pool.ref, pool.key, notes, kind=POOL_NODE, selector={names.LABEL_POOL: pool.meta.name})


def _release(pool: Declared[KVPool], message: str) -> SetFinalizers:
    rest = tuple(f for f in pool.meta.finalizers if f != names.FINALIZER)
    notes = (_note(pool, "Released", message),)
    return SetFinalizers(pool.ref, pool.key, notes, finalizers=rest, resource_version=pool.meta.resource_version)


def _note(pool: Declared[KVPool], reason: str, message: str, severity: Severity = Severity.NORMAL) -> Note:
    return Note(pool.ref, pool.uid, reason, message, severity)
