"""Work on memory under asyncio: whoever gives the memory back waits for the thread that is at it."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvstrata import AsyncClient, Target
from kvstrata_api.blocks import Layout
from kvstrata_client.verbs.calls import Operation, Work

pytestmark = pytest.mark.unit

AWAY = Target(Path("nowhere"), "pool", "token", Layout("tiny", "r1", "fp32", 16, 4, 2, 16, 4))


class Copying:
    """An operation with a thread at memory that it gives back when it is cancelled."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.begun, self.goes_on = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(AsyncClient(AWAY).run(self._operation()))

    def _operation(self) -> Operation[None]:
        try:
            yield Work(self._copy)
        except BaseException:
            self.events.append("given back")
            raise

    def _copy(self) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        self.goes_on.wait(5.0)
        self.events.append("copied")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_memory_is_given_back_behind_its_thread_however_often_the_caller_is_cancelled(times: int) -> None:
    copying = Copying()
    await copying.begun.wait()
    for _ in range(times):
        copying.task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not copying.task.done()
    copying.goes_on.set()
    await asyncio.wait((copying.task,))

    assert copying.task.cancelled()
    assert copying.events == ["copied", "given back"]


def test_the_end_of_a_loop_waits_for_threads_at_memory() -> None:
    made: list[Copying] = []

    async def main() -> None:
        made.append(Copying())
        await made[0].begun.wait()
        asyncio.get_running_loop().call_later(0.01, made[0].goes_on.set)

    asyncio.run(main())

    assert made[0].events == ["copied", "given back"]
