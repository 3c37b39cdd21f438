"""A volume in memory that can lose power, lie, rot, fail and hang: the medium of record stores in tests.

Deterministic: what happens depends on the calls and on the random generator that it is given. It runs on a VirtualLoop
(no threads). Reads see what a running machine sees; `crash` gives the volume that the next start finds.
"""

import asyncio
import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from kvstrata_agent.backends.file.volume import nothing
from kvstrata_agent.backends.threads import settle
from sim.volume_image import PAGE_BYTES, Change, File, Image, crash_images

SITES: Final = (
    "names", "load", "create", "open", "rename", "unlink", "sync", "free_bytes",
    "write", "fdatasync", "read", "read_pages", "allocate", "punch",
)  # fmt: skip
"""Where faults can be put. `fdatasync` is the second half of a `write`: the bytes are seen, and lost at a crash."""

_HOLE: Final = bytes(PAGE_BYTES)


P = ParamSpec("P")
T = TypeVar("T")


def settled(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A call that goes on when its caller is cancelled, who waits for it: threads and devices cannot be stopped."""

    @wraps(call)
    async def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return await settle(asyncio.ensure_future(call(*args, **kwargs)))

    return done


@dataclass(slots=True)
class Fault:
    """An errno for the calls at one site whose file name begins with `name`."""

    site: str
    number: int
    name: str = ""
    skip: int = 0
    """Calls that still go well before it strikes."""
    times: int = 1
    """Calls that fail; -1: all from then on."""

    def strikes(self, site: str, name: str) -> bool:
        """Count one call; true when it has to fail."""
        if site != self.site or not name.startswith(self.name) or self.times == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass(slots=True)
class Lie:
    """What becomes of the next write that the medium acknowledges all the same."""

    kind: str
    """`lost`: nothing is written; `misdirected`: it lands `by_bytes` off, or in file `name`; `torn`: part of it."""
    by_bytes: int = PAGE_BYTES
    name: str = ""


@dataclass(slots=True)
class MemoryVolume:
    """Files in memory. A `Volume`."""

    image: Image = field(default_factory=Image)
    """What a running machine sees."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    size_bytes: int = 1 << 50
    """ENOSPC beyond it."""
    latency_s: Callable[[str, int], float] | None = None
    """Seconds that a call at a site takes for so many bytes; may raise an `OSError`. None: one turn of the loop."""
    on_step: Callable[[], None] | None = None
    """Called whenever something has begun or ended: every place where power may be lost."""
    where: str = "memory"
    medium: str = "file-memory"
    fallback: str = ""
    faults: list[Fault] = field(default_factory=list)
    lies: list[Lie] = field(default_factory=list)
    """Taken by the next writes, in turn."""
    calls: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    """Most bytes that all files ever had, seen or on the medium."""
    is_closed: bool = False
    is_dead: bool = False
    disk: Image = field(default_factory=Image)
    """What is durable for certain."""
    pending: list[Change] = field(default_factory=list)
    """What has begun and may or may not be on the medium."""
    failed: set[tuple[int, int]] = field(default_factory=set)
    """File and offset of every write that failed, its sync included."""
    retried: list[str] = field(default_factory=list)
    """Writes to a place where one had failed: what fsyncgate forbids."""
    _holds: dict[str, asyncio.Event] = field(default_factory=dict)
    _next_file: int = 1

    def __post_init__(self) -> None:
        """Begin with what `image` holds, all of it durable."""
        self.disk = self.image.copy()
        self._next_file = max(self.image.files, default=0) + 1
        self._measure()

    # Faults.

    def fail(self, site: str, number: int, *, name: str = "", skip: int = 0, times: int = 1) -> Fault:
        """Let calls at a site fail with an errno."""
        assert site in SITES, site
        fault = Fault(site, number, name, skip, times)
        self.faults.append(fault)
        return fault

    def hold(self, site: str) -> asyncio.Event:
        """Let calls at a site hang until the event is set."""
        return self._holds.setdefault(site, asyncio.Event())

    def crash(self, rng: random.Random | None = None) -> "MemoryVolume":
        """Lose power: the volume that the next start finds; this one answers nothing any more."""
        return self._successor(next(crash_images(self.disk, self.pending, 1, rng or self.rng)))

    def kill(self) -> "MemoryVolume":
        """Lose the process only: what the machine saw is there, except that calls under way may not have been done."""
        return self._successor(self.image.copy())

    def crash_states(self, most: int) -> Iterator[Image]:
        """Every image that a power loss now may leave, or `most` drawn ones; the volume goes on."""
        return crash_images(self.disk, list(self.pending), most, self.rng)

    def _successor(self, image: Image) -> "MemoryVolume":
        self.is_dead = True
        for event in self._holds.values():
            event.set()
        return MemoryVolume(image, self.rng, self.size_bytes, self.latency_s, where=self.where)

    def peek(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Bytes of a file as a read would find them."""
        return self._bytes(self.image.files[self.image.names[name]], offset, size_bytes)

    def poke(self, name: str, offset: int, content: bytes) -> None:
        """Change bytes behind the store's back: rot, misdirected and stale sectors."""
        number = self.image.names[name]
        first, end = offset // PAGE_BYTES, -(-(offset + len(content)) // PAGE_BYTES)
        for image in (self.image, self.disk):
            file = image.files.get(number)
            if file is None:
                continue
            whole = bytearray(self._bytes(file, first * PAGE_BYTES, (end - first) * PAGE_BYTES))
            at = offset - first * PAGE_BYTES
            whole[at : at + len(content)] = content
            for page in range(first, end):
                begin = (page - first) * PAGE_BYTES
                file.pages[page] = bytes(whole[begin : begin + PAGE_BYTES])

    def flip(self, name: str, offset: int, mask: int) -> None:
        """Flip bits of one byte."""
        self.poke(name, offset, bytes([self.peek(name, offset, 1)[0] ^ mask]))

    # The calls of a store.

    @settled
    async def names(self) -> Mapping[str, int]:
        """See `Volume`."""
        await self._pass("names")
        return {name: self.image.files[number].size_bytes for name, number in self.image.names.items()}

    @settled
    async def load(self, name: str) -> bytes:
        """See `Volume`."""
        await self._pass("load", name)
        file = self._file(name)
        return self._bytes(file, 0, file.size_bytes)

    @settled
    async def create(self, name: str, size_bytes: int) -> "MemoryFile":
        """See `Volume`."""
        await self._pass("create", name, size_bytes)
        if name in self.image.names:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if self.image.size_bytes + size_bytes > self.size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        number, self._next_file = self._next_file, self._next_file + 1
        self.disk.files[number] = File(size_bytes)
        self._begin(Change(number, names=((name, number),), size_bytes=size_bytes))
        return MemoryFile(self, name, number)

    @settled
    async def open(self, name: str) -> "MemoryFile":
        """See `Volume`."""
        await self._pass("open", name)
        self._file(name)
        return MemoryFile(self, name, self.image.names[name])

    @settled
    async def rename(self, old: str, new: str) -> None:
        """See `Volume`."""
        await self._pass("rename", old)
        self._file(old)
        number = self.image.names[old]
        self._begin(Change(number, names=((old, None), (new, number))))

    @settled
    async def unlink(self, name: str) -> None:
        """See `Volume`."""
        await self._pass("unlink", name)
        if name in self.image.names:
            self._begin(Change(self.image.names[name], names=((name, None),)))

    @settled
    async def sync(self) -> None:
        """See `Volume`."""
        covered = [c for c in self.pending if c.names]
        await self._pass("sync")
        for change in covered:
            self._settle(change)

    @settled
    async def free_bytes(self) -> int:
        """See `Volume`."""
        await self._pass("free_bytes")
        return self.size_bytes - self.image.size_bytes

    async def close(self) -> None:
        """See `Volume`."""
        self.is_closed = True

    # Inside.

    async def _pass(self, site: str, name: str = "", size_bytes: int = 0) -> None:
        """Take the time of a call. Raises the `OSError` of a fault."""
        self.calls[site] += 1
        self._step()
        await asyncio.sleep(self.latency_s(site, size_bytes) if self.latency_s else 0)
        if site in self._holds:
            await self._holds[site].wait()
        if self.is_dead:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), name)
        fault = next((f for f in self.faults if f.strikes(site, name)), None)
        if fault is not None:
            raise OSError(fault.number, os.strerror(fault.number), name)

    def _step(self) -> None:
        if self.on_step is not None and not self.is_dead:
            self.on_step()

    def _measure(self) -> None:
        """Look at the bytes of all files; needed where names have changed."""
        named, files = {*self.image.names.values(), *self.disk.names.values()}, self.disk.files
        self.peak_bytes = max(self.peak_bytes, sum(files[n].size_bytes for n in named if n in files))

    def _file(self, name: str) -> File:
        if name not in self.image.names:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.image.files[self.image.names[name]]

    def _begin(self, change: Change) -> None:
        change.apply(self.image)
        self.pending.append(change)
        self._measure()
        self._step()

    def _settle(self, change: Change) -> None:
        """From now on the change is on the medium for certain."""
        if change in self.pending:
            self.pending.remove(change)
            change.apply(self.disk)
            if change.names:
                self._measure()
            self._step()

    @staticmethod
    def _bytes(file: File, offset: int, size_bytes: int) -> bytes:
        first, end = offset // PAGE_BYTES, -(-(offset + size_bytes) // PAGE_BYTES)
        whole = b"".join(file.pages.get(page, _HOLE) for page in range(first, end))
        return whole[offset - first * PAGE_BYTES :][:size_bytes]


@dataclass(slots=True)
class MemoryFile:
    """One open file. A `VolumeFile`."""

    volume: MemoryVolume
    name: str
    number: int

    @property
    def _seen(self) -> File:
        return self.volume.image.files[self.number]

    @settled
    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        """See `VolumeFile`. The caller's memory is read when the call ends, as a slow device may do."""
        parts = made()
        if not parts:
            return
        size_bytes = sum(len(p) for p in parts)
        self._check(offset, size_bytes)
        if (self.number, offset) in self.volume.failed:
            self.volume.retried.append(f"{self.name} at {offset}")
        change = self._change(offset, b"".join(parts))
        self.volume.pending.append(change)
        try:
            await self.volume._pass("write", self.name, size_bytes)
            assert b"".join(parts) == b"".join(change.pages.values()), "a buffer changed while it was written"
        except OSError:
            self._fail(change)
            raise
        lie = self.volume.lies.pop(0) if self.volume.lies else None
        if lie is not None:
            self.volume.pending.remove(change)
            self._lie(lie, change)
            return
        change.apply(self.volume.image)
        await self._sync(change)

    async def _sync(self, change: Change) -> None:
        try:
            await self.volume._pass("fdatasync", self.name)
        except OSError:
            self.volume.failed.add((self.number, min(change.pages) * PAGE_BYTES))
            self.volume.pending.remove(change)  # The kernel has forgotten that it was not written (fsyncgate).
            raise
        self.volume._settle(change)

    def _fail(self, change: Change) -> None:
        """Leave any part of a failed write."""
        self.volume.failed.add((self.number, min(change.pages) * PAGE_BYTES))
        self.volume.pending.remove(change)
        fate = change.random_fate(self.volume.rng)
        for image in (self.volume.image, self.volume.disk):
            change.apply(image, fate)

    def _lie(self, lie: Lie, change: Change) -> None:
        number, by_pages = self.number, lie.by_bytes // PAGE_BYTES
        if lie.kind == "lost":
            return
        if lie.kind == "misdirected" and lie.name:
            number, by_pages = self.volume.image.names[lie.name], 0
        pages = {page + by_pages: content for page, content in change.pages.items()}
        told = change if lie.kind == "torn" else Change(number, pages)
        fate = change.random_fate(self.volume.rng) if lie.kind == "torn" else None
        for image in (self.volume.image, self.volume.disk):
            told.apply(image, fate)

    @settled
    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        """See `VolumeFile`."""
        await self.volume._pass("read", self.name, sum(len(into) for _, into in ranges))
        for offset, into in ranges:
            self._check(offset, len(into))
            into[:] = self.volume._bytes(self._seen, offset, len(into))
        then()

    @settled
    async def read_pages(self, offsets: Sequence[int], into: memoryview) -> None:
        """See `VolumeFile`."""
        await self.volume._pass("read_pages", self.name, len(into))
        for n, offset in enumerate(offsets):
            self._check(offset, PAGE_BYTES)
            into[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] = self.volume._bytes(self._seen, offset, PAGE_BYTES)

    @settled
    async def allocate(self, offset: int, size_bytes: int) -> None:
        """See `VolumeFile`."""
        await self.volume._pass("allocate", self.name, size_bytes)
        self._check(offset, size_bytes)

    @settled
    async def punch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `VolumeFile`."""
        changes = [self._change(offset, bytes(size_bytes)) for offset, size_bytes in ranges]
        self.volume.pending.extend(changes)
        try:
            await self.volume._pass("punch", self.name)
        except OSError:
            for change in changes:
                self._fail(change)
            raise
        for change in changes:
            change.apply(self.volume.image)
            self.volume._settle(change)

    async def close(self) -> None:
        """See `VolumeFile`."""
        self.volume.calls["close"] += 1

    def _change(self, offset: int, content: bytes) -> Change:
        first = offset // PAGE_BYTES
        pages = {first + n: content[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] for n in range(len(content) // PAGE_BYTES)}
        return Change(self.number, pages)

    def _check(self, offset: int, size_bytes: int) -> None:
        assert offset % PAGE_BYTES == 0 == size_bytes % PAGE_BYTES, f"{self.name}: {offset}+{size_bytes} is not aligned"
        if offset + size_bytes > self._seen.size_bytes:
            raise OSError(errno.EIO, f"{size_bytes} B at {offset} are beyond the end", self.name)
