"""What decisions need to know of nodes, refreshed node by node. Pure: it is given changes, and reads no clock.

Every decision about a node depends on that node, its KVPoolNodes and what the pools ask for, so a change of one node
costs the same in a fleet of any size. What all nodes of a pool share changes with the pool alone; then every node is
judged again.

Laws: after any changes the facts are those that would be gathered from scratch; a sum depends on the KVPoolNodes that
are in it and not on the order in which they came or went; of tenants and shares that no KVPoolNode reports nothing is
kept.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvstrata_api import names
from kvstrata_api.models.model_cache import KVModelCache
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import MODELS_MAX, ModelOrder
from kvstrata_operator.decide.models.model_caches import CacheFacts, asks, in_order
from kvstrata_operator.decide.pools.placement import Picked, Placement, Rules, rules_of, scales_of
from kvstrata_operator.decide.pools.pool_facts import (
    PoolPods,
    PoolSums,
    Tally,
    is_serving,
    judge,
    memory_bytes,
    pages_bytes,
    pages_lacking,
)
from kvstrata_operator.decide.pools.reconcile import Difference, ModelWant, is_plain
from kvstrata_operator.decide.trust.tenant_usage import Asked, Held
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.records import AgentPodSeen, Declared, NodeSeen, PoolNodeSeen
from kvstrata_operator.observe.world import View, World

_NO_CACHES: Final[Mapping[str, Declared[KVModelCache]]] = MappingProxyType({})


@dataclass(slots=True)
class FleetSums:
    """What all agents report of tenants and shares, added up."""

    held: defaultdict[str, Held] = field(default_factory=lambda: defaultdict(Held))
    """By tenant."""
    asked: defaultdict[str, Asked] = field(default_factory=lambda: defaultdict(Asked))
    """By tenant."""
    share_hits: Counter[str] = field(default_factory=Counter)
    """Blocks that readers of a share were given, by its uid."""

    def add(self, node: PoolNodeSeen, sign: int) -> None:
        """Take in what one node reports (`sign` 1), or take it out again (-1)."""
        for row in node.tenants:
            self.held[row.tenant].add((node.pool, row.tier), node.node, row, sign)
            if self.held[row.tenant].is_empty:
                del self.held[row.tenant]
        for asked in node.tenant_lookups:
            self.asked[asked.tenant].add(asked, sign)
            if self.asked[asked.tenant].is_empty:
                del self.asked[asked.tenant]
        for uid, count in node.share_hits:
            self.share_hits[uid] += sign * count
            if not self.share_hits[uid]:
                del self.share_hits[uid]


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
    pages: Mapping[str, int] = field(default_factory=dict)
    """Huge pages that its tiers want on each node, in bytes, by the name of the resource."""
    small: dict[str, str] = field(default_factory=dict)
    """Nodes of the placement that lack huge pages of the pool, and what they lack."""
    models: dict[str, tuple[ModelWant, ...]] = field(default_factory=dict)
    """Weights that KVModelCaches want, by the name of the node; nodes without any are left out."""
    placement: Placement | None = None
    """None while the pool is refused, unreadable or on its way out."""
    picked: Picked = field(default_factory=Picked)
    difference: Difference = field(default_factory=Difference)
    tally: Tally = field(default_factory=Tally)


class FleetFacts:
    """All pools' nodes and what agents report. Not thread safe."""

    def __init__(
        self,
        pools: Mapping[str, Declared[KVPool]],
        nodes: Mapping[str, NodeSeen],
        pool_nodes: Mapping[str, PoolNodeSeen],
        pods: Mapping[str, AgentPodSeen],
        caches: Mapping[str, Declared[KVModelCache]] = _NO_CACHES,
    ) -> None:
        """Count what is in these; each later change of them has to be reported to the `*_changed` methods."""
        self._pools = pools
        self._nodes = nodes
        self._pool_nodes = pool_nodes
        self._caches = caches
        self._alive: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()
        self._rules = Rules({}, (), {}, ())
        self._is_stale = True
        self._changed: set[str] = set()
        """Names of nodes that have to be judged again."""
        self.pools: dict[str, Members] = {}
        """By pool; those that have KVPoolNodes and no KVPool as well."""
        self.models: dict[str, CacheFacts] = {}
        """By KVModelCache."""
        self._models_of: dict[str, tuple[CacheFacts, ...]] = {}
        """By pool, those that want something of its nodes, the oldest first."""
        self._are_caches_stale = True
        self.mislabelled: dict[str, dict[str, str | None]] = {}
        """Nodes whose labels do not state the weights that they have, with what to set; None for one to remove."""
        self.sums = FleetSums()
        for node in pool_nodes.values():
            self.pool_node_changed(None, node)
        for pod in pods.values():
            self.pod_changed(None, pod)

    @classmethod
    def following(cls, world: World) -> "FleetFacts":
        """Make facts that every change of a world is reported to."""
        items = {kind: store.items for kind, store in world.stores.items()}
        made = cls(
            items[kinds.POOL], items[kinds.NODE], items[kinds.POOL_NODE], items[kinds.POD], items[kinds.MODEL_CACHE]
        )
        world.follow(kinds.POOL, made.pool_changed)
        world.follow(kinds.NODE, made.node_changed)
        world.follow(kinds.POOL_NODE, made.pool_node_changed)
        world.follow(kinds.POD, made.pod_changed)
        world.follow(kinds.MODEL_CACHE, made.model_cache_changed)
        return made

    def pool_changed(self, old: Declared[KVPool] | None, new: Declared[KVPool] | None) -> None:
        """Have every node judged again when what the pool asks for has changed; of its status sizes alone matter."""
        if old is None or new is None or _asks(old) != _asks(new):
            self._is_stale = True

    def node_changed(self, old: NodeSeen | None, new: NodeSeen | None) -> None:
        """Have this node judged again."""
        self._changed.update(node.key for node in (old, new) if node is not None)

    def pool_node_changed(self, old: PoolNodeSeen | None, new: PoolNodeSeen | None) -> None:
        """Count what it reports, and have its node judged again."""
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
        """Count it, and have its node judged again; a pod that is meant for no node yet counts for nothing."""
        if old is not None and old.node:
            self._members(old.pool).pods.remove(old)
            self._changed.add(old.node)
        if new is not None and new.node:
            self._members(new.pool).pods.put(new)
            self._changed.add(new.node)

    def model_cache_changed(self, old: Declared[KVModelCache] | None, new: Declared[KVModelCache] | None) -> None:
        """Have the nodes of its pool judged again when what it asks for has changed."""
        if old is None or new is None or asks(old) != asks(new):
            self._are_caches_stale = True

    def refresh(self, alive: frozenset[str], silent: frozenset[str]) -> None:
        """Judge whatever has changed; both name KVPoolNodes, those whose agents live and those whose are gone."""
        if alive is not self._alive or silent is not self._silent:
            turned = (self._alive ^ alive) | (self._silent ^ silent)
            self._changed.update(self._pool_nodes[key].node for key in turned if key in self._pool_nodes)
            self._alive, self._silent = alive, silent
        if self._is_stale:
            self._begin()
        if self._are_caches_stale:
            self._begin_models()
        if self._changed:
            self._place(self._changed)
            concerned = self._changed | self._resolve()
            for node in concerned | self._choose(concerned):
                self._judge(node)
            self._changed = set()

    def seen_of(self, pool: str) -> Mapping[str, PoolNodeSeen]:
        """KVPoolNodes of a pool by node name."""
        return self.pools[pool].seen if pool in self.pools else {}

    def model_peers(self, order: ModelOrder, node: str) -> tuple[str, ...]:
        """Nodes that the agent of a node asks for the weights of an order."""
        return self.models[order.name].peers_of(node)

    def _begin(self) -> None:
        """Forget all verdicts, and have every node judged."""
        self._is_stale, self._are_caches_stale = False, True
        self.models = {}
        self._rules = rules_of(pool for pool in self._pools.values() if not pool.error)
        for name in [*self.pools]:
            members = self.pools[name]
            members.placement, members.picked = None, Picked()
            members.difference, members.tally, members.idle, members.small = Difference(), Tally(), set(), {}
            members.models = {}
            if not members.seen and not members.pods.by_node and name not in self._rules.placed:
                del self.pools[name]
        for name in self._rules.placed:
            self._members(name)
            self._resettle(name)
        self._changed.update(self._nodes)
        for members in self.pools.values():
            self._changed.update(members.seen)

    def _begin_models(self) -> None:
        """Take in the KVModelCaches as they are, and have nodes judged where one has changed."""
        self._are_caches_stale = False
        before, self.models = self.models, {}
        for cache in in_order(self._caches.values()):
            known = before.pop(cache.key, None)
            if known is not None and asks(known.cache) == asks(cache):
                self.models[cache.key] = known
                continue
            pool = cache.model.spec.pool_ref if cache.model is not None else ""
            self.models[cache.key] = CacheFacts(cache, self._pools.get(pool))
            self._concern(pool, known)
        for gone in before.values():
            self._concern("", gone)
        of_pool: defaultdict[str, list[CacheFacts]] = defaultdict(list)
        for facts in self.models.values():
            if facts.want is not None and not facts.cache.is_deleting:
                of_pool[facts.pool].append(facts)
        self._models_of = {pool: tuple(its) for pool, its in of_pool.items()}

    def _concern(self, pool: str, before: CacheFacts | None) -> None:
        """Have the nodes of a pool judged, and those of the pool that a KVModelCache was for before."""
        for name in {pool, before.pool if before is not None else ""} & self.pools.keys():
            self._changed |= self.pools[name].picked.nodes | self.pools[name].seen.keys()

    def _choose(self, nodes: Collection[str]) -> set[str]:
        """Settle which nodes are to have weights after these have changed; return the nodes that concerns."""
        concerned: set[str] = set()
        for pool in self._rules.placed:
            members = self.pools[pool]
            for facts in self._models_of.get(pool, ()):
                for node in nodes:
                    seen = members.seen.get(node)
                    is_alive = seen is not None and seen.key in self._alive
                    here = self._nodes.get(node) if node in members.picked.nodes else None
                    facts.consider(node, here, seen, is_alive=is_alive)
                concerned |= facts.choose()
        return concerned

    def _place(self, nodes: Collection[str]) -> None:
        """Pick these nodes again."""
        for pool, found in self._rules.pick({n: self._nodes[n] for n in nodes if n in self._nodes}).items():
            picked = self.pools[pool].picked
            picked.nodes.difference_update(nodes)
            picked.nodes |= found.nodes
            for node in picked.excluded.keys() & nodes:
                del picked.excluded[node]
            picked.excluded |= found.excluded

    def _resolve(self) -> set[str]:
        """Divide shared tiers again where the number of nodes asks for it; return the nodes that concerns."""
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
        members.pages = pages_bytes(members.placement.tiers)

    def _judge(self, node: str) -> None:
        """Judge one node for each pool, the oldest first: what older pools take there counts."""
        before_bytes = 0
        pages: dict[str, int] = {}
        labels: dict[str, str] = {}
        offered = self._nodes[node].pages_bytes if node in self._nodes else None
        for pool in self._rules.placed:
            members = self.pools[pool]
            placement, seen = members.placement, members.seen.get(node)
            assert placement is not None
            is_silent = seen is not None and seen.key in self._silent
            is_alive = seen is not None and seen.key in self._alive
            verdict = judge(placement, node, seen, is_silent=is_silent, before_bytes=before_bytes)
            members.tally.put(node, verdict)
            is_wanted = node in placement.nodes
            models = self._judge_models(pool, node, seen, labels, is_alive=is_alive)
            members.difference.put(
                node,
                is_wanted=is_wanted,
                is_there=seen is not None,
                is_plain=seen is not None and is_plain(placement, seen, models),
            )
            if is_wanted and not is_serving(members.pods.by_node.get(node), seen, is_alive=is_alive):
                members.idle.add(node)
            else:
                members.idle.discard(node)
            members.small.pop(node, None)
            if not is_wanted:
                continue
            before_bytes += memory_bytes(placement.tiers)
            if members.pages and (lacking := pages_lacking(members.pages, offered, pages)):
                members.small[node] = lacking
                continue
            for name, size_bytes in members.pages.items():
                pages[name] = pages.get(name, 0) + size_bytes
        self._label(node, labels)

    def _judge_models(
        self, pool: str, node: str, seen: PoolNodeSeen | None, labels: dict[str, str], *, is_alive: bool
    ) -> tuple[ModelWant, ...]:
        """Judge the weights of one node of a pool: the orders for it, and into `labels` those that it has."""
        wants: list[ModelWant] = []
        for facts in self._models_of.get(pool, ()):
            is_ordered = len(wants) < MODELS_MAX
            facts.observe(node, seen, is_alive=is_alive, is_ordered=is_ordered)
            if node not in facts.chosen or facts.want is None:
                continue
            if is_ordered:
                wants.append(facts.want)
            revision = facts.label_of(node, seen)
            if revision is not None:
                labels[f"{names.LABEL_MODEL_PREFIX}{facts.cache.key}"] = revision
        members = self.pools[pool]
        if wants:
            members.models[node] = tuple(wants)
        else:
            members.models.pop(node, None)
        return tuple(wants)

    def _label(self, node: str, wanted: Mapping[str, str]) -> None:
        """Note what a Node's labels lack, or have too much, of the weights that it has."""
        self.mislabelled.pop(node, None)
        if node not in self._nodes:
            return
        stated = {k: v for k, v in self._nodes[node].labels.items() if k.startswith(names.LABEL_MODEL_PREFIX)}
        if stated != wanted:
            patch: dict[str, str | None] = dict.fromkeys(stated.keys() - wanted.keys())
            self.mislabelled[node] = patch | {k: v for k, v in wanted.items() if stated.get(k) != v}

    def _count(self, node: PoolNodeSeen, sign: int) -> None:
        self._members(node.pool).sums.add(node, sign)
        self.sums.add(node, sign)
        self._changed.add(node.node)

    def _members(self, pool: str) -> Members:
        return self.pools.setdefault(pool, Members())


Seen = tuple[View, FleetFacts]
"""All that a plan is made from: what was seen, and what follows from it."""


def _asks(pool: Declared[KVPool]) -> tuple[object, ...]:
    """What the nodes of a pool depend on."""
    spec = pool.model.spec if pool.model is not None else None
    sizes = tuple(scales_of(pool.status).items())
    return (pool.uid, pool.meta.creation_timestamp, pool.is_deleting, bool(pool.error), spec, sizes)
