"""Objects that LMCache has found and not yet let go of. Pure but for its lock.

The agent keeps one pin for a block and a connection, however often it is asked for; so locks on one object are counted
here, and the last one takes the pin back. Pins end by themselves: what LMCache forgets to unlock is not kept for ever.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata_client.connectors.lmcache_names import Name
from kvstrata_client.connectors.lmcache_transfers import Keys

LOCK_S: Final = 60.0
"""A load follows its lookup within seconds; a lock that lasts longer belongs to nobody any more."""
LOCKS_MAX: Final = 65_536
"""Objects counted at a time; locks beyond that are not taken back, and end by themselves."""


class Locks:
    """Counts locks by object; any thread may call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Count by `clock`, in monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[Name, tuple[int, float, Keys]] = {}
        """Locks, when the last of them ends by itself, and what is pinned."""

    def __len__(self) -> int:
        return len(self._held)

    def take(self, names: Sequence[Name], found: Sequence[Keys]) -> None:
        """Count a lock on each object that was found, and pinned."""
        now_s = self._clock()
        with self._lock:
            self._forget(now_s, len(names))
            for name, keys in zip(names, found, strict=True):
                if keys and (name in self._held or len(self._held) < LOCKS_MAX):
                    count = self._held[name][0] if name in self._held else 0
                    self._held[name] = (count + 1, now_s + LOCK_S, keys)

    def give(self, names: Sequence[Name]) -> list[Keys]:
        """Take one lock off each object; returns what nobody locks any more."""
        free: list[Keys] = []
        with self._lock:
            for name in names:
                count, ends_s, keys = self._held.pop(name, (0, 0.0, ()))
                if count > 1:
                    self._held[name] = (count - 1, ends_s, keys)
                elif count:
                    free.append(keys)
        return free

    def _forget(self, now_s: float, coming: int) -> None:
        """Make room by forgetting locks that have ended by themselves."""
        if len(self._held) + coming <= LOCKS_MAX:
            return
        for name in [n for n, (_, ends_s, _) in self._held.items() if ends_s <= now_s]:
            del self._held[name]
