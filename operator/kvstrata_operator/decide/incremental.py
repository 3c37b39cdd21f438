"""What decisions need to know of nodes, kept up to date node by node. Pure: told of changes, it reads no clock.

Every decision about a node depends on that node, its KVPoolNodes and what the pools ask for, so a change of one node
costs the same in a fleet of any size. What all nodes of a pool share changes with the pool alone; then everything is
looked at again.

Law: after any changes a census says what one says that was taken anew.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvstrata_api.models.pool import KVPool
from kvstrata_operator.decide.agents.rollout import Standing
from kvstrata_operator.decide.pools import autoscaling
from kvstrata_operator.decide.pools.placement import Picked, Placement, Rules, rules_of
from kvstrata_operator.decide.pools.pool_facts import Tally, judge, memory_bytes
from kvstrata_operator.decide.pools.pool_pods import PoolPods
from kvstrata_operator.decide.pools.reconcile import Difference, is_plain
from kvstrata_operator.decide.pools.sums import FleetSums, PoolSums
from kvstrata_operator.observe.records import AgentPodSeen, Declared, NodeSeen, PoolNodeSeen


@dataclass(slots=True)
class Members:
    """One pool's nodes."""

    seen: dict[str, PoolNodeSeen] = field(default_factory=dict)
    """KVPoolNodes by the name of their node."""
    draining: set[str] = field(default_factory=set)
    """Nodes whose KVPoolNode has been asked to drain."""
    sums: PoolSums = field(default_factory=PoolSums)
    pods: PoolPods = field(default_factory=PoolPods)
    """Pods of its agents, where we run them."""
    idle: set[str] = field(default_factory=set)
    """Nodes of the placement whose agent does not serve from a pod of ours."""
    placement: Placement | None = None
    """None while the pool is refused, unreadable or on its way out."""
    picked: Picked = field(default_factory=Picked)
    difference: Difference = field(default_factory=Difference)
    tally: Tally = field(default_factory=Tally)


class Census:
    """All pools' nodes. Not thread safe."""

    def __init__(
        self,
        pools: Mapping[str, Declared[KVPool]],
        nodes: Mapping[str, NodeSeen],
        pool_nodes: Mapping[str, PoolNodeSeen],
        pods: Mapping[str, AgentPodSeen],
    ) -> None:
        """Follow these four, which may change as long as this is told; what is in them already is counted."""
        self._pools = pools
        self._nodes = nodes
        self._pool_nodes = pool_nodes
        self._alive: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()
        self._rules = Rules({}, (), {}, ())
        self._is_stale = True
        self._changed: set[str] = set()
        """Names of nodes that have to be looked at again."""
        self.pools: dict[str, Members] = {}
        """By pool; those that have KVPoolNodes and no KVPool as well."""
        self.sums = FleetSums()
        for node in pool_nodes.values():
            self.pool_node_changed(None, node)
        for pod in pods.values():
            self.pod_changed(None, pod)

    def pool_changed(self, old: Declared[KVPool] | None, new: Declared[KVPool] | None) -> None:
        """Look at everything again when what the pool asks for has changed; of its status sizes alone matter."""
        if old is None or new is None or _asks(old) != _asks(new):
            self._is_stale = True

    def node_changed(self, old: NodeSeen | None, new: NodeSeen | None) -> None:
        """Look at this node again."""
        self._changed.update(node.key for node in (old, new) if node is not None)

    def pool_node_changed(self, old: PoolNodeSeen | None, new: PoolNodeSeen | None) -> None:
        """Count what it reports, and look at its node again."""
        if old is not None:
            self._count(old, -1)
            members = self._members(old.pool)
            members.seen.pop(old.node, None)
            members.draining.discard(old.node)
        if new is not None:
            self._count(new, 1)
            members = self._members(new.pool)
            members.seen[new.node] = new
            if new.drain.requested:
                members.draining.add(new.node)

    def pod_changed(self, old: AgentPodSeen | None, new: AgentPodSeen | None) -> None:
        """Count it, and look at its node again; a pod that is meant for no node yet counts for nothing."""
        if old is not None and old.node:
            self._members(old.pool).pods.remove(old)
            self._changed.add(old.node)
        if new is not None and new.node:
            self._members(new.pool).pods.put(new)
            self._changed.add(new.node)

    def bring_up_to_date(self, alive: frozenset[str], silent: frozenset[str]) -> None:
        """Look at whatever has changed; both name KVPoolNodes, those whose agents live and those whose are gone."""
        if alive is not self._alive or silent is not self._silent:
            turned = (self._alive ^ alive) | (self._silent ^ silent)
            self._changed.update(self._pool_nodes[key].node for key in turned if key in self._pool_nodes)
            self._alive, self._silent = alive, silent
        if self._is_stale:
            self._begin()
        if self._changed:
            self._place(self._changed)
            for node in self._changed | self._resolve():
                self._look(node)
            self._changed = set()

    def _begin(self) -> None:
        """Forget all verdicts, and have every node looked at."""
        self._is_stale = False
        self._rules = rules_of(pool for pool in self._pools.values() if not pool.error)
        for name in [*self.pools]:
            members = self.pools[name]
            members.placement, members.picked = None, Picked()
            members.difference, members.tally, members.idle = Difference(), Tally(), set()
            if not members.seen and not members.pods.by_node and name not in self._rules.placed:
                del self.pools[name]
        for name in self._rules.placed:
            self._members(name)
            self._resettle(name)
        self._changed.update(self._nodes)
        for members in self.pools.values():
            self._changed.update(members.seen)

    def _place(self, nodes: Collection[str]) -> None:
        """Pick these nodes anew."""
        for pool, found in self._rules.pick({n: self._nodes[n] for n in nodes if n in self._nodes}).items():
            picked = self.pools[pool].picked
            picked.nodes.difference_update(nodes)
            picked.nodes |= found.nodes
            for node in picked.excluded.keys() & nodes:
                del picked.excluded[node]
            picked.excluded |= found.excluded

    def _resolve(self) -> set[str]:
        """Divide shared tiers anew where the number of nodes asks for it; return the nodes that concerns."""
        concerned: set[str] = set()
        for pool in self._rules.placed:
            members = self.pools[pool]
            assert members.placement is not None
            if self._rules.has_shared_tier(pool):
                before = members.placement.tiers_digest
                self._resettle(pool)
                if members.placement.tiers_digest != before:
                    concerned |= members.picked.nodes | members.seen.keys()
        return concerned

    def _resettle(self, pool: str) -> None:
        members = self.pools[pool]
        members.placement = self._rules.placement(pool, members.picked)

    def _look(self, node: str) -> None:
        """Judge one node for each pool, the oldest first: what older pools take there counts."""
        before_bytes = 0
        for pool in self._rules.placed:
            members = self.pools[pool]
            placement, seen = members.placement, members.seen.get(node)
            assert placement is not None
            is_silent = seen is not None and seen.key in self._silent
            is_alive = seen is not None and seen.key in self._alive
            verdict = judge(placement, node, seen, is_silent=is_silent, before_bytes=before_bytes)
            members.tally.put(node, verdict)
            is_wanted = node in placement.nodes
            members.difference.put(
                node,
                is_wanted=is_wanted,
                is_there=seen is not None,
                is_plain=seen is not None and is_plain(placement, seen),
            )
            standing = Standing(members.pods.by_node.get(node), seen, is_alive=is_alive)
            if is_wanted and not standing.is_serving:
                members.idle.add(node)
            else:
                members.idle.discard(node)
            if is_wanted:
                before_bytes += memory_bytes(placement.tiers)

    def _count(self, node: PoolNodeSeen, sign: int) -> None:
        self._members(node.pool).sums.add(node, sign)
        self.sums.add(node, sign)
        self._changed.add(node.node)

    def _members(self, pool: str) -> Members:
        return self.pools.setdefault(pool, Members())


def _asks(pool: Declared[KVPool]) -> tuple[object, ...]:
    """What the nodes of a pool depend on."""
    spec = pool.model.spec if pool.model is not None else None
    sizes = tuple(autoscaling.scales_of(pool.status).items())
    return (pool.uid, pool.meta.creation_timestamp, pool.is_deleting, bool(pool.error), spec, sizes)
