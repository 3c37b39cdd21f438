"""Which file systems are memory: tmpfs and hugetlbfs among the mounts of this process. Parsing is pure."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_api.units import GIB, KIB, MIB

MOUNTS: Final = Path("/proc/self/mountinfo")
_UNITS: Final = {"K": KIB, "M": MIB, "G": GIB}


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system."""

    path: Path
    kind: str
    """Such as tmpfs, hugetlbfs or ext4."""
    page_bytes: int = 0
    """Of a hugetlbfs; 0 for all others."""


def parse_mounts(text: str) -> list[Mount]:
    """Read the content of mountinfo (man 5 proc); the last mount on a path hides the ones before it."""
    found: dict[Path, Mount] = {}
    for line in text.splitlines():
        front, _, back = line.partition(" - ")
        places, rest = front.split(), back.split()
        if len(places) < 5 or len(rest) < 3:
            continue
        path = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), places[4]))
        found[path] = Mount(path, rest[0], _page_bytes(rest[2]) if rest[0] == "hugetlbfs" else 0)
    return list(found.values())


def _page_bytes(options: str) -> int:
    match = re.search(r"pagesize=(\d+)([KMG])", options)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the mount that a path lies on, the deepest one."""
    holding = [m for m in mounts if path.is_relative_to(m.path)]
    return max(holding, key=lambda m: len(m.path.parts), default=None)


def is_memory(path: Path, mounts: list[Mount]) -> bool:
    """True for a path on tmpfs."""
    mount = mount_of(path, mounts)
    return mount is not None and mount.kind == "tmpfs"


def huge_mount(page_bytes: int, mounts: list[Mount]) -> Path | None:
    """Return where pages of a size are mounted, or None."""
    return next((m.path for m in mounts if m.kind == "hugetlbfs" and m.page_bytes == page_bytes), None)


def read_mounts(file: Path = MOUNTS) -> list[Mount]:
    """Read the mounts of this process."""
    return parse_mounts(file.read_text())
