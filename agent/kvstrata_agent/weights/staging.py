"""Brings the files of one revision here: from other revisions on this node, from other agents, or from the source.

Bytes are taken over in the order of their file, each run of chunks checked by its name, and the whole file by its
SHA-256 before anybody sees it. What is here already is not brought again: a staging that was ended anywhere goes on
with what of its files is right. Without a listing (neither at the source nor at another agent) it is made while the
files come, and the source has to be the same at the end as it was at the start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from kvstrata_agent.backends.threads import in_thread, together
from kvstrata_agent.fleet.peers.client import PeerHolding, WeightsPlace
from kvstrata_agent.weights.folder import Known, allocate, copy_chunks, read_at, seal, write_at
from kvstrata_agent.weights.listing import (
    LENGTH_BYTES,
    LISTING_FILE,
    Chunk,
    Listing,
    ModelFile,
    chunk_name,
    cut,
    decode,
    header_bytes,
    listing_of,
    tensor_ends,
)
from kvstrata_agent.weights.plan import Run, runs_of
from kvstrata_api.errors import BlockCorruptError, InvalidInputError, KvStrataError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from kvstrata_agent.weights.folder import ModelFolder, Place
    from kvstrata_agent.weights.source import Source, SourceFile

RUNS_AHEAD: Final = 3
"""Runs of one file that are on their way while one is written: with the files at once, 128 MiB of memory."""
FILES_AT_ONCE: Final = 2
"""SHA-256 goes over a file from its start: several files keep several cores busy."""
FILES_OPEN_MAX: Final = 8
"""Those, and files that are synced or about to begin: the disk works on while others are filled."""
PATIENCE_S: Final = 15.0
"""Without a byte more from other agents for so long, the source is read."""
POLL_INTERVAL_S: Final = 0.25
"""Between two questions to agents that do not have a piece yet."""
NOTE_BYTES: Final = 256 << 20
"""After so many bytes of files that are whole, what is known of them is kept: so much is read again after a crash."""
SAFETENSORS: Final = ".safetensors"

_log = logging.getLogger(__name__)


class Origin(StrEnum):
    """Where bytes came from."""

    SOURCE = "source"
    PEER = "peer"
    SHARED = "shared"
    """Another revision on this node."""
    KEPT = "kept"
    """An earlier try of the same staging."""


@runtime_checkable
class WeightPeers(Protocol):
    """Reads weights of other agents; both raise a `KvStrataError` where that one does not answer, or has it not."""

    async def weights_held(self, node: str, model: str, revision: str) -> PeerHolding:
        """What the agent of a node has."""

    async def read_weights(self, node: str, at: WeightsPlace, into: memoryview) -> None:
        """Fill `into` with what that agent has there. Nothing is verified."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The revision that is to be here."""

    model: str
    revision: str
    digest: str
    """Of its listing; empty for any."""

    @property
    def key(self) -> tuple[str, str]:
        """Model and revision."""
        return self.model, self.revision


@dataclass(slots=True)
class Progress:
    """How far a staging has come, to be read by others."""

    listing: Listing | None = None
    size_bytes: int = 0
    by_origin: dict[Origin, int] = field(default_factory=lambda: dict.fromkeys(Origin, 0))
    verified: dict[str, int] = field(default_factory=dict)
    """By path the bytes from the start of a file that are written, and right."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that are here."""
        return sum(self.by_origin.values())


@dataclass(slots=True, eq=False)
class Staging:
    """One staging; `run` it once."""

    wanted: Wanted
    folder: ModelFolder
    open_source: Callable[[], Awaitable[Source]]
    turn: Callable[[int], AbstractAsyncContextManager[None]]
    """Waits until so many bytes may go to the tier's path."""
    reserve: Callable[[int], Awaitable[None]]
    """Waits until the tier has room for so many bytes."""
    nodes: Callable[[], Sequence[str]] = tuple
    """Those whose agents have the revision, or get it before this one, in the order in which to ask."""
    peers: WeightPeers | None = None
    progress: Progress = field(default_factory=Progress)
    _source: Source | None = None
    _moved_at_s: float = field(default_factory=time.monotonic)
    _bad: set[str] = field(default_factory=set)
    """Nodes that sent wrong bytes."""
    _known: Known = field(default_factory=Known)
    _area: Path = Path()
    _here: dict[str, Place] = field(default_factory=dict)
    _document: bytes = b""
    _noting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unnoted_bytes: int = 0
    _gate: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, FILES_AT_ONCE))
    _opened: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, FILES_OPEN_MAX))

    async def run(self) -> Listing:
        """Bring everything that is missing; the revision has its name when this returns.

        Raises `InvalidInputError` for a source that is none, `BlockCorruptError` for bytes or a listing of another
        digest, `BackendFailedError` for a source that does not answer, `RetryableError` for one that changed, `OSError`
        for the disk, and what `reserve` raises. What has come stays for the next try.
        """
        wanted, folder = self.wanted, self.folder
        try:
            self._known = await in_thread(None, partial(folder.known, *wanted.key))
            self._area = await in_thread(None, partial(folder.staging, *wanted.key))
            self._here = folder.chunks(wanted.key)
            listing = self.progress.listing = await self._listing()
            listing = await self._discover() if listing is None else await self._bring(listing)
            digest = self.wanted.digest  # It may be known only by now.
            if digest not in ("", listing.digest):
                raise BlockCorruptError(f"the files have the digest {listing.digest}, {digest} is wanted")
            await in_thread(None, partial(folder.finish, *wanted.key, listing))
        finally:
            if self._source is not None:
                await self._source.close()
        return listing

    async def _from(self) -> Source:
        if self._source is None:
            self._source = await self.open_source()
        return self._source

    async def _listing(self) -> Listing | None:
        """The listing, if somebody has it before the files: an earlier try, another agent, or the source."""
        kept = self._known.listing
        if kept is not None and self.wanted.digest in ("", kept.digest):
            return kept
        listing = await self._listing_of_peers()
        if listing is None:
            listing = await self._listing_of_source()
        if listing is not None:
            self._known = msgspec.structs.replace(self._known, listing=listing)
            await self._note()
        return listing

    async def _listing_of_peers(self) -> Listing | None:
        """Wait for the listing while some other agent that comes first has more bytes each time."""
        seen_bytes, since_s = -1, time.monotonic()
        while self.peers is not None and time.monotonic() - since_s < PATIENCE_S:
            most_bytes = -1
            for node in self.nodes():
                try:
                    held = await self.peers.weights_held(node, *self.wanted.key)
                    if held.listing_bytes and self.wanted.digest in ("", held.digest):
                        return await self._listing_from(node, held)
                except KvStrataError as e:
                    _log.info("no weights from peer", extra={"peer": node, "cause": str(e)})
                    continue
                most_bytes = max(most_bytes, held.staged_bytes)
            if most_bytes < 0:
                break  # Nobody is there.
            if most_bytes > seen_bytes:
                seen_bytes, since_s = most_bytes, time.monotonic()
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    async def _listing_from(self, node: str, held: PeerHolding) -> Listing:
        assert self.peers is not None
        document = bytearray(held.listing_bytes)
        place = WeightsPlace(*self.wanted.key, held.digest, -1, 0)
        await self.peers.read_weights(node, place, memoryview(document))
        listing = decode(bytes(document))
        if listing.digest != held.digest:
            raise BlockCorruptError(f"listing of digest {listing.digest} came for {held.digest}")
        return listing

    async def _listing_of_source(self) -> Listing | None:
        source = await self._from()
        found = {file.path: file.size_bytes for file in await source.files()}
        size_bytes = found.pop(LISTING_FILE, None)
        if size_bytes is None:
            return None
        listing = decode(bytes(await source.read(LISTING_FILE, 0, size_bytes)))
        listed = {file.path: file.size_bytes for file in listing.files}
        other = next(iter(sorted(listed.items() ^ found.items())), None)
        if other is not None:
            path = other[0]
            raise InvalidInputError(
                f"{LISTING_FILE}: {path} of {listed.get(path)} B is at the source with {found.get(path)} B"
            )
        if self.wanted.digest not in ("", listing.digest):
            raise BlockCorruptError(f"the source has the digest {listing.digest}, {self.wanted.digest} is wanted")
        return listing

    async def _bring(self, listing: Listing) -> Listing:
        """Bring the files of a listing."""
        self.progress.size_bytes = listing.size_bytes
        await self.reserve(listing.size_bytes)
        await self._clean({file.path for file in listing.files})
        held = self.folder.files(self.wanted.key)
        await self._check_room(sum(file.size_bytes for file in listing.files if file.sha256 not in held))
        await self._together([partial(self._file, file, at) for at, file in enumerate(listing.files)])
        return listing

    async def _discover(self) -> Listing:
        """Bring all files of the source, and list them by that."""
        source = await self._from()
        before = await source.files()
        self.progress.size_bytes = size_bytes = sum(file.size_bytes for file in before)
        await self.reserve(size_bytes)
        await self._clean({file.path for file in before})
        await self._check_room(size_bytes)
        try:
            files = await self._together([partial(self._discovered, file) for file in before])
        finally:
            await self._note()
        if await source.files() != before:
            raise RetryableError("the source has changed while it was read")
        return listing_of(tuple(files))

    async def _check_room(self, size_bytes: int) -> None:
        """Look whether the disk has room before the first byte travels: the budget is of the tier, not of the disk."""
        await in_thread(None, partial(self.folder.check_room, *self.wanted.key, size_bytes))

    async def _discovered(self, seen: SourceFile) -> ModelFile:
        mark, found = self._known.found.get(seen.path, ("", None))
        if found is not None and mark == seen.mark and found.size_bytes == seen.size_bytes:
            return await self._file(found, None)
        sizes = cut(seen.size_bytes, await self._tensor_ends(seen))
        skeleton = ModelFile(seen.path, seen.size_bytes, "", tuple(Chunk(size, "") for size in sizes))
        made = await self._file(skeleton, None)
        self._known.found[seen.path] = seen.mark, made
        self._unnoted_bytes += made.size_bytes
        if self._unnoted_bytes >= NOTE_BYTES:
            await self._note()
        return made

    async def _note(self) -> None:
        """Keep what is known of finished files for the next try; one after the other."""
        async with self._noting:
            self._unnoted_bytes = 0
            document = msgspec.json.encode(self._known)
            await in_thread(None, partial(self.folder.note, *self.wanted.key, document))

    async def _tensor_ends(self, seen: SourceFile) -> list[int] | None:
        if not seen.path.endswith(SAFETENSORS):
            return None
        source = await self._from()
        prefix = await source.read(seen.path, 0, min(LENGTH_BYTES, seen.size_bytes))
        length = header_bytes(seen.path, seen.size_bytes, bytes(prefix))
        header = await source.read(seen.path, LENGTH_BYTES, LENGTH_BYTES + length)
        return [LENGTH_BYTES + length, *await in_thread(None, partial(_ends, seen, bytes(header)))]

    async def _together(self, calls: list[Callable[[], Awaitable[ModelFile]]]) -> list[ModelFile]:
        """Bring files, some at a time; the first failure ends the others."""

        async def one(call: Callable[[], Awaitable[ModelFile]]) -> ModelFile:
            async with self._opened:
                return await call()

        tasks = [asyncio.create_task(one(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def _clean(self, paths: set[str]) -> None:
        """Remove files of an earlier try that are none of these."""
        await in_thread(None, partial(_remove_others, self._area, paths))

    async def _file(self, file: ModelFile, number: int | None) -> ModelFile:
        """Bring one file; returns it with the names of its chunks and its SHA-256.

        `number` is its place in the listing that other agents have as well; None where there is none.
        """
        path = self._area / file.path
        if file.sha256 and await self._link(file, path):
            return file
        fd, is_begun = await in_thread(None, partial(_open, path, file.size_bytes))
        try:
            async with self._gate:
                made = await self._fill(file, number, fd, is_kept_possible=is_begun and bool(file.sha256))
            await in_thread(None, partial(seal, fd))
        except BlockCorruptError:
            path.unlink(missing_ok=True)
            raise
        finally:
            await in_thread(None, partial(os.close, fd))
        return made

    async def _link(self, file: ModelFile, path: Path) -> bool:
        """Give a file that another revision has a second name; False when none has it."""
        held = self.folder.files(self.wanted.key).get(file.sha256)
        if held is None or not await in_thread(None, partial(_linked, held, path, file.size_bytes)):
            return False
        self._count(file.path, file.size_bytes, file.size_bytes, Origin.SHARED)
        return True

    async def _fill(self, file: ModelFile, number: int | None, fd: int, *, is_kept_possible: bool) -> ModelFile:
        hasher = hashlib.sha256()
        chunks: list[Chunk] = []
        ahead: deque[tuple[Run, asyncio.Task[tuple[memoryview, Origin, list[str]]]]] = deque()
        runs = iter(runs_of(file, self._here if file.sha256 else ()))
        try:
            while True:
                while len(ahead) < RUNS_AHEAD and (run := next(runs, None)) is not None:
                    getting = self._get(file, number, run, fd, is_kept_possible=is_kept_possible)
                    ahead.append((run, asyncio.create_task(getting)))
                if not ahead:
                    break
                run, task = ahead[0]
                piece, origin, names = await task
                ahead.popleft()
                chunks += [Chunk(c.size_bytes, name) for c, name in zip(run.chunks, names, strict=True)]
                work = [in_thread(None, partial(hasher.update, piece))]
                if origin not in (Origin.KEPT, Origin.SHARED):
                    work.append(self._write(fd, run.offset, piece))
                await together(work)
                self._count(file.path, run.offset + run.size_bytes, run.size_bytes, origin)
        finally:
            await _end([task for _, task in ahead])
        digest = hasher.hexdigest()
        if file.sha256 not in ("", digest):
            raise BlockCorruptError(f"{file.path}: SHA-256 {digest}, {file.sha256} is wanted")
        return ModelFile(file.path, file.size_bytes, digest, tuple(chunks))

    async def _write(self, fd: int, offset: int, piece: memoryview) -> None:
        async with self.turn(len(piece)):
            await in_thread(None, partial(write_at, fd, offset, piece))

    def _count(self, path: str, end: int, size_bytes: int, origin: Origin) -> None:
        self.progress.by_origin[origin] += size_bytes
        self.progress.verified[path] = end

    async def _get(
        self, file: ModelFile, number: int | None, run: Run, fd: int, *, is_kept_possible: bool
    ) -> tuple[memoryview, Origin, list[str]]:
        """One run's bytes, of the right names, from where they cost least; with the names of its chunks."""
        if is_kept_possible and (piece := await self._read_back(run, fd)) is not None:
            return piece, Origin.KEPT, [chunk.name for chunk in run.chunks]
        if run.is_here and (piece := await self._copied(run, fd)) is not None:
            return piece, Origin.SHARED, [chunk.name for chunk in run.chunks]
        if number is not None and (piece := await self._from_peers(number, run)) is not None:
            return piece, Origin.PEER, [chunk.name for chunk in run.chunks]
        source = await self._from()
        piece = await source.read(file.path, run.offset, run.offset + run.size_bytes)
        names = await in_thread(None, partial(_names, piece, run.chunks))
        wrong = next((c for c, name in zip(run.chunks, names, strict=True) if c.name not in ("", name)), None)
        if wrong is not None:
            raise BlockCorruptError(
                f"{file.path}: bytes of the source from {run.offset} to {run.offset + run.size_bytes} are others than "
                "those that were listed"
            )
        return piece, Origin.SOURCE, names

    async def _read_back(self, run: Run, fd: int) -> memoryview | None:
        piece = await in_thread(None, partial(read_at, fd, run.offset, run.size_bytes))
        return piece if await self._is_right(piece, run) else None

    async def _is_right(self, piece: memoryview, run: Run) -> bool:
        if len(piece) != run.size_bytes:
            return False
        names = await in_thread(None, partial(_names, piece, run.chunks))
        return names == [chunk.name for chunk in run.chunks]

    async def _copied(self, run: Run, fd: int) -> memoryview | None:
        with ExitStack() as readers:
            for key in tuple(self.folder.revisions):
                readers.enter_context(self.folder.reading(*key))
            async with self.turn(run.size_bytes):
                copy = partial(copy_chunks, fd, run.offset, run.chunks, self._here)
                if not await in_thread(None, copy):
                    return None
        return await self._read_back(run, fd)

    async def _from_peers(self, number: int, run: Run) -> memoryview | None:
        """Read a run from the first agent that has it; None once none had anything new for so long."""
        listing = self.progress.listing
        if self.peers is None or listing is None:
            return None
        place = WeightsPlace(*self.wanted.key, listing.digest, number, run.offset)
        piece = memoryview(bytearray(run.size_bytes))
        while (nodes := [n for n in self.nodes() if n not in self._bad]) and self._may_wait():
            for node in nodes:
                try:
                    await self.peers.read_weights(node, place, piece)
                except KvStrataError as e:
                    _log.debug("no piece from peer", extra={"peer": node, "cause": str(e)})
                    continue
                if await self._is_right(piece, run):
                    self._moved_at_s = time.monotonic()
                    return piece
                self._bad.add(node)
                _log.warning("wrong bytes from peer", extra={"peer": node, "model": self.wanted.model})
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    def _may_wait(self) -> bool:
        return time.monotonic() - self._moved_at_s < PATIENCE_S

    def held(self) -> PeerHolding:
        """What other agents may have of it while it is on its way."""
        listing = self.progress.listing
        if listing is None:
            return PeerHolding(staged_bytes=self.progress.staged_bytes)
        return PeerHolding(listing.digest, len(self.document), self.progress.staged_bytes)

    @property
    def document(self) -> bytes:
        """The listing as other agents get it; empty while there is none."""
        if not self._document and self.progress.listing is not None:
            self._document = self.progress.listing.encode()
        return self._document

    def path_of(self, file: ModelFile, end: int) -> Path | None:
        """Where the bytes of a file up to `end` are; None while they are not all here."""
        return self._area / file.path if self.progress.verified.get(file.path, 0) >= end else None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for them: threads may still use what their callers would close."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ends(seen: SourceFile, header: bytes) -> list[int]:
    return tensor_ends(seen.path, seen.size_bytes, header)


def _names(piece: memoryview, chunks: tuple[Chunk, ...]) -> list[str]:
    names, at = [], 0
    for chunk in chunks:
        names.append(chunk_name(piece[at : at + chunk.size_bytes]))
        at += chunk.size_bytes
    return names


def _open(path: Path, size_bytes: int) -> tuple[int, bool]:
    """Open a file on its way, with all of its blocks; and whether an earlier try has begun it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        status = path.stat()
        is_begun = status.st_size == size_bytes and status.st_nlink == 1
        if not is_begun:
            path.unlink()
        else:
            path.chmod(0o644)
    except FileNotFoundError:
        is_begun = False
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        allocate(fd, size_bytes, path)
    except OSError:
        os.close(fd)
        if not is_begun:
            path.unlink()  # The blocks that it got before there were no more of them are KV's again.
        raise
    return fd, is_begun


def _linked(held: Path, path: Path, size_bytes: int) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.unlink(missing_ok=True)
        os.link(held, path)
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def _remove_others(area: Path, paths: set[str]) -> None:
    """Remove files, and folders that have none then: a file may be wanted where one was."""
    for folder, names, files in os.walk(area, topdown=False):
        for name in files:
            found = Path(folder, name)
            if found.relative_to(area).as_posix() not in paths:
                found.unlink()
        for name in names:
            with suppress(OSError):  # Of the files that are wanted some are there.
                Path(folder, name).rmdir()
