"""What should run the agents of one pool, how far that is, and which agents are replaced now. Pure.

Every pod is to end at the pool's template. A node is drained where its memory would be lost, then its pod is deleted,
and its DaemonSet makes a new one. Laws: of nodes that serve, one is taken only while fewer than `maxUnavailable` are
away for whatever reason; of those with an agent that does not serve, no more than `maxUnavailable` are in our hands; an
agent that is gone is replaced at once. An agent that can do what is wanted in its old pod does that first: a tier that
goes is emptied where its directory is. When a new pod is not ready by the deadline nothing more is taken until it is,
or until something else is wanted.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import KVPool, UpdateStrategy
from kvstrata_operator.decide.agents import workloads
from kvstrata_operator.decide.agents.workloads import AgentPods, Body, NodeClasses, PodsOfPool
from kvstrata_operator.decide.incremental import Members
from kvstrata_operator.decide.plan.actions import Action, Delete, Note
from kvstrata_operator.decide.plan.conditions import Fault
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.pool_facts import is_serving
from kvstrata_operator.decide.pools.reconcile import DrainOrder, Holds, drain_order, must_drain, order_drains
from kvstrata_operator.observe.kinds import BUDGET, DAEMON_SET, POD, Ref, parse_time
from kvstrata_operator.observe.records import AgentPodSeen, Declared, MadeSeen, NodeSeen, PoolNodeSeen, Room
from kvstrata_operator.observe.world import ClusterSeen, PoolsSeen, Setting, View


@dataclass(frozen=True, slots=True)
class PodState:
    """One node of a pool's placement."""

    pod: AgentPodSeen | None = None
    seen: PoolNodeSeen | None = None
    is_alive: bool = False
    is_silent: bool = False
    """Neither, before its agent's Lease was read."""
    is_current: bool = True
    """True when its KVPoolNode has what the pool wants."""
    has_small_pages: bool = False
    """True when its pod should have small pages in place of huge ones, whatever it has."""

    @property
    def is_serving(self) -> bool:
        """True when engines have its agent now, and it was not asked to empty itself."""
        return is_serving(self.pod, self.seen, is_alive=self.is_alive)

    @property
    def is_draining(self) -> bool:
        """True when its agent was asked to empty itself."""
        return self.seen is not None and self.seen.drain.requested

    @property
    def is_free(self) -> bool:
        """True when nothing is done to it already, and it is known whether its agent lives."""
        return not (self.is_draining or _is_deleting(self)) and (self.is_alive or self.is_silent)

    @property
    def is_settling(self) -> bool:
        """True while its agent has not done what it was asked: blocks of a tier that goes are moved in the old pod."""
        is_behind = self.seen is not None and (
            not self.is_current
            or self.seen.observed_revision != self.seen.revision
            or self.seen.is_false("TiersSettled")
        )
        return self.is_alive and is_behind

    @property
    def is_gone(self) -> bool:
        """True when there is no agent that could lose anything."""
        is_unheard = self.is_silent or self.seen is None or not self.seen.has_reported
        return self.pod is not None and not self.pod.is_ready and is_unheard


@dataclass(frozen=True, slots=True)
class RollSpec:
    """What a roll is to bring about."""

    revision: str
    room: Room
    strategy: UpdateStrategy
    order: DrainOrder | None
    """None where memory outlives a pod."""
    small_revision: str = ""
    """In place of `revision`, on nodes that lack huge pages of the pool."""
    small_room: Room = field(default_factory=Room)

    def revision_on(self, state: PodState) -> str:
        """Revision that a node's pod should have."""
        return self.small_revision if state.has_small_pages else self.revision

    def has_room(self, state: PodState) -> bool:
        """True when a node's pod has room for what the pool wants there."""
        room = self.small_room if state.has_small_pages else self.room
        return state.pod is not None and state.pod.room.covers(room)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is done to which node now. Nodes are sorted."""

    outdated: frozenset[str] = frozenset()
    """Nodes whose pod is of another revision."""
    without_room: frozenset[str] = frozenset()
    """Those of them whose pod has no room for what the pool wants: their KVPoolNodes change with the new pod."""
    missing: frozenset[str] = frozenset()
    """Nodes without a pod."""
    away: frozenset[str] = frozenset()
    """Nodes that do not serve, those included that are taken now."""
    drained: frozenset[str] = frozenset()
    """Nodes whose order to drain stands."""
    drain: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    stuck: str = ""
    """A node whose new pod is not ready in time; empty when there is none."""

    @property
    def holds(self) -> Holds:
        """What the roll keeps from `reconcile`."""
        return Holds(self.without_room, self.drained)


NO_ROLLOUT = Rollout()
"""Of a pool whose agents others run."""


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of one pool. Empty where others run them."""

    pods: PodsOfPool | None = None
    bodies: Mapping[Ref, Body] = field(default_factory=dict)
    """What runs them."""
    fault: Fault | None = None
    """Why there is nothing that runs them although there should be."""
    rollout: Rollout = NO_ROLLOUT
    remark: str = ""
    """What an administrator should know of them although all is well."""

    @property
    def revision(self) -> str:
        """Name what the pods should be; empty where others run them."""
        return self.pods.pods.revision if self.pods else ""


def agents_of(view: View, pool: Declared[KVPool], members: Members, setting: Setting, now: datetime) -> Agents:
    """Judge an accepted pool: of its nodes those alone that do not serve from the pod that they should have."""
    placement = members.placement
    if not setting.agent_template or pool.model is None or placement is None:
        return Agents()
    pods = _pods(view.cluster, pool.model, placement, setting)
    if isinstance(pods, Fault):
        return Agents(fault=pods)
    small = workloads.small_nodes(placement.nodes, members.small.keys())
    doubtful = members.idle | (_not_as_wanted(members, pods, small) & placement.nodes)
    states = {
        node: _pod_state(view.pools, placement, members, node, has_small_pages=node in small) for node in doubtful
    }
    wanted = RollSpec(
        pods.pods.revision,
        pods.pods.room,
        pool.model.spec.update_strategy,
        _order(pool, pods.pods),
        pods.small.revision,
        pods.small.room,
    )
    rollout = roll(wanted, states, now)
    leaving = members.difference.surplus & view.pools.nodes.keys()
    classes = _classes(members, small, rollout, leaving, view.pools.nodes)
    made = _made(view.cluster, workloads.refs(pool.key, setting.namespace))
    bodies = workloads.bodies(pool, placement, pods, classes, setting.namespace, made)
    return Agents(pods, bodies, None, rollout, _remark(members, placement, pods))


def plan_agents(
    view: View, pool: Declared[KVPool], agents: Agents, members: Members, setting: Setting, now: datetime
) -> tuple[Action, ...]:
    """Plan the workload, then what its roll does to nodes now."""
    if agents.pods is None:
        return ()
    refs = workloads.refs(pool.key, setting.namespace)
    made = workloads.plan_workload(pool, agents.bodies, _made(view.cluster, refs))
    nodes = [members.seen[node] for node in agents.rollout.drain]
    drains = order_drains(nodes, drain_order(pool), {n.key for n in nodes}, since=now, now=now)
    replaced = (_replace(pool, members.pods.by_node[node], setting.namespace) for node in agents.rollout.replace)
    return (*made, *drains, *replaced)


def forget_agents(cluster: ClusterSeen, pool: Declared[KVPool], setting: Setting) -> tuple[Action, ...]:
    """Stop the agents of a pool that has no nodes any more; the garbage collector would need up to half a minute."""
    made = _made(cluster, workloads.refs(pool.key, setting.namespace))
    return tuple(Delete(ref, pool.key, uid=record.uid) for ref, record in made.items())


def _pods(cluster: ClusterSeen, pool: KVPool, placement: Placement, setting: Setting) -> PodsOfPool | Fault:
    held = cluster.config_maps.get(setting.agent_template)
    if held is None or not held.template:
        where = f"ConfigMap {setting.namespace}/{setting.agent_template}"
        return Fault("AgentTemplateMissing", f"{where} with entry {names.AGENT_TEMPLATE_ENTRY} is not there")
    try:
        return workloads.pods_of(pool, placement, held.template)
    except InvalidInputError as e:
        return Fault("AgentTemplateInvalid", str(e))


def _not_as_wanted(members: Members, pods: PodsOfPool, small: AbstractSet[str]) -> AbstractSet[str]:
    """Nodes whose pod is not of the revision that they should have."""
    if not small:
        return members.pods.not_of(pods.pods.revision)
    return (members.pods.not_of(pods.pods.revision) - small) | (members.pods.not_of(pods.small.revision) & small)


def _classes(
    members: Members,
    wanted: AbstractSet[str],
    rollout: Rollout,
    leaving: AbstractSet[str],
    seen: Mapping[str, NodeSeen],
) -> NodeClasses:
    """A node whose agent still serves or drains stays with the DaemonSet of its pod, which would end it at once.

    It goes to the other one when its pod does.
    """
    small = set(wanted)
    replaced = {*rollout.replace}
    for node in rollout.outdated - replaced:
        pod = members.pods.by_node[node]
        if not pod.is_deleting and pod.has_small_pages != (node in small):
            small ^= {node}
    by_node = members.pods.by_node
    going_small = {node for node in leaving if node in by_node and by_node[node].has_small_pages}
    return NodeClasses(small, frozenset(leaving), going_small, seen)


def _remark(members: Members, placement: Placement, pods: PodsOfPool) -> str:
    small = ""
    if members.small:
        node = min(members.small)
        counted = f"{len(members.small)} of {placement.matched} nodes have pages of 4Ki in place of huge ones"
        small = f"{counted}; {node}: {members.small[node]}"
    return "; ".join(filter(None, (small, pods.pods.remark)))


def _pod_state(
    pools: PoolsSeen, placement: Placement, members: Members, node: str, *, has_small_pages: bool
) -> PodState:
    seen, pod = members.seen.get(node), members.pods.by_node.get(node)
    if seen is None:
        return PodState(pod, has_small_pages=has_small_pages)
    alive, silent = seen.key in pools.alive, seen.key in pools.silent
    return PodState(
        pod,
        seen,
        is_alive=alive,
        is_silent=silent,
        is_current=placement.is_current(seen),
        has_small_pages=has_small_pages,
    )


def _order(pool: Declared[KVPool], pods: AgentPods) -> DrainOrder | None:
    """How agents are emptied before they are replaced; None where what they hold lasts, or may be lost."""
    order = drain_order(pool)
    return None if pods.keeps_memory or order.mode == "Drop" else order


def _made(cluster: ClusterSeen, refs: Iterable[Ref]) -> dict[Ref, MadeSeen]:
    stores = {DAEMON_SET: cluster.daemon_sets, BUDGET: cluster.budgets}
    return {ref: stores[ref.kind][ref.name] for ref in refs if ref.name in stores[ref.kind]}


def _replace(pool: Declared[KVPool], pod: AgentPodSeen, namespace: str) -> Delete:
    note = Note(pool.ref, pool.uid, "ReplacingAgent", f"node {pod.node}: pod {pod.key} is of another revision")
    return Delete(Ref(POD, pod.key, namespace), pool.key, (note,), uid=pod.uid)


def roll(wanted: RollSpec, states: Mapping[str, PodState], now: datetime) -> Rollout:
    """Decide by node name.

    `states` has the nodes of the placement; those that serve from a pod of `wanted.revision` may be left out, because
    nothing is done to them and nothing depends on them.
    """
    outdated = {n for n, s in states.items() if s.pod is not None and s.pod.revision != wanted.revision_on(s)}
    without_room = frozenset(n for n in outdated if not wanted.has_room(states[n]))
    away = {n for n, s in states.items() if not s.is_serving}
    missing = frozenset(n for n, s in states.items() if s.pod is None)
    stuck = _first_late(states, away - outdated, wanted.strategy, now)
    if stuck or wanted.strategy.type == "OnDelete":
        return Rollout(frozenset(outdated), without_room, missing, frozenset(away), stuck=stuck)
    hands = {n for n in away - missing if n not in outdated or _is_taken(states[n])}
    drain: list[str] = []
    replace: list[str] = []
    for node in sorted(outdated, key=lambda n: (n not in away, n)):
        state = states[node]
        if state.is_gone or (state.is_draining and not _waits(state, wanted, now)):
            replace.append(node)
        elif not state.is_free or (state.is_settling and node not in without_room):
            continue
        elif (len(hands) if node in away else len(away)) < wanted.strategy.max_unavailable:
            hands.add(node)
            away.add(node)
            (drain if _waits(state, wanted, now) else replace).append(node)
    ordered = frozenset(n for n in outdated if states[n].is_draining) | frozenset(drain)
    replaced = tuple(n for n in replace if not _is_deleting(states[n]))
    return Rollout(frozenset(outdated), without_room, missing, frozenset(away), ordered, tuple(drain), replaced)


def _waits(state: PodState, wanted: RollSpec, now: datetime) -> bool:
    """True while an agent has to bring blocks to safety before its pod goes."""
    if state.seen is None or wanted.order is None:
        return False
    alive: Collection[str] = (state.seen.key,) if state.is_alive else ()
    return must_drain(state.seen, wanted.order, alive, since=now, now=now)


def _is_taken(state: PodState) -> bool:
    return state.is_draining or _is_deleting(state)


def _is_deleting(state: PodState) -> bool:
    return state.pod is not None and state.pod.is_deleting


def _first_late(
    states: Mapping[str, PodState], updated: Collection[str], strategy: UpdateStrategy, now: datetime
) -> str:
    """Return the first node by name whose new pod has had its time and is not ready."""
    latest = now - timedelta(seconds=strategy.progress_deadline_seconds)
    late = (n for n in sorted(updated) if _is_late(states[n].pod, latest))
    return next(late, "")


def _is_late(pod: AgentPodSeen | None, latest: datetime) -> bool:
    if pod is None or pod.is_ready or pod.is_deleting:
        return False
    since = parse_time(pod.ready_since or pod.created)
    return since is not None and since <= latest
