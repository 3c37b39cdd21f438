"""The KVPoolNodes that a pool should have, the ones it has, and the actions between the two. Pure.

Laws: applying the actions reaches the wanted state, and planning again then asks for nothing; a node that leaves is
never deleted under a connected agent before that agent has drained or its time is up; the withdrawal of a node
never waits longer than the drain's timeout.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from kvfleet_api.models.pool import DrainSpec, KVPool
from kvfleet_operator import objects
from kvfleet_operator.actions import Action, Apply, Create, Delete, Merge, Note
from kvfleet_operator.kinds import POOL_NODE, Ref
from kvfleet_operator.moments import format_time, parse_time
from kvfleet_operator.placement import Placement
from kvfleet_operator.records import Declared, DrainSeen, PoolNodeSeen

NO_DRAIN: Final = DrainSeen()

DRAINED: Final = "Drained"
"""Reason of the condition Draining=False by which an agent says that it is done."""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """How a pool wants nodes to be emptied before they leave it."""

    mode: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Difference:
    """What separates the wanted nodes of a pool from its KVPoolNodes. Sorted, so that plans are the same twice."""

    absent: tuple[str, ...]
    """Nodes without a KVPoolNode."""
    outdated: tuple[str, ...]
    """Nodes whose KVPoolNode is not what it should be."""
    surplus: tuple[str, ...]
    """Nodes that should have none."""


def drain_order(pool: Declared[KVPool]) -> DrainOrder:
    """Take the drain of the update strategy; blocks that are to be destroyed are not moved first."""
    if pool.model is None:
        return DrainOrder(DrainSpec().mode, float(DrainSpec().timeout_seconds))
    drain = pool.model.spec.update_strategy.drain
    is_destroyed = pool.model.spec.deletion_policy == "Destroy" and pool.is_deleting
    return DrainOrder("Drop" if is_destroyed else drain.mode, float(drain.timeout_seconds))


def compare(placement: Placement, seen: Mapping[str, PoolNodeSeen]) -> Difference:
    """Compare a placement with the pool's KVPoolNodes by node name."""
    here = placement.nodes & seen.keys()
    return Difference(
        absent=tuple(sorted(placement.nodes - seen.keys())),
        outdated=tuple(sorted(node for node in here if not is_current(placement, seen[node]))),
        surplus=tuple(sorted(seen.keys() - placement.nodes)),
    )


def is_current(placement: Placement, seen: PoolNodeSeen) -> bool:
    """True when a KVPoolNode's spec is what the placement wants of that node, and it is to stay."""
    return (
        seen.revision == placement.revision
        and seen.tiers_digest == placement.tiers_digest
        and not seen.drain.requested
        and not seen.is_deleting
    )


def reconcile(
    pool: Declared[KVPool],
    placement: Placement,
    seen: Mapping[str, PoolNodeSeen],
    alive: Collection[str],
    now: datetime,
) -> tuple[Action, ...]:
    """Plan one pool: withdrawals first, then changes, then new nodes.

    `seen` maps node names to the pool's KVPoolNodes; `alive` names the KVPoolNodes with a connected agent.
    """
    difference = compare(placement, seen)
    leaving = [seen[node] for node in difference.surplus]
    changed = [node for node in difference.outdated if not seen[node].is_deleting]
    return (
        *_told(pool, "WithdrawingNodes", retire(leaving, drain_order(pool), alive, now)),
        *_told(pool, "ChangingNodes", tuple(_change(pool, placement, node) for node in changed)),
        *_told(pool, "CreatingNodes", tuple(_create(pool, placement, node) for node in difference.absent)),
    )


def retire(
    leaving: Iterable[PoolNodeSeen], order: DrainOrder, alive: Collection[str], now: datetime
) -> tuple[Action, ...]:
    """Drain nodes whose agent is connected, and delete those that are drained, late, or have no agent to ask."""
    staying = [node for node in leaving if not node.is_deleting]
    drains = order_drains(staying, order, alive, since=now, now=now)
    deletes = tuple(
        Delete(Ref(POOL_NODE, node.key), node.pool, uid=node.uid)
        for node in staying
        if not must_drain(node, order, alive, since=now, now=now)
    )
    return deletes + drains


def order_drains(
    nodes: Iterable[PoolNodeSeen], order: DrainOrder, alive: Collection[str], *, since: datetime, now: datetime
) -> tuple[Action, ...]:
    """Ask those agents to drain that must and have not been asked; their time runs from `since`."""
    deadline = format_time(since + timedelta(seconds=order.timeout_s))
    drain = DrainSeen(requested=True, mode=order.mode, deadline=deadline)
    return tuple(
        Merge(Ref(POOL_NODE, node.key), node.pool, body=objects.drain_body(drain))
        for node in nodes
        if not node.drain.requested and must_drain(node, order, alive, since=since, now=now)
    )


def must_drain(
    node: PoolNodeSeen, order: DrainOrder, alive: Collection[str], *, since: datetime, now: datetime
) -> bool:
    """True while a node that leaves has an agent that may still bring blocks to safety; its time runs from `since`."""
    if node.key not in alive or is_drained(node):
        return False
    latest = since + timedelta(seconds=order.timeout_s)
    deadline = parse_time(node.drain.deadline) if node.drain.requested else latest
    return deadline is not None and now < min(deadline, latest)


def is_drained(node: PoolNodeSeen) -> bool:
    """True when the agent has said that nothing is left to move."""
    verdict = node.conditions.get("Draining")
    return verdict is not None and verdict.status == "False" and verdict.reason == DRAINED


def next_deadline(nodes: Iterable[PoolNodeSeen]) -> datetime | None:
    """Return when the first drain runs out, which no event will tell."""
    deadlines = (parse_time(node.drain.deadline) for node in nodes if node.drain.requested)
    return min((d for d in deadlines if d is not None), default=None)


def _create(pool: Declared[KVPool], placement: Placement, node: str) -> Action:
    body = objects.pool_node_body(pool.meta, placement, node, NO_DRAIN)
    return Create(objects.pool_node_ref(placement.pool, node), placement.pool, body=body)


def _change(pool: Declared[KVPool], placement: Placement, node: str) -> Action:
    body = objects.pool_node_body(pool.meta, placement, node, NO_DRAIN)
    return Apply(objects.pool_node_ref(placement.pool, node), placement.pool, body=body)


def _told(pool: Declared[KVPool], reason: str, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Let the first action tell of them all: one Event for each plan, not one for each node."""
    if not actions:
        return ()
    counts = Counter(_DOINGS[type(action)] for action in actions)
    told = ", ".join(f"{count} to {doing}" for doing, count in sorted(counts.items()))
    note = Note(pool.ref, pool.uid, reason, f"KVPoolNodes: {told}")
    return (replace(actions[0], notes=(note,)), *actions[1:])


_DOINGS: Final[Mapping[type[Action], str]] = {Create: "create", Apply: "change", Merge: "drain", Delete: "delete"}
"""What people call the verbs of this module."""
