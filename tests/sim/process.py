"""Processes of the simulated world: whatever runs in one's context dies, stops and wakes with it."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any


class Process:
    """One operating-system process. A killed one runs no line of code any more, not even a `finally`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.backlog: deque[asyncio.Handle] = deque()
        """What became due while the process was stopped."""
        self.at_exit: list[Callable[[], None]] = []
        """What the kernel does at its end: closing sockets."""
        self._loop = loop
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a task as this process."""
        return self._loop.create_task(work, context=self.context.copy())

    def root(self, work: Coroutine[Any, Any, Any], world: Any) -> None:
        """Run the task that is the process; a bug that ends it breaks the run."""

        def ended(task: "asyncio.Task[Any]") -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
                world.violate("bug", f"{self.name} ended: {type(cause).__name__}: {cause}")

        self.spawn(work).add_done_callback(ended)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as this process, now."""
        return self.context.copy().run(function, *args)

    def kill(self) -> None:
        """End it as SIGKILL does. Idempotent."""
        if self.is_dead:
            return
        self.is_dead = True
        self.backlog.clear()
        for closing in self.at_exit:
            closing()

    def stop(self) -> None:
        """Run nothing until `wake`, as SIGSTOP does."""
        self.is_stopped = True

    def wake(self) -> None:
        """Go on; what became due meanwhile comes first, in order."""
        self.is_stopped = False
        while self.backlog:
            handle = self.backlog.popleft()
            self._loop._ready.append(handle)  # type: ignore[attr-defined]


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
"""Who runs; None is the world itself: networks, disks, Redis, checkers."""
