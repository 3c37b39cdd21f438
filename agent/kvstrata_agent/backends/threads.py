"""Waiting for work in threads that cannot be stopped half-way."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from kvstrata_api.units import KIB

T = TypeVar("T")

INLINE_BYTES_MAX: Final = 128 * KIB
"""Up to this sealing, copying and hashing (5 GB/s and more) cost less than a thread that is woken, about 60 us."""


async def settle(future: "asyncio.Future[T]") -> T:
    """Wait for `future` even when the caller is cancelled, and raise the cancellation only then.

    A thread or a device goes on using its buffers after a cancellation; the caller would give them to the next
    block too early. So a cancelled call lasts as long as the I/O that it started.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # Marks it as seen: the cancellation is what the caller hears of.
        raise


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all at once, and end when all have ended, also when this is cancelled or one of them raises.

    `asyncio.gather` ends with the first that is cancelled or raises; the others would go on at memory of the caller.
    """
    if len(work) == 1:
        return [await work[0]]  # Without a task of its own.
    ends = await asyncio.gather(*work, return_exceptions=True)
    return [_ended(end) for end in ends]


def _ended(end: T | BaseException) -> T:
    if isinstance(end, BaseException):
        raise end
    return end


class Apart:
    """Work that goes on when its caller leaves, because it uses nothing of the caller's."""

    def __init__(self, grace_s: float) -> None:
        """A cancelled caller still waits `grace_s` for the work: mostly it ends at once, and its room is free then."""
        self._grace_s = grace_s
        self._under_way: set[asyncio.Future[Any]] = set()

    async def outlive(self, work: "asyncio.Future[T]") -> T:
        """Wait for `work`, which is never cancelled by this."""
        self._under_way.add(work)
        work.add_done_callback(self._forget)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work], timeout=self._grace_s)
            raise

    def _forget(self, work: "asyncio.Future[Any]") -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # Marks it as seen: a caller that has left does not want it.

    async def settle(self) -> None:
        """Wait for everything that is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)


class Later:
    """Work that is done once, some time after it was first asked for."""

    def __init__(self, delay_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait `delay_s` from the first call of `ask`; what is asked for while `work` runs is done once more."""
        self._delay_s = delay_s
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def ask(self) -> None:
        """Have it done in time."""
        if self._task is None and not self._is_stopped:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(self._delay_s)
        self._task = None
        await self._work()

    def stop(self) -> None:
        """Do nothing any more."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()


async def in_thread(executor: Executor | None, call: Callable[[], T]) -> T:
    """Run a blocking call in a thread and settle it."""
    return await settle(asyncio.get_running_loop().run_in_executor(executor, call))


async def here_or_in_thread(executor: Executor | None, size_bytes: int, call: Callable[[], T]) -> T:
    """Run a call that goes over so many bytes: at once when they are few, else as `in_thread` does."""
    return call() if size_bytes <= INLINE_BYTES_MAX else await in_thread(executor, call)
