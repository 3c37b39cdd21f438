"""Memory that dead engines left behind: files of vLLM's offloading in /dev/shm, which nobody else removes.

vLLM names such a file after its engine and removes it at its end; killed, it leaves gigabytes. Whether anybody has one
open or mapped is known to the kernel alone, whatever its user and its process namespace: it grants a write lease to
whoever has the only open description of a file (man 2 fcntl, F_SETLEASE). Where it does not answer, files stay.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_node import directories

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata_telemetry.agent_metrics import Counters

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  Where vLLM puts them.
REAP_S: Final = 30.0
"""Between two rounds. Listing a directory of some files takes microseconds."""
REAPED_MAX: Final = 16
"""Files of one round: giving back 100 GiB takes the kernel seconds."""
YOUNG_S: Final = 60.0
"""A file that was written to within this time is left alone, whoever has it open."""
_NAME: Final = re.compile(r"vllm_offload_.+\.mmap")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """A file that may have been left behind."""

    name: str
    changed_s: float
    """Unix time of the last change to its bytes or its name."""


def old_ones(files: Iterable[Left], now_s: float) -> list[Left]:
    """Those that may be reaped in one round if nobody has them open, the oldest first. Pure."""
    found = [f for f in files if _NAME.fullmatch(f.name) and now_s - f.changed_s >= YOUNG_S]
    return sorted(found, key=lambda f: (f.changed_s, f.name))


class EngineMemory:
    """Gives back what dead engines left behind."""

    def __init__(self, counters: Counters, directory: Path = SHARED_MEMORY) -> None:
        """Count what is reaped."""
        self._counters = counters
        self._directory = directory

    async def reap(self) -> None:
        """Remove what nobody has open, `REAPED_MAX` files at most."""
        for name, size_bytes in await asyncio.to_thread(reap, self._directory, time.time()):
            self._counters.add("kvstrata_engine_memory_reaped_files_total")
            _log.info("memory of a dead engine given back", extra={"file": name, "size_bytes": size_bytes})


def reap(directory: Path, now_s: float) -> list[tuple[str, int]]:
    """Remove files of dead engines; returns their names and the bytes of memory that they took. Blocking."""
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # Not a machine that has one.
        return []
    try:
        reaped: list[tuple[str, int]] = []
        for left in old_ones(_files(folder), now_s):
            if len(reaped) == REAPED_MAX:
                break
            size_bytes = _remove(folder, left.name)
            if size_bytes is not None:
                reaped.append((left.name, size_bytes))
        return reaped
    finally:
        os.close(folder)


def _files(folder: int) -> list[Left]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # Gone meanwhile.
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                found.append(Left(entry.name, max(status.st_mtime, status.st_ctime)))
    return found


def _remove(folder: int, name: str) -> int | None:
    """Remove a file that nobody else has open; returns its bytes, or None for one that stays."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # Gone, or another user's.
        return None
    try:
        with directories.write_lease(file):
            status = os.fstat(file)
            if status.st_ino != os.stat(
                name, dir_fd=folder, follow_symlinks=False
            ).st_ino or not directories.has_write_lease(file):
                return None
            os.unlink(name, dir_fd=folder)
            return status.st_blocks * 512  # POSIX: units of st_blocks.
    except OSError as e:
        _log.debug("memory of an engine stays", extra={"file": name, "cause": errno.errorcode.get(e.errno or 0, "")})
        return None
    finally:
        os.close(file)
