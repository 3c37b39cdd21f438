"""One pass over a pool's KVPoolNodes: what there is to say about the pool. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvfleet_api import units
from kvfleet_api.models.poolnode import NodeTier
from kvfleet_operator.parse import takes_node_memory
from kvfleet_operator.placement import Placement
from kvfleet_operator.reconcile import is_current
from kvfleet_operator.records import PoolNodeSeen

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
    """Whose agent runs the revision that the pool wants now."""
    reported: int
    ready: int
    draining: int
    """On their way out or drained on request, nodes that no longer match included."""
    degraded: Finding
    unready: Finding
    excluded: Finding
    over_capacity: Finding
    capacity_known: int
    without_metadata: Finding
    metadata_known: int


def gather(
    placement: Placement,
    seen: Mapping[str, PoolNodeSeen],
    silent: Collection[str],
    claimed_before: Mapping[str, int],
) -> Facts:
    """Look at each node of a placement.

    `seen` maps node names to the pool's KVPoolNodes; `claimed_before` maps node names to the memory in bytes that
    older pools take there.
    """
    here = {node: seen[node] for node in sorted(placement.nodes & seen.keys())}
    told = {node: it for node, it in here.items() if it.has_reported}
    own_bytes = memory_bytes(placement.tiers)
    current = {node for node, it in here.items() if is_current(placement, it)}
    return Facts(
        matched=placement.matched,
        current=len(current),
        updated=sum(1 for node in current if here[node].observed_revision == placement.revision),
        reported=len(told),
        ready=sum(1 for it in told.values() if is_ready(it, silent)),
        draining=sum(1 for it in seen.values() if it.drain.requested or it.is_true("Draining")),
        degraded=_find((node, _degradation(it, silent)) for node, it in told.items()),
        unready=_find((node, _unreadiness(here.get(node), silent)) for node in sorted(placement.nodes)),
        excluded=_find((n, (str(e.reason), e.message)) for n, e in sorted(placement.excluded.items())),
        over_capacity=_find((n, _shortage(it, own_bytes, claimed_before.get(n, 0))) for n, it in told.items()),
        capacity_known=sum(1 for it in told.values() if it.memory_bytes or "CapacitySatisfied" in it.conditions),
        without_metadata=_find((node, _complaint(it, "MetadataAvailable")) for node, it in told.items()),
        metadata_known=sum(1 for it in told.values() if "MetadataAvailable" in it.conditions),
    )


def is_ready(node: PoolNodeSeen, silent: Collection[str]) -> bool:
    """True when the agent says that it is ready and is still there."""
    return node.is_true("Ready") and node.key not in silent


def memory_bytes(tiers: Iterable[NodeTier]) -> int:
    """Sum of the tiers that take the node's own memory."""
    return sum(t.capacity_bytes for t in tiers if takes_node_memory(t.type, t.cxl.mode if t.cxl else ""))


def claims_before(placements: Iterable[Placement]) -> dict[str, dict[str, int]]:
    """Memory in bytes that older pools take on each node, by pool and node. `placements` is oldest first."""
    taken: Counter[str] = Counter()
    before: dict[str, dict[str, int]] = {}
    for placement in placements:
        before[placement.pool] = {node: taken[node] for node in placement.nodes if node in taken}
        own_bytes = memory_bytes(placement.tiers)
        if own_bytes:
            taken.update(dict.fromkeys(placement.nodes, own_bytes))
    return before


_Wrong = tuple[str, str] | None
"""Reason and message, or None when all is well."""


def _find(verdicts: Iterable[tuple[str, _Wrong]]) -> Finding:
    """Count the nodes with something wrong and keep the first one's words."""
    wrong = [(node, verdict) for node, verdict in verdicts if verdict is not None]
    if not wrong:
        return Finding()
    node, (reason, message) = wrong[0]
    return Finding(len(wrong), node, reason, message)


def _complaint(node: PoolNodeSeen, type_: str) -> _Wrong:
    verdict = node.conditions.get(type_)
    if verdict is None or verdict.status != "False":
        return None
    return (verdict.reason or type_, verdict.message or verdict.reason)


def _degradation(node: PoolNodeSeen, silent: Collection[str]) -> _Wrong:
    if node.key in silent:
        return ("LeaseExpired", "the agent's Lease has run out")
    broken = next((t for t in node.tiers if t.phase in _BROKEN_PHASES), None)
    if broken is not None:
        return (
            f"Tier{broken.phase}",
            f"tier {broken.name} is {broken.phase}: {broken.last_error or 'no reason given'}",
        )
    return _complaint(node, "AgentConnected") or _complaint(node, "TierReady")


def _unreadiness(node: PoolNodeSeen | None, silent: Collection[str]) -> _Wrong:
    if node is None:
        return ("NoPoolNode", "there is no KVPoolNode yet")
    if not node.has_reported:
        return ("NoAgent", "no agent has reported yet")
    if is_ready(node, silent):
        return None
    return _degradation(node, silent) or _complaint(node, "Ready") or ("NotReady", "the agent is not ready yet")


def _shortage(node: PoolNodeSeen, own_bytes: int, before_bytes: int) -> _Wrong:
    """Compare what pools want of a node's memory with what it has; the agent's own word goes first."""
    complaint = _complaint(node, "CapacitySatisfied")
    if complaint is not None or not node.memory_bytes or own_bytes + before_bytes <= node.memory_bytes:
        return complaint
    older = f", and older pools {units.format_rounded(before_bytes)}" if before_bytes else ""
    wants = units.format_rounded(own_bytes)
    has = units.format_rounded(node.memory_bytes)
    return ("InsufficientMemory", f"memory tiers want {wants}{older}; the node has {has}")
