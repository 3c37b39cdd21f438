"""Where the memory of an arena comes from and what becomes of it; and memory that ends with the process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from kvstrata_agent.backends.base import Columns, Record, SlotRef
from kvstrata_agent.backends.memory.mapping import MappedExtent, Remains
from kvstrata_agent.backends.slot_table import Extent, SlotTable

Maker = Callable[[int], MappedExtent]
"""Makes zeroed memory of a size in bytes. Raises `TierFullError` or `BackendFailedError`."""

FIRST_STAMP: Final = 1


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
        """Nothing is to survive."""
        memory.release()

    def close(self) -> None:
        """Nothing is held."""

    def discard(self) -> None:
        """Nothing is kept."""
