"""The simulator's event loop: virtual time, seeded delays, processes that die and stop, simulated sockets."""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from sim.process import PROCESS
from support.runner.virtual_loop import StuckError, VirtualLoop, _call

T = TypeVar("T")

_CANCELLED_MIN: Final = 256
"""Cancelled timers that are put up with before the heap is made anew."""

_TASKS_MAX: Final = 1 << 12
"""Tasks that are kept before those that are done are left out."""

_new: Any = object.__new__
_copy_context: Final = contextvars.copy_context


def _note_nothing(_: object) -> None:
    """Stands for the method that would note a task."""


class Task(asyncio.Task[T]):
    """A task whose hash is its number, so that sets of tasks have an order that does not depend on addresses."""

    number = 0
    """Given by the loop before anybody can put the task in a set."""

    def __hash__(self) -> int:
        return self.number


class _Handle(asyncio.Handle):
    """A handle without the debugging of the standard library's."""

    __slots__ = ()

    def cancel(self) -> None:
        """Do not run it."""
        self._cancelled = True


class _Timer(asyncio.TimerHandle):
    """The same for timers."""

    __slots__ = ()
    _scheduled: bool
    _loop: "SimLoop"

    def cancel(self) -> None:
        """Do not run it."""
        if not self._cancelled:
            self._cancelled = True
            if self._scheduled:
                self._loop._cancelled += 1


class SimLoop(VirtualLoop):
    """Runs everything of one seed."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.slow_executor = 0.0
        """Chance that a thread takes milliseconds instead of no time."""
        self.net: Any = None
        self.tasks: list[asyncio.Task[Any]] = []
        self._timers: list[tuple[float, int, _Timer]] = []
        self._asked = 0
        self._cancelled = 0
        self._numbers = itertools.count(1)

    get_debug = bool
    """False, without running a line of Python: every future and task asks."""

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> "asyncio.Task[T]":
        """Start a task."""
        task: Task[T] = Task(coro, loop=self, name=name or "task", context=context)
        task.number = next(self._numbers)
        self.tasks.append(task)
        if len(self.tasks) > _TASKS_MAX:
            self.tasks = [t for t in self.tasks if not t.done()]
        return task

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def run_forever(self) -> None:
        """Run until somebody stops it. Nobody asks for all tasks meanwhile, so the module does not note them weakly."""
        known: Any = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
        known.add = _note_nothing
        try:
            super().run_forever()
        finally:
            del known.add

    def executor_delay_s(self) -> float:
        """Most calls of a thread take a moment, some take long enough for anything to happen meanwhile."""
        if self.slow_executor and self.rng.random() < self.slow_executor:
            return self.rng.random() ** 3 * 0.2
        return 0.0

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]  # noqa: ARG002
        """Call `func` later, in the context of the process that asked."""
        future: asyncio.Future[Any] = self.create_future()
        delay_s = self.executor_delay_s()
        if delay_s:
            self.call_later(delay_s, _call, future, func, args)
        else:
            self.call_soon(_call, future, func, args)
        return future

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        """Run a callback in the next turn; what was asked for first comes first."""
        handle = _new(_Handle)  # Filled here: this is called more often than anything else.
        handle._context = _copy_context() if context is None else context
        handle._loop = self
        handle._callback = callback
        handle._args = args
        handle._cancelled = False
        handle._repr = None
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        """Run a callback at a virtual second; of equal ones the one that was asked for first."""
        timer = _new(_Timer)
        timer._context = _copy_context() if context is None else context
        timer._loop = self
        timer._callback = callback
        timer._args = args
        timer._cancelled = False
        timer._repr = None
        timer._when = when
        timer._scheduled = True
        self._asked += 1
        heapq.heappush(self._timers, (when, self._asked, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after so many virtual seconds."""
        timer: asyncio.TimerHandle = self.call_at(self.now_s + delay, callback, *args, context=context)
        return timer

    def _run_once(self) -> None:  # noqa: C901  One frame for all that is ready: a third of what a turn costs.
        ready = self._ready  # type: ignore[attr-defined]
        if self._cancelled > _CANCELLED_MIN and self._cancelled * 2 > len(self._timers):
            self._drop_cancelled()
        timers = self._timers
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._cancelled -= 1
            if not timers:
                raise StuckError("nothing is ready and no timer runs")
            self.now_s = max(self.now_s, timers[0][0])
        if timers and timers[0][0] <= self.now_s:
            self._take_due()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            process = context.get(PROCESS)
            if process is not None and (process.is_dead or process.is_stopped):
                if not process.is_dead:
                    process.backlog.append(handle)
                continue
            try:
                context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as e:  # noqa: BLE001  As every loop does.
                self.call_exception_handler({"message": f"exception in {handle._callback}", "exception": e})

    def _take_due(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self.now_s:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._cancelled -= 1
            else:
                self._ready.append(timer)  # type: ignore[attr-defined]

    def _drop_cancelled(self) -> None:
        self._timers = [item for item in self._timers if not item[2]._cancelled]
        heapq.heapify(self._timers)
        self._cancelled = 0

    # Sockets are the simulated network's.

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Call back whenever a simulated socket can be read."""
        fd.set_reader(callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """Call back no more."""
        fd.set_reader(None, ())
        return True

    def remove_writer(self, fd: Any) -> bool:  # noqa: ARG002
        """Simulated sockets always take what they are given."""
        return False

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Connect to a simulated agent's socket. Raises `OSError`."""
        await self.net.connect_local(sock, address)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect to a simulated address. Raises `OSError`."""
        return await self.net.connect(protocol_factory, f"{host}:{port}")

    async def create_server(self, protocol_factory: Any, *_: Any, **given: Any) -> Any:
        """Listen on a simulated address."""
        return self.net.listen(protocol_factory, given["sock"])

    def end(self) -> None:
        """Throw everything away that still waits, without running any of it."""
        self._ready.clear()  # type: ignore[attr-defined]
        self._timers.clear()
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            work: Any = task.get_coro()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if not task.done() and work is not None:
                with contextlib.suppress(BaseException):  # What it wants to do at its end, it may not: it is dead.
                    work.close()
        self.close()
