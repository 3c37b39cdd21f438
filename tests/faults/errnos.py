"""One errno at one site of the record store: what a user of the store sees, and what is there afterwards."""

import asyncio
import errno
import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Final

from sim.volume import MemoryVolume

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.segment_io import HOLD_S
from kvstrata_agent.backends.record.layout import HEADER_BYTES
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, TierFullError
from support.backends.contract import ANNA, BOB, content, record

ERRNOS: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.ETIMEDOUT)
RUNNING_SITES: Final = (
    "create", "open", "rename", "unlink", "sync", "free_bytes", "write", "fdatasync", "read", "allocate", "punch",
)  # fmt: skip
STARTING_SITES: Final = ("names", "load", "create", "open", "rename", "unlink", "sync", "write", "read", "read_pages")
CAPACITY_BYTES: Final = 512 << 10
BLOCK_BYTES: Final = 8192
_SETTLED_S: Final = HOLD_S + 2.0
_FULL_PAUSE_S: Final = 6.0
_STATES: Final = 12
"""Crash states tried after each case."""


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of a site that fail: after `skip` good ones, `times` of them, or all (-1)."""

    site: str
    number: int
    times: int
    skip: int

    def __str__(self) -> str:
        which = "every" if self.times < 0 else "one"
        return f"{errno.errorcode[self.number]} at {which} {self.site} after {self.skip}"


@dataclass(slots=True)
class User:
    """Uses a store and notes what it was told."""

    store: RecordStore
    held: dict[int, tuple[SlotRef, Record]] = field(default_factory=dict)
    failed_extents: set[int] = field(default_factory=set)
    """Segments where a write failed."""
    wrong: list[str] = field(default_factory=list)
    _next: int = 1

    async def put(self, count: int) -> None:
        """Write new blocks; a refusal or a failure is a miss."""
        numbers = range(self._next, self._next + count)
        self._next = numbers.stop
        await asyncio.gather(*(self._put(n) for n in numbers))

    async def _put(self, number: int) -> None:
        scope = BOB if number % 3 == 0 else ANNA
        stored = content(number, BLOCK_BYTES)
        try:
            slot = self.store.reserve(scope, BLOCK_BYTES)
        except TierFullError:
            return
        if slot.extent in self.failed_extents:
            self.wrong.append(f"segment {slot.extent} failed and gives slots")
        made = record(number, stored, slot, scope)
        try:
            await self.store.write(slot, made, stored)
        except BackendFailedError:
            self.failed_extents.add(slot.extent)
            self.store.drop(slot)
            return
        self.held[number] = (slot, made)

    async def read_all(self, *, must_work: bool = False) -> None:
        """Read what is held: right bytes or a failure."""
        for number, (slot, made) in self.held.items():
            into = bytearray(BLOCK_BYTES)
            try:
                await self.store.read(slot, made, memoryview(into))
            except BackendFailedError:
                if must_work:
                    self.wrong.append(f"block {number} cannot be read after the fault")
                continue
            except BlockCorruptError:
                self.wrong.append(f"block {number} is corrupt")
                continue
            if into != content(number, BLOCK_BYTES):
                self.wrong.append(f"block {number} came back with other bytes")

    async def drop(self, count: int) -> None:
        """Drop some blocks, none of them neighbours at first, and let them be buried."""
        numbers = list(self.held)
        for number in (numbers[1::3] + numbers[::3] + numbers[2::3])[:count]:
            self.store.drop(self.held.pop(number)[0])
        await asyncio.sleep(_SETTLED_S)


async def _opened(volume: MemoryVolume) -> RecordStore:
    store = await open_store(volume, CAPACITY_BYTES)
    store._state.table.target_bytes = 4 * (BLOCK_BYTES + HEADER_BYTES)  # Four slots: some are used again.
    return store


async def running(case: Case, seed: int) -> tuple[bool, list[str]]:
    """Let a fault strike a running store; whether it did, and what was wrong."""
    volume = MemoryVolume(rng=random.Random(seed))
    user = User(await _opened(volume))
    await user.put(9)
    await user.store.write_index()
    await user.drop(2)
    volume = await _restarted(user, volume)
    fault = volume.fail(case.site, case.number, skip=case.skip, times=case.times)
    if case.site == "free_bytes":
        volume.fail("create", errno.ENOSPC, name="seg-", times=-1)  # Only then anybody asks.
    for work in (user.put(3), user.read_all(), user.drop(2), user.put(4), user.store.write_index(), user.put(12)):
        await _survived(work, user)
    has_struck = fault.times != case.times or (case.times < 0 and volume.calls[case.site] > case.skip)
    volume.faults.clear()
    await user.read_all(must_work=True)
    await asyncio.sleep(_FULL_PAUSE_S)
    before = len(user.held)
    await user.drop(1)
    await user.put(1)
    if len(user.held) < before:
        user.wrong.append("no block can be written after the fault")
    user.wrong += [f"a failed write was tried again: {place}" for place in volume.retried]
    for image in volume.crash_states(_STATES):
        user.wrong += await _lost(MemoryVolume(image), user)
    await _empty(user, volume)
    return has_struck, user.wrong


async def _restarted(user: User, volume: MemoryVolume) -> MemoryVolume:
    """Go on with a store that has found its blocks: some segments are not open yet."""
    await user.store.close()
    after = volume.kill()
    user.store = await _opened(after)
    user.held = {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in user.store.recover()}
    return after


async def _survived(work: Awaitable[None], user: User) -> None:
    try:
        await work
    except (OSError, KeyError, AssertionError) as e:
        user.wrong.append(f"{type(e).__name__} came through: {e}")


async def _lost(volume: MemoryVolume, user: User) -> list[str]:
    store = await _opened(volume)
    found = {int.from_bytes(r.key.digest, "big") async for _, r in store.recover()}
    return [f"block {n} was synced and is lost" for n in user.held if n not in found]


async def _empty(user: User, volume: MemoryVolume) -> None:
    """Everything dropped: the books are at zero, and the files within the capacity."""
    await user.drop(len(user.held))
    await asyncio.sleep(_SETTLED_S)
    if user.store.used_bytes:
        user.wrong.append(f"{user.store.used_bytes} B in use of nothing")
    if volume.peak_bytes > CAPACITY_BYTES:
        user.wrong.append(f"{volume.peak_bytes} B of {CAPACITY_BYTES} B taken")
    await user.store.close()


async def starting(case: Case, seed: int) -> tuple[bool, list[str]]:
    """Let a fault strike a start; it is refused or finds blocks, and the next start without it works."""
    volume = MemoryVolume(rng=random.Random(seed))
    user = User(await _opened(volume))
    await user.put(9)
    await user.store.write_index()
    await user.put(3)
    volume = volume.crash()
    fault = volume.fail(case.site, case.number, skip=case.skip, times=case.times)
    is_media_error = case.number == errno.EIO and case.site in {"open", "read_pages"}
    try:
        user.store = await _opened(volume)
        user.held = {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in user.store.recover()}
        await user.read_all()
        await user.store.close()
    except (InvalidInputError, BackendFailedError, OSError):
        pass  # `open_nvme` makes a refusal of what the volume raises while the store is opened.
    has_struck = fault.times != case.times or volume.calls[case.site] > case.skip
    again = volume.crash()
    if not is_media_error:
        user.held = {n: user.held.get(n, _UNKNOWN) for n in range(1, 13)}
    user.wrong += await _lost(again, user)
    return has_struck, user.wrong


_UNKNOWN: Final = (SlotRef(0, 0, 0, 0), record(0, content(0, BLOCK_BYTES), SlotRef(0, 0, 0, 0)))
