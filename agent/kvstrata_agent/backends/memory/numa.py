"""Room on single NUMA nodes, and where pages really lie.

Pages that are bound to a node have nowhere else to go: on a full one the kernel ends processes, this one perhaps,
before it refuses (an allocation under MPOL_BIND calls the OOM killer, mm/oom_kill.c), and pages that are interleaved
go elsewhere without an error. So room is checked before memory is taken.
"""

import ctypes
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvstrata_api.errors import BackendFailedError, TierFullError
from kvstrata_api.units import KIB, PAGE_BYTES

ROOT: Final = Path("/")
_PAGE_BYTES: Final = PAGE_BYTES["4Ki"]
_SYS_MOVE_PAGES: Final = {"x86_64": 279, "aarch64": 239}
_libc = ctypes.CDLL(None, use_errno=True)


def check_room(size_bytes: int, nodes: Sequence[int], root: Path = ROOT) -> None:
    """Raise `TierFullError` with need and room when a node cannot give its share of `size_bytes` in small pages.

    Whoever takes memory of the node between this check and the use of it can still make it short.
    """
    if not nodes:
        return
    share_bytes = -(-size_bytes // len(nodes) // _PAGE_BYTES) * _PAGE_BYTES
    for node in nodes:
        there_bytes = available_bytes(node, root)
        if there_bytes is not None and there_bytes < share_bytes:
            raise TierFullError(f"{share_bytes} B wanted on NUMA node {node}, {there_bytes} B available there")


def available_bytes(node: int, root: Path = ROOT) -> int | None:
    """Bytes of a node that are free or taken back without loss; None when the kernel does not report it."""
    try:
        meminfo = (root / f"sys/devices/system/node/node{node}/meminfo").read_text()
        zones = (root / "proc/zoneinfo").read_text()
    except OSError:
        return None
    return parse_available(meminfo, parse_watermarks(zones, node))


def parse_available(meminfo: str, watermarks: tuple[int, int]) -> int:
    """Pure. The kernel's own estimate of MemAvailable (mm/show_mem.c, si_mem_available) for a single node.

    `watermarks` are the sums of its zones' low and high ones, in bytes.
    """
    low_bytes, high_bytes = watermarks
    has = {name: int(kib) * KIB for name, kib in re.findall(r"(\S+):\s+(\d+) kB", meminfo)}
    cached = has.get("Active(file)", 0) + has.get("Inactive(file)", 0)
    slabs = has.get("SReclaimable", 0)
    kept = sum(min(part // 2, low_bytes) for part in (cached, slabs))
    return max(0, has.get("MemFree", 0) - high_bytes + cached + slabs - kept)


def parse_watermarks(zoneinfo: str, node: int) -> tuple[int, int]:
    """Pure. Low and high watermarks of /proc/zoneinfo, summed over the zones of a node, in bytes."""
    zones = [part for part in re.split(r"^(?=Node )", zoneinfo, flags=re.MULTILINE) if part.startswith(f"Node {node},")]
    low, high = (
        sum(int(pages) for zone in zones for pages in re.findall(rf"^\s+{name}\s+(\d+)$", zone, re.MULTILINE))
        for name in ("low", "high")
    )
    return low * _PAGE_BYTES, high * _PAGE_BYTES


def nodes_of(address: int, size_bytes: int) -> frozenset[int]:
    """Nodes on which the small pages of mapped memory lie; those never touched lie nowhere (man 2 move_pages).

    Raises `BackendFailedError` when the kernel does not report it.
    """
    count = size_bytes // _PAGE_BYTES
    pages = (ctypes.c_void_p * count)(*range(address, address + size_bytes, _PAGE_BYTES))
    status = (ctypes.c_int * count)()
    number = ctypes.c_long(_SYS_MOVE_PAGES[os.uname().machine])
    if _libc.syscall(number, ctypes.c_int(0), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0)):
        raise BackendFailedError(f"move_pages: {os.strerror(ctypes.get_errno())}")
    return _there(status)


def _there(status: Iterable[int]) -> frozenset[int]:
    """Negative numbers are errors of single pages."""
    return frozenset(node for node in status if node >= 0)
