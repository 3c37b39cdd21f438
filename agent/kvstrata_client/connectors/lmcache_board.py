"""Tasks that run beside whoever submits them, and the board where their results are found.

LMCache's controllers submit, go on, and read the board when its descriptor is ready. Nothing here waits for an agent
on a controller's thread: a task that finds no place in the queue is answered at once.

`Locks` are the objects that LMCache has found and not yet released. The agent keeps one pin for a block and a
connection, however often it is asked for; so locks on one object are counted here, and the last one takes the pin
back. Pins end by themselves: what LMCache forgets to unlock is not kept for ever.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvstrata_client.connectors.lmcache_names import Name
from kvstrata_client.connectors.object_transfers import Keys

T = TypeVar("T")

TASKS_MAX: Final = 1024
"""Tasks that wait in one queue; a controller of LMCache has some tens under way."""
RESULTS_MAX: Final = 65_536
"""Results that nobody has fetched: of requests that were given up. The oldest go first."""

LOCK_S: Final = 60.0
"""A load follows its lookup within seconds; a lock that lasts longer belongs to nobody any more."""
LOCKS_MAX: Final = 65_536
"""Objects counted at a time; locks beyond that are not taken back, and end by themselves."""

_log: Final = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be done by a worker. Exactly one of the two is called, `give_up` also when `run` raised."""

    run: Callable[[], None]
    give_up: Callable[[], None]


class Workers:
    """Threads that carry out tasks in the order in which they come."""

    def __init__(self, name: str, threads: int) -> None:
        """Start `threads` threads."""
        self._tasks: queue.Queue[Task | None] = queue.Queue(TASKS_MAX + threads)
        self._lock = threading.Lock()
        self._is_closing = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """True while there is a thread for every task."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, task: Task) -> None:
        """Have a task done, or give it up at once when there is no place in the queue. Never waits."""
        with self._lock:
            is_taken = not self._is_closing and self._tasks.qsize() < TASKS_MAX
            if is_taken:
                self._tasks.put_nowait(task)
        if not is_taken:
            task.give_up()

    def close(self) -> None:
        """Give up what waits and return when nothing is being done any more. Idempotent."""
        with self._lock:
            self._is_closing = True
        while (task := self._next()) is not None:
            task.give_up()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _next(self) -> Task | None:
        try:
            return self._tasks.get_nowait()
        except queue.Empty:
            return None

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do one task; False when there are to be no more. What it held is let go of before the next is waited for."""
        task = self._tasks.get()
        if task is None:
            return False
        try:
            task.run()
        except Exception:  # noqa: BLE001  The root of every task: an engine must not wait for a result that never comes.
            _log.exception("a task failed")
            task.give_up()
        return True


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
