"""The KVPoolNodes that a pool should have, the ones it has, and the actions between the two. Pure.

Laws: applying the actions reaches the wanted state, and planning again then asks for nothing; a node that leaves is
never deleted under a connected agent before that agent has drained or its time is up; the withdrawal of a node
never waits longer than the drain's timeout.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.pool import DrainSpec, KVPool
from kvstrata_api.models.poolnode import KVPoolNodeSpec, ModelOrder, NodeDrain, NodeOrder
from kvstrata_operator.decide.plan.actions import Action, Apply, Create, Delete, Merge, Note
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.observe.kinds import (
    POOL,
    POOL_NODE,
    Ref,
    body_of,
    format_time,
    owner_reference,
    parse_time,
    pool_node_labels,
    pool_node_ref,
)
from kvstrata_operator.observe.parse import model_digest
from kvstrata_operator.observe.records import Declared, DrainSeen, PoolNodeSeen

NO_DRAIN: Final = DrainSeen()

DRAINED: Final = "Drained"
"""Reason of the condition Draining=False by which an agent reports that every block that can survive has a copy."""

RELEASED: Final = "Released"
"""The same of an agent that has closed all tiers and given their memory back."""

DESTROYED: Final = "Destroyed"
"""The same of an agent that has removed everything, on media that survive as well."""


RELEASE_S: Final = 15.0
"""For an agent to give its memory back once a drain has ended, however it did: readers get 5 s, the rest takes less."""

DESTRUCTION_S_MIN: Final = 30.0
"""Files are removed within seconds; a drain's timeout of 0 implies nothing about how long that may take."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What KVOperations want of one node."""

    drain: DrainSeen = NO_DRAIN
    orders: tuple[NodeOrder, ...] = ()


_NOTHING: Final = Wants()


@dataclass(frozen=True, slots=True)
class ModelWant:
    """Weights that nodes are to have."""

    order: ModelOrder
    """The same for each of them, but for its peers."""
    digest: str

    @classmethod
    def of(cls, order: ModelOrder) -> "ModelWant":
        """Name an order by its content."""
        return cls(order, model_digest(order.to_json()))


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """How a pool wants nodes to be emptied before they leave it."""

    mode: str
    timeout_s: float
    is_destruction: bool = False
    """Only an agent that has destroyed everything is done."""
    is_final: bool = False
    """Nobody comes after the agent: it is done when it has given its memory back as well, with `RELEASE_S` for that."""

    @property
    def wait_s(self) -> float:
        """How long an agent is waited for: beyond `timeout_s`, which it is given, while it gives memory back."""
        return self.timeout_s + (RELEASE_S if self.is_final else 0.0)

    @property
    def enough(self) -> tuple[str, ...]:
        """What an agent that is done may report."""
        if self.is_destruction:
            return (DESTROYED,)
        return (DESTROYED, RELEASED) if self.is_final else (DESTROYED, RELEASED, DRAINED)


@dataclass(frozen=True, slots=True)
class Holds:
    """Nodes that stay as they are for now."""

    unchanged: frozenset[str] = frozenset()
    """Keep their tiers and revision: the pod there was not made for others."""
    draining: frozenset[str] = frozenset()
    """Their order to drain stands though they stay."""


@dataclass(frozen=True, slots=True)
class Stays:
    """What is to be with nodes that stay, besides their placement."""

    wanted: Mapping[str, Wants] = field(default_factory=lambda: MappingProxyType({}))
    """What KVOperations want, by node name."""
    holds: Holds = Holds()
    """What a roll of the agents keeps as it is."""

    @property
    def nodes(self) -> set[str]:
        """Nodes that any of this is about."""
        return self.wanted.keys() | self.holds.unchanged | self.holds.draining

    def of(self, node: str) -> Wants:
        """Return what KVOperations want of one node."""
        return self.wanted.get(node, _NOTHING)


NO_STAYS: Final = Stays()


@dataclass(slots=True)
class Difference:
    """What separates the wanted nodes of a pool from its KVPoolNodes, as names of nodes."""

    absent: set[str] = field(default_factory=set)
    """Nodes without a KVPoolNode."""
    outdated: set[str] = field(default_factory=set)
    """Nodes whose KVPoolNode is not what it should be where nobody wants or holds anything besides."""
    surplus: set[str] = field(default_factory=set)
    """Nodes that should have none."""

    def put(self, node: str, *, is_wanted: bool, is_there: bool, is_plain: bool) -> None:
        """Take in how things are on one node, in place of how they were."""
        _set(self.absent, node, is_wanted and not is_there)
        _set(self.outdated, node, is_wanted and is_there and not is_plain)
        _set(self.surplus, node, is_there and not is_wanted)


def _set(members: set[str], node: str, is_member: bool) -> None:  # noqa: FBT001  The one fact that this is about.
    if is_member:
        members.add(node)
    else:
        members.discard(node)


def drain_order(pool: Declared[KVPool]) -> DrainOrder:
    """Take the drain of the update strategy; blocks that are to be destroyed are not moved first."""
    if pool.model is None:
        return DrainOrder(DrainSpec().mode, float(DrainSpec().timeout_seconds), is_final=pool.is_deleting)
    drain = pool.model.spec.update_strategy.drain
    is_destroyed = pool.model.spec.deletion_policy == "Destroy" and pool.is_deleting
    if is_destroyed:
        return DrainOrder("Drop", max(DESTRUCTION_S_MIN, float(drain.timeout_seconds)), is_destruction=True)
    return DrainOrder(drain.mode, float(drain.timeout_seconds), is_final=pool.is_deleting)


def _drain_of(seen: PoolNodeSeen, stays: Stays) -> DrainSeen:
    """Return the order to drain of a node that stays: a roll's own stands, else it is a KVOperation's."""
    is_held = seen.node in stays.holds.draining and seen.drain.requested
    return seen.drain if is_held else stays.of(seen.node).drain


def _is_drain_right(seen: PoolNodeSeen, stays: Stays) -> bool:
    drain = _drain_of(seen, stays)
    return seen.drain == drain if drain.requested else not seen.drain.requested or seen.node in stays.holds.draining


def is_plain(placement: Placement, seen: PoolNodeSeen, models: Sequence[ModelWant] = ()) -> bool:
    """True when a KVPoolNode's spec is what it should be where no KVOperation wants or holds anything besides."""
    is_idle = not seen.drain.requested and not seen.orders
    return placement.is_current(seen) and is_idle and has_models(seen, models)


def has_models(seen: PoolNodeSeen, models: Sequence[ModelWant]) -> bool:
    """True when a KVPoolNode has exactly these orders for weights."""
    return seen.models == {want.order.uid: want.digest for want in models}


def _is_ordered(seen: PoolNodeSeen, wanted: Wants) -> bool:
    return set(seen.orders) == {order.uid for order in wanted.orders}


def _is_as_it_stays(placement: Placement, seen: PoolNodeSeen, stays: Stays) -> bool:
    return (seen.node in stays.holds.unchanged or placement.is_current(seen)) and _is_drain_right(seen, stays)


@dataclass(frozen=True, slots=True)
class Stands:
    """How a pool stands: what is wanted, what is there, and what separates the two."""

    placement: Placement
    seen: Mapping[str, PoolNodeSeen]
    """The pool's KVPoolNodes by node name."""
    difference: Difference
    models: Mapping[str, tuple[ModelWant, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Weights that KVModelCaches want, by node name; nothing where a node is absent."""
    peers: Callable[[ModelOrder, str], tuple[str, ...]] = field(default=lambda _order, _node: ())
    """Nodes that the agent of a node asks for weights. Set with an order and not changed for themselves: where one is
    gone, the agent reads the source."""

    def model_orders(self, node: str) -> tuple[ModelOrder, ...]:
        """Orders for weights of one node."""
        orders = [want.order for want in self.models.get(node, ())]
        return tuple(order.model_copy(update={"peers": self.peers(order, node)}) for order in orders)

    def is_ordered(self, seen: PoolNodeSeen, wanted: Wants) -> bool:
        """True when a KVPoolNode has the orders that it should have; what an operation wants never changes."""
        return _is_ordered(seen, wanted) and has_models(seen, self.models.get(seen.node, ()))


def reconcile(
    pool: Declared[KVPool],
    stands: Stands,
    alive: Callable[[Iterable[PoolNodeSeen]], Collection[str]],
    now: datetime,
    stays: Stays = NO_STAYS,
) -> tuple[Action, ...]:
    """Plan one pool: withdrawals first, then changes, then new nodes; each sorted, so that plans are the same twice.

    `alive` gives the keys of those KVPoolNodes that have a connected agent; `stays` has what else is to be with nodes
    of the placement.
    """
    placement, seen, difference = stands.placement, stands.seen, stands.difference
    leaving = [seen[node] for node in sorted(difference.surplus)]
    doubtful = sorted(n for n in difference.outdated | stays.nodes if n in placement.nodes and n in seen)
    outdated = [n for n in doubtful if not _is_as_it_stays(placement, seen[n], stays)]
    changed = [node for node in outdated if not seen[node].is_deleting]
    reordered = [n for n in sorted(set(doubtful) - set(outdated)) if not stands.is_ordered(seen[n], stays.of(n))]
    return (
        *_with_event(pool, "WithdrawingNodes", retire(leaving, drain_order(pool), alive(leaving), now)),
        *_with_event(pool, "ChangingNodes", tuple(_change(pool, stands, seen[node], stays) for node in changed)),
        *(_reorder(seen[node], stays.of(node), stands) for node in reordered),
        *_with_event(pool, "CreatingNodes", _creates(pool, placement, sorted(difference.absent))),
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
    """Ask those agents to drain that must and have not been asked so; their time runs from `since`."""
    latest = since + timedelta(seconds=order.timeout_s)
    drain = DrainSeen(requested=True, mode=order.mode, deadline=format_time(latest))
    return tuple(
        Merge(Ref(POOL_NODE, node.key), node.pool, body=_drain_body(drain))
        for node in nodes
        if not _is_asked(node, order, latest) and must_drain(node, order, alive, since=since, now=now)
    )


def _is_asked(node: PoolNodeSeen, order: DrainOrder, latest: datetime) -> bool:
    """False also where somebody has put the deadline off or changed the mode by hand, or the pool's timeout is less."""
    deadline = parse_time(node.drain.deadline)
    is_late = deadline is not None and deadline > latest
    return node.drain.requested and node.drain.mode == order.mode and not is_late


def must_drain(
    node: PoolNodeSeen, order: DrainOrder, alive: Collection[str], *, since: datetime, now: datetime
) -> bool:
    """True while a node that leaves has an agent that may still bring blocks to safety; its time runs from `since`."""
    if node.key not in alive or is_done(node, order):
        return False
    latest = since + timedelta(seconds=order.timeout_s)
    deadline = parse_time(node.drain.deadline) if node.drain.requested else latest
    return deadline is not None and now < min(deadline, latest) + timedelta(seconds=order.wait_s - order.timeout_s)


def is_done(node: PoolNodeSeen, order: DrainOrder) -> bool:
    """True when the agent has reported that nothing is left to do before it goes."""
    verdict = node.conditions.get("Draining")
    return verdict is not None and verdict.status == "False" and verdict.reason in order.enough


def drain_deadlines(nodes: Iterable[PoolNodeSeen]) -> list[datetime | None]:
    """Return when drains run out, which no event will report."""
    return [parse_time(text) for text in {node.drain.deadline for node in nodes if node.drain.requested}]


def _body(
    pool: ObjectMeta,
    placement: Placement,
    node: str,
    drain: DrainSeen,
    orders: Iterable[NodeOrder] = (),
    models: Iterable[ModelOrder] = (),
) -> dict[str, Any]:
    """Return the whole KVPoolNode without status."""
    spec = KVPoolNodeSpec(
        pool_ref=placement.pool,
        node_name=node,
        tiers=placement.tiers,
        revision=placement.revision,
        drain=NodeDrain.model_validate({"requested": drain.requested, "mode": drain.mode, "deadline": drain.deadline}),
        orders=tuple(orders),
        models=tuple(models),
    )
    labels = pool_node_labels(placement.pool, node)
    metadata = {"labels": labels, "ownerReferences": [owner_reference(POOL, pool)]}
    return body_of(pool_node_ref(placement.pool, node), metadata, spec=spec.to_json())


def _body_like(body: Mapping[str, Any], pool: str, node: str) -> dict[str, Any]:
    """Return `body`, a KVPoolNode of the same placement, for another node: most of it is the same."""
    metadata = {**body["metadata"], "name": pool_node_ref(pool, node).name, "labels": pool_node_labels(pool, node)}
    return {**body, "metadata": metadata, "spec": {**body["spec"], "nodeName": node}}


def _drain_body(drain: DrainSeen) -> dict[str, Any]:
    """Return a merge patch that orders a drain and leaves the rest of a KVPoolNode as it is."""
    return {"spec": {"drain": {"requested": drain.requested, "mode": drain.mode, "deadline": drain.deadline}}}


def _creates(pool: Declared[KVPool], placement: Placement, nodes: Sequence[str]) -> tuple[Action, ...]:
    if not nodes:
        return ()
    first = _body(pool.meta, placement, nodes[0], NO_DRAIN)
    bodies = {node: _body_like(first, placement.pool, node) for node in nodes}
    return tuple(
        Create(pool_node_ref(placement.pool, node), placement.pool, body=body, adopts=True)
        for node, body in bodies.items()
    )


def _reorder(node: PoolNodeSeen, wants: Wants, stands: Stands) -> Action:
    """Set what KVOperations and KVModelCaches want of a node, where it is not so, and leave the rest as it is."""
    spec: dict[str, Any] = {}
    if not _is_ordered(node, wants):
        spec["orders"] = [order.to_json() for order in wants.orders]
    if not has_models(node, stands.models.get(node.node, ())):
        spec["models"] = [order.to_json() for order in stands.model_orders(node.node)]
    return Merge(Ref(POOL_NODE, node.key), node.pool, body={"spec": spec})


def _change(pool: Declared[KVPool], stands: Stands, seen: PoolNodeSeen, stays: Stays) -> Action:
    ref, drain, placement = Ref(POOL_NODE, seen.key), _drain_of(seen, stays), stands.placement
    if seen.node in stays.holds.unchanged:
        return Merge(ref, placement.pool, body=_drain_body(drain))
    orders = stays.of(seen.node).orders
    body = _body(pool.meta, placement, seen.node, drain, orders, stands.model_orders(seen.node))
    return Apply(ref, placement.pool, body=body)


def _with_event(pool: Declared[KVPool], reason: str, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Let the first action carry one Event for all: one Event for each plan, not one for each node."""
    if not actions:
        return ()
    counts = Counter(_DOINGS[type(action)] for action in actions)
    counted = ", ".join(f"{count} to {doing}" for doing, count in sorted(counts.items()))
    note = Note(pool.ref, pool.uid, reason, f"KVPoolNodes: {counted}")
    return (replace(actions[0], notes=(note,)), *actions[1:])


_DOINGS: Final[Mapping[type[Action], str]] = {Create: "create", Apply: "change", Merge: "drain", Delete: "delete"}
"""What people call the verbs of this module."""
