"""Whether a Lease is still held, for agents and replicas alike. Pure: the caller gives a monotonic clock.

A Lease counts from when this process saw it change. The times in it are another machine's; comparing them with ours
would let a skewed clock kill an agent or make two leaders (the rule of Kubernetes' own leader election).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_kube.leases import Lease

DURATION_S: Final = 15.0
"""Of a Lease that states none."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A Lease and when this process first saw it as it is."""

    lease: Lease
    since_s: float

    def is_current(self, now_s: float) -> bool:
        """True until the Lease has stood still for longer than its duration, whoever holds it."""
        return now_s - self.since_s <= (self.lease.duration_s or DURATION_S)

    def is_held(self, now_s: float) -> bool:
        """True while somebody holds the Lease: it has a holder, who renews it in time."""
        return bool(self.lease.holder) and self.is_current(now_s)


def sight(before: Sighting | None, lease: Lease, now_s: float) -> Sighting:
    """Take in a reading; the moment stays while holder and time stay. The first one has just moved."""
    if before and (before.lease.holder, before.lease.renewed) == (lease.holder, lease.renewed):
        return Sighting(lease, before.since_s)
    return Sighting(lease, now_s)


def sight_all(before: Mapping[str, Sighting], leases: Iterable[Lease], now_s: float) -> dict[str, Sighting]:
    """Take in a complete list, by Lease name; those that it lacks are forgotten."""
    return {lease.name: sight(before.get(lease.name), lease, now_s) for lease in leases}
