"""CXL memory as a character device (devdax): mapped by this process alone.

A descriptor of the device opens all of it, so engines cannot be given a part: blocks come up to a tier that they map.
The memory counts as volatile, whatever the device is; what a block leaves behind is cleared when its extent goes, and
nobody is given bytes that no checksum stands for.
Copies go past the caches and end with a fence, which is what persistent regions behind the device ask for as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Capabilities, matches
from kvstrata_agent.backends.device.device_tier import DeviceTier
from kvstrata_agent.backends.memory import sigbus
from kvstrata_api.errors import (
    BackendFailedError,
    BlockCorruptError,
    InvalidInputError,
    TierFullError,
    UnsupportedError,
)
from kvstrata_api.units import KIB, MIB
from kvstrata_native import copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata_agent.backends.base import Record, SlotRef
    from kvstrata_agent.backends.slot_table import Extent
    from kvstrata_node.discovery import DaxDevice

DRIVER: Final = "device_dax"
MAP_BYTES: Final = 2 * MIB
"""Devices are mapped in multiples of this, whatever their own alignment of 4 KiB or 2 MiB."""
_ALIGNMENT_BYTES: Final = 4 * KIB
_PARTS: Final = 64
_DEV: Final = Path("/dev")


def open_devdax(capacity_bytes: int, devices: Sequence[DaxDevice], dev: Path = _DEV) -> DaxTier:
    """Tier on the first dax device that is large enough and in nobody's use.

    Raises `UnsupportedError` when there is none in mode devdax, and `InvalidInputError` when all are too small or
    taken, with the name and size of each.
    """
    there = [d for d in devices if d.driver == DRIVER]
    if not there:
        found = "; ".join(f"{d.name} has {f'driver {d.driver}' if d.driver else 'no driver'}" for d in devices)
        raise UnsupportedError(
            f"CXL mode DevDax: this node has no dax device with driver {DRIVER}{found and f': {found}'}; make one "
            "(daxctl reconfigure-device --mode=devdax), or use mode NumaNode for memory that is online"
        )
    refused = []
    for device in there:
        if device.size_bytes < capacity_bytes:
            refused.append(f"{device.name} has {device.size_bytes} B")
            continue
        try:
            return _opened(dev / device.name, device.size_bytes, capacity_bytes)
        except OSError as e:
            refused.append(f"{device.name}: {e.strerror}")
    raise InvalidInputError(f"CXL mode DevDax: {capacity_bytes} B asked for; {'; '.join(refused)}")


def _opened(path: Path, size_bytes: int, capacity_bytes: int) -> DaxTier:
    part_bytes = capacity_bytes // _PARTS
    page_bytes = MAP_BYTES if part_bytes >= MAP_BYTES else _ALIGNMENT_BYTES  # Zeros take the place of whole pages only.
    unit_bytes = max(page_bytes, part_bytes // page_bytes * page_bytes)
    memory = DaxMemory(path, size_bytes // MAP_BYTES * MAP_BYTES, unit_bytes)
    can = Capabilities(
        medium="cxl-devdax",
        is_memory=True,
        survives_restart=False,
        is_emulated=False,
        alignment_bytes=_ALIGNMENT_BYTES,
    )
    return DaxTier(can, memory, capacity_bytes, page_bytes=unit_bytes)


class DaxTier(DeviceTier["DaxMemory"]):
    """Blocks in a mapped device."""

    def _release(self, extent: Extent) -> None:
        self.memory.free(extent.id)
        super()._release(extent)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Copy host bytes to the device; on return they are there. See `TierBackend`."""
        self._check_there(slot)
        await self._run(partial(self.memory.copy_in, slot.extent, slot.offset, stored[: record.stored_bytes]))

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Copy to host memory and verify the copy. See `TierBackend`."""
        self._check_there(slot)
        is_same = await self._run(partial(self._copy_out, slot, record, into[: record.stored_bytes]))
        if not is_same or not self._table.is_live(slot):
            raise BlockCorruptError(f"block {record.key} in extent {slot.extent} at {slot.offset}: checksum differs")

    def _copy_out(self, slot: SlotRef, record: Record, target: memoryview) -> bool:
        self.memory.copy_out(slot.extent, slot.offset, target)
        return matches(target, record, slot.stamp)

    def _check_there(self, slot: SlotRef) -> None:
        if slot.extent not in self._table.extents:
            raise BackendFailedError(f"extent {slot.extent} is gone: slot at {slot.offset} was dropped")


@dataclass(frozen=True, slots=True)
class Region:
    """Where an extent lies in a mapped device."""

    offset: int
    size_bytes: int


def _lock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class DaxMemory:
    """One mapped device, given out in units (`DeviceMemory`)."""

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        unit_bytes: int,
        *,
        first_at: int = 0,
        lock: Callable[[int], None] = _lock,
    ) -> None:
        """Map the device and take it for this process; units begin at `first_at`. Raises `OSError`."""
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock(self._fd)
            self._map = mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED)
        except OSError:
            os.close(self._fd)
            raise
        self._whole = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._unit_bytes = unit_bytes
        self._first_at = first_at
        self._is_free = [True] * ((size_bytes - first_at) // unit_bytes)
        self._regions: dict[int, Region] = {}
        self._guarded: dict[int, sigbus.Guarded] = {}
        self._lock = threading.Lock()
        """`make` and the thread of the copies both search for room."""

    def make(self, extent: int, size_bytes: int) -> None:
        """Give an extent the first units in a row that are free. See `DeviceMemory`."""
        units = -(-size_bytes // self._unit_bytes)
        with self._lock:
            first = self._first_free(units)
            if first is None:
                free = f"{sum(self._is_free) * self._unit_bytes} B are free"
                raise TierFullError(f"{size_bytes} B of {self._path} in one piece; {free}", delay_s=0.1)
            self._is_free[first : first + units] = [False] * units
            at = self._first_at + first * self._unit_bytes
            region = self._regions[extent] = Region(at, units * self._unit_bytes)
        self._guarded[extent] = sigbus.guard(self._address + region.offset, region.size_bytes)

    def _first_free(self, units: int) -> int | None:
        run = 0
        for i, is_free in enumerate(self._is_free):
            run = run + 1 if is_free else 0
            if run == units:
                return i - units + 1
        return None

    def _clear(self, region: Region) -> None:
        zeros = bytes(min(region.size_bytes, MIB))
        for at in range(region.offset, region.offset + region.size_bytes, len(zeros)):
            end = min(at + len(zeros), region.offset + region.size_bytes)
            copy(self._whole[at:end], zeros[: end - at])

    def free(self, extent: int) -> None:
        """Let other extents have the units of one that goes: who writes there comes after `release`, in one thread."""
        if not self._guarded[extent].is_lost:
            with self._lock:
                for unit in self._units(self._regions[extent]):
                    self._is_free[unit] = True

    def release(self, extent: int) -> None:
        """Clear an extent. Where the device has failed its units are not used again. See `DeviceMemory`."""
        self._clear(self._regions[extent])
        region, is_lost = self._forget(extent)
        if is_lost:  # Zeros of ours lie there now, and what is behind them is not to be touched again.
            with self._lock:
                for unit in self._units(region):
                    self._is_free[unit] = False

    def _forget(self, extent: int) -> tuple[Region, bool]:
        """Forget an extent; returns where it was, and whether the device had failed there."""
        with self._lock:
            region, guarded = self._regions.pop(extent), self._guarded.pop(extent)
        sigbus.unguard(guarded)
        return region, guarded.is_lost

    def _units(self, region: Region) -> range:
        first = (region.offset - self._first_at) // self._unit_bytes
        return range(first, first + region.size_bytes // self._unit_bytes)

    def copy_in(self, extent: int, offset: int, source: memoryview) -> None:
        """Fill a part of an extent. Raises `BackendFailedError`."""
        copy(self._part(extent, offset, len(source)), source)
        self._check(extent)

    def copy_out(self, extent: int, offset: int, into: memoryview) -> None:
        """Read a part of an extent. Raises `BackendFailedError`."""
        copy(into, self._part(extent, offset, len(into)))
        self._check(extent)

    def _part(self, extent: int, offset: int, size_bytes: int) -> memoryview:
        at = self._regions[extent].offset + offset
        return self._whole[at : at + size_bytes]

    def _check(self, extent: int) -> None:
        """A load that the device cannot serve is a SIGBUS, which `sigbus` survives and remembers."""
        if self._guarded[extent].is_lost:
            raise BackendFailedError(f"{self._path}: memory error in extent {extent}; its blocks are lost")

    def broken(self) -> frozenset[int]:
        """Extents with memory errors."""
        return frozenset(extent for extent, guarded in tuple(self._guarded.items()) if guarded.is_lost)

    def close(self) -> None:
        """Clear what is left and unmap."""
        for extent in tuple(self._regions):
            self.release(extent)
        self._unmap()

    def _unmap(self) -> None:
        self._whole.release()
        self._map.close()
        os.close(self._fd)
