"""One tier over several devices: a record store on each, blocks spread over them (`TierBackend`, `StripedBackend`).

Every block lies whole on one device, under a claim and an index of that device: it can be added, taken out or lost
without the others. Extents carry the number of their device in their lowest bits; stamps are counted for all together.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstrata_agent.backends.base import (
    Capabilities,
    Device,
    GroupBackend,
    MediumIntactError,
    Notes,
    NotingBackend,
    OptionalCapabilities,
    Reading,
    Record,
    SealingBackend,
    SlotRef,
    StripedBackend,
    Writing,
)
from kvstrata_agent.backends.file.devices import DeviceHealth, DeviceLoad, divide, measure_room, order, room_of_each
from kvstrata_agent.backends.file.record_store import slot_bytes
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.threads import in_thread, together
from kvstrata_api.errors import BackendFailedError, InvalidInputError, KvStrataError, TierFullError
from kvstrata_api.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from kvstrata_agent.backends.base import Columns
    from kvstrata_agent.backends.file.record_store import RecordStore
    from kvstrata_api.blocks import ScopeId

    Opener = Callable[[int], Awaitable[RecordStore]]

A = TypeVar("A", Reading, Writing)
T = TypeVar("T")

DEVICE_BITS: Final = 5
"""32 devices; 2^27 segments are left for each, which are years of writing at the rate of any device."""

_log = logging.getLogger(__name__)


class _Part:
    """One device: its store when it could be opened, how it fares, and what is under way on it."""

    def __init__(self, number: int, name: str, opener: Opener) -> None:
        self.number = number
        self.name = name
        self.opener = opener
        self.store: RecordStore | None = None
        """None while the device is absent: until what lies on it is known, its free places are not."""
        self.granted_bytes = 0
        """Its part of the tier's capacity."""
        self.health = DeviceHealth()
        self.moving_bytes = 0
        self.written_bytes = 0
        self.unwritten: dict[int, int] = {}
        """Bytes of slots that were given out and not written yet, by stamp."""

    def extent(self, local: int) -> int:
        """Number outside of an extent of this device."""
        return local << DEVICE_BITS | self.number

    def extents(self, local: Iterable[int]) -> frozenset[int]:
        """See `extent`."""
        return frozenset(self.extent(i) for i in local)

    def outside(self, slot: SlotRef) -> SlotRef:
        """Name a slot of this device for the tier's callers."""
        return SlotRef(self.extent(slot.extent), slot.offset, slot.size_bytes, slot.stamp)

    def lack(self, cause: Exception) -> None:
        """Be absent until a later try."""
        if self.health.error != str(cause):
            _log.warning("device cannot be opened", extra={"device": self.name, "cause": str(cause)})
        self.store, self.health.error = None, str(cause)

    def settle(self, slot: SlotRef) -> None:
        """Note that a slot is written, or will not be."""
        self.moving_bytes -= self.unwritten.pop(slot.stamp, 0)

    @contextmanager
    def moving(self, size_bytes: int) -> Iterator[None]:
        """Count bytes that are under way."""
        self.moving_bytes += size_bytes
        try:
            yield
        finally:
            self.moving_bytes -= size_bytes

    def state(self) -> Device:
        """State of the device. One that takes no blocks offers no room."""
        if self.store is None:
            return Device(self.name, 0, 0, self.health.error, self.written_bytes)
        used_bytes = self.store.used_bytes
        capacity_bytes = used_bytes if self.health.error else self.store.capacity_bytes
        return Device(self.name, capacity_bytes, used_bytes, self.health.error, self.written_bytes)


class StripedStore(OptionalCapabilities):
    """A tier of records over several record stores."""

    def __init__(self, parts: tuple[_Part, ...], capacity_bytes: int, fallback: str) -> None:
        """Use `open_striped`."""
        assert len(parts) <= 1 << DEVICE_BITS
        self._parts = parts
        self._capacity_bytes = capacity_bytes
        self._fallback = fallback
        self._next_stamp = max(store.skip_stamps(0) for store in self._stores())
        first = next(iter(self._stores()))
        self._can = first.capabilities

    def _stores(self) -> Iterator[RecordStore]:
        return (part.store for part in self._parts if part.store is not None)

    @property
    def group(self) -> GroupBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def striped(self) -> StripedBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def noting(self) -> NotingBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    def notes(self, extent: int) -> Notes | None:
        """What a device keeps of its extent. See `NotingBackend`."""
        store = self._parts[extent & (1 << DEVICE_BITS) - 1].store
        return None if store is None else store.notes(extent >> DEVICE_BITS)

    @property
    def sealing(self) -> SealingBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """State what the media can do."""
        media = dict.fromkeys(store.capabilities.medium for store in self._stores())
        reasons = [store.capabilities.fallback for store in self._stores()]
        return Capabilities(
            medium="+".join(media),
            is_memory=False,
            survives_restart=True,
            is_emulated=False,
            alignment_bytes=self._can.alignment_bytes,
            fallback="; ".join(dict.fromkeys(filter(None, (self._fallback, *reasons)))),
            is_encrypted=self._can.is_encrypted,
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices as they are. See `StripedBackend`."""
        return tuple(part.state() for part in self._parts)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all devices that take blocks, and what lies on the others; of all of them when none does."""
        known = self.devices
        if all(d.error for d in known):
            return sum(store.capacity_bytes for store in self._stores())
        return sum(d.capacity_bytes for d in known)

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now on all devices."""
        return sum(store.used_bytes for store in self._stores())

    @property
    def last_error(self) -> str:
        """Errors of devices that have failed, or the last failure of any that goes on."""
        failed = [f"{part.name}: {part.health.error}" for part in self._parts if part.health.error]
        return "; ".join(failed) or next((s.last_error for s in self._stores() if s.last_error), "")

    def slot_bytes(self, size_bytes: int) -> int:
        """Bytes of such a record's slot, which are the same on every device. See `TierBackend`."""
        return slot_bytes(size_bytes)

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take a slot on the device that has least to do. See `TierBackend`."""
        full: TierFullError | None = None
        for part, store in self._candidates():
            store.skip_stamps(self._next_stamp)
            try:
                slot = store.reserve(scope, size_bytes)
            except TierFullError as e:
                full = e
                continue
            self._next_stamp = slot.stamp + 1
            part.health.trying(_now_s())
            part.unwritten[slot.stamp] = slot.size_bytes
            part.moving_bytes += slot.size_bytes
            return part.outside(slot)
        assert full is not None, "there is a device"
        raise full

    def _candidates(self) -> list[tuple[_Part, RecordStore]]:
        now_s = _now_s()
        opened = [(part, part.store) for part in self._parts if part.store is not None]
        loads = [
            DeviceLoad(part.health.may_take(now_s), part.moving_bytes, store.used_bytes, store.capacity_bytes)
            for part, store in opened
        ]
        return [opened[i] for i in order(loads)]

    def _at(self, slot: SlotRef) -> tuple[_Part, RecordStore, SlotRef]:
        """Where a slot is, and its name there."""
        part = self._parts[slot.extent & (1 << DEVICE_BITS) - 1]
        assert part.store is not None, f"nobody was given a slot of {part.name}"
        return part, part.store, SlotRef(slot.extent >> DEVICE_BITS, slot.offset, slot.size_bytes, slot.stamp)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Write to the slot's device. See `TierBackend`."""
        (end,) = await self.write_group([Writing(slot, stored[: record.stored_bytes], record)])
        if isinstance(end, KvStrataError):
            raise end

    async def write_group(self, writings: Sequence[Writing]) -> Sequence[Record | KvStrataError]:
        """Write to the slots' devices, to all at once. See `GroupBackend`."""
        return await self._on_each(writings, self._write_on)

    async def _write_on(self, part: _Part, writings: Sequence[Writing]) -> Sequence[Record | KvStrataError]:
        """Write to one device, whose own names the slots have."""
        assert part.store is not None
        try:
            ends = await part.store.write_group(writings)
        finally:
            for writing in writings:
                part.settle(writing.slot)
        part.written_bytes += sum(end.stored_bytes for end in ends if isinstance(end, Record))
        failed = _device_failure(ends)
        if failed is not None:
            self._report(part, failed)
            part.health.write_failed(failed, _now_s())
        elif any(isinstance(end, Record) for end in ends):
            if part.health.error:
                _log.info("device takes blocks again", extra={"device": part.name})
            part.health.wrote()
        return ends

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Read from the slot's device. See `TierBackend`."""
        (end,) = await self.read_group([Reading(slot, record, into)])
        if isinstance(end, KvStrataError):
            raise end

    async def read_group(self, readings: Sequence[Reading]) -> Sequence[bytes | KvStrataError]:
        """Read from the slots' devices, from all at once. See `GroupBackend`."""
        return await self._on_each(readings, self._read_on)

    async def _read_on(self, part: _Part, readings: Sequence[Reading]) -> Sequence[bytes | KvStrataError]:
        """Read from one device, whose own names the slots have."""
        assert part.store is not None
        with part.moving(sum(r.slot.size_bytes for r in readings)):
            ends = await part.store.read_group(readings)
        failed = _device_failure(ends)
        if failed is not None:
            part.health.read_failed(failed, _now_s())
        if any(isinstance(end, bytes) for end in ends):
            part.health.read()
        return ends

    async def _on_each(
        self, asked: Sequence[A], work: Callable[[_Part, Sequence[A]], Coroutine[Any, Any, Sequence[T]]]
    ) -> list[T]:
        """Do the work of each device, and put what came of it into the order of what was asked."""
        shares: dict[_Part, dict[int, A]] = {}
        for at, one in enumerate(asked):
            part, _, local = self._at(one.slot)
            shares.setdefault(part, {})[at] = replace(one, slot=local)
        done = await together([work(part, list(share.values())) for part, share in shares.items()])
        ends = {
            at: end
            for share, found in zip(shares.values(), done, strict=True)
            for at, end in zip(share, found, strict=True)
        }
        return [ends[at] for at in range(len(asked))]

    def _report(self, part: _Part, cause: str) -> None:
        if not part.health.error:
            _log.warning("device failed", extra={"device": part.name, "cause": cause})

    def drop(self, slot: SlotRef) -> None:
        """Give a slot back to its device. See `TierBackend`."""
        part, store, local = self._at(slot)
        part.settle(local)
        store.drop(local)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Divide another capacity; returns the extents that close. See `TierBackend`."""
        self._capacity_bytes = capacity_bytes
        await _divide(self._parts, capacity_bytes)
        return await self._resize_parts()

    async def _resize_parts(self) -> frozenset[int]:
        """Resize the devices that are there to what they are granted; returns the extents that close."""
        closing: frozenset[int] = frozenset()
        for part in self._parts:
            if part.store is not None:
                closing |= part.extents(await part.store.resize(part.granted_bytes))
        return closing

    def extents_to_free(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        """Extents of the device that needs the fewest emptied. See `TierBackend`."""
        chosen: frozenset[int] | None = None
        for part, store in self._candidates():
            needed = part.extents(store.extents_to_free(scope, size_bytes))
            if not needed and store.capacity_bytes >= 2 * size_bytes:
                return needed  # There is room, unless the device is too small for any such block.
            if needed and (chosen is None or len(needed) < len(chosen)):
                chosen = needed
        return chosen or frozenset()

    def compact(self) -> frozenset[int]:
        """Close sparse extents on each device. See `TierBackend`."""
        return frozenset().union(*(p.extents(p.store.compact()) for p in self._parts if p.store is not None))

    async def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks of earlier runs, device by device; one that cannot be read is reported, and absent from then on.

        Raises `BackendFailedError` when none can.
        """
        failed: BackendFailedError | None = None
        for part in self._parts:
            if part.store is None:
                continue
            try:
                found = await _left_on(part.store)
            except BackendFailedError as e:
                part.lack(e)
                failed = e
                continue
            for slot, record in _each(found):
                yield part.outside(slot), record
        if failed is not None and all(d.error for d in self.devices):
            raise failed

    async def recover_late(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Try absent devices again. See `StripedBackend`.

        The others give back what they were granted in the place of one that comes: `compact` names what closes there.
        """
        late = [part for part in self._parts if part.store is None]
        if not late:
            return
        await _divide(self._parts, self._capacity_bytes)
        for part in late:
            try:
                store = await part.opener(part.granted_bytes)
                found = await _left_on(store)
            except (InvalidInputError, BackendFailedError) as e:
                part.lack(e)
                continue
            await store.resize(part.granted_bytes)  # The tier may have another capacity by now.
            await self._resize_parts()
            self._next_stamp = max(self._next_stamp, store.skip_stamps(0))
            part.store, part.health = store, DeviceHealth()
            _log.info("device is there now", extra={"device": part.name})
            for slot, record in _each(found):
                yield part.outside(slot), record

    @property
    def waiting(self) -> frozenset[bytes]:
        """Tags of scopes whose key is missing. See `SealingBackend`."""
        return frozenset().union(*(store.waiting for store in self._stores()))

    async def recover_waiting(self, tag: bytes) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks that waited for a key, device by device. See `SealingBackend`.

        One that fails is heard of at the end: it keeps nobody from the blocks of others.
        """
        failed: BackendFailedError | None = None
        for part in self._parts:
            if part.store is not None and tag in part.store.waiting:
                try:
                    async for slot, record in part.store.recover_waiting(tag):
                        yield part.outside(slot), record
                except BackendFailedError as e:
                    failed = e
        if failed is not None:
            raise failed

    async def forget_waiting(self, tag: bytes) -> None:
        """Remove what waits for a key from all devices, as far as they do it. See `SealingBackend`."""
        failed: BackendFailedError | None = None
        for store in tuple(self._stores()):
            if tag in store.waiting:
                try:
                    await store.forget_waiting(tag)
                except BackendFailedError as e:
                    failed = e
        if failed is not None:
            raise failed

    async def close(self) -> None:
        """Close all devices; one that cannot be closed keeps none of the others. Idempotent."""
        results = await asyncio.gather(*(store.close() for store in self._stores()), return_exceptions=True)
        failed = next((r for r in results if isinstance(r, BaseException)), None)
        if failed is not None:
            raise failed


def _device_failure(ends: Sequence[Record | bytes | KvStrataError]) -> str | None:
    """Error of a device that failed; None when it did not, whatever became of the records."""
    failed = (e for e in ends if isinstance(e, BackendFailedError) and not isinstance(e, MediumIntactError))
    return next(map(str, failed), None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def open_striped(openers: Mapping[str, Opener], capacity_bytes: int) -> StripedStore:
    """Open the record stores of a tier by their directories; ones that cannot be opened are tried again later.

    Raises what the first one raised when none can be opened.
    """
    parts = tuple(_Part(i, name, opener) for i, (name, opener) in enumerate(openers.items()))
    shared = await _divide(parts, capacity_bytes)
    failures: list[InvalidInputError] = []
    for part in parts:
        try:
            part.store = await part.opener(part.granted_bytes)
        except InvalidInputError as e:
            part.lack(e)
            failures.append(e)
    if len(failures) == len(parts):
        raise failures[0]
    return StripedStore(parts, capacity_bytes, shared)


async def _left_on(store: RecordStore) -> list[Columns]:
    """Everything that earlier runs have left on a device; its store is closed when that cannot be read."""
    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(_let_go, store)
        found = [columns async for columns in store.recover_columns()]
        on_failure.pop_all()
    return found


async def _let_go(store: RecordStore) -> None:
    try:
        await store.close()
    except OSError as e:
        _log.warning("device cannot be closed", extra={"cause": str(e)})


def _each(extents: Iterable[Columns]) -> Iterator[tuple[SlotRef, Record]]:
    return (pair for columns in extents for pair in columns.pairs())


async def _divide(parts: tuple[_Part, ...], capacity_bytes: int) -> str:
    """Give each device its part of the capacity; returns which of them are no devices of their own."""
    rooms = [await in_thread(None, partial(measure_room, Path(part.name))) for part in parts]
    grain_bytes = MIB if capacity_bytes >= len(parts) * 64 * MIB else DIRECT_BYTES
    granted = divide(capacity_bytes, room_of_each(rooms), grain_bytes)
    first: dict[int, str] = {}
    shared: list[str] = []
    for part, room, granted_bytes in zip(parts, rooms, granted, strict=True):
        part.granted_bytes = granted_bytes
        if room is not None and first.setdefault(room.file_system, part.name) != part.name:
            shared.append(f"{part.name} is on the file system of {first[room.file_system]}: no device of its own")
    return "; ".join(shared)
