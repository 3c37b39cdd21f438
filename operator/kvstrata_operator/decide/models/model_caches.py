"""Which nodes are to have the weights of a KVModelCache, and how far each of them is. Pure, level-triggered.

What is remembered is in the objects: orders in the specs of KVPoolNodes, reports in their statuses, and in that of the
KVModelCache the digest that its generation has found. Facts are kept node by node, so that one node costs the same in a
pool of any size; only a KVModelCache with `copies` chooses anew, when a node comes, goes, or gets the weights.

Laws: with `copies` never more nodes are chosen than that, and as many while so many match; a node that has the weights
is not left for one that has not; without new nodes or reports the choice stays as it is.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import heapify, heappop, heappush
from typing import Final, TypeVar

from kvstrata_api.directories import MODEL_TIERS_TEXT, holds_models
from kvstrata_api.models.model_cache import KVModelCache, KVModelCacheSpec
from kvstrata_api.models.operation import OperationNodes
from kvstrata_api.models.pool import KVPool, KVPoolSpec
from kvstrata_api.models.poolnode import MODEL_PEERS_MAX, MODELS_MAX, ModelOrder
from kvstrata_api.tiers import TierType
from kvstrata_operator.decide.plan.conditions import Fault
from kvstrata_operator.decide.pools.reconcile import ModelWant
from kvstrata_operator.observe.kinds import parse_time
from kvstrata_operator.observe.records import Declared, ModelSeen, NodeSeen, PoolNodeSeen

ModelCache = Declared[KVModelCache]
K = TypeVar("K", str, int)

_ZONE: Final = "topology.kubernetes.io/zone"
"""Well-known label of Nodes (kubernetes.io/docs/reference/labels-annotations-taints)."""

AT_WORK: Final = "InProgress"
"""Reason of a node that is not done and has nothing to complain of."""
EVICTED: Final = "Evicted"
"""State of weights that a node has removed to make room for KV, and reason of that node."""


_CHILDREN: Final = 2
"""Nodes that one node sends weights to: with two, n nodes are log2(n) hops deep, and a link carries the files twice."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one node is that is to have the weights."""

    reason: str = ""
    """Why it has not all files; empty when it has."""
    message: str = ""
    digest: str = ""
    """Of the files that it found for the order as it is now; empty before."""
    size_bytes: int = 0
    staged_bytes: int = 0
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What the choice among nodes goes by."""

    rank: int
    """The lowest first."""
    zone: str


def fault_of(cache: ModelCache, pool: Declared[KVPool] | None) -> Fault | None:
    """Return why no node can be asked for the weights."""
    if cache.model is None or cache.error:
        return Fault("Invalid", cache.error)
    spec = cache.model.spec
    if pool is None or pool.model is None or pool.error:
        return Fault("PoolNotFound", f"spec.poolRef: pool {spec.pool_ref} does not exist, or is not accepted")
    if pool.is_deleting:
        return Fault("PoolDeleting", f"spec.poolRef: pool {spec.pool_ref} is being deleted")
    return _tier_fault(spec, pool.model.spec)


def _tier_fault(spec: KVModelCacheSpec, pool: KVPoolSpec) -> Fault | None:
    if spec.tier is None:
        has_one = any(tier.type is TierType.NVME for tier in pool.tiers)
        nowhere = f"pool {spec.pool_ref} has no tier of type {TierType.NVME}; spec.tier may name another one"
        return None if has_one else Fault("TierNotFound", nowhere)
    tier = next((tier for tier in pool.tiers if tier.name == spec.tier), None)
    if tier is None:
        return Fault("TierNotFound", f"spec.tier: pool {spec.pool_ref} has no tier {spec.tier}")
    if holds_models(tier):
        return None
    pages = f" and has pages of {tier.host_dram.page_size}" if tier.host_dram is not None else ""
    what = f"tier {spec.tier} of pool {spec.pool_ref} is of type {tier.type}{pages}"
    return Fault("TierUnsuitable", f"spec.tier: {what}; {MODEL_TIERS_TEXT}")


def tier_of(cache: KVModelCache, pool: KVPool) -> str:
    """Name the tier that holds the weights, of a cache without fault; memory only where it is named."""
    return cache.spec.tier or next(tier.name for tier in pool.spec.tiers if tier.type is TierType.NVME)


def found_digest(cache: ModelCache) -> str:
    """Digest that the files have to have: the declared one, or the first that was found for this generation."""
    if cache.model is None:
        return ""
    is_current = cache.status.get("observedGeneration") == cache.meta.generation
    return cache.model.spec.digest or (str(cache.status.get("digest") or "") if is_current else "")


def staging_since(cache: ModelCache) -> datetime | None:
    """Since when copies are missing, as stored for this generation; None when none is, or that was not stored."""
    is_current = cache.status.get("observedGeneration") == cache.meta.generation
    return parse_time(str(cache.status.get("stagingSince") or "")) if is_current else None


def deadline(cache: ModelCache) -> datetime | None:
    """When all nodes should have them; None while none is missing."""
    since = staging_since(cache)
    return since + timedelta(seconds=cache.model.spec.deadline_seconds) if since and cache.model else None


def asks(cache: ModelCache) -> tuple[object, ...]:
    """What the nodes of a cache depend on; of its status the digest alone."""
    spec = cache.model.spec if cache.model is not None else None
    return (cache.uid, cache.meta.generation, cache.is_deleting, cache.error, spec, found_digest(cache))


def in_order(caches: Iterable[ModelCache]) -> list[ModelCache]:
    """The oldest first: it goes first where a node has not enough room for orders."""
    return sorted(caches, key=lambda c: (c.meta.creation_timestamp, c.key))


class CacheFacts:
    """One KVModelCache and the nodes of its pool. Changes of it or its pool make a new one."""

    def __init__(self, cache: ModelCache, pool: Declared[KVPool] | None) -> None:
        self.cache = cache
        self.fault = fault_of(cache, pool)
        self.want: ModelWant | None = None
        """The order that chosen nodes get; None with a fault."""
        self.is_paused = pool is not None and pool.model is not None and pool.model.spec.paused
        self.chosen: set[str] = set()
        """Nodes that are to have the weights."""
        self.open: dict[str, Standing] = {}
        """Chosen nodes that have them not, or not yet."""
        self.in_use = 0
        """Nodes where an engine has a file of them open."""
        self.staged_bytes = 0
        """Over all nodes."""
        self.digests: Counter[str] = Counter()
        """How many nodes have found files of which digest, for the order as it is."""
        self.sizes: Counter[int] = Counter()
        """How many nodes have found so many bytes; those that have found none are left out."""
        self._candidates: dict[str, _Candidate] = {}
        self._standings: dict[str, Standing] = {}
        self._is_settled = True
        self._in_turn: list[str] | None = None
        """Chosen nodes, those that have the weights first; None while that has to be put together anew."""
        self._turns: dict[str, int] = {}
        """Where each of them stands in it."""
        if self.fault is None and cache.model is not None and pool is not None and pool.model is not None:
            self.want = ModelWant.of(_order(cache, cache.model, pool.model))

    @property
    def pool(self) -> str:
        """Pool that it names; empty when it cannot be read."""
        return self.cache.model.spec.pool_ref if self.cache.model is not None else ""

    @property
    def staged(self) -> int:
        """How many chosen nodes have all files."""
        return len(self._standings) - len(self.open)

    def consider(self, name: str, node: NodeSeen | None, seen: PoolNodeSeen | None, *, is_alive: bool) -> None:
        """Take in whether a node of the pool may be chosen; `node` is None when it is not one of the pool's."""
        found = self._candidate(node, seen, is_alive=is_alive) if node is not None else None
        if found == self._candidates.get(name):
            return
        self._is_settled = False
        if found is None:
            del self._candidates[name]
        else:
            self._candidates[name] = found

    def choose(self) -> set[str]:
        """Settle which nodes are to have the weights; return those for which that has changed."""
        if self._is_settled:
            return set()
        self._is_settled = True
        before, copies = self.chosen, self.cache.model.spec.copies if self.cache.model is not None else None
        self.chosen = {*self._candidates} if copies is None else _best(self._candidates, copies)
        return before ^ self.chosen

    def observe(self, name: str, seen: PoolNodeSeen | None, *, is_alive: bool, is_ordered: bool) -> None:
        """Take in how far a node is; `is_ordered` says whether its KVPoolNode has room for the order."""
        standing = None
        if name in self.chosen and self.want is not None:
            full = Standing("TooManyModels", f"the node has {MODELS_MAX} older KVModelCaches, which is the most")
            standing = _standing(self.want.order, seen, is_alive=is_alive) if is_ordered else full
        before = self._standings.pop(name, None)
        self.open.pop(name, None)
        self._in_turn = None
        for one, sign in ((before, -1), (standing, 1)):
            if one is not None:
                self.in_use += sign * one.in_use
                self.staged_bytes += sign * one.staged_bytes
                _count(self.digests, one.digest, sign)
                _count(self.sizes, one.size_bytes, sign)
        if standing is not None:
            self._standings[name] = standing
            if standing.reason:
                self.open[name] = standing

    def peers_of(self, name: str) -> tuple[str, ...]:
        """Nodes whose agents have the weights or get them before a node, in the order in which it asks.

        All chosen nodes make a binary tree, those that have the weights first: a node asks its parent, then the parent
        of that, up to the root. So each sends to two others, and of those without the weights one reads the source.
        """
        if self._in_turn is None:
            self._in_turn = sorted(
                self.chosen, key=lambda node: (node in self.open or node not in self._standings, node)
            )
            self._turns = {node: at for at, node in enumerate(self._in_turn)}
        peers: list[str] = []
        at = self._turns.get(name, 0)
        while at > 0 and len(peers) < MODEL_PEERS_MAX:
            at = (at - 1) // _CHILDREN
            peers.append(self._in_turn[at])
        return tuple(peers)

    def label_of(self, name: str, seen: PoolNodeSeen | None) -> str | None:
        """Revision that a Node's label has to state; None for no label.

        The label stays while a new generation is taken up: the files of the revision are there.
        """
        if self.want is None or seen is None or name not in self.chosen:
            return None
        order = self.want.order
        has = any(
            uid == order.uid and revision == order.revision and order.digest in (None, digest)
            for uid, revision, digest in seen.staged
        )
        return order.revision if has else None

    def _candidate(self, node: NodeSeen, seen: PoolNodeSeen | None, *, is_alive: bool) -> _Candidate | None:
        model = self.cache.model
        if self.want is None or model is None or not _is_meant(model.spec.nodes, node):
            return None
        if model.spec.copies is None:
            return _ANY
        return _Candidate(_rank(self.want.order, seen, is_alive=is_alive), node.labels.get(_ZONE, ""))


_ANY: Final = _Candidate(0, "")
"""Of nodes among which nothing is chosen."""


def _order(cache: ModelCache, model: KVModelCache, pool: KVPool) -> ModelOrder:
    spec = model.spec
    return ModelOrder(
        name=cache.key,
        uid=cache.uid,
        generation=cache.meta.generation,
        tier=tier_of(model, pool),
        source=spec.source,
        revision=spec.revision,
        digest=found_digest(cache) or None,
        weight=spec.weight,
        idle_seconds=spec.idle_seconds,
    )


def _is_meant(chosen: OperationNodes | None, node: NodeSeen) -> bool:
    """Whether a node is named, or has all labels; every one is where nothing is chosen."""
    if chosen is None:
        return True
    has_labels = bool(chosen.match_labels) and chosen.match_labels.items() <= node.labels.items()
    return node.key in chosen.names or has_labels


def _rank(order: ModelOrder, seen: PoolNodeSeen | None, *, is_alive: bool) -> int:
    """How soon a node is chosen.

    One that has the weights keeps them though its agent is silent: agents restart, and a copy of hundreds of GB is not
    made for that. One whose agent failed keeps its order: it is tried again, and what fails is mostly the source.
    """
    if seen is None or seen.is_deleting:
        return 4
    if any(uid == order.uid and revision == order.revision for uid, revision, _ in seen.staged):
        return 0
    if order.uid in seen.models:
        return 1 if is_alive else 3
    return 2 if is_alive and not seen.drain.requested else 4


def _best(candidates: Mapping[str, _Candidate], copies: int) -> set[str]:
    """Choose the lowest ranks, and within one rank the zone with the fewest chosen nodes, then by name."""
    ranks: defaultdict[int, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, candidate in candidates.items():
        ranks[candidate.rank][candidate.zone].append(name)
    chosen: set[str] = set()
    in_zone: Counter[str] = Counter()
    for rank in sorted(ranks):
        zones = ranks[rank]
        for names_ in zones.values():
            names_.sort(reverse=True)
        heap = [(in_zone[zone], names_[-1], zone) for zone, names_ in zones.items()]
        heapify(heap)
        while heap and len(chosen) < copies:
            _, name, zone = heappop(heap)
            chosen.add(name)
            in_zone[zone] += 1
            zones[zone].pop()
            if zones[zone]:
                heappush(heap, (in_zone[zone], zones[zone][-1], zone))
    return chosen


def _standing(order: ModelOrder, seen: PoolNodeSeen | None, *, is_alive: bool) -> Standing:
    """How far a node is that has, or will have, the order."""
    if seen is None or seen.is_deleting:
        return Standing("NoPoolNode", "there is no KVPoolNode yet")
    report = next((w for w in seen.weights if w.uid == order.uid and w.revision == order.revision), None)
    is_current = report is not None and report.generation == order.generation
    if report is None or not is_current:
        in_use = report is not None and report.in_use
        away = Standing("AgentAway", "the agent's Lease is not current", in_use=in_use)
        return Standing(AT_WORK, in_use=in_use) if is_alive else away
    reason, message = _lack(order, report)
    if reason == AT_WORK and not is_alive:
        reason, message = "AgentAway", "the agent's Lease is not current"
    return Standing(reason, message, report.digest, report.size_bytes, report.staged_bytes, report.in_use)


def _lack(order: ModelOrder, report: ModelSeen) -> tuple[str, str]:
    """Reason and message of a report that is about the order as it is; empty when all files are there."""
    if report.state == "Failed":
        return report.reason or "Failed", report.message
    if report.state == EVICTED:
        return EVICTED, report.message
    if report.state == "Staged" and order.digest in (None, report.digest):
        return "", ""
    is_waiting = report.state == "Staging" and bool(report.reason)
    return (report.reason, report.message) if is_waiting else (AT_WORK, "")


def _count(counts: Counter[K], key: K, sign: int) -> None:
    """Count one more or one less of what is not nothing; what there is none of any more is forgotten."""
    if not key:
        return
    counts[key] += sign
    if not counts[key]:
        del counts[key]
