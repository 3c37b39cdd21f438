"""Opening a directory as a volume, with the best I/O engine that works: NIXL on io_uring, POSIX, the page cache.

Which I/O engine is faster on a directory's disk: the same groups of records go through each, in turns.
"""

import asyncio
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal

from kvstrata_agent.backends.file.nixl import NixlFile, NixlMover, NixlVolume
from kvstrata_agent.backends.file.posix import PosixFile, PosixVolume, write_fully
from kvstrata_agent.backends.file.volume import DIRECT_BYTES, Volume, VolumeFile
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.errors import InvalidInputError, UnsupportedError
from kvstrata_api.units import KIB, MIB
from kvstrata_node import directories as folders

_GROUPS: Final = 16
_GROUP_BYTES: Final = 1 * MIB
_RECORD_BYTES: Final = 256 * KIB
_ROUNDS_MAX: Final = 5
_TIME_S: Final = 0.5
"""No further round begins after it; a disk of 2 GB/s takes 0.2 s for all."""

_NEEDED_GAIN: Final = 0.75
"""io_uring has to take less than this part of the time of POSIX calls, which write neighbours as one, hash in the
thread that writes, return their errno and leave more of the processor: with both in a busy agent, in turns, they wrote
blocks of 2 MiB 1.2 times as fast and of 256 KiB 1.3 times, read as fast, and took 20 to 30 % less of it."""


def prefers_posix(uring_s: Sequence[float], posix_s: Sequence[float]) -> bool:
    """Decide by the best round of each: what else runs on the machine only ever makes a round longer."""
    return min(uring_s) >= _NEEDED_GAIN * min(posix_s)


async def posix_is_faster(probe: Path, mover: NixlMover) -> bool:
    """Write and read the file `probe` by both engines; True also when no comparison was possible.

    A disk without room for 16 MiB, or one that fails, is reported by whoever uses it.
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


async def open_volume(
    directory: Path, asked: Literal["Auto", "Uring", "Posix", "Buffered"], *, is_waiting: bool = False
) -> Volume:
    """Make the directory, take its lock and start the best engine that works there.

    `Auto` takes the faster one of NIXL and POSIX threads, by trying. `fallback` of the volume states why it is not the
    one asked for. Raises `InvalidInputError` when another process
    holds the directory (unless `is_waiting` until it lets go), or it cannot be written.
    """
    try:
        lock_fd = await in_thread(None, partial(_lock, directory, is_waiting=is_waiting))
    except OSError as e:
        raise _unwritable(directory, e) from e
    try:
        return await _choose(directory, lock_fd, asked)
    except OSError as e:
        os.close(lock_fd)
        raise _unwritable(directory, e) from e


def _unwritable(directory: Path, error: OSError) -> InvalidInputError:
    path = Path(error.filename or directory)
    if path.is_block_device():
        todo = "raw devices are not used: make a file system on it, mount it, and name a directory there"
        return InvalidInputError(f"{path}: is a block device; {todo}")
    return InvalidInputError(f"{path}: {error.strerror}; the agent must be able to write there")


def _lock(directory: Path, *, is_waiting: bool) -> int:
    _make(directory)
    return folders.lock(directory, "another agent process holds it", is_waiting=is_waiting)


def _make(directory: Path) -> None:
    """Make a directory and those above it, durable on return: what is synced in it would be lost with it."""
    if directory.exists():
        return
    _make(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    folders.sync(directory.parent)


async def _choose(directory: Path, lock_fd: int, asked: str) -> Volume:
    if asked == "Buffered":
        return PosixVolume(directory, lock_fd, is_direct=False)
    probe = directory / f".probe-{os.getpid()}"
    try:
        reason = await in_thread(None, partial(_direct_refusal, directory, probe))
        if reason:
            fallback = f"O_DIRECT asked for, but {reason}; use a local NVMe file system"
            return PosixVolume(directory, lock_fd, is_direct=False, fallback=fallback)
        if asked == "Posix":
            return PosixVolume(directory, lock_fd, is_direct=True)
        volume = await _uring_or_posix(directory, lock_fd, probe, is_measured=asked == "Auto")
        if asked == "Auto":
            volume.fallback = ""  # Nothing else was asked for.
        return volume
    finally:
        probe.unlink(missing_ok=True)


def _direct_refusal(directory: Path, probe: Path) -> str:
    """Why O_DIRECT makes no sense here; empty when it does."""
    kind = file_system(directory)
    if kind in {"tmpfs", "ramfs"}:
        return f"{directory} is on {kind}, which is memory and lost at reboot"
    os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        fd = os.open(probe, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        return f"{kind} at {directory} refuses it: {e.strerror}"
    try:
        with mmap.mmap(-1, DIRECT_BYTES) as page, memoryview(page) as view:
            write_fully(fd, 0, [view])
    except OSError as e:
        return f"{kind} at {directory} refuses it: {e.strerror}"
    finally:
        os.close(fd)
    return ""


async def _uring_or_posix(directory: Path, lock_fd: int, probe: Path, *, is_measured: bool) -> PosixVolume:
    """NIXL when a page goes to the probe file through it, and measured no slower; else POSIX with the reason."""
    try:
        mover = await asyncio.to_thread(NixlMover)
    except UnsupportedError as e:
        return PosixVolume(directory, lock_fd, is_direct=True, fallback=str(e))
    fd = os.open(probe, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    page = mmap.mmap(-1, DIRECT_BYTES)
    works = not await mover.move("WRITE", fd, [(0, [memoryview(page)])])
    os.close(fd)
    if works and not (is_measured and await posix_is_faster(probe, mover)):
        return NixlVolume(directory, lock_fd, mover)
    await mover.close()
    reason = "NIXL starts, but io_uring transfers fail; is io_uring allowed here?"
    return PosixVolume(directory, lock_fd, is_direct=True, fallback=reason)


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, from /proc/self/mountinfo; empty when it is unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""
