"""An event loop whose time is virtual: it jumps to the next timer when nothing is ready, and threads do not exist.

The same calls in the same order give the same run, whatever else the machine is doing.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

EPOCH_S: Final = 1000.0
"""First second of virtual time: not 0, which some code might mistake for never."""


class StuckError(Exception):
    """Something is waited for that can never happen: no callback is ready and no timer runs."""


class _Selector:
    """Stands where the loop would wait for sockets: time passes at once."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        """Let `timeout_s` of virtual time pass. Raises `StuckError` when the wait would have no end."""
        if timeout_s is None:
            raise StuckError("nothing is ready and no timer runs")
        self._loop.now_s += max(0.0, timeout_s)
        return []

    def close(self) -> None:
        """Nothing is held."""


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio without a world: no sockets, no threads, no waiting.

    `run_in_executor` calls at the next turn of the loop, so the caller still waits once and others run meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = EPOCH_S
        self._clock_resolution = 1e-9
        self._selector = _Selector(self)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]  # noqa: ARG002
        """Call `func` in the loop itself, one turn later."""
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self.executor_delay_s(), _call, future, func, args, context=contextvars.copy_context())
        return future

    def executor_delay_s(self) -> float:
        """How long the next call of an executor takes; 0 unless a subclass says otherwise."""
        return 0.0

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
        """Run `work` to its end. Raises `TimeoutError` after `limit_s` virtual seconds, `StuckError` at a deadlock."""
        return self.run_until_complete(asyncio.wait_for(work, limit_s))

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Wakes a loop that waits in another thread: there is none."""


def _call(future: "asyncio.Future[T]", func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(func(*args))
    except Exception as e:  # noqa: BLE001  As an executor does: the waiter gets it.
        future.set_exception(e)


def run_virtually(work: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
    """Run `work` on a loop of its own, and end whatever it leaves behind. Raises like `VirtualLoop.run`."""
    loop = VirtualLoop()
    try:
        return loop.run(work, limit_s)
    finally:
        loop.run_until_complete(_end_others())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
