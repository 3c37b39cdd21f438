"""What `kvstrata up` declares by itself: tiers from what the machine has, and the tenant that started it.

`read_machine` reads; the rest is pure.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.errors import UnsupportedError
from kvstrata_api.units import GIB, MIB
from kvstrata_node.discovery import ROOT, read_hugepages

Json = dict[str, Any]

MEMORY_SHARE: Final = 0.25
"""Of the memory that is free now: the engine, its weights and the page cache have the rest."""
HUGE_SHARE: Final = 0.5
"""Of the free huge pages: whoever reserved them may have others in mind."""
DISK_SHARE: Final = 0.25
DISK_BYTES_MAX: Final = 100 * GIB
"""A cache that nobody sized should not write a laptop's disk full."""
MEMORY_BYTES_MIN: Final = 64 * MIB
HUGE_BYTES_MIN: Final = 256 * MIB
DISK_BYTES_MIN: Final = GIB
DRAIN_S: Final = 30
"""For bringing memory to the disk at the end: what people wait for without a second Ctrl-C."""
GRAIN_BYTES: Final = 64 * MIB
"""Sizes are whole multiples, which people read easily."""
HUGE_PAGE_BYTES: Final = 2 * MIB
_TMPFS: Final = frozenset({"tmpfs", "ramfs"})
"""File systems in memory: a tier there would be a second, slower memory tier."""
_STAT_BLOCK_BYTES: Final = 512
"""Unit of st_blocks (man 3 stat)."""
NVME: Final = "nvme"
"""Directory of the default NVMe tier, in the state directory."""
_NO_LIMIT: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Machine:
    """What default tiers depend on."""

    memory_free_bytes: int
    """That processes could take now without swapping; within the control group's limit."""
    huge_free_bytes: int
    """In free huge pages of 2 MiB."""
    disk_free_bytes: int
    """Of the file system of the state directory, for this user, with what a tier there holds already; 0 where that lies
    in memory."""


def read_machine(state_dir: Path, root: Path = ROOT) -> Machine:
    """Read what there is. Never raises for what is missing, which counts as 0."""
    huge = sum(p.free * p.page_bytes for p in read_hugepages(root) if p.page_bytes == HUGE_PAGE_BYTES)
    return Machine(min(_memory_free(root), _group_free(root)), huge, _disk_free(state_dir, root))


def default_pool(machine: Machine, name: str, compatibility: Mapping[str, Any], state_dir: Path) -> Json:
    """Declare a KVPool: host memory, above a directory on the disk where there is room for one.

    Raises `UnsupportedError` when there is too little memory for a tier.
    """
    huge = _share(machine.huge_free_bytes, HUGE_SHARE)
    memory = _share(machine.memory_free_bytes, MEMORY_SHARE)
    disk = min(_share(machine.disk_free_bytes, DISK_SHARE), DISK_BYTES_MAX)
    is_huge = huge >= HUGE_BYTES_MIN
    size = huge if is_huge else memory
    if size < MEMORY_BYTES_MIN:
        raise UnsupportedError(
            f"{machine.memory_free_bytes} B of memory are free: a quarter of it is less than {MEMORY_BYTES_MIN} B; "
            "declare tiers with -f"
        )
    dram = {"pageSize": "2Mi" if is_huge else "4Ki"}
    tiers: list[Json] = [{"name": "dram", "type": "HostDRAM", "capacityPerNode": _written(size), "hostDRAM": dram}]
    if disk >= DISK_BYTES_MIN:
        path = str(state_dir / NVME)
        tiers.append({"name": "nvme", "type": "NVMe", "capacityPerNode": _written(disk), "nvme": {"path": path}})
    drain = {"drain": {"timeoutSeconds": DRAIN_S}}
    return _object("KVPool", name, {"compatibility": dict(compatibility), "tiers": tiers, "updateStrategy": drain})


def default_tenant(namespace: str, account: str) -> Json:
    """Declare the tenant of one identity, by its name."""
    return _object("KVTenant", account, {"serviceAccounts": [{"namespace": namespace, "name": account}]})


def _object(kind: str, name: str, spec: Json) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _share(free_bytes: int, share: float) -> int:
    return int(free_bytes * share) // GRAIN_BYTES * GRAIN_BYTES


def _written(size_bytes: int) -> str:
    return units.format_quantity(size_bytes)


def _memory_free(root: Path) -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _group_free(root: Path) -> int:
    """Memory that the control group still allows this process, by the tightest of its ancestors' limits."""
    found = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    if found is None:
        return _NO_LIMIT
    top, left = root / "sys/fs/cgroup", _NO_LIMIT
    group = top / found[1]
    for at in (group, *group.parents):
        limit, used = _text(at / "memory.max").strip(), _text(at / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            left = min(left, max(0, int(limit) - int(used)))
        if at == top:
            break
    return left


def _disk_free(folder: Path, root: Path) -> int:
    """Bytes that this user may write below a folder, which need not exist yet."""
    there = next(p for p in (folder, *folder.parents) if p.is_dir())
    mounts = [line.split() for line in _text(root / "proc/self/mounts").splitlines()]
    holding = [m for m in mounts if there.resolve().is_relative_to(m[1])]
    if holding and max(holding, key=lambda m: len(m[1]))[2] in _TMPFS:
        return 0
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize + _held(folder / NVME)


def _held(folder: Path) -> int:
    """Bytes on the disk of all files below a folder: the next start should find as much room as the first one."""
    held = 0
    for at, _, files in os.walk(folder):
        for name in files:
            try:
                held += Path(at, name).lstat().st_blocks * _STAT_BLOCK_BYTES
            except OSError:
                continue
    return held


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
