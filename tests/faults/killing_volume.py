"""A volume in a real directory on which the process kills itself at a named point of a named call."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstrata_agent.backends.file.claim import NEW_SUFFIX, STORE_FILE
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.posix import PosixFile, PosixVolume
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, nothing


def _points(told: str) -> tuple[str, ...]:
    return tuple(f"{line.split(': ')[0]} {when}" for line in told.splitlines() for when in line.split(": ")[1].split())


POINTS: Final = _points("""\
create segment: before made half after
sync created segment: before after
write segment: before sector header payload half unsynced after
punch segment: before half after
allocate segment: before after
unlink segment: before after
sync unlinked segment: before after
create index: before made after
write body: before half after
write new map 0: before half after
write new map 1: before half after
rename index: before after
sync renamed index: before after
write map 0: before half after
write map 1: before half after
unlink new index: before after
create marker: before made after
write marker: before half after
rename marker: before after
sync renamed marker: before after
read segment: before after
headers segment: before after""")
"""Where the process dies. `sector` to `unsynced` are parts of a record that got to the file before it died."""

_KINDS: Final = {STORE_FILE + NEW_SUFFIX: "marker", INDEX_FILE + NEW_SUFFIX: "index", INDEX_FILE: "index"}


class Killer:
    """Kills this process when it comes to a point for the n-th time."""

    def __init__(self, point: str, turn: int) -> None:
        self._point = point
        self._left = turn
        self.is_armed = True

    def comes_to(self, point: str) -> None:
        """Die here, or go on."""
        if point == self._point and self.is_due():
            os.kill(os.getpid(), signal.SIGKILL)

    def part_of(self, call: str) -> str:
        """What of a call is to be done before dying in it; empty when it is not to die here."""
        when = self._point.removeprefix(call + " ") if self._point.startswith(call + " ") else ""
        is_part = when in {"made", "sector", "header", "payload", "half", "unsynced"}
        return when if is_part and self.is_due() else ""

    def is_due(self) -> bool:
        """Count a visit."""
        self._left -= self.is_armed
        return self._left == 0 and self.is_armed


class KillingVolume(PosixVolume):
    """A POSIX volume with a killer."""

    def __init__(self, directory: Path, lock_fd: int, killer: Killer, *, is_direct: bool) -> None:
        super().__init__(directory, lock_fd, is_direct=is_direct)
        self.killer = killer
        self._last = ""

    async def create(self, name: str, size_bytes: int) -> PosixFile:
        """Make a file, or part of it."""
        call = f"create {kind_of(name)}"
        self.killer.comes_to(f"{call} before")
        part = self.killer.part_of(call)
        if part:
            fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if part == "half":
                os.posix_fallocate(fd, 0, size_bytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self._last = f"created {kind_of(name)}"
        file = await super().create(name, size_bytes)
        self.killer.comes_to(f"{call} after")
        return file

    def _file(self, fd: int) -> "KillingFile":
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return KillingFile(fd, self, path)

    async def rename(self, old: str, new: str) -> None:
        """Rename, and know the index in force from the one to come."""
        call = f"rename {kind_of(new)}" if new == INDEX_FILE else f"rename {kind_of(old)}"
        self.killer.comes_to(f"{call} before")
        await super().rename(old, new)
        self._last = f"renamed {kind_of(old)}"
        self.killer.comes_to(f"{call} after")

    async def unlink(self, name: str) -> None:
        """Remove a name."""
        call = "unlink new index" if name == INDEX_FILE + NEW_SUFFIX else f"unlink {kind_of(name)}"
        self.killer.comes_to(f"{call} before")
        await super().unlink(name)
        self._last = f"unlinked {kind_of(name)}"
        self.killer.comes_to(f"{call} after")

    async def sync(self) -> None:
        """Sync what came last."""
        call = f"sync {self._last}"
        self.killer.comes_to(f"{call} before")
        await super().sync()
        self.killer.comes_to(f"{call} after")


class KillingFile(PosixFile):
    """A file of it."""

    def __init__(self, fd: int, volume: KillingVolume, path: Path) -> None:
        super().__init__(fd, volume._movers, volume._namers)
        self._volume = volume
        self._killer = volume.killer
        self._path = path

    def _call(self, offset: int) -> str:
        kind = kind_of(self._path.name)
        if kind != "index":
            return f"write {kind}"
        if offset >= 2 * DIRECT_BYTES:
            return "write body"
        is_new = Path(f"/proc/self/fd/{self.fd}").readlink().name.endswith(NEW_SUFFIX)
        return f"write {'new ' if is_new else ''}map {offset // DIRECT_BYTES}"

    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        """Write all, or a part that gets to the file through the page cache."""
        call = self._call(offset)
        self._killer.comes_to(f"{call} before")
        part = self._killer.part_of(call)
        if part:
            whole = b"".join(made())
            first, last = {
                "sector": (0, 512),
                "header": (0, DIRECT_BYTES),
                "payload": (DIRECT_BYTES, len(whole)),
                "half": (0, len(whole) // 2),
                "unsynced": (0, len(whole)),
            }[part]
            plain = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
            os.pwrite(plain, whole[first:last], offset + first)
            os.kill(os.getpid(), signal.SIGKILL)
        await super().write(offset, made)
        self._killer.comes_to(f"{call} after")

    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        """Read records."""
        kind = kind_of(self._path.name)
        self._killer.comes_to(f"read {kind} before")
        await super().read(ranges, then)
        self._killer.comes_to(f"read {kind} after")

    async def read_pages(self, offsets: Sequence[int], into: memoryview) -> None:
        """Read headers."""
        self._killer.comes_to("headers segment before")
        await super().read_pages(offsets, into)
        self._killer.comes_to("headers segment after")

    async def allocate(self, offset: int, size_bytes: int) -> None:
        """Fill a hole."""
        self._killer.comes_to("allocate segment before")
        await super().allocate(offset, size_bytes)
        self._killer.comes_to("allocate segment after")

    async def punch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make holes, or one page less than half of them."""
        self._killer.comes_to("punch segment before")
        if self._killer.part_of("punch segment"):
            offset, size_bytes = ranges[0]
            await super().punch([(offset, size_bytes // 2 // DIRECT_BYTES * DIRECT_BYTES or DIRECT_BYTES)])
            os.kill(os.getpid(), signal.SIGKILL)
        await super().punch(ranges)
        self._killer.comes_to("punch segment after")


def kind_of(name: str) -> str:
    """What a file is."""
    return _KINDS.get(name, "segment" if name.startswith("seg-") else "other")
