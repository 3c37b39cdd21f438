"""How often one status is written. Pure: the caller gives a monotonic clock.

Laws: two writes of one object are never closer than `WRITE_EVERY_S`; what is held back is due at the time that is
given back, so nothing is lost; an object that was quiet is written at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvstrata_operator.decide.plan.actions import Merge
from kvstrata_operator.decide.status_planner import StatusWrite

WRITE_EVERY_S: Final = 1.0
"""A pool of any size is written at most once a second (design)."""

USAGE_EVERY_S: Final = 10.0
"""Figures that move with the load are for people; programs read the metrics (conventions)."""


@dataclass(slots=True)
class Pacing:
    """When which object was written last. Bounded by the objects of the last `USAGE_EVERY_S`."""

    _written_s: dict[str, float] = field(default_factory=dict)

    def sort(self, writes: Iterable[StatusWrite], now_s: float) -> tuple[list[Merge], float | None]:
        """Return the writes that are due, and when the first of the others is."""
        self._written_s = {path: s for path, s in self._written_s.items() if now_s < s + USAGE_EVERY_S}
        due, held_s = [], []
        for write in writes:
            path = write.action.ref.path
            free_s = self._written_s.get(path, float("-inf")) + (
                USAGE_EVERY_S if write.is_usage_only else WRITE_EVERY_S
            )
            if now_s < free_s:
                held_s.append(free_s)
                continue
            self._written_s[path] = now_s
            due.append(write.action)
        return due, min(held_s, default=None)
