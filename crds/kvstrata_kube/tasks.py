"""Background tasks: those that never end by an error, and those that an owner has under way."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar

from kvstrata_api.errors import KvStrataError
from kvstrata_kube import backoff

Task = asyncio.Task[None]
T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


async def forever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run `run` again whenever it raises or returns, after a bounded wait; ends only by cancellation."""
    failures = 0
    while True:
        started_s = asyncio.get_running_loop().time()
        try:
            await run()
        except Exception:  # noqa: BLE001  A task root: whatever it was, the process goes on and logs it.
            _log.exception("task failed", extra={"task": name})
        lived_s = asyncio.get_running_loop().time() - started_s
        failures = 1 if lived_s > backoff.LONGEST_S else failures + 1
        await asyncio.sleep(backoff.delay_s(failures, random.random()))


def supervise(name: str, run: Callable[[], Awaitable[None]]) -> Task:
    """Start `forever` as a task; the caller keeps it and cancels it."""
    return asyncio.create_task(forever(name, run), name=name)


async def cancel(tasks: list[Task]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TaskSet(Generic[T]):
    """Tasks that one owner has under way, each until it has ended. For one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[T]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[T]]:
        return iter(tuple(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; it leaves the set before callbacks that are added later are called."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all of them, without waiting."""
        for task in self:
            task.cancel()

    async def close(self) -> None:
        """Cancel all of them and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def repeat(what: str, every_s: float, duty: Callable[[], Awaitable[None]]) -> None:
    """Do a duty until cancelled, whatever becomes of single rounds."""
    while True:
        try:
            await duty()
        except KvStrataError as e:
            _log.warning("duty failed", extra={"duty": what, "cause": str(e)})
        except Exception:  # noqa: BLE001  A task root: one bad round must not end expiry for good.
            _log.exception("duty failed", extra={"duty": what})
        await asyncio.sleep(every_s)
