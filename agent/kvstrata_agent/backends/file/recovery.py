"""Taking over what earlier runs left in a volume: from the index where it can be believed, else from all headers.

Sealed records whose key is not there wait, and are kept.
"""

import asyncio
import errno
import mmap
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstrata_agent.backends.base import Columns, Record
from kvstrata_agent.backends.file.index_format import Body, Listed, SegmentName, parse_name, unpack_entries
from kvstrata_agent.backends.file.segment import Segment
from kvstrata_agent.backends.file.segment_io import SegmentIo, StoreState
from kvstrata_agent.backends.file.volume import NO_FILE, Volume, VolumeFile
from kvstrata_agent.backends.record.layout import HEADER_BYTES, Form, Unread
from kvstrata_agent.backends.recovered import columns_of
from kvstrata_agent.backends.slot_table import NOBODY

_AT_A_TIME: Final = 8
"""Segments read at once; header reads are 4 KiB each and wait for the device."""

_PAGES: Final = 256
"""Headers read with one thread switch."""


_MEDIA_ERRORS: Final = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN})
"""The bytes are gone. Anything else (a device away, no descriptors left) may be better at the next start."""


@dataclass(slots=True)
class Found:
    """What one segment of an earlier run holds."""

    name: SegmentName
    file: VolumeFile | None = None
    blocks: Columns | None = None
    """Its records; None when there are none."""
    listed: Listed | None = None
    """What the index lists of it, when it was believed."""
    is_bad: bool = False
    """The medium failed here."""
    unread: bytes = b""
    """Tag of the scope of headers that could not be opened; empty when there was none."""

    async def close(self) -> None:
        """Close its file, where that is open."""
        file, self.file = self.file, None
        if file is not None:
            await file.close()


@dataclass(frozen=True, slots=True)
class Scan:
    """One scan for what earlier runs left in `volume`."""

    volume: Volume
    form: Form
    body: Body | None
    """The index, without the segments that were touched since."""

    async def segments(self, names: Mapping[str, int]) -> AsyncGenerator[Found, None]:
        """What each segment file holds, newest segment first, of one id the listed one. `names` are the volume's.

        What is returned has to be closed by its user; all others are closed when this ends.
        """
        listed = {s.name: s for s in self.body.listed} if self.body else {}
        there = (parse_name(name) for name, size_bytes in names.items() if size_bytes != NO_FILE)
        files = sorted((name for name in there if name is not None), key=lambda n: (-n.id, n not in listed))
        for start in range(0, len(files), _AT_A_TIME):
            batch = files[start : start + _AT_A_TIME]
            scans = (self.scan(name, names[str(name)], listed.get(name)) for name in batch)
            ends = await asyncio.gather(*scans, return_exceptions=True)
            left = [end for end in ends if isinstance(end, Found)]
            try:
                for end in ends:
                    if isinstance(end, BaseException):
                        raise end
                while left:
                    yield left.pop(0)
            finally:
                await _let_go(left)

    async def scan(self, name: SegmentName, size_bytes: int, listed: Listed | None = None) -> Found:
        """What one segment file holds, by the index when that lists it."""
        found = Found(name)
        if listed is not None and self.body is not None and size_bytes == name.size_bytes:
            found.listed = listed
            blocks = unpack_entries(listed, self.body.kinds)
            found.blocks = blocks if len(blocks) else None
            return found
        slots = min(name.slots, size_bytes // name.stride_bytes)
        try:
            found.file = await self.volume.open(str(name))
            await self._read_headers(found, slots)
        except OSError as e:
            found.is_bad = True
            if e.errno not in _MEDIA_ERRORS:
                await _let_go([found])
                raise
        return found

    async def _read_headers(self, found: Found, slots: int) -> None:
        """Read the header page of every slot; slots without a valid one count as free.

        Only headers of one scope count: a segment belongs to one scope for all its life.
        """
        assert found.file is not None
        stride, uses = found.name.stride_bytes, list[tuple[int, int, Record]]()
        buffer = memoryview(mmap.mmap(-1, _PAGES * HEADER_BYTES))
        for first in range(0, slots, _PAGES):
            offsets = [index * stride for index in range(first, min(slots, first + _PAGES))]
            pages = buffer[: len(offsets) * HEADER_BYTES]
            await self._read_pages(found, offsets, pages)
            for at, offset in enumerate(offsets):
                page = pages[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
                header = self.form.header(page, found.name.id, offset)
                if isinstance(header, Unread):
                    found.unread = header.scope_tag
                elif header is not None and _belongs(found, uses, header[1]):
                    uses.append((first + at, *header))
        found.blocks = columns_of(found.name.id, stride, uses) if uses else None

    async def _read_pages(self, found: Found, offsets: list[int], into: memoryview) -> None:
        """Read pages at once, or one by one where one of them cannot be read, which then holds nothing."""
        assert found.file is not None
        try:
            await found.file.read_pages(offsets, into)
        except OSError as e:
            found.is_bad = True
            if e.errno not in _MEDIA_ERRORS:
                raise
            for at, offset in enumerate(offsets):
                page = into[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
                try:
                    await found.file.read_pages([offset], page)
                except OSError:
                    page[:] = bytes(HEADER_BYTES)


async def _let_go(unused: Iterable[Found]) -> None:
    """Close files that nobody uses: a failure of that changes nothing."""
    for found in unused:
        with suppress(OSError):
            await found.close()


def _belongs(found: Found, uses: Sequence[tuple[int, int, Record]], record: Record) -> bool:
    """Whether a record fits its slot and is of the same scope as those before it."""
    is_of_scope = not uses or record.key.scope == uses[0][2].key.scope
    return is_of_scope and record.stored_bytes <= found.name.stride_bytes - HEADER_BYTES


def adopt(found: Found, state: StoreState, volume: Volume) -> Segment:
    """Enter what was found into the tables, and make its segment."""
    name, blocks = found.name, found.blocks
    assert blocks is not None, "a segment without records is not adopted"
    stamps = blocks.stamps(name.size_bytes // name.stride_bytes)
    extent = state.table.adopt(name.id, (blocks.scope, NOBODY, name.stride_bytes), name.size_bytes, stamps)
    segment = Segment.of(extent, volume, is_made=True)
    segment.file = found.file
    segment.enter_all(blocks, state.traits)
    state.segments[name.id] = segment
    return segment


async def delete_all(volume: Volume, unwanted: list[Found]) -> None:
    """Remove segment files, durable on return."""
    for found in unwanted:
        await found.close()
        await volume.unlink(str(found.name))
    if unwanted:
        await volume.sync()


class Fit(Protocol):
    """Sets what segments may take in all, with so many new ones that have so many slots."""

    def __call__(self, new_segments: int, new_slots: int) -> None: ...  # noqa: D102


@dataclass(slots=True)
class Recovery:
    """Fills a store's tables from its volume. Methods raise `BackendFailedError` when the volume fails."""

    form: Form
    io: SegmentIo
    fit: Fit
    _waiting: dict[bytes, dict[SegmentName, Found]] = field(default_factory=dict)
    """Segments whose headers could not be opened, by the tag of their scope; each until it is adopted or deleted."""

    @property
    def waiting(self) -> frozenset[bytes]:
        """Tags of the scopes that a key is missing of."""
        return frozenset(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the segments that wait."""
        return sum(name.size_bytes for found in self._waiting.values() for name in found)

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
            raise self.io.fail(e) from e

    async def _run(self) -> AsyncGenerator[Found, None]:
        """Adopt what can be read. What holds nothing goes, and the oldest of what the capacity has no room for."""
        table = self.io.state.table
        names = await self.io.volume.names()
        body = await self.io.state.index.load()
        self.io.state.traits.kinds.extend(body.kinds if body else ())
        table.skip_extents(body.next_segment if body else 0)
        table.skip_extents(max((name.id + 1 for name in map(parse_name, names) if name is not None), default=0))
        unwanted: list[Found] = []
        async with aclosing(Scan(self.io.volume, self.form, body).segments(names)) as segments:
            async for found in segments:
                if self._take(found, unwanted):
                    yield found
                else:
                    await found.close()
        await delete_all(self.io.volume, unwanted)

    async def _resume(self, tag: bytes) -> AsyncGenerator[Found, None]:
        """Scan again; what is no record of ours after all goes, and waits until it is deleted."""
        unwanted: list[Found] = []
        scan, names = Scan(self.io.volume, self.form, None), await self.io.volume.names()
        for waiting in self._of(tag):
            if str(waiting.name) not in names:  # A try that failed later has removed it, maybe not durably.
                unwanted.append(waiting)
                continue
            found = await scan.scan(waiting.name, names[str(waiting.name)])
            self._end_waiting(waiting)
            if self._take(found, unwanted):
                yield found
            else:
                found.unread = found.unread or tag
                self._wait(found)
                await found.close()
        await self._delete_waiting(unwanted)

    async def forget(self, tag: bytes) -> None:
        """Remove what waits for a key that is gone for good."""
        try:
            await self._delete_waiting(self._of(tag))
        except OSError as e:
            raise self.io.fail(e) from e

    async def _delete_waiting(self, unwanted: list[Found]) -> None:
        await delete_all(self.io.volume, unwanted)
        for found in unwanted:
            self._end_waiting(found)
        self.fit(0, 0)

    def _of(self, tag: bytes) -> list[Found]:
        return list(self._waiting.get(tag, {}).values())

    def _wait(self, found: Found) -> None:
        self._waiting.setdefault(found.unread, {})[found.name] = found

    def _end_waiting(self, found: Found) -> None:
        waiting = self._waiting[found.unread]
        del waiting[found.name]
        if not waiting:
            del self._waiting[found.unread]

    def _take(self, found: Found, unwanted: list[Found]) -> bool:
        """Adopt a segment, let it wait or note that nobody wants it; True when it was adopted."""
        self.fit(1, found.name.slots)
        table = self.io.state.table
        is_over = table.held_bytes + found.name.size_bytes > table.capacity_bytes
        is_copy = found.name.id in self.io.state.segments
        if is_over or is_copy or not (found.blocks or found.unread):
            unwanted.append(found)
            return False
        if not found.blocks:
            self._wait(found)
            self.fit(0, 0)
            return False
        segment = adopt(found, self.io.state, self.io.volume)
        if found.is_bad:
            segment.is_listable = False
            table.close_extent(found.name.id)
        if found.listed is None:
            self.io.index_soon()
        return True
