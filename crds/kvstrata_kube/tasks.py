"""Background tasks that never end by an error: the task roots of the Kubernetes side."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from kvstrata_api.errors import KvStrataError
from kvstrata_kube import backoff

Task = asyncio.Task[None]

_log: Final = logging.getLogger(__name__)


async def forever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run `run` again whenever it raises or returns, after a bounded wait; ends only by cancellation."""
    failures = 0
    while True:
        started_s = asyncio.get_running_loop().time()
        try:
            await run()
        except Exception:  # noqa: BLE001  A task root: whatever it was, the agent goes on and says so.
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
