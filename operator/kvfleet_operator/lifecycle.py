"""The finalizer of a KVPool: drain, then delete, then let go, each within a bound. Pure.

Laws: nothing waits for a drain once `deletionTimestamp` + the drain's timeout is past; the pool is let go at the
latest `GRACE_S` after that, whatever the API server or the agents do; a pool without KVPoolNodes is let go at once.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Final

from kvfleet_api import names
from kvfleet_api.models.pool import KVPool
from kvfleet_operator.actions import Action, DeleteMany, Note, SetFinalizers
from kvfleet_operator.kinds import POOL_NODE
from kvfleet_operator.moments import parse_time
from kvfleet_operator.reconcile import drain_order, must_drain, order_drains
from kvfleet_operator.records import Declared, PoolNodeSeen

GRACE_S: Final = 60.0
"""Time for the deletes themselves. What is left then has the pool as its owner and goes with it."""


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
        return (_delete_nodes(pool, ()), _release(pool, f"{len(seen)} KVPoolNodes are left to the garbage collector"))
    if any(must_drain(node, order, alive, since=since, now=now) for node in seen.values()):
        return order_drains(seen.values(), order, alive, since=since, now=now)
    if all(node.is_deleting for node in seen.values()):
        return ()
    return (_delete_nodes(pool, (_note(pool, "DeletingNodes", f"deleting {len(seen)} KVPoolNodes"),)),)


def next_step(pool: Declared[KVPool], now: datetime) -> datetime | None:
    """Return when time alone moves a deletion on: the end of the drain, then the end of the grace."""
    since = parse_time(pool.meta.deletion_timestamp or "")
    if since is None:
        return None
    drained = since + timedelta(seconds=drain_order(pool).timeout_s)
    return next((t for t in (drained, drained + timedelta(seconds=GRACE_S)) if t > now), None)


def _delete_nodes(pool: Declared[KVPool], notes: tuple[Note, ...]) -> DeleteMany:
    return DeleteMany(pool.ref, pool.key, notes, kind=POOL_NODE, selector={names.LABEL_POOL: pool.meta.name})


def _release(pool: Declared[KVPool], message: str) -> SetFinalizers:
    rest = tuple(f for f in pool.meta.finalizers if f != names.FINALIZER)
    notes = (_note(pool, "Released", message),)
    return SetFinalizers(pool.ref, pool.key, notes, finalizers=rest, resource_version=pool.meta.resource_version)


def _note(pool: Declared[KVPool], reason: str, message: str) -> Note:
    return Note(pool.ref, pool.uid, reason, message)
