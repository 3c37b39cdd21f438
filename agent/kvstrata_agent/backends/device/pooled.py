"""CXL memory that several hosts reach: each writes into slices that it has claimed, and everybody reads everywhere.

The head of the device says what it is (`Superblock`) and who has which slice (`Line`). Both are written and read as
whole cache lines, flushed each time: two hosts share no coherent cache before CXL 3. No compare-and-swap reaches
across hosts either, so a slice is claimed as a delta lease is (Chockler and Malkhi, PODC 2002; sanlock keeps its host
ids so): write, wait, read again. The owner counts on; a line that has not moved for `LAPSE_S` belongs to a host that is
dead or stands still, and may be overwritten, which its owner finds out with its next count.

That is enough, because claims only decide where one writes. What is read is verified against key, epoch and stamp of
its writer: a host that wakes up and finishes a copy into a slice of a new owner costs blocks, never wrong bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from stat import S_ISCHR
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.backends.base import Capabilities, SharedBackend, matches
from kvstrata_agent.backends.device.devdax import MAP_BYTES, DaxMemory, DaxTier, Region
from kvstrata_agent.backends.memory import sigbus
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, UnsupportedError
from kvstrata_api.units import KIB, MIB
from kvstrata_native import copy, flush, xxh3_128
from kvstrata_native import level as native_level
from kvstrata_native.choice import PYTHON

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kvstrata_agent.backends.base import Record, SlotRef
    from kvstrata_api.models.pool import CxlPooled

_log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Between two counts of an owner's lines."""
LAPSE_S: Final = 10.0
"""A line that has not moved for so long belongs to nobody: ten counts, as a heartbeat of a busy host may be late."""
SETTLE_S: Final = 0.2
"""Between a claim and its second look: longer than others take from reading a line to writing it."""
SLICES_MAX: Final = 4096
HEAD_BYTES: Final = 512 * KIB
"""The superblock's page and the lines, twice what they take."""
_SLICE_BYTES: Final = 16 * MIB
"""Of devices that have room for many: a block of any model in use fits."""
SLICE_BYTES_MIN: Final = 64 * KIB
_SLICES_WANTED: Final = 64
"""Of a small device: each scope of each host has slices of its own."""
_LARGE_BYTES: Final = 64 * MIB
_TABLE_AT: Final = 4 * KIB
_MAGIC: Final = "kvstrata-pooled-memory"
_FORMAT: Final = 1
_LINE: Final = struct.Struct("<4sIQ16s16s8x")
_LINE_MAGIC: Final = b"kvSL"
_LINE_BYTES: Final = 64
_FREE_LINE: Final = bytes(_LINE_BYTES)
_OWNER_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Line:
    """Who has a slice. A free slice has a line of zeros."""

    node: bytes
    """Digest of the host's name (16 B)."""
    owner: bytes
    """Random number of the process that claimed it (16 B): no two are alike."""
    beat: int
    """How often it has counted."""

    def packed(self) -> bytes:
        """64 B with a checksum, so that half a line is none."""
        body = _LINE.pack(_LINE_MAGIC, _FORMAT, self.beat, self.node, self.owner)
        return body + xxh3_128(body)[:8]


def parse_line(line: bytes) -> Line | None:
    """None for a free slice, and for what no owner has written."""
    magic, version, beat, node, owner = _LINE.unpack(line[: _LINE.size])
    if magic != _LINE_MAGIC or version != _FORMAT or xxh3_128(line[: _LINE.size])[:8] != line[_LINE.size :]:
        return None
    return Line(node, owner, beat)


class Table(Protocol):
    """The lines of a device."""

    def read(self) -> list[bytes]:
        """All lines as they are in memory now."""

    def write(self, index: int, line: bytes) -> None:
        """Replace one; it is in memory on return."""


@dataclass(slots=True)
class _Watched:
    """A line of another owner, and when it was first seen like this."""

    line: bytes
    since_s: float


@dataclass(slots=True)
class Claims:
    """Slices of one process. Everything but the device and the clock is here; not for two threads at a time."""

    table: Table
    node: bytes
    owner: bytes
    clock: Callable[[], float]
    wait: Callable[[float], None]
    held: set[int] = field(default_factory=set)
    """Slices that are ours."""
    dirty: set[int] = field(default_factory=set)
    """Of these, those in which blocks of an owner before may lie."""
    barred: set[int] = field(default_factory=set)
    """Slices that are not to be claimed: this host has met a memory error there."""
    _beat: int = 0
    _watched: dict[int, _Watched] = field(default_factory=dict)

    def observe(self) -> list[bytes]:
        """Look at all lines, and remember since when those of others stand still."""
        lines, now_s = self.table.read(), self.clock()
        for index, line in enumerate(lines):
            watched = self._watched.get(index)
            if watched is None or watched.line != line:
                self._watched[index] = _Watched(line, now_s)
        return lines

    def free(self, lines: Sequence[bytes]) -> list[int]:
        """Slices that may be claimed, those of this node and of nobody first."""
        now_s = self.clock()
        first = int.from_bytes(self.node[:4], "little") % max(1, len(lines))
        order = [*range(first, len(lines)), *range(first)]  # Hosts begin at different places: few claim the same.
        at_once, lapsed = [], []
        for index in order:
            line, of = lines[index], parse_line(lines[index])
            if index in self.held or index in self.barred:
                continue
            if line == _FREE_LINE or (of is not None and of.node == self.node):
                at_once.append(index)
            elif now_s - self._watched[index].since_s >= LAPSE_S:
                lapsed.append(index)
        return at_once + lapsed

    def claim(self, count: int, within_s: float) -> int:
        """Claim until `count` slices are held or `within_s` has passed; returns how many are held then."""
        until_s = self.clock() + within_s
        while (missing := count - len(self.held)) > 0:
            before = self.observe()
            if taken := self.free(before)[:missing]:
                self._take(taken, before)
            elif self.clock() >= until_s:
                break
            else:
                self.wait(BEAT_S / 2)
                self.renew()
        return len(self.held)

    def _take(self, taken: Sequence[int], before: Sequence[bytes]) -> None:
        """Write, wait, read again: who wrote last has it."""
        self._count(taken)
        self.wait(SETTLE_S)
        after = self.observe()
        ours = {index for index in taken if self.is_ours(after[index])}
        self.held |= ours
        self.dirty |= {index for index in ours if before[index] != _FREE_LINE}

    def renew(self) -> frozenset[int]:
        """Count on; returns the slices that are not ours any more."""
        lines = self.observe()
        lost = frozenset(i for i in self.held if not self.is_ours(lines[i]))
        self.held -= lost
        self.dirty -= lost
        self._count(sorted(self.held))
        return lost

    def _count(self, indices: Sequence[int]) -> None:
        self._beat += 1
        line = Line(self.node, self.owner, self._beat).packed()
        for index in indices:
            self.table.write(index, line)

    def lose_all(self) -> frozenset[int]:
        """Hold nothing any more, without a look at the device; returns what was held."""
        lost = frozenset(self.held)
        self.held.clear()
        self.dirty.clear()
        return lost

    def give_back(self, indices: Sequence[int]) -> None:
        """Leave slices to whoever wants them; those that have another owner by now stay as they are.

        So do those in which blocks still lie: they lapse, and whoever takes them then clears them first.
        """
        lines = self.table.read()
        for index in {*indices} & self.held - self.dirty - self.barred:
            if self.is_ours(lines[index]):
                self.table.write(index, _FREE_LINE)
        self.held -= {*indices}
        self.dirty -= {*indices}

    def is_ours(self, line: bytes) -> bool:
        """True for the line of a slice that this process has."""
        of = parse_line(line)
        return of is not None and of.owner == self.owner

    def others_held(self, lines: Sequence[bytes]) -> int:
        """Slices that other owners have."""
        return sum(line != _FREE_LINE and not self.is_ours(line) for line in lines)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What every host would write at the head of a device. It follows from pool and size, so nobody has to be first."""

    pool: str
    size_bytes: int

    @property
    def slice_bytes(self) -> int:
        """Power of two, so that there are at most `SLICES_MAX`; one extent each."""
        small = 1 << max(1, self.size_bytes // _SLICES_WANTED).bit_length() - 1
        large = 1 << max(0, self.size_bytes // SLICES_MAX - 1).bit_length()
        return max(SLICE_BYTES_MIN, min(_SLICE_BYTES, small), large)

    @property
    def first_at(self) -> int:
        """Where the first slice begins: where devices are mapped in pages of 2 MiB, at one."""
        return MAP_BYTES if self.size_bytes >= _LARGE_BYTES else HEAD_BYTES

    @property
    def slices(self) -> int:
        """How many fit."""
        return min(SLICES_MAX, (self.size_bytes - self.first_at) // self.slice_bytes)

    def packed(self) -> bytes:
        """A page, ended by its checksum."""
        fields = {"magic": _MAGIC, "format": _FORMAT, "pool": self.pool, "size_bytes": self.size_bytes}
        text = json.dumps(fields, sort_keys=True).encode()
        return (text + bytes(_TABLE_AT - 16 - len(text))) + xxh3_128(text)


def check_superblock(page: bytes, wanted: Superblock, where: Path) -> bool:
    """True where a device is already ours, False where nobody has claimed it.

    Raises `InvalidInputError` for one of another pool, size or format.
    """
    text, digest = page[:-16].rstrip(b"\0"), page[-16:]
    if xxh3_128(text) != digest or _MAGIC.encode() not in text:
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        version = found.get("format") if isinstance(found, dict) else text[:80]
        raise InvalidInputError(f"cxl.pooled.path {where}: format {version!r:.80}, this version has {_FORMAT}")
    for name, value in (("pool", wanted.pool), ("size_bytes", wanted.size_bytes)):
        if found.get(name) != value:
            raise InvalidInputError(
                f"cxl.pooled.path {where}: it belongs to {name} {found.get(name)!s:.80}, not {value}; clear its first "
                f"{HEAD_BYTES} B where no host uses it any more"
            )
    return True


class _MappedTable:
    """Lines in mapped memory."""

    def __init__(self, memory: memoryview, slices: int, guarded: sigbus.Guarded) -> None:
        self._lines = memory[_TABLE_AT : _TABLE_AT + slices * _LINE_BYTES]
        self._guarded = guarded

    def read(self) -> list[bytes]:
        """All lines. Raises `BackendFailedError` where the device has failed."""
        flush(self._lines)
        found = bytes(self._lines)
        if self._guarded.is_lost:
            raise BackendFailedError("memory error in the head of the device: who has which slice is not known")
        return [found[at : at + _LINE_BYTES] for at in range(0, len(found), _LINE_BYTES)]

    def read_one(self, index: int) -> bytes:
        """One line; of zeros where the device has failed."""
        with self._lines[index * _LINE_BYTES : (index + 1) * _LINE_BYTES] as at:
            flush(at)
            return bytes(at)

    def write(self, index: int, line: bytes) -> None:
        """Replace one line."""
        with self._lines[index * _LINE_BYTES : (index + 1) * _LINE_BYTES] as at:
            at[:] = line
            flush(at)

    def close(self) -> None:
        """Let go of the memory."""
        self._lines.release()
        sigbus.unguard(self._guarded)


class PooledMemory(DaxMemory):
    """The slices of a device that this host has claimed (`DeviceMemory`), and reading those of others."""

    def __init__(self, path: Path, node: str, superblock: Superblock) -> None:
        """Map the device and make sure of its head. Raises `OSError`, `InvalidInputError` and `BackendFailedError`."""
        size_bytes, first_at = superblock.size_bytes, superblock.first_at
        super().__init__(path, size_bytes, superblock.slice_bytes, first_at=first_at, lock=_lock_of(node))
        self.superblock = superblock
        self._is_free = [False] * superblock.slices
        self._lost: set[int] = set()
        guarded = sigbus.guard(self._address, first_at)
        try:
            self._check_head(guarded)
        except (InvalidInputError, BackendFailedError):
            self._unmap()
            sigbus.unguard(guarded)
            raise
        self._table = _MappedTable(self._whole, superblock.slices, guarded)
        digest = blake2b(node.encode(), digest_size=16).digest()
        self._stop = threading.Event()
        self.claims = Claims(self._table, digest, os.urandom(_OWNER_BYTES), time.monotonic, self._wait)
        self._claiming = threading.Lock()
        self._taking_up = threading.Lock()
        self._wanted = 0
        self._beats = threading.Thread(target=self._beat, name="kvstrata-pooled", daemon=True)

    def _check_head(self, guarded: sigbus.Guarded) -> None:
        """Write the superblock of a device without one. Raises `InvalidInputError` and `BackendFailedError`."""
        with self._whole[:_TABLE_AT] as head:
            flush(head)
            found = bytes(head)
            if guarded.is_lost:
                raise BackendFailedError(f"{self._path}: memory error in the head")
            if not check_superblock(found, self.superblock, self._path):
                head[:] = self.superblock.packed()
                flush(head)

    def _wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def claim(self, size_bytes: int, within_s: float) -> None:
        """Hold slices of `size_bytes` from now on. Raises `BackendFailedError`, and `InvalidInputError` with room."""
        unit_bytes = self._unit_bytes
        count = size_bytes // unit_bytes
        with self._claiming:
            before = self.claims.held.copy()
            held = self.claims.claim(count, within_s)
            if held < count:
                others = self.claims.others_held(self._table.read())
                self._give_up(self.claims.held - before)
                raise InvalidInputError(
                    f"cxl.pooled.path {self._path}: {size_bytes} B asked for, {held * unit_bytes} B could be had of "
                    f"{self.superblock.slices * unit_bytes} B; other hosts have {others * unit_bytes} B"
                )
            self._wanted = count
        if not self._beats.is_alive():
            self._beats.start()
        self._take_up()

    def _give_up(self, indices: set[int]) -> None:
        """Give back slices that no extent has had."""
        for index in sorted(self.claims.dirty & indices):
            self._clear_slice(index)
            self._renew()  # The beat waits for this.
        self.claims.give_back(sorted(indices))

    def shrink(self, size_bytes: int) -> None:
        """Hold no more slices than for `size_bytes`; those that still have blocks go once these have gone."""
        self._wanted = size_bytes // self._unit_bytes

    def _take_up(self, *, counts: bool = False) -> None:
        """Clear new slices and let extents have them; `counts` on meanwhile where the beat itself does it."""
        with self._taking_up:  # Else one thread would clear what the other one has given to an extent.
            for index in sorted(self.claims.dirty.copy()):
                self._clear_slice(index)
                if counts:
                    self._renew()
            with self._lock:
                claims = self.claims
                clear = claims.held.copy() - claims.dirty.copy() - claims.barred.copy()
                for index in clear - self._used() - self._lost:
                    self._is_free[index] = True

    def _used(self) -> set[int]:
        """Slices that extents have, for whoever has the lock."""
        return {unit for region in self._regions.values() for unit in self._units(region)}

    def _slice(self, index: int) -> Region:
        return Region(self._first_at + index * self._unit_bytes, self._unit_bytes)

    def _clear_slice(self, index: int) -> None:
        """Clear a slice that no extent has, unless another host has it. Where the device has failed it is barred."""
        if not self.claims.is_ours(self._table.read_one(index)):
            return  # Clearing others takes long, and we may have stood still.
        region = self._slice(index)
        with suppress(BackendFailedError), self._guard(region.offset, region.offset + region.size_bytes):
            self._clear(region)
        self.claims.dirty.discard(index)

    def _beat(self) -> None:
        """Count on until the end; without a head nothing is ours any more."""
        while not self._stop.wait(BEAT_S):
            try:
                with self._claiming:
                    self._count()
            except BackendFailedError as e:
                self._lose(self.claims.lose_all())  # Nobody counts on for them: they are not to be used again.
                _log.error("pooled memory has failed", extra={"path": str(self._path), "error": str(e)})
                return

    def _count(self) -> None:
        """Count on, replace what was lost, and give back what is not wanted any more."""
        self._renew()
        held = len(self.claims.held)
        if held < self._wanted and self.claims.claim(self._wanted, 0.0) > held:
            self._take_up(counts=True)
        elif held > self._wanted:
            self._give_back(held - self._wanted)

    def _renew(self) -> None:
        lost = self.claims.renew()
        if lost:
            self._lose(lost)
            details = {"path": str(self._path), "slices": len(lost)}
            _log.warning("slices of pooled memory have another owner", extra=details)

    def _lose(self, units: Collection[int]) -> None:
        """Blocks there are lost; extents that have some of these units are given up."""
        with self._lock:
            self._lost |= self._used() & {*units}
            for unit in units:
                self._is_free[unit] = False

    def _give_back(self, count: int) -> None:
        with self._lock:
            held = self.claims.held - self._used()  # What an extent still has is not cleared.
            idle = [i for i in sorted(held, reverse=True) if self._is_free[i]][:count]
            for index in idle:
                self._is_free[index] = False
        self.claims.give_back(idle)

    def free(self, extent: int) -> None:
        """Let other extents have the slice of one that goes, unless it was lost."""
        if self._lost.isdisjoint(self._units(self._regions[extent])):
            super().free(extent)

    def release(self, extent: int) -> None:
        """Clear what an extent has not lost. Where the device has failed its slices are barred. See `DeviceMemory`."""
        units = self._units(self._regions[extent])
        for unit in sorted({*units} - self._lost):
            self._clear(self._slice(unit))
        if self._guarded[extent].is_lost:
            self._bar(units)  # Before nobody has them any more: a claim might take them up.
        self._forget(extent)
        if self._lost.isdisjoint(units):
            return
        with self._lock:
            gone = {*units} - self._used()
            self._lost -= gone  # Of what another extent has by now it is the mark.
            for unit in gone:
                self._is_free[unit] = unit in self.claims.held and unit not in self.claims.barred

    def _bar(self, units: range) -> None:
        """Use slices no more and claim them no more; what extents have there is lost."""
        self.claims.barred.update(units)
        self._lose(units)

    def copy_in(self, extent: int, offset: int, source: memoryview) -> None:
        """Fill a part of an extent; other hosts see it on return. Raises `BackendFailedError`."""
        self._check_owned(extent)
        super().copy_in(extent, offset, source)
        flush(self._part(extent, offset, len(source)))

    def copy_out(self, extent: int, offset: int, into: memoryview) -> None:
        """Read a part of an extent. Raises `BackendFailedError`."""
        self._check_owned(extent)
        super().copy_out(extent, offset, into)

    def _check_owned(self, extent: int) -> None:
        if self._lost and not self._lost.isdisjoint(self._units(self._regions[extent])):
            raise BackendFailedError(f"{self._path}: slices of extent {extent} have another owner; its blocks are lost")

    def broken(self) -> frozenset[int]:
        """Extents with memory errors, and those whose slices were lost."""
        if not self._lost:
            return super().broken()
        regions = tuple(self._regions.items())
        return super().broken() | {e for e, region in regions if not self._lost.isdisjoint(self._units(region))}

    def place(self, extent: int) -> str:
        """Name of an extent's slices for other hosts. Raises `KeyError` once it has gone."""
        return f"{self.claims.owner.hex()}-{self._units(self._regions[extent])[0]}"

    def copy_other(self, place: str, offset: int, into: memoryview) -> None:
        """Read what another host wrote, past the caches of this one.

        Raises `InvalidInputError` for a place that cannot be, and `BlockCorruptError` for slices that have another
        owner by now.
        """
        owner, index = _parse_place(place)
        if index >= self.superblock.slices or not 0 <= offset <= self._unit_bytes - len(into):
            raise InvalidInputError(
                f"{len(into)} B at {offset} of {place}: slices of {self._unit_bytes} B, {self.superblock.slices} in all"
            )
        of = parse_line(self._table.read_one(index))
        if of is None or of.owner != owner:
            raise BlockCorruptError(f"{place}: this slice has another owner by now")
        at = self._first_at + index * self._unit_bytes + offset
        with self._whole[at : at + len(into)] as there, self._guard(at, at + len(into)):
            flush(there)
            copy(into, there)

    @contextmanager
    def _guard(self, begin: int, end: int) -> Iterator[None]:
        """Survive memory errors in what others have. Where one is met, this host sees zeros and writes no more."""
        begin = max(begin // MAP_BYTES * MAP_BYTES, self._first_at)  # The head has a guard of its own.
        end = min(round_up(end, MAP_BYTES), len(self._whole))
        guarded = sigbus.guard(self._address + begin, end - begin)
        try:
            yield
        finally:
            sigbus.unguard(guarded)
        if guarded.is_lost:
            first = (begin - self._first_at) // self._unit_bytes
            self._bar(range(first, min(self.superblock.slices, -(-(end - self._first_at) // self._unit_bytes))))
            raise BackendFailedError(f"{self._path}: memory error between bytes {begin} and {end}")

    def close(self) -> None:
        """Clear what is left, give back what is clear and unmap."""
        self._stop.set()
        if self._beats.is_alive():
            self._beats.join()
        for extent in tuple(self._regions):
            self.release(extent)
        with suppress(BackendFailedError):
            self.claims.give_back(sorted(self.claims.held))
        self._table.close()
        super().close()


def _parse_place(place: str) -> tuple[bytes, int]:
    owner, _, index = place.partition("-")
    try:
        found = bytes.fromhex(owner), int(index)
    except ValueError:
        found = b"", -1
    if len(found[0]) != _OWNER_BYTES or found[1] < 0:
        raise InvalidInputError(f"{place!r} names no slice of pooled memory")
    return found


class PooledTier(DaxTier):
    """Blocks in claimed slices (`TierBackend`, `SharedBackend`)."""

    memory: PooledMemory

    def _target_bytes(self, capacity_bytes: int) -> int:  # noqa: ARG002
        """One slice: a run of them is not to be had where several hosts take and leave."""
        return self.memory.superblock.slice_bytes

    @property
    def shared(self) -> SharedBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    def file_of(self, slot: SlotRef) -> str:
        """Name of the slices that hold a slot, for other hosts."""
        return self.memory.place(slot.extent)

    async def read_other(self, node: str, file: str, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Read and verify a block that another host wrote. See `SharedBackend`."""
        target = into[: record.stored_bytes]

        def read() -> bool:
            self.memory.copy_other(file, slot.offset, target)
            return matches(target, record, slot.stamp)

        if not await self._run(read):
            raise BlockCorruptError(f"block {record.key} of {node} in {file} at {slot.offset}: checksum differs")

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Claim what is more, or give back what is less. See `TierBackend`."""
        if capacity_bytes > self.capacity_bytes:
            await in_thread(None, partial(self.memory.claim, capacity_bytes, 0.0))
        else:
            self.memory.shrink(capacity_bytes)
        return await super().resize(capacity_bytes)


def open_pooled(settings: CxlPooled, pool: str, node: str, capacity_bytes: int) -> PooledTier:
    """Tier in slices of a device that other nodes of the pool reach as well. Blocking; waits for slices of dead hosts.

    A regular file plays the device where several agents of one machine are tried, and says "emulated". Raises
    `InvalidInputError` for a device that cannot be opened, is too small, is another pool's or has too little free,
    `BackendFailedError` for one with a memory error in its head, and `UnsupportedError` where cache lines cannot be
    flushed.
    """
    path = Path(settings.path)
    try:
        is_device = S_ISCHR(path.stat().st_mode)
        size_bytes = _size_of(path, is_device=is_device) // MAP_BYTES * MAP_BYTES
    except OSError as e:
        raise InvalidInputError(f"cxl.pooled.path {path}: {e.strerror}") from e
    if is_device and native_level == PYTHON:
        raise UnsupportedError("CXL mode Pooled: this build has no compiled kernels, which flush cache lines")
    superblock = Superblock(pool, size_bytes)
    room_bytes = max(0, superblock.slices) * superblock.slice_bytes
    if not superblock.slice_bytes <= capacity_bytes <= room_bytes:
        raise InvalidInputError(
            f"cxl.pooled.path {path}: {capacity_bytes} B asked for, it has {room_bytes} B in slices of "
            f"{superblock.slice_bytes} B"
        )
    try:
        memory = PooledMemory(path, node, superblock)
    except OSError as e:
        raise InvalidInputError(f"cxl.pooled.path {path}: {e.strerror}") from e
    try:
        memory.claim(capacity_bytes, LAPSE_S + BEAT_S)
    except (InvalidInputError, BackendFailedError):
        memory.close()
        raise
    can = Capabilities(
        medium="cxl-pooled" if is_device else "emulated-cxl-pooled",
        is_memory=True,
        survives_restart=False,
        is_emulated=not is_device,
        alignment_bytes=4 * KIB,
    )
    return PooledTier(can, memory, capacity_bytes, page_bytes=superblock.slice_bytes)


def _size_of(path: Path, *, is_device: bool) -> int:
    """Bytes of a dax device, by its number in sysfs, or of a file."""
    if not is_device:
        return path.stat().st_size
    number = path.stat().st_rdev
    size = Path(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}/size")
    try:
        return int(size.read_text())
    except (OSError, ValueError) as e:
        raise InvalidInputError(f"cxl.pooled.path {path}: no dax device, {size} cannot be read") from e


def _lock_of(node: str) -> Callable[[int], None]:
    """Lock that one process of a node takes: on a byte of its own, as the device, or its file, is everybody's."""
    at = int.from_bytes(blake2b(node.encode(), digest_size=7).digest(), "little")

    def lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))

    return lock
