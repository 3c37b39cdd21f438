"""Directories of the local file system: one process's own, and durable."""

import fcntl
import os
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
