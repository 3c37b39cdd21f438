"""Where pages lie, asked of the kernel independently of the product."""

import ctypes
import errno
import re
from collections import Counter
from pathlib import Path

import numpy as np

PAGE_BYTES = 4096
UNTOUCHED = -errno.ENOENT
_SYS_MOVE_PAGES = 279  # x86-64, arch/x86/entry/syscalls/syscall_64.tbl
_libc = ctypes.CDLL(None, use_errno=True)


def nodes_of(view: memoryview) -> Counter[int]:
    """Count pages by NUMA node (man 2 move_pages with no target nodes); negative: the errno of one that is nowhere."""
    address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    count = len(view) // PAGE_BYTES
    pages = (ctypes.c_void_p * count)(*range(address, address + count * PAGE_BYTES, PAGE_BYTES))
    status = (ctypes.c_int * count)()
    if _libc.syscall(ctypes.c_long(_SYS_MOVE_PAGES), 0, ctypes.c_ulong(count), pages, None, status, 0):
        raise OSError(ctypes.get_errno(), "move_pages")
    return Counter(status)


def free_bytes(node: int) -> int:
    text = Path(f"/sys/devices/system/node/node{node}/meminfo").read_text()
    return int(re.search(r"MemFree:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]
