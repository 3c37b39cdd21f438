"""Threads that do for adapters of opaque objects what their engines must not wait for, and a log of what changes.

Whoever submits a task goes on. Nothing here waits for an agent on an engine's thread: a task that finds no place in the
queue is given up at once.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstrata_api.errors import KvStrataError

TASKS_MAX: Final = 1024
"""Tasks that wait in one queue; engines have some tens under way."""

_log: Final = logging.getLogger(__name__)


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


class StateLog:
    """Logs changes: one line when something begins to fail, fails for another reason, or works again."""

    def __init__(self, log: logging.Logger, meanwhile: str) -> None:
        """Write to `log`; `meanwhile` says what a failure means to the engine."""
        self._log = log
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}

    def note(self, subject: str, error: KvStrataError | None) -> None:
        """Log the state of a subject, if it is not the one that it had; None: it works."""
        state = type(error).__name__ if error is not None else ""
        with self._lock:
            if self._last.get(subject, "") == state:
                return
            self._last[subject] = state
        if error is None:
            self._log.info("%s: works again", subject)
        else:
            self._log.warning("%s: %s: %s until that changes", subject, error, self._meanwhile)
