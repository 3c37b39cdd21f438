"""Which I/O engine is faster on a directory's disk: the same groups of records go through each, in turns."""

import asyncio
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvstrata_agent.backends.file.nixl import NixlFile, NixlMover
from kvstrata_agent.backends.file.posix import PosixFile
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, VolumeFile
from kvstrata_api.units import KIB, MIB

_GROUPS: Final = 16
_GROUP_BYTES: Final = 1 * MIB
_RECORD_BYTES: Final = 256 * KIB
_ROUNDS_MAX: Final = 5
_TIME_S: Final = 0.5
"""No further round begins after it; a disk of 2 GB/s takes 0.2 s for all."""

_NEEDED_GAIN: Final = 0.75
"""io_uring has to take less than this part of the time of POSIX calls, which write neighbours as one, hash in the
thread that writes, tell their errno and leave more of the processor: with both in a busy agent, in turns, they wrote
blocks of 2 MiB 1.2 times as fast and of 256 KiB 1.3 times, read as fast, and took 20 to 30 % less of it."""


def prefers_posix(uring_s: Sequence[float], posix_s: Sequence[float]) -> bool:
    """Decide by the best round of each: what else runs on the machine only ever makes a round longer."""
    return min(uring_s) >= _NEEDED_GAIN * min(posix_s)


async def posix_is_faster(probe: Path, mover: NixlMover) -> bool:
    """Write and read the file `probe` by both engines; True also when no comparison was possible.

    A disk without room for 16 MiB, or one that fails, is told of by whoever uses it.
    """
    threads = ThreadPoolExecutor(_GROUPS, "kvstrata-probe")
    files: list[VolumeFile] = []
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        posix = PosixFile(os.open(probe, flags), threads, threads)
        files.append(posix)
        files.append(NixlFile(os.open(probe, flags | os.O_DSYNC), threads, threads, mover))
        await posix.allocate(0, _GROUPS * _GROUP_BYTES)
        return prefers_posix(*await _timed(files[1], posix))
    except OSError:
        return True
    finally:
        with suppress(OSError):
            for file in files:
                await file.close()
        threads.shutdown(wait=False)


async def _timed(uring: VolumeFile, posix: VolumeFile) -> tuple[list[float], list[float]]:
    """Seconds of each round; the first one, which lays the file out, does not count."""
    took_s: tuple[list[float], list[float]] = ([], [])
    view = memoryview(mmap.mmap(-1, _GROUPS * _GROUP_BYTES))  # Freed with its last user, which may be NIXL's thread.
    await _pass(posix, view)
    ends_s = time.monotonic() + _TIME_S
    for number in range(_ROUNDS_MAX):
        if number and time.monotonic() > ends_s:
            break
        for file, seconds in zip((uring, posix), took_s, strict=True):
            started_s = time.monotonic()
            await _pass(file, view)
            seconds.append(time.monotonic() - started_s)
    return took_s


async def _pass(file: VolumeFile, memory: memoryview) -> None:
    """Write all groups as records do, a page and a payload each, and read them again."""
    groups = [(at, memory[at : at + _GROUP_BYTES]) for at in range(0, _GROUPS * _GROUP_BYTES, _GROUP_BYTES)]
    await asyncio.gather(*(file.write(at, partial(_parts, view)) for at, view in groups))
    await asyncio.gather(*(file.read([(at + i, view[i : i + _RECORD_BYTES]) for i in _RECORDS]) for at, view in groups))


_RECORDS: Final = range(0, _GROUP_BYTES, _RECORD_BYTES)


def _parts(group: memoryview) -> list[memoryview]:
    cuts = ((i, i + DIRECT_BYTES, i + _RECORD_BYTES) for i in _RECORDS)
    return [part for first, payload, end in cuts for part in (group[first:payload], group[payload:end])]
