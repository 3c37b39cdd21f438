"""Taking over what earlier runs left in a volume. Sealed records whose key is not there wait, and are kept."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from kvstrata_agent.backends.file.index_file import IndexFile
from kvstrata_agent.backends.file.scan import Found, Scan, adopt, delete_all
from kvstrata_agent.backends.file.segment import Segment
from kvstrata_agent.backends.file.slot_index import Traits
from kvstrata_agent.backends.file.volume import Volume
from kvstrata_agent.backends.record.layout import Form
from kvstrata_agent.backends.recovered import Columns
from kvstrata_agent.backends.slot_table import SlotTable
from kvstrata_api.errors import BackendFailedError


class Fit(Protocol):
    """Sets what segments may take in all, with so many new ones that have so many slots."""

    def __call__(self, new_segments: int, new_slots: int) -> None: ...  # noqa: D102


@dataclass(slots=True)
class Recovery:
    """Fills a store's tables from its volume. Methods raise what `fail` makes of an `OSError`."""

    volume: Volume
    form: Form
    table: SlotTable
    segments: dict[int, Segment]
    traits: Traits
    index: IndexFile
    fit: Fit
    differs: Callable[[], None]
    """Called when the index does not list what was found."""
    fail: Callable[[OSError], BackendFailedError]
    _waiting: dict[bytes, list[Found]] = field(default_factory=dict)
    """Segments whose headers could not be opened, by the tag of their scope."""

    @property
    def waiting(self) -> frozenset[bytes]:
        """Tags of the scopes that a key is missing of."""
        return frozenset(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the segments that wait."""
        return sum(f.name.size_bytes for found in self._waiting.values() for f in found)

    async def run(self) -> AsyncIterator[Columns]:
        """Adopt what an earlier run left, as far as it can be read; returns where the records lie."""
        async for blocks in self._blocks(self._run()):
            yield blocks

    async def resume(self, tag: bytes) -> AsyncIterator[Columns]:
        """Adopt what waited for the key of a scope."""
        async for blocks in self._blocks(self._resume(tag)):
            yield blocks

    async def _blocks(self, segments: AsyncGenerator[Found, None]) -> AsyncIterator[Columns]:
        try:
            async with aclosing(segments):
                async for found in segments:
                    assert found.blocks is not None, "else it is not adopted"
                    yield found.blocks
        except OSError as e:
            raise self.fail(e) from e

    async def _run(self) -> AsyncGenerator[Found, None]:
        """Adopt what can be read. What holds nothing goes, and the oldest of what the capacity has no room for."""
        names = await self.volume.names()
        body = await self.index.load()
        self.traits.kinds.extend(body.kinds if body else ())
        self.table.skip_extents(body.next_segment if body else 0)
        unwanted: list[Found] = []
        async for found in Scan(self.volume, self.form, body).segments(names):
            self.table.skip_extents(found.name.id + 1)
            if await self._is_taken(found, unwanted):
                yield found
        await delete_all(self.volume, unwanted)

    async def _resume(self, tag: bytes) -> AsyncGenerator[Found, None]:
        """Look again; what is no record of ours after all goes."""
        unwanted: list[Found] = []
        scan, names = Scan(self.volume, self.form, None), await self.volume.names()
        for name in [f.name for f in self._waiting.pop(tag, ())]:
            found = await scan.look(name, names.get(str(name), 0))
            if await self._is_taken(found, unwanted):
                yield found
        await delete_all(self.volume, unwanted)

    async def forget(self, tag: bytes) -> None:
        """Remove what waits for a key that is gone for good."""
        try:
            await delete_all(self.volume, self._waiting.pop(tag, []))
        except OSError as e:
            raise self.fail(e) from e
        finally:
            self.fit(0, 0)

    async def _is_taken(self, found: Found, unwanted: list[Found]) -> bool:
        is_taken = self._take(found, unwanted)
        if not is_taken and found.file is not None:
            await found.file.close()
            found.file = None
        return is_taken

    def _take(self, found: Found, unwanted: list[Found]) -> bool:
        """Adopt a segment, let it wait or note that nobody wants it; True when it was adopted."""
        self.fit(1, found.name.slots)
        is_over = self.table.held_bytes + found.name.size_bytes > self.table.capacity_bytes
        if is_over or not (found.blocks or found.unread):
            unwanted.append(found)
            return False
        if not found.blocks:
            self._waiting.setdefault(found.unread, []).append(found)
            self.fit(0, 0)
            return False
        segment = self.segments[found.name.id] = adopt(found, self.table, self.volume, self.traits)
        if found.is_bad:
            segment.is_listable = False
            self.table.close_extent(found.name.id)
        if found.listed is None:
            self.differs()
        return True
