"""Where a memory tier's extents can outlive the agent, or why they cannot.

Only file systems that are memory will do: tmpfs and hugetlbfs among the mounts of this process.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.memory.extent_store import ExtentStore, Maker, VolatileStore
from kvstrata_agent.backends.memory.mapping import give_name
from kvstrata_agent.backends.memory.persistent_extents import (
    PersistentStore,
    acquire_run_lock,
    boot_id,
    held_bytes,
    remove_files,
)
from kvstrata_api.errors import BackendFailedError, InvalidInputError, TierFullError, UnsupportedError
from kvstrata_api.names import MODELS_FOLDER
from kvstrata_api.units import GIB, KIB, MIB
from kvstrata_node import directories

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata_api.tiers import Persistence


MOUNTS: Final = Path("/proc/self/mountinfo")
_UNITS: Final = {"K": KIB, "M": MIB, "G": GIB}

_PLACE_FILE: Final = "memory-place"
"""Beside the ledgers: the directory with the bytes, for whoever finds the ledgers when the tier is gone."""
_TRIAL_FILE: Final = "trial"
_SMALL_PAGE_BYTES: Final = 4 * KIB
_NO_DIRECTORY: Final = "start the agent with --memory-dir on a tmpfs of the host"


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system."""

    path: Path
    kind: str
    """Such as tmpfs, hugetlbfs or ext4."""
    page_bytes: int = 0
    """Of a hugetlbfs; 0 for all others."""


def parse_mounts(text: str) -> list[Mount]:
    """Read the content of mountinfo (man 5 proc); the last mount on a path hides the ones before it."""
    found: dict[Path, Mount] = {}
    for line in text.splitlines():
        front, _, back = line.partition(" - ")
        places, rest = front.split(), back.split()
        if len(places) < 5 or len(rest) < 3:
            continue
        path = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), places[4]))
        found[path] = Mount(path, rest[0], _page_bytes(rest[2]) if rest[0] == "hugetlbfs" else 0)
    return list(found.values())


def _page_bytes(options: str) -> int:
    match = re.search(r"pagesize=(\d+)([KMG])", options)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the mount that a path lies on, the deepest one."""
    holding = [m for m in mounts if path.is_relative_to(m.path)]
    return max(holding, key=lambda m: len(m.path.parts), default=None)


def is_memory(path: Path, mounts: list[Mount]) -> bool:
    """True for a path on tmpfs."""
    mount = mount_of(path, mounts)
    return mount is not None and mount.kind == "tmpfs"


def huge_mount(page_bytes: int, mounts: list[Mount]) -> Path | None:
    """Return where pages of a size are mounted, or None."""
    return next((m.path for m in mounts if m.kind == "hugetlbfs" and m.page_bytes == page_bytes), None)


def read_mounts(file: Path = MOUNTS) -> list[Mount]:
    """Read the mounts of this process."""
    return parse_mounts(file.read_text())


@dataclass(frozen=True, slots=True)
class PersistenceRoot:
    """Where one agent's memory that is to outlive it lies."""

    directory: Path | None = None
    """On tmpfs; ledgers lie here, and extents of small pages."""
    pool: str = ""
    node: str = ""
    mounts: list[Mount] = field(default_factory=list)
    tier: str = ""
    """Name of the tier in question."""
    host_directory: Path | None = None
    """`directory` as the host and its pods name it; None where that is the same."""

    def tier_directory(self) -> Path:
        """Directory of the tier's own, for files that engines open by their path. Made by whoever writes there.

        Raises `UnsupportedError`, which states what is missing, where there is none on a tmpfs.
        """
        if self.directory is None:
            raise UnsupportedError(f"tier {self.tier}: {_NO_DIRECTORY}")
        if not is_memory(self.directory.resolve(), self.mounts):
            raise UnsupportedError(f"tier {self.tier}: {_no_tmpfs(self.directory)}")
        return self.directory / self.pool / self.tier

    def on_host(self, path: Path) -> Path:
        """A path of this process as the host names it."""
        if self.directory is None or self.host_directory is None or not path.is_relative_to(self.directory):
            return path
        return self.host_directory / path.relative_to(self.directory)


@dataclass(frozen=True, slots=True)
class TierDirectories:
    """Outcome: directories for one tier, or the reason why its memory ends with the agent."""

    ledger_dir: Path | None
    memory_dir: Path | None
    reason: str = ""
    page_bytes: int = _SMALL_PAGE_BYTES

    @property
    def own_bytes(self) -> int:
        """Bytes that extents of earlier runs take."""
        return held_bytes(self.memory_dir) if self.memory_dir is not None else 0


NO_PERSISTENCE: Final = PersistenceRoot()
NOWHERE: Final = TierDirectories(None, None)


def choose_directories(
    root: PersistenceRoot, persistence: Persistence, page_bytes: int, path: Path | None = None
) -> TierDirectories:
    """Choose the directories of a tier. `path` is given where its bytes have a place of their own (emulation)."""
    if persistence == "None":
        return NOWHERE
    if root.directory is None:
        return _ends_with_agent(persistence, _NO_DIRECTORY)
    if not is_memory(root.directory.resolve(), root.mounts):
        return _ends_with_agent(persistence, _no_tmpfs(root.directory))
    own = root.directory / root.pool / root.tier / root.node
    if path is None and page_bytes == _SMALL_PAGE_BYTES:
        return TierDirectories(own, own)
    other = path or huge_mount(page_bytes, root.mounts)
    if other is None:
        return _ends_with_agent(persistence, f"no hugetlbfs with pages of {page_bytes} B is mounted")
    return TierDirectories(own, other / "kvstrata" / root.pool / root.tier / root.node, page_bytes=page_bytes)


def _no_tmpfs(directory: Path) -> str:
    return f"{directory} is not on a tmpfs; mount one there"


def _ends_with_agent(persistence: Persistence, reason: str) -> TierDirectories:
    """Reported only to an administrator who asked for it: without asking it is what memory does."""
    return TierDirectories(None, None, f"memory ends with the agent: {reason}" if persistence == "AgentRestart" else "")


def choose_store(
    root: PersistenceRoot, wanted: TierDirectories, capacity_bytes: int, make: Callable[[Path], Maker], volatile: Maker
) -> tuple[ExtentStore, TierDirectories]:
    """Open the store of a tier's extents: `make` gives files of a directory, `volatile` memory that ends with us.

    What an earlier run left is given back where nothing is to last now. Where the directories cannot be used the
    outcome states why. Raises `InvalidInputError` when another process holds them.
    """
    outcome = wanted
    try:
        if wanted.ledger_dir is not None and wanted.ledger_dir == wanted.memory_dir:
            reason = lacks_room(wanted, capacity_bytes)
            outcome = TierDirectories(None, None, reason) if reason else wanted
        if outcome.ledger_dir is not None:
            return open_store(outcome, make), outcome
        remove_tier(root)
        return VolatileStore(volatile), outcome
    except (OSError, BackendFailedError) as e:
        return VolatileStore(volatile), TierDirectories(None, None, f"memory ends with the agent: {e}")


def lacks_room(outcome: TierDirectories, capacity_bytes: int) -> str:
    """Why the file system of small pages is too small for the tier; empty when it is not."""
    assert outcome.ledger_dir is not None
    nearest = next(p for p in (outcome.ledger_dir, *outcome.ledger_dir.parents) if p.exists())
    status = os.statvfs(nearest)
    room_bytes = status.f_bavail * status.f_frsize + outcome.own_bytes + _weights_bytes(outcome.ledger_dir.parent)
    if capacity_bytes <= room_bytes:
        return ""
    return f"memory ends with the agent: {capacity_bytes} B wanted, tmpfs {nearest} has room for {room_bytes} B"


def _weights_bytes(tier_directory: Path) -> int:
    """Bytes that weights of models take in a tier's directory: its capacity is for them as well."""
    found = {}
    for folder, _, names in os.walk(tier_directory / MODELS_FOLDER):
        for name in names:
            status = os.lstat(Path(folder, name))
            found[status.st_ino] = status.st_blocks * 512  # Unit of st_blocks; man 3type stat.
    return sum(found.values())


def open_store(outcome: TierDirectories, make: Callable[[Path], Maker]) -> PersistentStore:
    """Lock the directories and check that they can be used.

    Raises `InvalidInputError` when another process holds them, `OSError` or `BackendFailedError` when they are not.
    """
    ledger_dir, memory_dir = outcome.ledger_dir, outcome.memory_dir
    assert ledger_dir is not None
    assert memory_dir is not None
    run_lock = acquire_run_lock(ledger_dir)
    try:
        before = _memory_dir(ledger_dir)
        if before != memory_dir and before.is_dir():
            remove_files(before, set())  # Pages of another size are of no use any more.
        memory_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _try_out(make(memory_dir), memory_dir / _TRIAL_FILE, outcome.page_bytes)
        (ledger_dir / _PLACE_FILE).write_text(str(memory_dir))
    except (OSError, BackendFailedError):
        run_lock.release()
        raise
    return PersistentStore(run_lock, memory_dir, make(memory_dir), boot=boot_id())


def _try_out(make: Maker, path: Path, page_bytes: int) -> None:
    """Make a file without a name and name it, which not every file system can; a full one has proved itself before."""
    path.unlink(missing_ok=True)
    try:
        memory = make(page_bytes)
    except TierFullError:
        return
    try:
        give_name(memory, path)
        path.unlink()
    finally:
        memory.release()


def _memory_dir(ledger_dir: Path) -> Path:
    """Where the bytes of these ledgers are."""
    place = ledger_dir / _PLACE_FILE
    return Path(place.read_text()) if place.exists() else ledger_dir


def remove_abandoned(root: PersistenceRoot, wanted: frozenset[str]) -> list[str]:
    """Give the memory of tiers back that are not declared any more, weights too; returns their names. Blocking."""
    if root.directory is None or not (root.directory / root.pool).is_dir():
        return []
    gone = [p for p in sorted((root.directory / root.pool).iterdir()) if p.name not in wanted and p.is_dir()]
    return [p.name for p in gone if remove_tier(replace(root, tier=p.name)) | _remove_weights(p)]


def _remove_weights(tier_directory: Path) -> bool:
    """Give back what weights take; another agent that has them keeps them. An engine that has a file open keeps it."""
    weights = tier_directory / MODELS_FOLDER
    try:
        lock = directories.lock(weights, "another agent process holds it")
    except (InvalidInputError, OSError):
        return False
    try:
        shutil.rmtree(weights)
    finally:
        os.close(lock)
    return True


def remove_tier(root: PersistenceRoot) -> bool:
    """Give back what one tier left behind; another agent that holds it keeps it. Blocking."""
    if root.directory is None:
        return False
    own = root.directory / root.pool / root.tier / root.node
    if not own.is_dir():
        return False
    try:
        run_lock = acquire_run_lock(own)
    except (InvalidInputError, OSError):
        return False
    try:
        for directory in {own, _memory_dir(own)}:
            if directory.is_dir():
                remove_files(directory, set())
        shutil.rmtree(own)
    finally:
        run_lock.release()
    return True
