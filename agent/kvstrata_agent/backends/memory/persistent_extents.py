"""Memory that outlives the agent: each extent is a named file of a memory file system, with a ledger beside it.

Files are made without a name and get one when an extent gets its scope; they lose it before the memory goes back. So
at every instant a file is either nobody's and gone with the process, or one scope's with a ledger that says so. A
reboot empties everything: what carries another boot id is removed. docs/memory.md tells what survives what.

What lies in one extent of lasting memory: a small mapped file beside it, with one record for each slot.

Stores into a mapped file of a memory file system survive the process however it ends, so nothing is synced and a
publication costs one copy of 128 bytes. A record that a kill cut in half fails its check, which is bound to extent
and slot, and counts as a slot that somebody may still write to. docs/memory.md has the format.
"""

import logging
import mmap
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.memory.extent_store import Found, Maker
from kvstrata_agent.backends.memory.mapping import MappedExtent, Remains, erase_file, give_name, has_writers, open_file
from kvstrata_agent.backends.memory.run_lock import Hold
from kvstrata_agent.backends.recovered import Columns, fields_of
from kvstrata_agent.backends.slot_table import Extent, SlotTable, sole_writer
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import BackendFailedError, InvalidInputError, TierFullError

MAGIC: Final = b"KVSTRMEM"
VERSION: Final = 2
_VERSION_WITHOUT_WRITER: Final = 1
"""Of agents before; whoever could write the scope could write these extents, so they count as its owner's."""

_HEADER: Final = struct.Struct("<8sIIQQQQ36sH512s")
"""magic, version, length of the writer's name, extent, stride, slots, bytes of the extent, boot id, scope length,
scope."""
HEADER_BYTES: Final = 1024
"""Header, its check and zeros; a multiple of the records' size."""
_SCOPE_BYTES_MAX: Final = 512
_WRITER_BYTES_MAX: Final = 253
"""Longest name of a Kubernetes object; it follows the header, and the check covers it."""

_BODY: Final = struct.Struct("<QQQQ16s16s20s20sBB14s")
"""stamp, epoch, raw bytes, stored bytes, checksum, layout id, digest, parent, its length, codec length, codec."""
_CHECK_BYTES: Final = 8
RECORD_BYTES: Final = _CHECK_BYTES + _BODY.size
"""128: the check, XXH3-64 of the body under the place as seed, and the body."""

CODEC_BYTES_MAX: Final = 14
RECORD: Final = fields_of(CODEC_BYTES_MAX)
"""The same for NumPy."""
_CHECKED: Final = np.dtype([("check", ">u8"), ("body", f"V{_BODY.size}")])
"""The same as what is checked."""

_MARK: Final = struct.Struct("<QQQ")
"""What a record begins with while its slot is being written: no check, the stamp, and when it was given up in
monotonic milliseconds, 0 while it was not."""
_FREE: Final = bytes(RECORD_BYTES)
_UNCHECKED: Final = bytes(_CHECK_BYTES)

GIVEN_UP_MS: Final = 3_600_000
"""A writer that lost its reservation so long before it is taken to be gone: an hour. Copies take milliseconds."""


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """What is true of an extent for all its life."""

    extent: int
    stride_bytes: int
    slots: int
    size_bytes: int
    boot: str
    """Boot id of the machine: memory of another boot is not there any more, whatever a file says."""
    scope: ScopeId
    writer: str
    """Tenant whose clients may write there; empty for none."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a ledger says after a restart."""

    live: Columns
    """Every block."""
    suspects: list[int]
    """Slots that were being written, or whose record is damaged."""


class Ledger:
    """The ledger of one extent, mapped. No method waits."""

    __slots__ = ("_extent", "_map", "_stride_bytes", "path")

    def __init__(self, path: Path, fd: int, header: LedgerHeader) -> None:
        """Map `fd`, which is of the right size, and close it."""
        self.path = path
        self._extent = header.extent
        self._stride_bytes = header.stride_bytes
        try:
            self._map = mmap.mmap(fd, file_bytes(header.slots))
        finally:
            os.close(fd)

    def take(self, offset: int, stamp: int) -> None:
        """Note that a slot was given out for writing."""
        _MARK.pack_into(self._map, self._at(offset // self._stride_bytes), 0, stamp, 0)

    def commit(self, offset: int, stamp: int, record: Record) -> None:
        """Note the block that a slot holds. Raises `InvalidInputError` for a codec name that is too long."""
        index = offset // self._stride_bytes
        at = self._at(index)
        self._map[at : at + RECORD_BYTES] = pack_record(record, self._extent, index, stamp)

    def drop(self, offset: int, now_ms: int) -> None:
        """Note that a slot is free; one that was never committed may still be written to by whoever had it."""
        at = self._at(offset // self._stride_bytes)
        if self._map[at : at + _CHECK_BYTES] == _UNCHECKED:
            stamp = _MARK.unpack_from(self._map, at)[1]
            _MARK.pack_into(self._map, at, 0, stamp, now_ms)
        else:
            self._map[at : at + RECORD_BYTES] = _FREE

    def contents(self, header: LedgerHeader, now_ms: int) -> Contents:
        """Read all records. Those that do not count any more are wiped, so that they never come back."""
        records = np.frombuffer(self._map[:], RECORD, offset=HEADER_BYTES)
        words = records.view(np.uint64).reshape(header.slots, RECORD_BYTES // 8)
        written = np.flatnonzero(words.any(axis=1))[::-1]
        found = records.take(written)  # Twenty times as fast as by an index.
        is_live = are_whole(found, header.extent, written)
        suspects = []
        for index in written[~is_live].tolist():
            if _is_given_up(records[index].tobytes(), now_ms):
                self.wipe(index)
            else:
                suspects.append(index)
        live = Columns(header.scope, header.extent, header.stride_bytes, written[is_live], found.compress(is_live))
        return Contents(live, suspects)

    def wipe(self, index: int) -> None:
        """Make a slot free, whatever stood there."""
        at = self._at(index)
        self._map[at : at + RECORD_BYTES] = _FREE

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()

    @staticmethod
    def _at(index: int) -> int:
        return HEADER_BYTES + index * RECORD_BYTES


def file_bytes(slots: int) -> int:
    """Size of the ledger of so many slots."""
    return HEADER_BYTES + slots * RECORD_BYTES


def make_ledger(path: Path, header: LedgerHeader) -> Ledger:
    """Make the ledger of a new extent, with all its blocks allocated. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, file_bytes(header.slots))
        os.pwrite(fd, pack_header(header), 0)
    except OSError:
        os.close(fd)
        path.unlink()
        raise
    return Ledger(path, fd, header)


def open_ledger(path: Path) -> tuple[Ledger, LedgerHeader] | None:
    """Open the ledger of an earlier process; None when its header is damaged. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    header = unpack_header(os.pread(fd, HEADER_BYTES, 0))
    if header is None or os.fstat(fd).st_size != file_bytes(header.slots):
        os.close(fd)
        return None
    return Ledger(path, fd, header), header


def pack_header(header: LedgerHeader) -> bytes:
    """Write a header down. Raises `InvalidInputError` for a scope or writer that is too long."""
    scope, writer = header.scope.encode(), header.writer.encode()
    for name, text, most_bytes in (("scope", scope, _SCOPE_BYTES_MAX), ("writer", writer, _WRITER_BYTES_MAX)):
        if len(text) > most_bytes:
            raise InvalidInputError(f"{name} of {len(text)} B, at most {most_bytes} B fit a ledger")
    fields = _HEADER.pack(
        MAGIC, VERSION, len(writer), header.extent, header.stride_bytes, header.slots, header.size_bytes,
        header.boot.encode(), len(scope), scope,
    )  # fmt: skip
    fields += writer
    return (fields + xxhash.xxh3_64_digest(fields)).ljust(HEADER_BYTES, b"\0")


def unpack_header(page: bytes) -> LedgerHeader | None:
    """Read a header; None for a damaged one and for other formats."""
    if len(page) < HEADER_BYTES:
        return None
    magic, version, length, extent, stride, slots, size, boot, scope_length, text = _HEADER.unpack_from(page)
    end = _HEADER.size + min(length, _WRITER_BYTES_MAX)
    if xxhash.xxh3_64_digest(page[:end]) != page[end : end + _CHECK_BYTES]:
        return None
    if magic != MAGIC or version not in (VERSION, _VERSION_WITHOUT_WRITER) or stride * slots > size:
        return None
    scope = ScopeId(text[:scope_length].decode())
    writer = page[_HEADER.size : end].decode() if version == VERSION else sole_writer(scope)
    return LedgerHeader(extent, stride, slots, size, boot.rstrip(b"\0").decode(), scope, writer)


def pack_record(record: Record, extent: int, index: int, stamp: int) -> bytes:
    """Write a record down for one slot: its check does not hold for any other.

    Raises `InvalidInputError` for a codec name that is too long.
    """
    codec = record.codec.encode()
    if len(codec) > CODEC_BYTES_MAX:
        raise InvalidInputError(f"codec {record.codec!r}: names of at most {CODEC_BYTES_MAX} B fit a ledger")
    body = _BODY.pack(
        stamp, record.epoch, record.raw_bytes, record.stored_bytes, record.checksum, record.layout_id,
        record.key.digest, record.parent, len(record.parent), len(codec), codec,
    )  # fmt: skip
    return xxhash.xxh3_64_digest(body, extent << 32 | index) + body


def are_whole(records: NDArray[np.void], extent: int, indices: NDArray[np.intp]) -> NDArray[np.bool_]:
    """True for each record (`RECORD`) that was written down for its slot of the extent, and for nothing else."""
    seeds = (extent << 32 | indices.astype(np.uint64)).tolist()
    checks = map(xxhash.xxh3_64_intdigest, records.view(_CHECKED)["body"].tolist(), seeds)
    is_whole: NDArray[np.bool_] = records["check"] == np.fromiter(checks, np.uint64, len(records))
    return is_whole


def _is_given_up(packed: bytes, now_ms: int) -> bool:
    """True for a slot that nobody writes to any more; a damaged mark may be anything."""
    check, _, given_up_ms = _MARK.unpack_from(packed)
    return not check and bool(given_up_ms) and now_ms - given_up_ms >= GIVEN_UP_MS


assert struct.calcsize("<16s16s20s") == CHECKSUM_BYTES + LAYOUT_ID_BYTES + KEY_BYTES, "the format fixes these sizes"
assert RECORD.itemsize == RECORD_BYTES, "both say the same of a record"
assert HEADER_BYTES % RECORD_BYTES == 0, "records are aligned"
assert _HEADER.size + _WRITER_BYTES_MAX + _CHECK_BYTES <= HEADER_BYTES, "the header fits its place"


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(r"ext-[0-9a-f]{8,}\.(data|ledger)")
_log = logging.getLogger(__name__)


def boot_id() -> str:
    """Return what the kernel drew at random when the machine started."""
    return _BOOT_ID.read_text().strip()


def monotonic_ms() -> int:
    """Milliseconds of the clock that all processes of one boot share."""
    return time.monotonic_ns() // 1_000_000


class LastingStore:
    """Extents of one arena in files (`ExtentStore`). Their bytes lie in `memory_dir`, their ledgers in what is held."""

    def __init__(
        self,
        hold: Hold,
        memory_dir: Path,
        make: Maker,
        *,
        boot: str,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """Take over `hold`. `make` gives unnamed files of `memory_dir`, which no other arena uses."""
        self._hold = hold
        self._memory_dir = memory_dir
        self._make = make
        self._boot = boot
        self._clock_ms = clock_ms
        self._ledgers: dict[int, Ledger] = {}
        self.first_stamp = hold.first_stamp

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
        `BackendFailedError` when the directories cannot be read; what was not looked at stays.
        """
        try:
            yield from self._found(table)
        except OSError as e:
            raise BackendFailedError(f"{e.filename or self._hold.directory}: {e.strerror}") from e

    def _found(self, table: SlotTable) -> Iterator[Found]:
        kept: set[int] = set()
        ledgers = sorted(self._hold.directory.glob("ext-*.ledger"), key=lambda p: p.name, reverse=True)
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
        for directory in (self._hold.directory, self._memory_dir):
            remove_files(directory, names)

    def let_go(self, memory: MappedExtent) -> None:
        """See `ExtentStore`."""
        memory.let_go()

    def close(self) -> None:
        """See `ExtentStore`."""
        while self._ledgers:
            self._ledgers.popitem()[1].close()
        self._hold.release()

    def discard(self) -> None:
        """See `ExtentStore`."""
        try:
            self._remove_others(set())
        finally:
            self.close()

    def _ledger_path(self, extent: int) -> Path:
        return self._hold.directory / f"ext-{extent:08x}.ledger"

    def _memory_path(self, extent: int) -> Path:
        return self._memory_dir / f"ext-{extent:08x}.data"


def remove_files(directory: Path, kept: set[str]) -> None:
    """Remove ledgers and memory of all extents but the ones with names in `kept`. Foreign files stay."""
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) and path.stem not in kept:
            erase_file(path) if path.suffix == ".data" else path.unlink()


def held_bytes(directory: Path) -> int:
    """Bytes that extents of earlier runs take in a directory; 0 where there is none, or none that we may look into."""
    try:
        return sum(p.stat().st_size for p in directory.glob("ext-*.data"))
    except OSError:
        return 0
