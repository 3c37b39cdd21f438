"""When planners are asked, statuses written and failed actions tried again. Pure: the caller gives a monotonic clock.

Laws: a moment that was set stands until the planner is asked, whatever else is planned meanwhile. Two writes of one
object are never closer than `WRITE_EVERY_S`; what is held back is due at the time that is given back, so nothing is
lost; an object that was quiet is written at once. The pause after failures grows with each of them and never exceeds
`PAUSE_S_MAX`; one success forgets all failures; what is wanted keeps its failures, also while it is being tried or has
to wait.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvstrata_api.errors import KvStrataError, RetryableError
from kvstrata_operator.decide.plan.actions import Merge, StatusWrite

WRITE_EVERY_S: Final = 1.0
"""A pool of any size is written at most once a second (design)."""

USAGE_EVERY_S: Final = 10.0
"""Figures that move with the load are for people; programs read the metrics (conventions)."""

PAUSE_S_MAX: Final = 30.0
"""What was refused for good, a missing right for instance, is tried again this often: people repair such things."""

PAUSE_S_FIRST: Final = 0.5

T = TypeVar("T")


@dataclass(slots=True)
class Turn:
    """One planner's next turn."""

    is_wanted: bool = True
    """Something has changed that it depends on."""
    at_s: float = 0.0
    """When it is asked though nothing has changed."""

    def is_due(self, now_s: float) -> bool:
        """True when the planner is to be asked now."""
        return self.is_wanted or now_s >= self.at_s

    def begin(self, at_latest_s: float) -> None:
        """Note that the planner is being asked; its next turn is by a change, by `by`, or then."""
        self.is_wanted = False
        self.at_s = at_latest_s

    def by(self, moment_s: float | None) -> None:
        """Ask at that moment, unless that is done before; None for no such moment."""
        if moment_s is not None:
            self.at_s = min(self.at_s, moment_s)

    def put_off(self, moment_s: float) -> None:
        """Ask at that moment and not before."""
        self.is_wanted = False
        self.at_s = moment_s


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


@dataclass(slots=True)
class Retries:
    """Failures by action. Bounded by the actions that the last plans asked for, see `keep`."""

    _until_s: dict[Hashable, float] = field(default_factory=dict)
    _count: dict[Hashable, int] = field(default_factory=dict)

    def is_due(self, key: Hashable, now_s: float) -> bool:
        """True unless the action has failed a moment ago."""
        return now_s >= self._until_s.get(key, 0.0)

    def has_failed(self, key: Hashable) -> bool:
        """True when the last try of the action failed."""
        return key in self._until_s

    def note(self, key: Hashable, error: KvStrataError | None, now_s: float) -> None:
        """Take in how an action went."""
        if error is None:
            self._until_s.pop(key, None)
            self._count.pop(key, None)
            return
        count = self._count.get(key, 0)
        first_s = min(error.delay_s, PAUSE_S_MAX) if isinstance(error, RetryableError) else PAUSE_S_FIRST
        self._count[key] = count + 1
        self._until_s[key] = now_s + min(first_s * 2 ** min(count, 16), PAUSE_S_MAX)

    def keep(self, wanted: Collection[Hashable]) -> None:
        """Forget all actions that are not asked for any more."""
        for key in self._until_s.keys() - set(wanted):
            del self._until_s[key], self._count[key]

    def due(self, wanted: Mapping[Hashable, T], now_s: float) -> list[T]:
        """Leave out what failed a moment ago. `wanted` is all that is asked for, and all that is remembered."""
        self.keep(wanted.keys())
        return [what for key, what in wanted.items() if self.is_due(key, now_s)]

    def next_s(self, now_s: float) -> float | None:
        """Return when the first of the pauses that last ends.

        What is due already has no moment: it is under way, or waits for something that wakes the caller.
        """
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=None)
