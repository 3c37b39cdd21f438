"""The pods of one pool by node, kept up to date while they come, change and go. Pure.

Law: what is told depends on the pods that are there and not on the order in which they came or went.
"""

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvstrata_operator.observe.records import AgentPodSeen


@dataclass(slots=True)
class PoolPods:
    """A change of one pod costs the same in a pool of any size."""

    by_node: dict[str, AgentPodSeen] = field(default_factory=dict)
    """Of several on one node the one that stays, and of those the newest."""
    troubled: set[str] = field(default_factory=set)
    """Nodes whose pod says why it does not run."""
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
        pods = self._every[node].values()
        if not pods:
            del self._every[node]
            return
        chosen = max(pods, key=lambda p: (not p.is_deleting, p.created, p.key))
        self.by_node[node] = chosen
        self._revisions[chosen.revision].add(node)
        if chosen.trouble:
            self.troubled.add(node)
