"""What is known of a pool: each of its nodes is judged by itself, and the verdicts are added up. Pure.

Pods and what agents report are kept beside them, while they come, change and go. Law: all of it depends on the
verdicts, pods and KVPoolNodes that are in it and not on the order in which they came or went.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from kvstrata_api import units
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.observe.kinds import parse_time
from kvstrata_operator.observe.parse import takes_node_memory
from kvstrata_operator.observe.records import AgentPodSeen, PoolNodeSeen

COUNTS: Final = (
    "matched", "current", "updated", "reported", "ready", "draining", "capacity_known", "metadata_known",
)  # fmt: skip
FINDINGS: Final = ("degraded", "unready", "excluded", "unsettled", "over_capacity", "without_metadata")


@dataclass(slots=True)
class PoolPods:
    """A change of one pod costs the same in a pool of any size."""

    by_node: dict[str, AgentPodSeen] = field(default_factory=dict)
    """Of several on one node the one that stays, and of those the newest."""
    troubled: set[str] = field(default_factory=set)
    """Nodes whose pod states why it does not run."""
    unstarted: set[str] = field(default_factory=set)
    """Nodes whose pod is there and has no sandbox yet."""
    _every: defaultdict[str, dict[str, AgentPodSeen]] = field(default_factory=lambda: defaultdict(dict))
    """All pods of each node by key."""
    _revisions: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Nodes by the revision of their pod: a pool has one, and two while it rolls."""

    def remove(self, pod: AgentPodSeen) -> None:
        """Forget a pod."""
        del self._every[pod.node][pod.key]
        self._choose(pod.node)

    def put(self, pod: AgentPodSeen) -> None:
        """Take in a pod that is meant for a node."""
        self._every[pod.node][pod.key] = pod
        self._choose(pod.node)

    def not_of(self, revision: str) -> AbstractSet[str]:
        """Nodes whose pod was made from another revision."""
        return set[str]().union(*(nodes for found, nodes in self._revisions.items() if found != revision))

    def _choose(self, node: str) -> None:
        """Settle which pod of a node counts."""
        before = self.by_node.pop(node, None)
        if before is not None:
            self._revisions[before.revision].discard(node)
            if not self._revisions[before.revision]:
                del self._revisions[before.revision]
        self.troubled.discard(node)
        self.unstarted.discard(node)
        pods = self._every[node].values()
        if not pods:
            del self._every[node]
            return
        chosen = max(pods, key=lambda p: (not p.is_deleting, p.created, p.key))
        self.by_node[node] = chosen
        self._revisions[chosen.revision].add(node)
        if chosen.trouble:
            self.troubled.add(node)
        if chosen.unstarted_since and not chosen.is_deleting:
            self.unstarted.add(node)

    def late(self, now: datetime) -> AbstractSet[str]:
        """Nodes whose pod should have had its sandbox by now."""
        return {node for node in self.unstarted if (at := self._late_at(node)) is not None and at <= now}

    def next_late(self, now: datetime) -> datetime | None:
        """When the next one of them is late; None when time alone makes none so."""
        moments = (self._late_at(node) for node in self.unstarted)
        return min((at for at in moments if at is not None and at > now), default=None)

    def _late_at(self, node: str) -> datetime | None:
        since = parse_time(self.by_node[node].unstarted_since)
        return since + timedelta(seconds=UNSTARTED_S) if since is not None else None


UNSTARTED_S: Final = 20.0
"""A pod's volumes and network are ready within 2 s here; the kubelet says only in Events what they wait for."""

_NO_PODS: Final = PoolPods()
"""Of a pool whose agents others run. Never written to."""

_BROKEN_PHASES: Final = frozenset({"Degraded", "Failed"})


@dataclass(slots=True)
class PoolSums:
    """What a pool's agents report, added up."""

    used_bytes: Counter[str] = field(default_factory=Counter)
    """By tier."""
    blocks: int = 0
    """Copies over all tiers, each node's count rounded down by an eighth at most."""
    queried_blocks: int = 0
    hit_blocks: int = 0
    evicted_per_minute: int = 0
    directory_backlog: int = 0
    _capacities: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """How many nodes offer how many bytes, by tier: fleets have few sizes."""

    def add(self, node: PoolNodeSeen, sign: int) -> None:
        """Take in what one node reports (`sign` 1), or take it out again (-1)."""
        self.queried_blocks += sign * node.queried_blocks
        self.hit_blocks += sign * node.hit_blocks
        self.evicted_per_minute += sign * node.evicted_per_minute
        self.directory_backlog += sign * node.directory_backlog
        for tier in node.tiers:
            self.used_bytes[tier.name] += sign * tier.used_bytes
            self.blocks += sign * tier.blocks
            sizes = self._capacities[tier.name]
            sizes[tier.capacity_bytes] += sign
            if not sizes[tier.capacity_bytes]:
                del sizes[tier.capacity_bytes]

    def allocatable_bytes(self, tier: str) -> int:
        """Bytes that agents offer of a tier."""
        return sum(size * nodes for size, nodes in self._sizes(tier).items())

    def least_bytes(self, tier: str) -> int | None:
        """Bytes of the node that offers the least, if any offers something."""
        return min((size for size in self._sizes(tier) if size), default=None)

    def _sizes(self, tier: str) -> Counter[int]:
        return self._capacities.get(tier, Counter())


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, on some nodes."""

    nodes: int = 0
    node: str = ""
    """The first of them by name."""
    reason: str = ""
    message: str = ""

    def __bool__(self) -> bool:
        return self.nodes > 0

    def describe(self, of: int) -> str:
        """Describe it for people: how many, and what the first of them reports."""
        return f"{self.nodes} of {of} nodes; {self.node}: {self.message}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pool's conditions and counts are made of. Counts are of nodes that the pool is placed on."""

    matched: int
    """Nodes that the selector picks, those included that had to be left out."""
    current: int
    """With a KVPoolNode that has what the pool wants now."""
    updated: int
    """Whose agent runs what the pool wants now, in the pod that it should where we run agents."""
    reported: int
    ready: int
    draining: int
    """On their way out or drained on request, nodes that no longer match included."""
    degraded: Finding
    unready: Finding
    excluded: Finding
    unsettled: Finding
    """Nodes on which a tier goes or shrinks and blocks are still to move."""
    unrun: Finding
    """Pods that do not run, and will not by themselves."""
    over_capacity: Finding
    capacity_known: int
    without_metadata: Finding
    metadata_known: int


_Wrong = tuple[str, str] | None
"""Reason and message, or None when all is well."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node adds to the facts of its pool; the fields are those of `Facts`."""

    matched: bool = False
    current: bool = False
    updated: bool = False
    reported: bool = False
    ready: bool = False
    draining: bool = False
    capacity_known: bool = False
    metadata_known: bool = False
    degraded: _Wrong = None
    unready: _Wrong = None
    excluded: _Wrong = None
    unsettled: _Wrong = None
    over_capacity: _Wrong = None
    without_metadata: _Wrong = None


def judge(
    placement: Placement, node: str, seen: PoolNodeSeen | None, *, is_silent: bool, before_bytes: int
) -> NodeFacts:
    """Judge one node: `seen` is its KVPoolNode, `before_bytes` the memory that older pools take there."""
    draining = seen is not None and (seen.drain.requested or seen.is_true("Draining"))
    excluded = placement.excluded.get(node)
    if excluded is not None:
        return NodeFacts(matched=True, draining=draining, excluded=(str(excluded.reason), excluded.message))
    if node not in placement.nodes:
        return NodeFacts(draining=draining)
    unready = _unreadiness(seen, is_silent=is_silent)
    if seen is None:
        return NodeFacts(matched=True, unready=unready)
    current = placement.is_current(seen)
    updated = current and not seen.drain.requested and seen.observed_revision == placement.revision
    if not seen.has_reported:
        return NodeFacts(matched=True, current=current, updated=updated, draining=draining, unready=unready)
    return NodeFacts(
        matched=True,
        current=current,
        updated=updated,
        reported=True,
        ready=is_ready(seen, is_silent=is_silent),
        draining=draining,
        capacity_known=bool(seen.memory_bytes) or "CapacitySatisfied" in seen.conditions,
        metadata_known="MetadataAvailable" in seen.conditions,
        degraded=_degradation(seen, is_silent=is_silent),
        unready=unready,
        unsettled=_complaint(seen, "TiersSettled"),
        over_capacity=_shortage(seen, memory_bytes(placement.tiers), before_bytes),
        without_metadata=_complaint(seen, "MetadataAvailable"),
    )


@dataclass(slots=True)
class Tally:
    """Adds up the verdicts of a pool's nodes. A change of one node costs the same in a pool of any size."""

    _verdicts: dict[str, NodeFacts] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _wrong: dict[str, dict[str, tuple[str, str]]] = field(default_factory=lambda: {name: {} for name in FINDINGS})
    """By finding, then by node; only what is wrong."""

    def put(self, node: str, verdict: NodeFacts) -> None:
        """Take in one node's verdict in place of its earlier one."""
        before = self._verdicts.get(node, _NOTHING)
        if verdict == before:
            return
        for name in COUNTS:
            self._counts[name] += getattr(verdict, name) - getattr(before, name)
        for name in FINDINGS:
            wrong = getattr(verdict, name)
            if wrong is not None:
                self._wrong[name][node] = wrong
            else:
                self._wrong[name].pop(node, None)
        if verdict == _NOTHING:
            del self._verdicts[node]
        else:
            self._verdicts[node] = _SOUND.get(verdict, verdict)

    def facts(
        self,
        placement: Placement,
        not_run: Collection[str] = (),
        pods: PoolPods = _NO_PODS,
        now: datetime | None = None,
    ) -> Facts:
        """What all nodes together come to.

        `not_run` names nodes without the pod that they should have, `pods` are those of the pool where we run agents,
        of which `now` tells those that are late.
        """
        counts = self._counts
        stale = sum(1 for node in not_run if self._verdicts.get(node, _NOTHING).updated)
        in_trouble = pods.troubled | (pods.late(now) if now is not None else set())
        troubles = ((node, _trouble(pods.by_node[node])) for node in sorted(placement.nodes & in_trouble))
        return Facts(
            matched=counts["matched"],
            current=counts["current"],
            updated=counts["updated"] - stale,
            reported=counts["reported"],
            ready=counts["ready"],
            draining=counts["draining"],
            degraded=self._finding("degraded"),
            unready=self._finding("unready"),
            excluded=self._finding("excluded"),
            unsettled=self._finding("unsettled"),
            unrun=_find(troubles),
            over_capacity=self._finding("over_capacity"),
            capacity_known=counts["capacity_known"],
            without_metadata=self._finding("without_metadata"),
            metadata_known=counts["metadata_known"],
        )

    def _finding(self, name: str) -> Finding:
        """Count the nodes with something wrong and keep the first one's words."""
        wrong = self._wrong[name]
        if not wrong:
            return Finding()
        node = min(wrong)
        return Finding(len(wrong), node, *wrong[node])


_NOTHING: Final = NodeFacts()
"""Of a node that has nothing to do with the pool."""

_SOUND: Final[dict[NodeFacts, NodeFacts]] = {
    verdict: verdict
    for verdict in (
        NodeFacts(
            matched=True,
            current=True,
            updated=True,
            reported=True,
            ready=True,
            capacity_known=True,
            metadata_known=known,
        )
        for known in (True, False)
    )
}
"""Verdicts that most nodes share, kept once."""


def is_ready(node: PoolNodeSeen, *, is_silent: bool) -> bool:
    """True when the agent reports that it is ready and is still there."""
    return node.is_true("Ready") and not is_silent


def is_serving(pod: AgentPodSeen | None, node: PoolNodeSeen | None, *, is_alive: bool) -> bool:
    """True when engines have the agent of a pod of ours now, and it was not asked to empty itself."""
    is_up = pod is not None and pod.is_ready and not pod.is_deleting
    return is_up and is_alive and node is not None and node.is_true("Ready") and not node.drain.requested


def memory_bytes(tiers: Iterable[NodeTier]) -> int:
    """Sum of the tiers that take the node's own memory."""
    return sum(t.capacity_bytes for t in tiers if takes_node_memory(t.type, t.cxl.mode if t.cxl else ""))


def pages_bytes(tiers: Iterable[NodeTier]) -> Counter[str]:
    """Huge pages that tiers take, by the name of the resource."""
    taken = Counter[str]()
    for tier in tiers:
        if (name := page_resource(tier)) is not None:
            taken[name] += tier.capacity_bytes
    return taken


def page_resource(tier: NodeTier) -> str | None:
    """Name the resource of a node that a tier's huge pages are; None of a tier that has none."""
    if tier.host_dram is None or tier.host_dram.page_size == "4Ki":
        return None
    return f"hugepages-{tier.host_dram.page_size}"


def pages_lacking(wanted: Mapping[str, int], offered: Mapping[str, int] | None, before: Mapping[str, int]) -> str:
    """Say what a node lacks of the huge pages that are wanted, `before` being what older pools take; empty for nothing.

    A node whose kubelet has not reported lacks nothing: an agent there waits for it.
    """
    if offered is None:
        return ""
    for name, wanted_bytes in sorted(wanted.items()):
        left_bytes = max(0, offered.get(name, 0) - before.get(name, 0))
        if left_bytes < wanted_bytes:
            left, wants = units.format_rounded(left_bytes), units.format_rounded(wanted_bytes)
            return f"its kubelet offers {left} of {name}, {wants} wanted"
    return ""


def _find(verdicts: Iterable[tuple[str, _Wrong]]) -> Finding:
    """Count the nodes with something wrong and keep the first one's words."""
    wrong = [(node, verdict) for node, verdict in verdicts if verdict is not None]
    return Finding(len(wrong), wrong[0][0], *wrong[0][1]) if wrong else Finding()


def _complaint(node: PoolNodeSeen, type_: str) -> _Wrong:
    verdict = node.conditions.get(type_)
    if verdict is None or verdict.status != "False":
        return None
    return (verdict.reason or type_, verdict.message or verdict.reason)


def _trouble(pod: AgentPodSeen) -> _Wrong:
    if pod.trouble:
        return ("AgentsNotRunning", f"pod {pod.key}: {pod.trouble}")
    folders = f"one of {', '.join(pod.awaited)} is missing there" if pod.awaited else "a volume is not ready"
    why = f"{folders}, or the node has no network for it: kubectl describe pod says which"
    return ("AgentsNotStarted", f"pod {pod.key} was not started within {UNSTARTED_S:.0f} s: {why}")


def _degradation(node: PoolNodeSeen, *, is_silent: bool) -> _Wrong:
    if is_silent:
        return ("LeaseExpired", "the agent's Lease has run out")
    broken = next((t for t in node.tiers if t.phase in _BROKEN_PHASES), None)
    if broken is not None:
        return (
            f"Tier{broken.phase}",
            f"tier {broken.name} is {broken.phase}: {broken.last_error or 'no reason given'}",
        )
    return _complaint(node, "AgentConnected") or _complaint(node, "TierReady")


def _unreadiness(node: PoolNodeSeen | None, *, is_silent: bool) -> _Wrong:
    if node is None:
        return ("NoPoolNode", "there is no KVPoolNode yet")
    if not node.has_reported:  # Without its huge pages no agent is scheduled; node preparation reports why.
        return _complaint(node, "HugepagesReserved") or ("NoAgent", "no agent has reported yet")
    if is_ready(node, is_silent=is_silent):
        return None
    return (
        _degradation(node, is_silent=is_silent)
        or _complaint(node, "Ready")
        or ("NotReady", "the agent is not ready yet")
    )


def _shortage(node: PoolNodeSeen, own_bytes: int, before_bytes: int) -> _Wrong:
    """Compare what pools want of a node's memory with what it has; the agent's own word goes first."""
    complaint = _complaint(node, "CapacitySatisfied")
    if complaint is not None or not node.memory_bytes or own_bytes + before_bytes <= node.memory_bytes:
        return complaint
    older = f", and older pools {units.format_rounded(before_bytes)}" if before_bytes else ""
    wants = units.format_rounded(own_bytes)
    has = units.format_rounded(node.memory_bytes)
    return ("InsufficientMemory", f"memory tiers want {wants}{older}; the node has {has}")
