"""How far a KVOperation is: what it wants of which nodes now, and whether it is over. Pure, level-triggered.

What is remembered is in the objects: `status.startedAt` and the one final condition of the KVOperation, the orders in
the specs of KVPoolNodes, and their agents' answers. Laws: every operation ends, `timeoutSeconds` after its start at the
latest; an end is final; one that is cancelled wants nothing of anybody from then on; a node is asked only between start
and end, but a drain holds until its KVOperation is gone, on nodes that it names and those that it had asked; nothing is
asked for before the start is stored, so that a restart at any point goes on with the same deadline.

Laws of migrations: blocks never come under another layout, never from a medium that survives a restart to pools without
one unless they stay, and never from a sealed medium to an open one; every source node has a target while there is one,
its own node first, and all targets get about as many.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from kvstrata_api.models.conditions import is_true
from kvstrata_api.models.operation import KVOperation, MigrateOperation, OperationNodes
from kvstrata_api.models.pool import KVPool, KVPoolSpec, PoolTier
from kvstrata_api.models.poolnode import (
    MIGRATE_TARGETS_MAX,
    ORDERS_MAX,
    FlushOrder,
    MigrateOrder,
    NodeOrder,
    TierDrainOrder,
    WarmOrder,
)
from kvstrata_api.models.trust import KVTenant
from kvstrata_operator.decide.plan.conditions import Fault
from kvstrata_operator.decide.pools.reconcile import NO_DRAIN, DrainOrder, Wants, is_done
from kvstrata_operator.observe.kinds import format_time, parse_time
from kvstrata_operator.observe.records import AnswerSeen, Declared, DrainSeen, NodeSeen, PoolNodeSeen
from kvstrata_operator.observe.world import PoolsSeen

Operation = Declared[KVOperation]

_DRAIN: Final = DrainOrder("Demote", 0.0)
"""What an operation asks of nodes; its own time bounds it."""

REASONS_MAX: Final = 16
"""Reasons that a status states, those of most nodes first."""


class End(StrEnum):
    """How an operation is over: the type of its final condition, and its state."""

    COMPLETE = "Complete"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


@dataclass(frozen=True, slots=True)
class Open:
    """Why a node is not done, or never will be."""

    node: str
    reason: str
    message: str
    is_final: bool = False
    """True when waiting does not help."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an operation is."""

    fault: Fault | None = None
    """Why nothing can be asked for now; it may pass."""
    end: End | None = None
    """Set once it is over."""
    reason: str = ""
    """Of the end."""
    nodes: int = 0
    """Nodes that are meant."""
    done: int = 0
    open: tuple[Open, ...] = ()
    answers: tuple[AnswerSeen, ...] = ()
    """Of agents that work on it, or did."""


@dataclass(frozen=True, slots=True)
class Around:
    """What the progress of one operation depends on besides itself."""

    pool: Declared[KVPool] | None
    seen: Mapping[str, PoolNodeSeen]
    """The pool's KVPoolNodes by node name."""
    nodes: Mapping[str, NodeSeen]
    """Every Node, for its labels."""
    alive: Collection[str]
    """KVPoolNodes with a connected agent."""
    now: datetime
    tenants: Collection[str] = frozenset()
    """KVTenants that are there to stay."""
    pools: Mapping[str, Declared[KVPool]] = field(default_factory=dict)
    """All pools, for those that blocks migrate to."""
    seen_of: Callable[[str], Mapping[str, PoolNodeSeen]] = field(default=lambda _: {})
    """KVPoolNodes of any pool by node name."""

    def ready_in(self, pool: str) -> list[str]:
        """Nodes of a pool whose agent is connected and takes blocks; while there is none, all that stay."""
        staying = [n for n in self.seen_of(pool).values() if not n.is_deleting]
        ready = [n.node for n in staying if n.key in self.alive and not n.drain.requested]
        return ready or [n.node for n in staying]


def arounds(
    seen: PoolsSeen,
    tenants: Mapping[str, Declared[KVTenant]],
    seen_of: Callable[[str], Mapping[str, PoolNodeSeen]],
    now: datetime,
) -> dict[str, Around]:
    """What KVOperations depend on, for each pool that one of them names.

    `seen_of` gives the KVPoolNodes of a pool by node name.
    """
    named = {o.model.spec.pool_ref for o in seen.operations.values() if o.model is not None and o.model.spec.pool_ref}
    staying = {name for name, t in tenants.items() if t.model is not None and not t.is_deleting}
    return {
        pool: Around(
            seen.declared.get(pool), seen_of(pool), seen.nodes, seen.alive, now, staying, seen.declared, seen_of
        )
        for pool in named
    }


def nowhere(now: datetime) -> Around:
    """What an operation that names no pool depends on."""
    return Around(None, {}, {}, frozenset(), now)


def stored_end(operation: Operation) -> End | None:
    """How it was over when its status was last written; None while it is not."""
    return next((end for end in End if is_true(operation.conditions, end)), None)


def started_at(operation: Operation) -> datetime | None:
    """When its time began to run; None before that was stored."""
    return _moment(operation, "startedAt")


def finished_at(operation: Operation) -> datetime | None:
    """When it was over; None before that was stored."""
    return _moment(operation, "finishedAt")


def deadline(operation: Operation) -> datetime | None:
    """When it has failed at the latest; None before its start was stored."""
    start = started_at(operation)
    if start is None or operation.model is None:
        return None
    return start + timedelta(seconds=operation.model.spec.timeout_seconds)


def expires_at(operation: Operation) -> datetime | None:
    """When the object itself is to go; None for never, or not yet known."""
    finish = finished_at(operation)
    if finish is None or operation.model is None or operation.model.spec.ttl_seconds_after_finished is None:
        return None
    return finish + timedelta(seconds=operation.model.spec.ttl_seconds_after_finished)


def progress_of(operation: Operation, around: Around) -> Progress:
    """Return how far an operation is that is not over by its stored status."""
    model = operation.model
    if model is None or operation.error:
        return Progress(Fault("Invalid", operation.error), End.FAILED, "Invalid")
    fault = _fault(model, around)
    targets = () if fault else _targets(model, around)
    fault = fault or (None if targets else Fault("NoNodes", "none of the pool's nodes is meant"))
    verdicts = [_verdict(operation, node, around) for node in targets]
    still = tuple(v for v in verdicts if isinstance(v, Open))
    seen = (around.seen[n] for n in targets if n in around.seen)
    made = Progress(
        fault,
        nodes=len(targets),
        done=len(verdicts) - len(still),
        open=still,
        answers=tuple(node.answers[operation.uid] for node in seen if operation.uid in node.answers),
    )
    return ended(operation, made, around.now)


def ended(operation: Operation, made: Progress, now: datetime) -> Progress:
    """Add whether, and how, an operation is over that has come so far."""
    end, reason = _end(operation, made, now)
    return replace(made, end=end, reason=reason)


def _end(operation: Operation, made: Progress, now: datetime) -> tuple[End | None, str]:
    last = deadline(operation)
    if operation.model is not None and operation.model.spec.cancel:
        return End.CANCELLED, "Cancelled"
    if last is None:
        return None, ""  # Its start is not stored yet: nothing was asked for, so nothing is done.
    if made.fault is None and made.done == made.nodes:
        return End.COMPLETE, "Done"
    if made.fault is None and all(o.is_final for o in made.open):
        return End.FAILED, "NodesFailed"
    if now >= last:
        return End.FAILED, "DeadlineExceeded"
    return None, ""


def working(pool: Declared[KVPool] | None, label: str) -> KVPoolSpec | Fault:
    """What a pool declares, or why nothing can be asked of its agents now; `label` names it in messages."""
    if pool is None or pool.model is None:
        return Fault("PoolNotFound", f"{label} does not exist, or is not accepted")
    if pool.is_deleting:
        return Fault("PoolDeleting", f"{label} is being deleted")
    if pool.model.spec.paused:
        return Fault("PoolPaused", f"{label} is paused")
    return pool.model.spec


def _fault(model: KVOperation, around: Around) -> Fault | None:
    """Return why nothing can be asked of anybody now."""
    ready = working(around.pool, f"pool {model.spec.pool_ref}")
    return ready if isinstance(ready, Fault) else _work_fault(model, ready, around)


def _work_fault(model: KVOperation, pool: KVPoolSpec, around: Around) -> Fault | None:
    """The same of what the operation names besides its pool."""
    if model.spec.migrate is not None:
        return _migrate_fault(pool, model.spec.migrate, around)
    work = model.spec.drain or model.spec.flush or model.spec.warm
    tier = work.tier if work is not None else None
    if tier is not None and tier not in {t.name for t in pool.tiers}:
        return Fault("TierNotFound", f"pool {model.spec.pool_ref} has no tier {tier}")
    warm = model.spec.warm
    if warm is not None and warm.tenant not in around.tenants:
        return Fault("TenantNotFound", f"tenant {warm.tenant} does not exist, or is not accepted")
    return None


def _migrate_fault(source: KVPoolSpec, migrate: MigrateOperation, around: Around) -> Fault | None:
    found = fault(source, migrate, around.pools.get(migrate.to))
    if found is not None:
        return found
    if migrate.tenant is not None and migrate.tenant not in around.tenants:
        return Fault("TenantNotFound", f"tenant {migrate.tenant} does not exist, or is not accepted")
    if not around.ready_in(migrate.to):
        return Fault("NoTargets", f"spec.migrate.to: pool {migrate.to} has no nodes")
    return None


def _targets(model: KVOperation, around: Around) -> tuple[str, ...]:
    """Names of the nodes that are meant: those of the pool that are chosen, and those that were named."""
    work = model.spec.drain or model.spec.flush or model.spec.warm or model.spec.migrate
    chosen = work.nodes if work is not None else None
    here = [name for name, node in around.seen.items() if not node.is_deleting]
    if chosen is None:
        return tuple(sorted(here))
    picked = {name for name in here if _is_picked(chosen, around.nodes.get(name))}
    return tuple(sorted(picked | set(chosen.names)))


def _is_picked(chosen: OperationNodes, node: NodeSeen | None) -> bool:
    return node is not None and bool(chosen.match_labels) and chosen.match_labels.items() <= node.labels.items()


def _verdict(operation: Operation, name: str, around: Around) -> Open | None:
    """None when a node is done."""
    assert operation.model is not None, "only what can be read has nodes"
    node = around.seen.get(name)
    if node is None or node.is_deleting:
        return Open(name, "NoPoolNode", f"node {name} is none of the pool's")
    answer = node.answers.get(operation.uid)
    if answer is not None and answer.phase == "Failed":
        return Open(name, answer.reason or "Failed", answer.message, is_final=True)
    if _has_done(operation.model, node, answer):
        return None
    if node.key not in around.alive:
        return Open(name, "AgentAway", "the agent's Lease is not current")
    if answer is not None and answer.reason:
        return Open(name, answer.reason, answer.message)
    return Open(name, "InProgress", _drain_message(node) if operation.model.spec.drain else "")


def _has_done(model: KVOperation, node: PoolNodeSeen, answer: AnswerSeen | None) -> bool:
    if _is_whole_drain(model):
        return node.drain.requested and node.is_heard and is_done(node, _DRAIN)
    return answer is not None and answer.phase == "Done"


def _is_whole_drain(model: KVOperation) -> bool:
    """True for a drain of nodes with all their tiers, which is no order but a state of the KVPoolNode."""
    return model.spec.drain is not None and model.spec.drain.tier is None


def _drain_message(node: PoolNodeSeen) -> str:
    draining = node.conditions.get("Draining")
    return draining.message if draining is not None and draining.status == "True" else ""


@dataclass(slots=True)
class _Asked:
    """What is wanted of one pool's nodes, while it is put together."""

    drains: dict[str, DrainSeen] = field(default_factory=dict)
    orders: dict[str, list[NodeOrder]] = field(default_factory=dict)


def wants(operations: Iterable[Operation], arounds: Mapping[str, Around]) -> dict[str, dict[str, Wants]]:
    """What all operations together want of nodes now, by pool and node name; the oldest come first.

    `arounds` has an entry for each pool that is named by an operation.
    """
    asked: dict[str, _Asked] = {}
    for operation in in_order(operations):
        pool = operation.model.spec.pool_ref if operation.model is not None else None
        if pool is not None and not operation.is_deleting:
            _ask(operation, arounds[pool], asked.setdefault(pool, _Asked()))
    return {pool: _joined(its) for pool, its in asked.items()}


def in_order(operations: Iterable[Operation]) -> Sequence[Operation]:
    """The oldest first: it goes first where two want the same."""
    return sorted(operations, key=lambda o: (o.meta.creation_timestamp, o.meta.name))


def _ask(operation: Operation, around: Around, asked: _Asked) -> None:
    model, last = operation.model, deadline(operation)
    if model is None or last is None or model.spec.cancel:
        return
    end = stored_end(operation)
    is_holding = end is End.COMPLETE and model.spec.drain is not None
    if (end is not None and not is_holding) or operation.error or _fault(model, around):
        return
    meant = _targets(model, around)
    if is_holding:
        meant = tuple(node for node in meant if _is_held(operation, model, node, around))
    for node in meant:
        if _is_whole_drain(model):
            asked.drains.setdefault(node, DrainSeen(requested=True, mode="Demote", deadline=format_time(last)))
        elif len(its := asked.orders.setdefault(node, [])) < ORDERS_MAX:
            its.append(_migrate_order(operation, node, meant, around) or _order(operation.uid, model))


def _is_held(operation: Operation, model: KVOperation, name: str, around: Around) -> bool:
    """True where a drain that is Complete holds a node: one that it names, or had asked before its end.

    An order to drain alone would not tell: a roll of the agents drains nodes that came later, too.
    """
    assert model.spec.drain is not None, "only drains hold"
    node = around.seen.get(name)
    if node is None or name in model.spec.drain.nodes.names:
        return node is not None
    if not _is_whole_drain(model):
        return operation.uid in node.orders
    made, finish = parse_time(node.created), finished_at(operation)
    return node.drain.requested and (made is None or finish is None or made <= finish)


def _migrate_order(operation: Operation, node: str, meant: Sequence[str], around: Around) -> NodeOrder | None:
    migrate = operation.model.spec.migrate if operation.model is not None else None
    if migrate is None:
        return None
    nodes = targets(node, meant, around.ready_in(migrate.to))
    what = {"tenant": migrate.tenant, "tier": migrate.tier, "keep_source": migrate.keep_source}
    return NodeOrder(uid=operation.uid, type="Migrate", migrate=MigrateOrder(to=migrate.to, nodes=nodes, **what))


def _order(uid: str, model: KVOperation) -> NodeOrder:
    drain, flush, warm = model.spec.drain, model.spec.flush, model.spec.warm
    if drain is not None and drain.tier is not None:
        return NodeOrder(uid=uid, type="Drain", drain=TierDrainOrder(tier=drain.tier))
    if warm is not None:
        what = {"tenant": warm.tenant, "prefixes": warm.prefixes, "archived_sessions": warm.archived_sessions}
        return NodeOrder(uid=uid, type="Warm", warm=WarmOrder(**what, max_bytes=warm.max_bytes or 0, tier=warm.tier))
    assert flush is not None, "of a KVOperation exactly the block of its type is set"
    return NodeOrder(uid=uid, type="Flush", flush=FlushOrder(tier=flush.tier, mode=flush.mode))


def _joined(asked: _Asked) -> dict[str, Wants]:
    nodes = asked.drains.keys() | asked.orders.keys()
    return {n: Wants(asked.drains.get(n, NO_DRAIN), tuple(asked.orders.get(n, ()))) for n in nodes}


def by_reason(still: Iterable[Open]) -> list[tuple[int, Open]]:
    """Count open nodes by reason; the first node by name speaks for each. What is merely under way is left out."""
    waiting = [o for o in still if o.reason != "InProgress"]
    counts, first = Counter(o.reason for o in waiting), {o.reason: o for o in reversed(waiting)}
    return [(count, first[reason]) for reason, count in counts.most_common(REASONS_MAX)]


def _moment(operation: Operation, name: str) -> datetime | None:
    value = operation.status.get(name)
    return parse_time(value) if isinstance(value, str) else None


def fault(source: KVPoolSpec, migrate: MigrateOperation, target: Declared[KVPool] | None) -> Fault | None:
    """Return why no block may go there now."""
    ready = working(target, f"spec.migrate.to: pool {migrate.to}")
    return ready if isinstance(ready, Fault) else _mismatch(source, migrate, ready)


def _mismatch(source: KVPoolSpec, migrate: MigrateOperation, target: KVPoolSpec) -> Fault | None:
    ours, theirs = source.compatibility.model_dump(by_alias=True), target.compatibility.model_dump(by_alias=True)
    for name, value in ours.items():
        if theirs[name] != value:
            message = f"pool {migrate.to} has {theirs[name]!r}, blocks that go there have {value!r}"
            return Fault("LayoutMismatch", f"spec.compatibility.{name}: {message}")
    tiers = [t for t in target.tiers if migrate.tier in (None, t.name)]
    if not tiers:
        return Fault("TierNotFound", f"spec.migrate.tier: pool {migrate.to} has no tier {migrate.tier}")
    lasting = [t for t in tiers if t.type.survives_restart]
    if not migrate.keep_source and not lasting and any(t.type.survives_restart for t in source.tiers):
        return Fault("NotDurable", f"pool {migrate.to}: no tier of these survives a restart: {_listed(tiers)}")
    return _opened(source, migrate, target)


def _opened(source: KVPoolSpec, migrate: MigrateOperation, target: KVPoolSpec) -> Fault | None:
    """Blocks are demoted to any of the target's media in time, so all of them count."""
    sealed = [t.name for t in source.tiers if t.encryption.type != "None"]
    is_open = [t for t in target.tiers if t.type.survives_restart and t.encryption.type == "None"]
    if not sealed or not is_open:
        return None
    message = f"tiers[{is_open[0].name}].encryption.type of pool {migrate.to} is None, that of {sealed[0]} here is not"
    return Fault("NotEncrypted", message)


def _listed(tiers: Iterable[PoolTier]) -> str:
    return ", ".join(f"{t.name} ({t.type})" for t in tiers)


def targets(node: str, sources: Sequence[str], ready: Collection[str]) -> tuple[str, ...]:
    """Nodes of the other pool that a node's blocks go to, the first one first.

    `sources` are all nodes that blocks leave, `ready` those of the other pool with a connected agent.
    """
    ordered = sorted(ready)
    if not ordered:
        return ()
    at = sorted(sources).index(node) % len(ordered)
    turned = [n for n in ordered[at:] + ordered[:at] if n != node]
    return ((node,) * (node in ready) + tuple(turned))[:MIGRATE_TARGETS_MAX]
