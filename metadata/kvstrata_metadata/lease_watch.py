"""What the Leases of agents say, over successive lists. Pure. How one is judged stands in `kvstrata_kube.sightings`."""

from collections.abc import Mapping

from kvstrata_kube.leases import Lease
from kvstrata_kube.sightings import Sighting, sight
from kvstrata_metadata.collect import LeaseState


class LeaseWatch:
    """Remembers when each Lease last moved."""

    def __init__(self) -> None:
        self._seen: dict[str, Sighting] = {}

    def judge(self, seen: Mapping[str, Lease], now_s: float) -> dict[str, LeaseState]:
        """State of each agent's Lease, `now_s` on a monotonic clock; those that `seen` lacks are forgotten."""
        self._seen = {agent: sight(self._seen.get(agent), lease, now_s) for agent, lease in seen.items()}
        return {a: LeaseState.HELD if s.is_held(now_s) else LeaseState.EXPIRED for a, s in self._seen.items()}

    def ages(self, now_s: float) -> dict[str, float]:
        """Seconds for which each agent's Lease has stood still."""
        return {agent: now_s - sighting.since_s for agent, sighting in self._seen.items()}

    def forget(self) -> None:
        """Begin anew: while nobody can be asked nobody can renew either, so the time meanwhile counts for nobody."""
        self._seen.clear()
