"""The index of a record store on its volume: written whole now and then, and marked before a segment differs from it.

What makes it right after a crash: a start believes the list for those segments only that the map does not mark. The
map is on the medium before the first change of a segment; a new index takes the old one's place by a rename, with a
map that marks all that was touched since the list was taken.
"""

import asyncio
import logging
import mmap
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstrata_agent.backends.base import KeyAwayError
from kvstrata_agent.backends.file.claim import NEW_SUFFIX
from kvstrata_agent.backends.file.index_format import (
    BODY_OFFSET,
    EXTRA_BYTES,
    LISTED_MAX,
    MAPS,
    Body,
    EntrySealing,
    Listed,
    body_head,
    pack_map,
    seal,
    sealed_bytes,
    unpack_body,
    unpack_map,
)
from kvstrata_agent.backends.file.segment import Segment, Traits
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, Volume, VolumeFile
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.units import MIB

INDEX_FILE: Final = "kvstrata-index"
_PIECE_BYTES: Final = 8 * MIB
"""Written at a time: large enough for the disk, small enough to leave it to others in between."""

GENERATIONS_PER_RUN: Final = 1 << 32

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Map:
    """The map of one index file that a start may find."""

    file: VolumeFile
    generation: int
    positions: dict[int, int]
    """Bit of each listed segment."""
    bits: bytearray
    sequence: int = 0

    def is_clean(self, segment_id: int) -> bool:
        """True when a start that finds this index would not read the segment."""
        at = self.positions.get(segment_id)
        return at is not None and not self.bits[at // 8] >> at % 8 & 1

    def mark(self, segment_ids: Iterable[int]) -> None:
        """Note that segments differ; nothing is written."""
        for at in (self.positions.get(i) for i in segment_ids):
            if at is not None:
                self.bits[at // 8] |= 1 << at % 8

    async def write(self, secret: bytes) -> None:
        """Write both copies, one after the other, so that a crash leaves one of them whole."""
        self.sequence += 1
        for copy in range(MAPS):
            with mmap.mmap(-1, DIRECT_BYTES) as page, memoryview(page) as view:
                view[:] = pack_map(self.generation, self.sequence, bytes(self.bits), copy, secret)
                await self.file.write(copy * DIRECT_BYTES, partial(list, [view]))


class IndexFile:
    """The index of one store. Methods raise `OSError`."""

    def __init__(self, volume: Volume, secret: bytes, run: int, sealing: EntrySealing | None = None) -> None:
        """With `sealing` the entries are sealed, and a scope without a key is not listed."""
        self._volume = volume
        self._secret = secret
        self._sealing = sealing
        self._generation = run * GENERATIONS_PER_RUN
        self._maps: list[_Map] = []
        """Every index that a start may find: one, or several while it is not known which."""
        self._turn = asyncio.Lock()
        """Held while maps are written and while one index takes another one's place."""
        self._replacing = asyncio.Lock()
        self._asked: set[int] = set()
        self._marking: asyncio.Task[None] | None = None
        self._taken: set[int] = set()
        """Segments in the list that is being written."""
        self._late: set[int] = set()
        """Those of them that were touched since."""
        self._switched = asyncio.Event()
        self._is_sealed = False
        """The new map is written: what is touched now has to wait for the new index to be in force."""
        self._failure: OSError | None = None

    async def load(self) -> Body | None:
        """Read the index that an earlier run left; None when there is none that can be believed, and it is gone then.

        Segments that were touched are not in the list that is returned.
        """
        names = await self._volume.names()
        await self._volume.unlink(INDEX_FILE + NEW_SUFFIX)
        if INDEX_FILE not in names:
            return None
        body = None
        with suppress(OSError):
            body = await self._read(names[INDEX_FILE])
        if body is None:
            await self._volume.unlink(INDEX_FILE)
            await self._volume.sync()
        return body

    async def _read(self, size_bytes: int) -> Body | None:
        if size_bytes <= BODY_OFFSET or size_bytes % DIRECT_BYTES:
            return None
        file = await self._volume.open(INDEX_FILE)
        async with AsyncExitStack() as unless_believed:
            unless_believed.push_async_callback(file.close)
            whole = memoryview(mmap.mmap(-1, size_bytes))
            for at in range(0, size_bytes, _PIECE_BYTES):
                await file.read([(at, whole[at : at + _PIECE_BYTES])])
            extra_bytes = EXTRA_BYTES if self._sealing else 0
            body = await in_thread(None, partial(unpack_body, whole[BODY_OFFSET:], self._secret, extra_bytes))
            copies = [] if body is None else self._copies(whole, body.generation)
            if body is None or not copies:
                return None
            unless_believed.pop_all()
        positions = {s.name.id: at for at, s in enumerate(body.listed)}
        sequence, bits = max(copies)
        self._maps = [_Map(file, body.generation, positions, bytearray(bits), sequence)]
        clean = tuple(s for s in body.listed if self._maps[0].is_clean(s.name.id))
        believed = Body(body.generation, body.next_segment, body.kinds, clean)
        return self._sealing.opened(believed) if self._sealing else believed

    def _copies(self, whole: memoryview, generation: int) -> list[tuple[int, bytes]]:
        pages = (whole[copy * DIRECT_BYTES : (copy + 1) * DIRECT_BYTES] for copy in range(MAPS))
        found = (unpack_map(page, generation, copy, self._secret) for copy, page in enumerate(pages))
        return [f for f in found if f is not None]

    async def touch(self, segment_id: int) -> None:
        """Return once a start would read the segment itself; to be called before anything in it changes.

        May be cancelled at once: the marking goes on for others.
        """
        while True:
            while self._is_sealed and segment_id in self._taken - self._late:
                await self._switched.wait()
            if segment_id in self._taken:
                self._late.add(segment_id)
            if not any(m.is_clean(segment_id) for m in self._maps):
                return
            if self._failure is not None:
                raise self._failure
            self._asked.add(segment_id)
            if self._marking is None:
                self._marking = asyncio.ensure_future(self._mark())
                self._marking.add_done_callback(_seen)
            await asyncio.shield(self._marking)

    async def _mark(self) -> None:
        async with self._turn:
            asked, self._asked = self._asked, set()
            self._marking = None
            try:
                for known in self._maps:
                    await self._write_marks(known, asked)
            except OSError as e:
                await self._abandon(e)

    async def _write_marks(self, known: _Map, asked: set[int]) -> None:
        marked = _Map(known.file, known.generation, known.positions, bytearray(known.bits), known.sequence)
        marked.mark(asked)
        await marked.write(self._secret)
        known.bits, known.sequence = marked.bits, marked.sequence

    async def _abandon(self, error: OSError) -> None:
        """Do without an index that cannot be marked: the next start reads all headers."""
        try:
            await self._volume.unlink(INDEX_FILE)
            await self._volume.sync()
        except OSError:
            self._failure = error  # It may still be found: what it lists must not change any more.
            raise error from None
        await _close(self._give_up_maps())

    async def replace(self, segments: Iterable[Segment], traits: Traits, next_segment: int) -> None:
        """Write what `segments` hold now as the new index, durable on return.

        A failure leaves the old index in force, or either of both, and marks go to both then.
        """
        async with self._replacing:
            await self._replace(segments, traits, next_segment)

    async def _replace(self, segments: Iterable[Segment], traits: Traits, next_segment: int) -> None:
        self._generation += 1
        chosen = [s for s in segments if s.is_made and s.is_listable and self._can_list(s)][:LISTED_MAX]
        self._late = {s.name.id for s in chosen if not s.is_settled}
        self._taken = {s.name.id for s in chosen}
        try:
            body = Body(self._generation, next_segment, tuple(traits.kinds.known), tuple(map(_unlisted, chosen)))
            whole, sealed = await _laid_out(body, chosen, traits, self._sealing, self._late)
            await in_thread(None, partial(seal, sealed, self._secret))
            await self._put_in_place(whole, {s.name.id: at for at, s in enumerate(chosen)})
        finally:
            self._taken, self._late = set(), set()

    def _can_list(self, segment: Segment) -> bool:
        return self._sealing is None or self._sealing.has_key(segment.scope)

    async def _put_in_place(self, whole: memoryview, positions: dict[int, int]) -> None:
        new_name = INDEX_FILE + NEW_SUFFIX
        await self._volume.unlink(new_name)
        file = await self._volume.create(new_name, BODY_OFFSET + len(whole))
        made = _Map(file, self._generation, positions, bytearray(-(-max(1, len(positions)) // 8)))
        try:
            for at in range(0, len(whole), _PIECE_BYTES):
                await file.write(BODY_OFFSET + at, partial(list, [whole[at : at + _PIECE_BYTES]]))
            async with self._turn:
                await self._switch(made, new_name)
        except OSError:
            if made not in self._maps:
                await file.close()
                with suppress(OSError):
                    await self._volume.unlink(new_name)
            raise

    async def _switch(self, made: _Map, new_name: str) -> None:
        self._is_sealed = True
        self._switched.clear()
        try:
            made.mark(self._late)
            await made.write(self._secret)
            await self._volume.rename(new_name, INDEX_FILE)
            self._maps.append(made)
            await self._volume.sync()
            replaced = [known for known in self._maps if known is not made]
            self._maps, self._failure = [made], None
            await _close(replaced)
        finally:  # From here on the maps in force are all that counts.
            self._taken, self._late, self._is_sealed = set(), set(), False
            self._switched.set()

    async def close(self) -> None:
        """Let go of the files."""
        async with self._turn:
            await _close(self._give_up_maps())

    def _give_up_maps(self) -> list[_Map]:
        """Have no index in force; returns those that were."""
        maps, self._maps = self._maps, []
        return maps


async def _close(maps: Iterable[_Map]) -> None:
    """Close index files that count no more: a failure of that changes nothing."""
    for known in maps:
        try:
            await known.file.close()
        except OSError as e:
            _log.warning("old index cannot be closed", extra={"cause": str(e)})


def _unlisted(segment: Segment) -> Listed:
    return Listed(segment.name, segment.scope, memoryview(b""))


async def _laid_out(
    body: Body, segments: Sequence[Segment], traits: Traits, sealing: EntrySealing | None, late: set[int]
) -> tuple[memoryview, memoryview]:
    """Whole pages for a body with the entries of its segments, and the part of them that the seal goes over.

    Others have their turn between two segments: who touches one from now on makes it a late one. So does the loss of
    its key, which leaves nothing of it in the list.
    """
    extra_bytes = EXTRA_BYTES if sealing else 0
    head = body_head(body, sealing.tags(body) if sealing else (), extra_bytes)
    size_bytes = sealed_bytes(head)
    whole = memoryview(mmap.mmap(-1, round_up(size_bytes, DIRECT_BYTES)))
    whole[: len(head)] = head
    at = len(head)
    for segment in segments:
        entries = segment.entries(traits)
        end = at + len(entries) + extra_bytes
        if sealing:
            try:
                sealing.seal(body.generation, Listed(segment.name, segment.scope, entries), whole[at:end])
            except KeyAwayError:
                late.add(segment.name.id)
        else:
            whole[at:end] = entries
        at = end
        await asyncio.sleep(0)
    return whole, whole[:size_bytes]


def _seen(task: "asyncio.Task[None]") -> None:
    """Take note of a failure that nobody may wait for any more."""
    if not task.cancelled():
        task.exception()
