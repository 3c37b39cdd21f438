"""The ledger of one extent of persistent memory: a small mapped file beside it, with one record for each slot.

Stores into a mapped file of a memory file system survive the process however it ends, so nothing is synced and a
publication costs one copy of 128 bytes. A record that a kill cut in half fails its check, which is bound to extent
and slot, and counts as a slot that somebody may still write to. docs/memory.md has the format.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstrata_agent.backends.base import Columns, Record
from kvstrata_agent.backends.recovered import fields_of
from kvstrata_agent.backends.slot_table import sole_writer
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import InvalidInputError

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
    """Boot id of the machine: memory of another boot is not there any more, whatever a file states."""
    scope: ScopeId
    writer: str
    """Tenant whose clients may write there; empty for none."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a ledger lists after a restart."""

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
    try:
        scope = ScopeId(text[:scope_length].decode())
        writer = page[_HEADER.size : end].decode() if version == VERSION else sole_writer(scope)
        return LedgerHeader(extent, stride, slots, size, boot.rstrip(b"\0").decode(), scope, writer)
    except UnicodeDecodeError:
        return None


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
assert RECORD.itemsize == RECORD_BYTES, "both describe the same record"
assert HEADER_BYTES % RECORD_BYTES == 0, "records are aligned"
assert _HEADER.size + _WRITER_BYTES_MAX + _CHECK_BYTES <= HEADER_BYTES, "the header fits its place"
