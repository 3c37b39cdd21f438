"""A prompt's prefix read in parts under asyncio: `streaming.LayerStream` for tasks of an event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from kvstrata_client.prompt.ranges import Cut
from kvstrata_client.prompt.streaming import ARRIVE_S, WAIT_S, Layers, Leased, parts_of
from kvstrata_client.verbs.calls import Work
from kvstrata_client.verbs.leases import lost, void
from kvstrata_client.verbs.results import Bytes2D, Lease

Arrive = Callable[[Sequence[Lease], int, float], Awaitable[tuple[bytes, ...]]]
"""See `streaming.Arrive`."""

End = Callable[[Sequence[Lease], Sequence[Lease]], Awaitable[bool]]
"""See `streaming.End`."""

Perform = Callable[[Work], Awaitable[Any]]
"""Does work on memory in a thread; returns, also when cancelled, only when it is done."""


class AsyncLayerStream(Layers):
    """Leading blocks of a prompt, to be read layer by layer in an `async with` block. One reader at a time.

    Iterating yields each layer in turn. Leaving the block ends the leases whatever happened in it, cancellation
    included, and raises as `LayerStream` does.
    """

    def __init__(self, leased: Leased, cut: Cut, end: End, arrive: Arrive, perform: Perform) -> None:
        """Hold leases until `end` is called with them; `arrive` brings checksums of those that grow."""
        super().__init__(leased, cut)
        self._arrive = arrive
        self._end = end
        self._perform = perform

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not await self.close() and error is None:
            raise lost(self.blocks)

    async def __aiter__(self) -> AsyncIterator[Bytes2D]:
        """Yield layers from the first to the last: each (blocks, bytes wanted of a layer) uint8, the caller's."""
        for layer in range(self._cut.layout.layers):
            yield await self.read(range(layer, layer + 1))

    async def read(self, layers: range, into: Bytes2D | None = None) -> Bytes2D:
        """Like `LayerStream.read`, copying in a thread.

        Cancelled, it returns when nothing is written to `into` any more; the stream may be read on.
        """
        self._check(layers)
        ends_s = asyncio.get_running_loop().time() + ARRIVE_S
        while growing := self._lacking(layers.stop):
            wait_s = min(ends_s - asyncio.get_running_loop().time(), WAIT_S)
            self._grow(growing, await self._arrive(growing, parts_of(growing), wait_s) if wait_s > 0 else ())
        made: list[Bytes2D] = []
        await self._perform(Work(lambda: made.append(self._copy(layers, into))))
        return made[0]

    async def close(self) -> bool:
        """See `LayerStream.close`. The leases end also when this is cancelled."""
        leases = self._taken()
        is_valid = not leases or await self._end(leases, self._suspects)
        void(leases)
        return is_valid
