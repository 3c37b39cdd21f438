"""One agent's directory for lasting memory: held by one process at a time, and it counts its runs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_node import directories as folders

STAMPS_PER_RUN: Final = 1 << 32
"""2^32 slot uses a run, 2^16 runs before stamps leave the 48 bits of the directory."""
_RUN_FILE: Final = "run"


@dataclass(frozen=True, slots=True)
class Hold:
    """A directory that nobody else uses until `release`, or until this process ends."""

    directory: Path
    run: int
    """Number of this run, from 1."""
    lock_fd: int

    @property
    def first_stamp(self) -> int:
        """Above every stamp of earlier runs."""
        return self.run * STAMPS_PER_RUN

    def release(self) -> None:
        """Let another process have the directory."""
        os.close(self.lock_fd)


def take_hold(directory: Path) -> Hold:
    """Make a directory, lock it and count one more run.

    Raises `InvalidInputError` when another process holds it, and `OSError` when it cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock_fd = folders.lock(directory, "another agent process holds it")
    try:
        return Hold(directory, _next_run(directory), lock_fd)
    except OSError:
        os.close(lock_fd)
        raise


def _next_run(directory: Path) -> int:
    """Stamps found in ledgers are passed over as well, so a lost number repeats none that counts."""
    file = directory / _RUN_FILE
    said = file.read_text() if file.exists() else "0"
    run = (int(said) if said.isascii() and said.isdigit() else 0) + 1
    new = file.with_suffix(".new")
    new.write_text(str(run))
    new.replace(file)
    return run
