"""Hand a prompt's blocks over while they are computed, under asyncio: `growing.GrowingBlocks` for an event loop."""

from collections.abc import Awaitable, Callable
from typing import Any

from kvstrata_client.prompt.async_streaming import Perform
from kvstrata_client.prompt.handover import Growth, Slots
from kvstrata_client.target import Target
from kvstrata_client.verbs.calls import Call, Calls, Work
from kvstrata_client.verbs.results import Bytes2D, Published

Ask = Callable[[Call[Any]], Awaitable[Any]]
"""Executes one call."""

Send = Callable[[Calls], None]
"""Sends calls whose answers nobody needs."""


class AsyncGrowingBlocks(Growth):
    """Blocks that are written layer by layer, for one writer. Any verb that is cancelled gives the blocks up."""

    def __init__(self, target: Target, ask: Ask, send: Send, perform: Perform, slots: Slots) -> None:
        """Write to `slots`."""
        super().__init__(target, slots)
        self._ask = ask
        self._send = send
        self._perform = perform

    async def write(self, rows: Bytes2D) -> None:
        """Like `GrowingBlocks.write`, copying in a thread.

        Cancelled, it returns when nothing is read from `rows` or written to a slot any more: a layer that was not told
        of would leave a gap that no later one can close.
        """
        layer = self._begin_layer(rows)
        if not self._slots:
            return
        told: list[Call[int]] = []
        try:
            await self._perform(Work(lambda: told.append(self._filled(layer, rows))))
            growing = await self._ask(told[0])
        except BaseException:
            self.abandon()
            raise
        if growing < len(self._slots):
            self.abandon()

    async def finish(self) -> tuple[Published, ...]:
        """Like `GrowingBlocks.finish`. Cancelled, it leaves what becomes of the blocks to the agent."""
        count, publishing = len(self._slots), self._publishing()
        if publishing is None:
            self.abandon()
            return (Published.REFUSED,) * count
        return tuple(await self._ask(publishing))

    def abandon(self) -> None:
        """Like `GrowingBlocks.abandon`, without waiting for the agent."""
        if (giving_up := self._giving_up()) is not None:
            self._send((giving_up,))
