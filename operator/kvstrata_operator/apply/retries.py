"""When an action that failed may be tried again. Pure: the caller gives a monotonic clock.

Laws: the pause grows with each failure and never exceeds `PAUSE_S_MAX`; one success forgets all failures; what is
wanted keeps its failures, also while it is being tried or has to wait.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvstrata_api.errors import KvStrataError, RetryableError

PAUSE_S_MAX: Final = 30.0
"""What was refused for good, a missing right for instance, is tried again this often: people repair such things."""

PAUSE_S_FIRST: Final = 0.5

T = TypeVar("T")


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

        What is due already tells of no moment: it is under way, or waits for something that wakes the caller.
        """
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=None)
