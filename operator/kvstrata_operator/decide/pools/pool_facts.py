"""What there is to say about a pool: each of its nodes is judged by itself, and the verdicts are added up. Pure.

Law: what a tally says depends on the verdicts that it holds and not on the order in which they came or went.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvstrata_api import units
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.pool_pods import PoolPods
from kvstrata_operator.decide.pools.reconcile import is_told
from kvstrata_operator.observe.parse import takes_node_memory
from kvstrata_operator.observe.records import AgentPodSeen, PoolNodeSeen

_NO_PODS: Final = PoolPods()
"""Of a pool whose agents others run. Never written to."""

_BROKEN_PHASES: Final = frozenset({"Degraded", "Failed"})


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

    def tell(self, of: int) -> str:
        """Say it for people: how many, and what the first of them says."""
        return f"{self.nodes} of {of} nodes; {self.node}: {self.message}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pool's conditions and counts are made of. Counts are of nodes that the pool is placed on."""

    matched: int
    """Nodes that the selector picks, those included that had to be left out."""
    current: int
    """With a KVPoolNode that says what the pool wants now."""
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


COUNTS: Final = (
    "matched", "current", "updated", "reported", "ready", "draining", "capacity_known", "metadata_known",
)  # fmt: skip
FINDINGS: Final = ("degraded", "unready", "excluded", "unsettled", "over_capacity", "without_metadata")


def judge(
    placement: Placement, node: str, seen: PoolNodeSeen | None, *, is_silent: bool, before_bytes: int
) -> NodeFacts:
    """Look at one node: `seen` is its KVPoolNode, `before_bytes` the memory that older pools take there."""
    draining = seen is not None and (seen.drain.requested or seen.is_true("Draining"))
    excluded = placement.excluded.get(node)
    if excluded is not None:
        return NodeFacts(matched=True, draining=draining, excluded=(str(excluded.reason), excluded.message))
    if node not in placement.nodes:
        return NodeFacts(draining=draining)
    unready = _unreadiness(seen, is_silent=is_silent)
    if seen is None:
        return NodeFacts(matched=True, unready=unready)
    current = is_told(placement, seen)
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
    ) -> Facts:
        """What all nodes together come to.

        `not_run` names nodes without the pod that they should have, `pods` are those of the pool where we run agents.
        """
        counts = self._counts
        stale = sum(1 for node in not_run if self._verdicts.get(node, _NOTHING).updated)
        troubles = ((node, _trouble(pods.by_node[node])) for node in sorted(placement.nodes & pods.troubled))
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
    """True when the agent says that it is ready and is still there."""
    return node.is_true("Ready") and not is_silent


def memory_bytes(tiers: Iterable[NodeTier]) -> int:
    """Sum of the tiers that take the node's own memory."""
    return sum(t.capacity_bytes for t in tiers if takes_node_memory(t.type, t.cxl.mode if t.cxl else ""))


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
    if not pod.trouble:
        return None
    return ("AgentsNotRunning", f"pod {pod.key}: {pod.trouble}")


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
    if not node.has_reported:  # Without its huge pages no agent is scheduled; node preparation tells why.
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
