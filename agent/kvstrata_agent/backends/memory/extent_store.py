"""Where the memory of an arena comes from and what becomes of it; and memory that ends with the process.

Released memory that clients still have mapped is emptied again and again until they let go of it (`StillMapped`). Such
a client gets new pages by touching its old mapping: zeros, which its own memory limit pays for, but huge pages come out
of everybody's. The kernel knows who is left (`mapping.is_held`), so nothing here has to be believed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, Protocol

from kvstrata_agent.backends.base import Columns, Record, SlotRef
from kvstrata_agent.backends.memory.mapping import MappedExtent, Remains
from kvstrata_agent.backends.slot_table import Extent, SlotTable

Maker = Callable[[int], MappedExtent]
"""Makes zeroed memory of a size in bytes. Raises `TierFullError` or `BackendFailedError`."""

FIRST_STAMP: Final = 1

_POLL_INTERVAL_S: Final = 1.0
"""Polling interval of memory that is still mapped."""
_HELD_MAX: Final = 4096
"""Descriptors kept for it; beyond, the oldest is let go of and costs only the client that holds it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One extent of an earlier run, entered into the slot table."""

    extent: Extent
    memory: MappedExtent
    blocks: Columns


class ExtentStore(Protocol):
    """Makes and keeps the memory of one arena's extents. No method but `found` may take longer than a system call."""

    first_stamp: int
    """Above every stamp that an earlier run used."""

    def make(self, size_bytes: int) -> MappedExtent:
        """Zeroed memory that is nobody's yet. Raises `TierFullError` or `BackendFailedError`. Any thread."""

    def opened(self, extent: Extent, memory: MappedExtent) -> None:
        """Note whose memory it is from now on. Raises `TierFullError` or `BackendFailedError`; nothing is kept then."""

    def taken(self, slot: SlotRef) -> None:
        """Note that somebody may write to a slot from now on."""

    def committed(self, slot: SlotRef, record: Record) -> None:
        """Note the block that a slot holds."""

    def dropped(self, slot: SlotRef) -> None:
        """Note that a slot holds no block any more; before it can be taken again."""

    def released(self, extent: int, memory: MappedExtent) -> Remains | None:
        """Give the memory of an extent back for good: whoever still maps it sees zeros. Any thread.

        Returns what such a client has left, None when there is none.
        """

    def found(self, table: SlotTable) -> Iterator[Found]:
        """Extents of an earlier run, entered into `table` as far as they fit; what cannot be used is removed."""

    def let_go(self, memory: MappedExtent) -> None:
        """Close the memory of an extent at the end of the process; keep what is to survive it."""

    def close(self) -> None:
        """Let another process have what is kept."""

    def discard(self) -> None:
        """Remove what is kept, once all memory was released, and close."""


class VolatileStore:
    """Memory that ends with the process: nothing is noted, nothing is found."""

    first_stamp = FIRST_STAMP

    def __init__(self, make: Maker) -> None:
        self._make = make

    def make(self, size_bytes: int) -> MappedExtent:
        """See `ExtentStore`."""
        return self._make(size_bytes)

    def opened(self, extent: Extent, memory: MappedExtent) -> None:
        """Nothing to note."""

    def taken(self, slot: SlotRef) -> None:
        """Nothing to note."""

    def committed(self, slot: SlotRef, record: Record) -> None:
        """Nothing to note."""

    def dropped(self, slot: SlotRef) -> None:
        """Nothing to note."""

    def released(self, extent: int, memory: MappedExtent) -> Remains | None:  # noqa: ARG002  It has no name.
        """See `ExtentStore`."""
        return memory.release()

    def found(self, table: SlotTable) -> Iterator[Found]:  # noqa: ARG002  Nothing is entered.
        """Nothing survives."""
        return iter(())

    def let_go(self, memory: MappedExtent) -> None:
        """Nothing is to survive: what clients have left can be touched by them alone, and ends with them."""
        remains = memory.release()
        if remains is not None:
            remains.close()

    def close(self) -> None:
        """Nothing is held."""

    def discard(self) -> None:
        """Nothing is kept."""


class StillMapped:
    """Released memory of one arena that clients still have. Methods run in the event loop, polls in `worker`."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._held: list[Remains] = []
        self._poll: Future[tuple[int, list[Remains]]] | None = None
        self._polled_at_s = 0.0
        self.touched_bytes = 0
        """What the last poll found in it and took back."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, remains: Remains | None) -> None:
        """Take over what a release has left."""
        if remains is None:
            return
        self._held.append(remains)
        if len(self._held) > _HELD_MAX and self._poll is None:
            self._held.pop(0).close()

    def tend(self) -> None:
        """Poll it when it is time to. Returns at once."""
        if self._poll is not None:
            if not self._poll.done():
                return
            self._finish(*self._poll.result())
        now_s = asyncio.get_running_loop().time() if self._held else 0.0
        if self._held and now_s - self._polled_at_s >= _POLL_INTERVAL_S:
            self._polled_at_s = now_s
            self._poll = self._worker.submit(_poll, tuple(self._held))

    def empty(self) -> None:
        """Take back now what was touched, for somebody who needs the pages."""
        for remains in self._held:
            remains.empty()

    def close(self) -> None:
        """Forget all of it; after `worker` has ended."""
        self._poll = None
        while self._held:
            self._held.pop().close()

    def _finish(self, touched_bytes: int, free: list[Remains]) -> None:
        self._poll = None
        if touched_bytes and not self.touched_bytes:
            _log.warning("clients use memory that was taken back", extra={"bytes": touched_bytes})
        self.touched_bytes = touched_bytes
        for remains in free:
            self._held.remove(remains)
            remains.close()


def _poll(held: tuple[Remains, ...]) -> tuple[int, list[Remains]]:
    """Bytes that were touched since, and what nobody holds any more."""
    return sum(remains.empty() for remains in held), [remains for remains in held if not remains.is_held]
