"""Huge pages for tests: given back afterwards, and to one process at a time.

Whoever gives pages back sets the number that there was before. Where two processes overlap, that takes away pages which
the other one has mapped: a SIGBUS.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstrata_agent.backends.memory.host_dram import free_pages
from kvstrata_api.units import MIB

_NUMBER: Final = Path("/proc/sys/vm/nr_hugepages")


@contextmanager
def more_huge_pages(count: int) -> Iterator[bool]:
    """So many pages of 2 MiB more; False where there are none to be had, or by root alone."""
    with _NUMBER.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = int(_NUMBER.read_text())
        try:
            _NUMBER.write_text(f"{before + count}\n")
        except OSError:
            yield False
            return
        try:
            yield (free_pages(2 * MIB) or 0) >= count
        finally:
            _NUMBER.write_text(f"{before}\n")
