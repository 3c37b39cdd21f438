"""Memory that outlives the agent: each extent is a named file of a memory file system, with a ledger beside it.

Files are made without a name and get one when an extent gets its scope; they lose it before the memory goes back. So
at every instant a file is either nobody's and gone with the process, or one scope's with a ledger that names it. A
reboot empties everything: what carries another boot id is removed. docs/memory.md states what survives what. One
process at a time holds the directory of the ledgers (`RunLock`), and each that does counts one more run.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.memory.extent_store import Found, Maker
from kvstrata_agent.backends.memory.ledger import Contents, Ledger, LedgerHeader, make_ledger, open_ledger
from kvstrata_agent.backends.memory.mapping import MappedExtent, Remains, erase_file, give_name, has_writers, open_file
from kvstrata_agent.backends.slot_table import Extent, SlotTable
from kvstrata_api.errors import BackendFailedError, TierFullError
from kvstrata_node import directories as folders

STAMPS_PER_RUN: Final = 1 << 32
"""2^32 slot uses a run, 2^16 runs before stamps leave the 48 bits of the directory."""
_RUN_FILE: Final = "run"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLock:
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


def acquire_run_lock(directory: Path) -> RunLock:
    """Make a directory, lock it and count one more run.

    Raises `InvalidInputError` when another process holds it, and `OSError` when it cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock_fd = folders.lock(directory, "another agent process holds it")
    try:
        return RunLock(directory, _next_run(directory), lock_fd)
    except OSError:
        os.close(lock_fd)
        raise


def _next_run(directory: Path) -> int:
    """Stamps found in ledgers are passed over as well, so a lost number repeats none that counts."""
    file = directory / _RUN_FILE
    before = file.read_text() if file.exists() else "0"
    run = (int(before) if before.isascii() and before.isdigit() else 0) + 1
    new = file.with_suffix(".new")
    new.write_text(str(run))
    new.replace(file)
    return run


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(r"ext-[0-9a-f]{8,}\.(data|ledger)")


def boot_id() -> str:
    """Return what the kernel drew at random when the machine started."""
    return _BOOT_ID.read_text().strip()


def monotonic_ms() -> int:
    """Milliseconds of the clock that all processes of one boot share."""
    return time.monotonic_ns() // 1_000_000


class PersistentStore:
    """Extents of one arena in files (`ExtentStore`). Their bytes lie in `memory_dir`, their ledgers in what is held."""

    def __init__(
        self,
        run_lock: RunLock,
        memory_dir: Path,
        make: Maker,
        *,
        boot: str,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """Take over `run_lock`. `make` gives unnamed files of `memory_dir`, which no other arena uses."""
        self._run_lock = run_lock
        self._memory_dir = memory_dir
        self._make = make
        self._boot = boot
        self._clock_ms = clock_ms
        self._ledgers: dict[int, Ledger] = {}
        self.first_stamp = run_lock.first_stamp

    def make(self, size_bytes: int) -> MappedExtent:
        """See `ExtentStore`."""
        return self._make(size_bytes)

    def opened(self, extent: Extent, memory: MappedExtent) -> None:
        """Make the ledger, then give the memory its name. See `ExtentStore`."""
        header = LedgerHeader(
            extent.id,
            extent.stride_bytes,
            len(extent.stamps),
            extent.size_bytes,
            self._boot,
            extent.scope,
            extent.writer,
        )
        path = self._ledger_path(extent.id)
        try:
            self._remove(extent.id)  # Nothing is there, unless nobody asked what an earlier run had left.
            ledger = make_ledger(path, header)
        except OSError as e:
            raise TierFullError(f"ledger {path}: {e.strerror}") from e
        try:
            give_name(memory, self._memory_path(extent.id))
        except OSError as e:
            ledger.close()
            path.unlink()
            raise BackendFailedError(f"memory {self._memory_path(extent.id)}: {e.strerror}") from e
        self._ledgers[extent.id] = ledger

    def taken(self, slot: SlotRef) -> None:
        """See `ExtentStore`."""
        self._ledgers[slot.extent].take(slot.offset, slot.stamp)

    def committed(self, slot: SlotRef, record: Record) -> None:
        """See `ExtentStore`."""
        self._ledgers[slot.extent].commit(slot.offset, slot.stamp, record)

    def dropped(self, slot: SlotRef) -> None:
        """See `ExtentStore`."""
        self._ledgers[slot.extent].drop(slot.offset, self._clock_ms())

    def released(self, extent: int, memory: MappedExtent) -> Remains | None:
        """See `ExtentStore`. Files that cannot be removed stay, empty, until the next start."""
        try:
            self._remove(extent)
        except OSError as e:
            _log.warning("files of an extent stay", extra={"path": str(e.filename), "cause": e.strerror})
        self._ledgers.pop(extent).close()
        return memory.release()

    def _remove(self, extent: int) -> None:
        """Take the names away, the ledger's first: memory without a ledger is nobody's."""
        self._ledger_path(extent).unlink(missing_ok=True)
        if self._memory_path(extent).exists():
            erase_file(self._memory_path(extent))

    def found(self, table: SlotTable) -> Iterator[Found]:
        """Newest extents first; the oldest ones are removed when the capacity has become less. See `ExtentStore`.

        An extent where somebody may still be writing gets no new slots: its blocks move away and the file goes. Raises
        `BackendFailedError` when the directories cannot be read; what was not read stays.
        """
        try:
            yield from self._found(table)
        except OSError as e:
            raise BackendFailedError(f"{e.filename or self._run_lock.directory}: {e.strerror}") from e

    def _found(self, table: SlotTable) -> Iterator[Found]:
        kept: set[int] = set()
        ledgers = sorted(self._run_lock.directory.glob("ext-*.ledger"), key=lambda p: p.name, reverse=True)
        for path in ledgers:
            found = self._take_over(path, table)
            if found is not None:
                kept.add(found.extent.id)
                yield found
        self._remove_others(kept)

    def _take_over(self, path: Path, table: SlotTable) -> Found | None:
        opened = open_ledger(path)
        if opened is None:
            return None
        ledger, header = opened
        memory_path = self._memory_path(header.extent)
        is_ours = header.boot == self._boot and path == self._ledger_path(header.extent)
        if not is_ours or table.held_bytes + header.size_bytes > table.capacity_bytes or not memory_path.exists():
            ledger.close()
            return None
        contents = ledger.contents(header, self._clock_ms())
        try:
            is_written = bool(contents.suspects) and has_writers(memory_path)
            memory = open_file(memory_path, header.size_bytes) if len(contents.live) else None
        except OSError:
            memory = None
        if memory is None:
            ledger.close()
            return None
        self._ledgers[header.extent] = ledger
        return Found(self._adopt(table, header, contents, is_written=is_written), memory, contents.live)

    def _adopt(self, table: SlotTable, header: LedgerHeader, contents: Contents, *, is_written: bool) -> Extent:
        serves = (header.scope, header.writer, header.stride_bytes)
        stamps = contents.live.stamps(header.size_bytes // header.stride_bytes)
        extent = table.adopt(header.extent, serves, header.size_bytes, stamps)
        if is_written:
            table.close_extent(extent.id)
        else:
            for index in contents.suspects:
                self._ledgers[extent.id].wipe(index)
        return extent

    def _remove_others(self, kept: set[int]) -> None:
        """Remove the files of all extents that were not taken over, ledgers first."""
        names = {f"ext-{i:08x}" for i in kept}
        for directory in (self._run_lock.directory, self._memory_dir):
            remove_files(directory, names)

    def let_go(self, memory: MappedExtent) -> None:
        """See `ExtentStore`."""
        memory.let_go()

    def close(self) -> None:
        """See `ExtentStore`."""
        while self._ledgers:
            self._ledgers.popitem()[1].close()
        self._run_lock.release()

    def discard(self) -> None:
        """See `ExtentStore`."""
        try:
            self._remove_others(set())
        finally:
            self.close()

    def _ledger_path(self, extent: int) -> Path:
        return self._run_lock.directory / f"ext-{extent:08x}.ledger"

    def _memory_path(self, extent: int) -> Path:
        return self._memory_dir / f"ext-{extent:08x}.data"


def remove_files(directory: Path, kept: set[str]) -> None:
    """Remove ledgers and memory of all extents but the ones with names in `kept`. Foreign files stay."""
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) and path.stem not in kept:
            erase_file(path) if path.suffix == ".data" else path.unlink()


def held_bytes(directory: Path) -> int:
    """Bytes that extents of earlier runs take in a directory; 0 where there is none, or none that we may read."""
    try:
        return sum(p.stat().st_size for p in directory.glob("ext-*.data"))
    except OSError:
        return 0
