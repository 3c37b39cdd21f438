"""A volume in a directory, by plain POSIX calls in a few threads, with O_DIRECT where the file system has it."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final

from kvstrata_agent.backends.file.volume import DIRECT_BYTES, NO_FILE, nothing
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.units import KIB

_THREADS: Final = 32
"""Depth at which the measured disks saturate: hashed and durable pairs of 2 MiB blocks went at 0.9, 1.1 and 1.6 GB/s
with 4, 8 and 16 threads, where fio made 1.6 (virtual disk, load 13)."""

_NAME_THREADS: Final = 8
"""Names, allocation and header reads have threads of their own: a hung disk holds up nobody else's calls."""

_FALLOC_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01  # include/uapi/linux/falloc.h
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_PARTS_MAX: Final = 512
"""Half of IOV_MAX (linux/uio.h)."""

_NOWHERE: Final = memoryview(mmap.mmap(-1, 128 * KIB))
"""Reading over a gap of so much costs less than another read: 30 us at 4 GB/s."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class PosixFile:
    """`pwritev2` with RWF_DSYNC and `preadv`: one thread switch for each block. A `VolumeFile`."""

    def __init__(self, fd: int, movers: ThreadPoolExecutor, namers: ThreadPoolExecutor) -> None:
        """Take over `fd`."""
        self.fd = fd
        self._movers = movers
        self._namers = namers

    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        """Make, write and make durable in one thread, the last two by one system call."""
        await in_thread(self._movers, partial(_write_made, self.fd, offset, made))

    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        """Fill each memory, one after the other in one thread."""
        await in_thread(self._movers, partial(_read_ranges, self.fd, ranges, then))

    async def read_pages(self, offsets: Sequence[int], into: memoryview) -> None:
        """Read single pages, one after the other."""
        await in_thread(self._namers, partial(_read_pages, self.fd, offsets, into))

    async def allocate(self, offset: int, size_bytes: int) -> None:
        """Reserve the blocks of a range."""
        await in_thread(self._namers, partial(os.posix_fallocate, self.fd, offset, size_bytes))

    async def punch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Punch holes, then fdatasync once."""
        await in_thread(self._namers, partial(_punch, self.fd, ranges))

    async def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        await in_thread(self._namers, partial(os.close, fd))


class PosixVolume:
    """Files of one directory. A `Volume`."""

    def __init__(self, directory: Path, lock_fd: int, *, is_direct: bool, fallback: str = "") -> None:
        """Take over `lock_fd`, a descriptor of `directory` that holds its lock."""
        self.where = str(directory)
        self.fallback = fallback
        self._directory = directory
        self._lock_fd = lock_fd
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
        self._movers = ThreadPoolExecutor(_THREADS, "kvstrata-file")
        self._namers = ThreadPoolExecutor(_NAME_THREADS, "kvstrata-volume")

    @property
    def medium(self) -> str:
        """`file-posix` with O_DIRECT, `file-buffered` through the page cache."""
        return "file-posix" if self._flags & os.O_DIRECT else "file-buffered"

    async def names(self) -> dict[str, int]:
        """List the directory."""
        return await in_thread(self._namers, partial(_list, self._directory))

    async def load(self, name: str) -> bytes:
        """Read through the page cache."""
        return await in_thread(self._namers, (self._directory / name).read_bytes)

    async def create(self, name: str, size_bytes: int) -> PosixFile:
        """Make and allocate a file."""
        make = partial(_create, self._directory / name, self._flags, size_bytes)
        return self._file(await in_thread(self._namers, make))

    async def open(self, name: str) -> PosixFile:
        """Open a file."""
        return self._file(await in_thread(self._namers, partial(os.open, self._directory / name, self._flags)))

    def _file(self, fd: int) -> PosixFile:
        return PosixFile(fd, self._movers, self._namers)

    async def rename(self, old: str, new: str) -> None:
        """Rename over."""
        await in_thread(self._namers, partial(os.replace, self._directory / old, self._directory / new))

    async def unlink(self, name: str) -> None:
        """Remove a name; the blocks go back to the file system, which trims them."""
        await in_thread(self._namers, partial((self._directory / name).unlink, missing_ok=True))

    async def sync(self) -> None:
        """Fsync of the directory."""
        await in_thread(self._namers, partial(os.fsync, self._lock_fd))

    async def free_bytes(self) -> int:
        """Ask statvfs."""
        stat = await in_thread(self._namers, partial(os.fstatvfs, self._lock_fd))
        return stat.f_bavail * stat.f_frsize

    async def close(self) -> None:
        """Stop the threads and let go of the lock. Idempotent."""
        await in_thread(None, self._movers.shutdown)
        await in_thread(None, self._namers.shutdown)
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _write_made(fd: int, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
    write_fully(fd, offset, made())


def write_fully(fd: int, offset: int, parts: Sequence[memoryview]) -> None:
    """Blocking durable write of all parts; continues after short writes. Raises `OSError`."""
    left = list(parts)
    while left:
        written = os.pwritev(fd, left, offset, os.RWF_DSYNC)
        if written == 0:
            raise OSError(errno.EIO, "write made no progress")
        offset += written
        left = _behind(left, written)


def read_fully(fd: int, offset: int, into: memoryview) -> None:
    """Blocking read of all of `into`. Raises `OSError`; the end of the file is EIO."""
    _read_parts(fd, offset, [into])


def _read_ranges(fd: int, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None]) -> None:
    for offset, parts in joined(ranges):
        _read_parts(fd, offset, parts)
    then()


def joined(ranges: Sequence[tuple[int, memoryview]]) -> list[tuple[int, list[memoryview]]]:
    """Ranges that lie close to each other as one read: what stands between them goes to memory that nobody reads."""
    reads: list[tuple[int, list[memoryview]]] = []
    end = -1
    for offset, into in sorted(ranges, key=itemgetter(0)):
        if reads and 0 <= offset - end <= len(_NOWHERE) and len(reads[-1][1]) < _PARTS_MAX:
            reads[-1][1].extend([_NOWHERE[: offset - end], into] if offset > end else [into])
        else:
            reads.append((offset, [into]))
        end = offset + len(into)
    return reads


def _read_parts(fd: int, offset: int, parts: list[memoryview]) -> None:
    """Blocking read into all parts. Raises `OSError`; the end of the file is EIO."""
    while parts:
        count = os.preadv(fd, parts, offset)
        if count == 0:
            raise OSError(errno.EIO, f"end of file at {offset}, {sum(map(len, parts))} B missing")
        offset += count
        parts = _behind(parts, count)


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `parts` behind the first `count` bytes."""
    left = list(parts)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left


def _read_pages(fd: int, offsets: Sequence[int], into: memoryview) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for number, offset in enumerate(offsets):
        read_fully(fd, offset, into[number * DIRECT_BYTES : (number + 1) * DIRECT_BYTES])


def _punch(fd: int, ranges: Sequence[tuple[int, int]]) -> None:
    for offset, size_bytes in ranges:
        if _libc.fallocate(fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, offset, size_bytes) == 0:
            continue
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
        _zero_page(fd, offset)
    os.fdatasync(fd)


def _zero_page(fd: int, offset: int) -> None:
    """Zeros over one page where holes cannot be punched (network file systems)."""
    with mmap.mmap(-1, DIRECT_BYTES) as page, memoryview(page) as zeros:
        write_fully(fd, offset, [zeros])


def _list(directory: Path) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {e.name: e.stat().st_size if e.is_file(follow_symlinks=False) else NO_FILE for e in entries}


def _create(path: Path, flags: int, size_bytes: int) -> int:
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        with suppress(OSError):
            path.unlink()
        raise
    return fd
