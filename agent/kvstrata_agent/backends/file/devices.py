"""The devices of a tier: how much room each has, what part of the capacity it is to hold, and which one gets a block.

Only `measure_room` asks a file system; everything else is pure.
"""

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAUSE_S: Final = 10.0
"""A device that failed a write gets no block for so long, and twice as long after each further failure."""
PAUSE_S_MAX: Final = 320.0
"""One block in five minutes is lost on a device that stays broken: lost to the tier, which has others."""
READ_FAILURES_MAX: Final = 3
"""Failed reads in a row after which a device gets no blocks: one may be a bad sector."""


@dataclass(frozen=True, slots=True)
class DirectoryRoom:
    """What one directory has."""

    file_system: int
    """Device number: equal ones share their free bytes, their bandwidth and their end."""
    free_bytes: int
    own_bytes: int


def measure_room(path: Path) -> DirectoryRoom | None:
    """Measure one directory; None where that fails, which opening will explain. Blocking."""
    try:
        nearest = next(p for p in (path, *path.parents) if p.exists())
        status = os.statvfs(nearest)
        found = (f.lstat() for f in path.rglob("*"))
        own = {status.st_ino: status.st_blocks * 512 for status in found if stat.S_ISREG(status.st_mode)}
        own_bytes = sum(own.values())  # A file may have several names: weights that two revisions have alike.
        return DirectoryRoom(nearest.stat().st_dev, status.f_bavail * status.f_frsize, own_bytes)
    except (OSError, StopIteration):
        return None


def room_of_each(rooms: Sequence[DirectoryRoom | None]) -> list[int | None]:
    """Room of each directory; those of one file system get equal parts of what it has free."""
    count = Counter(r.file_system for r in rooms if r is not None)
    return [None if r is None else r.free_bytes // count[r.file_system] + r.own_bytes for r in rooms]


def room_of_all(rooms: Sequence[DirectoryRoom | None]) -> int | None:
    """Room of all directories together, each file system counted once; None when none of them can be measured."""
    known = [r for r in rooms if r is not None]
    if not known:
        return None
    return sum({r.file_system: r.free_bytes for r in known}.values()) + sum(r.own_bytes for r in known)


@dataclass(slots=True)
class DeviceHealth:
    """Whether one device works, by its last calls."""

    error: str = ""
    """Why it takes no blocks; empty while it does."""
    _paused_until_s: float = 0.0
    _pause_s: float = PAUSE_S
    _failed_reads: int = 0

    def wrote(self) -> None:
        """Note a write that succeeded: the device is whole again."""
        self.error, self._pause_s, self._failed_reads = "", PAUSE_S, 0

    def read(self) -> None:
        """Note a read that succeeded, which proves nothing of writes."""
        self._failed_reads = 0

    def write_failed(self, message: str, now_s: float) -> None:
        """Note a failed write."""
        self._fail(message, now_s)

    def read_failed(self, message: str, now_s: float) -> None:
        """Note a failed read."""
        self._failed_reads += 1
        if self._failed_reads >= READ_FAILURES_MAX:
            self._fail(message, now_s)

    def _fail(self, message: str, now_s: float) -> None:
        if not self.error or now_s >= self._paused_until_s:
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        self.error = message

    def may_take(self, now_s: float) -> bool:
        """Whether a block may be tried here."""
        return not self.error or now_s >= self._paused_until_s

    def trying(self, now_s: float) -> None:
        """Note that a block is tried here: of a device that has failed the next one waits for what becomes of it."""
        if self.error:
            self._paused_until_s = now_s + self._pause_s


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """What one device does and holds now."""

    may_take: bool
    moving_bytes: int
    """Of blocks that are being read or written, or are about to be written."""
    used_bytes: int
    capacity_bytes: int


def order(loads: Sequence[DeviceLoad]) -> list[int]:
    """Devices to try for a new block, the best first: least under way, then least full.

    The first spreads bursts and spares a slow device, the second keeps idle ones evenly full. Devices that have
    failed are left out; when all have, all are tried: the tier is not to give up what one of them may still do.
    """
    able = [i for i, load in enumerate(loads) if load.may_take] or list(range(len(loads)))
    return sorted(able, key=lambda i: (loads[i].moving_bytes, loads[i].used_bytes / max(1, loads[i].capacity_bytes), i))


def divide(capacity_bytes: int, rooms_bytes: Sequence[int | None], grain_bytes: int) -> tuple[int, ...]:
    """Divide a tier's capacity over devices with so much room (None: unknown), in whole grains.

    Equal parts, so that all devices work alike; what a small one has no room for goes to the others. The parts never
    add up to more than the capacity, and to less only where the room does.
    """
    parts = [0] * len(rooms_bytes)
    left_bytes = capacity_bytes
    open_ = list(range(len(rooms_bytes)))
    while open_ and left_bytes >= grain_bytes * len(open_):
        each_bytes = left_bytes // len(open_) // grain_bytes * grain_bytes
        for i in tuple(open_):
            room_bytes = rooms_bytes[i]
            wanted_bytes = parts[i] + each_bytes
            if room_bytes is not None and wanted_bytes >= room_bytes:
                wanted_bytes = max(parts[i], room_bytes // grain_bytes * grain_bytes)
                open_.remove(i)
            left_bytes -= wanted_bytes - parts[i]
            parts[i] = wanted_bytes
    return tuple(parts)
