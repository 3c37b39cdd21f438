"""The board where LMCache's controllers find the results of their tasks, and what they have locked.

Controllers submit tasks (`object_workers`), go on, and read the board when its descriptor is ready.

`Locks` are the objects that LMCache has found and not yet released. The agent keeps one pin for a block and a
connection, however often it is asked for; so locks on one object are counted here, and the last one takes the pin
back. Pins end by themselves: what LMCache forgets to unlock is not kept for ever.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvstrata_client.connectors.lmcache_names import Name
from kvstrata_client.connectors.object_transfers import Keys

T = TypeVar("T")

RESULTS_MAX: Final = 65_536
"""Results that nobody has fetched: of requests that were given up. The oldest go first."""

LOCK_S: Final = 60.0
"""A load follows its lookup within seconds; a lock that lasts longer belongs to nobody any more."""
LOCKS_MAX: Final = 65_536
"""Objects counted at a time; locks beyond that are not taken back, and end by themselves."""


class Board(Generic[T]):
    """Results by task. Every result is announced exactly once, after it can be fetched."""

    def __init__(self, notify: Callable[[], None]) -> None:
        """Call `notify` for each result, from the thread that has it."""
        self._notify = notify
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._is_closed = False

    def put(self, task: int, result: T) -> None:
        """File the result of a task and announce it; nobody is there any more once the board is closed."""
        with self._lock:  # The descriptor must not be closed, and perhaps be another's, before it is written to.
            if self._is_closed:
                return
            while len(self._results) >= RESULTS_MAX:
                del self._results[next(iter(self._results))]
            self._results[task] = result
            self._notify()

    def take(self, task: int) -> T | None:
        """Return the result of a task, once."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """Return all results that are there, once."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """Announce nothing any more. Idempotent."""
        with self._lock:
            self._is_closed = True


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
