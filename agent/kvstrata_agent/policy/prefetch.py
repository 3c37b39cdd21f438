"""Which sessions' blocks are brought up first before they come back, and when. Pure.

Laws: of two tenants that both have sessions to bring up, none is ahead of the other by more than one session of each,
for their weights; within a tenant urgency comes first, then the priority class, then the return that is soonest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvstrata_agent.policy.priority import PriorityClass

K = TypeVar("K")

LEAD_S: Final = 2.0
"""Before its expected return a session's blocks begin to come up, at least: the sweep is not exact to the second."""
DOUBT: Final = 0.1
"""Part of a wait by which it may be shorter than was said: an engine's word is an estimate."""
HORIZON_S: Final = 60.0
"""A session that is expected later is not looked at: no chain takes longer to come up that is still worth it."""
AGAIN_S: Final = 1.0
"""Blocks of an expected session that have left memory come up again after it."""
LOOK_S: Final = 5.0
"""Between two looks at where the blocks of a session are that is expected soon: they may leave meanwhile."""
CARE: Final = 2.0
"""Times the estimate that bringing up may take: paths have other moves to make meanwhile."""


@dataclass(frozen=True, slots=True)
class Wanted(Generic[K]):
    """One session whose blocks are to be brought up."""

    session: K
    tenant: str
    urgency: int
    priority: PriorityClass
    returns_at_s: float
    """0.0 for one that works already."""
    name: str
    """Decides between equals."""


def doubt_s(wait_s: float) -> float:
    """How much sooner or later than it was said a session may be back that waits so long."""
    return min(HORIZON_S, LEAD_S + DOUBT * max(0.0, wait_s))


def coming_up_s(latency_s: float, size_bytes: int, bytes_per_s: float) -> float:
    """How long before a return what is to be moved begins to come up; 0.0 bytes a second: nobody measured."""
    moving_s = size_bytes / bytes_per_s if bytes_per_s > 0 else 0.0
    return min(HORIZON_S, LEAD_S + CARE * (latency_s + moving_s))


class FairSessions(Generic[K]):
    """Sessions in the order in which they are brought up; remembers who was served while anybody waits."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        """Bytes that were begun for each tenant, by its weight, since all of them had their turn."""

    def order(self, wanted: Iterable[Wanted[K]]) -> Iterator[Wanted[K]]:
        """Sessions one by one; `served` is told of each before the next is asked for."""
        lines: dict[str, list[Wanted[K]]] = {}
        for one in wanted:
            lines.setdefault(one.tenant, []).append(one)
        for line in lines.values():
            line.sort(key=lambda w: (-w.urgency, w.priority, w.returns_at_s, w.name), reverse=True)
        least = min((self._served.get(tenant, 0.0) for tenant in lines), default=0.0)
        self._served = {tenant: max(0.0, self._served.get(tenant, 0.0) - least) for tenant in lines}
        while lines:
            tenant = min(lines, key=lambda t: (self._served[t], t))
            yield lines[tenant].pop()
            if not lines[tenant]:
                del lines[tenant]

    def served(self, tenant: str, size_bytes: int, weight: int) -> None:
        """So many bytes were begun for a tenant."""
        self._served[tenant] = self._served.get(tenant, 0.0) + size_bytes / weight
