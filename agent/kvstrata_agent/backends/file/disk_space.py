"""How many bytes directories could hold: what their file systems have free, and what lies in them already."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Room:
    """What one directory has."""

    file_system: int
    """Device number: equal ones share their free bytes, their bandwidth and their end."""
    free_bytes: int
    own_bytes: int


def look(path: Path) -> Room | None:
    """Look at one directory; None where it cannot be looked at, which opening will explain. Blocking."""
    try:
        nearest = next(p for p in (path, *path.parents) if p.exists())
        status = os.statvfs(nearest)
        own_bytes = sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file()) if path.exists() else 0
        return Room(nearest.stat().st_dev, status.f_bavail * status.f_frsize, own_bytes)
    except (OSError, StopIteration):
        return None


def each_bytes(rooms: Sequence[Room | None]) -> list[int | None]:
    """Room of each directory; those of one file system get equal parts of what it has free."""
    count = Counter(r.file_system for r in rooms if r is not None)
    return [None if r is None else r.free_bytes // count[r.file_system] + r.own_bytes for r in rooms]


def all_bytes(rooms: Sequence[Room | None]) -> int | None:
    """Room of all directories together, each file system counted once; None when none of them can be looked at."""
    known = [r for r in rooms if r is not None]
    if not known:
        return None
    return sum({r.file_system: r.free_bytes for r in known}.values()) + sum(r.own_bytes for r in known)
