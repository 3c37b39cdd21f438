"""Memory for direct I/O: what can be used as it lies, and a bounded set of page-aligned buffers for the rest."""

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.memory.mapping import address_of
from kvstrata_agent.backends.scratch import scratch
from kvstrata_agent.backends.slot_table import round_up

_BUFFERS_MAX: Final = 16
"""Twice the depth at which the measured disks saturate (8 transfers of 2 MiB)."""


def is_direct(view: memoryview) -> bool:
    """True when O_DIRECT can use the memory as it lies."""
    return len(view) % DIRECT_BYTES == 0 and address_of(view) % DIRECT_BYTES == 0


@dataclass(slots=True)
class Loan:
    """A buffer that somebody uses."""

    view: memoryview
    user: "asyncio.Future[Any] | None" = None
    """What uses the buffer even after the borrower has left; the buffer is not lent again before it is done."""


class Buffers:
    """A bounded set of page-aligned buffers for payloads that do not lie where O_DIRECT wants them."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._turn = asyncio.Semaphore(_BUFFERS_MAX)

    @asynccontextmanager
    async def lend(self, size_bytes: int) -> AsyncIterator[Loan]:
        """Borrow a buffer of `size_bytes`, rounded up to the alignment; waits while all are in use."""
        size = round_up(size_bytes, DIRECT_BYTES)
        await self._turn.acquire()
        buffer = self._free.pop() if self._free else scratch(size)
        if len(buffer) < size:
            buffer = scratch(size)
        loan = Loan(memoryview(buffer)[:size])
        try:
            yield loan
        finally:
            if loan.user is None or loan.user.done():
                self._give_back(buffer)
            else:
                loan.user.add_done_callback(lambda _: self._give_back(buffer))

    def _give_back(self, buffer: mmap.mmap) -> None:
        self._free.append(buffer)
        self._turn.release()
