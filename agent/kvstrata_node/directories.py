"""Directories and files of the local file system: one process's own, durable, and open nowhere else."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstrata_api.errors import InvalidInputError


def lock(folder: Path, whose: str, *, is_waiting: bool = False) -> int:
    """Make an existing folder this process's own until the descriptor that is returned is closed, or the process ends.

    `whose` is for the error, who has it already: "another agent process holds it".
    Raises `InvalidInputError` when another process has it and `is_waiting` is not set, `OSError`.
    """
    fd = _open(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if is_waiting else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(fd)
        raise InvalidInputError(f"{folder}: {whose}") from e
    except OSError:
        os.close(fd)
        raise
    return fd


def sync(folder: Path) -> None:
    """Make durable which files a folder has. Raises `OSError`."""
    fd = _open(folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file of mode 0600; a crash leaves the old or the new one. Raises `OSError`."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync(path.parent)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def write_lease(file: int) -> Iterator[None]:
    """Ask for a write lease; see `has_write_lease` for whether it is there. Whoever opens the file meanwhile waits."""
    # What tells us that somebody waits is SIGIO otherwise, which ends a process that expects none.
    fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:  # EAGAIN: it is open elsewhere. EACCES: another user's. EINVAL: no leases here.
        yield
        return
    try:
        yield
    finally:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def has_write_lease(file: int) -> bool:
    """Whether ours is the only open description of a leased file, and nobody is opening it at this moment."""
    return fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK
