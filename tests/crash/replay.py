"""Runs of a record store on a recording volume, and a check of every state that a power loss could leave of them.

A step is one operation of the store's user. Whenever anything has begun or ended on the medium, all images that a crash
could leave there are collected with what was promised until then; each is recovered and compared with the promise.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sim.volume import MemoryVolume
from sim.volume_image import Image

from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.segment_io import HOLD_S
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, TierFullError
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BOB, content, record
from support.runner.virtual_loop import run_virtually

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import Record, SlotRef

T = TypeVar("T")

BLOCK_BYTES: Final = 4096
"""One page of payload: a record of two pages has few enough tears to try them all."""

CAPACITY_BYTES: Final = 256 << 10
_SEGMENT_BYTES: Final = 4 * 2 * BLOCK_BYTES
"""Four slots: some are used again, some stay holes."""

_SETTLED_S: Final = 2.0
"""Beyond the time that they are held, dropped records are holes by then."""

_SLOW_FACTOR: Final = 25
_SLOWEST_S: Final = 0.7
_SLOW_SHARE: Final = 0.05
"""On a slow medium so many of the points are tried: runs are long, and what overlaps is what matters."""


class Promise(Enum):
    """What a start must find of a block."""

    HELD = "held"
    """`write` returned and nobody dropped it: found, and its bytes are right."""
    OPEN = "open"
    """`write` or the burial of a drop is under way: found or not, but never with wrong bytes."""
    GONE = "gone"
    """Dropped, and the drop was durable: not found."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation; `numbers` are blocks."""

    kind: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}({','.join(map(str, self.numbers))})"


@dataclass(slots=True)
class Findings:
    """States that were checked and what was wrong with them."""

    states: int = 0
    points: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    image: Image
    promises: dict[int, Promise]
    capacity_bytes: int
    at: str
    keys: KeyRing | None


class Recording:
    """A store on a recording volume, its user, and the states that a crash could have left."""

    def __init__(self, *, most: int, seed: int = 0, is_slow: bool = False, keys: KeyRing | None = None) -> None:
        """`most` images are drawn where there are more at one point. Calls on a slow medium take up to 0.7 s each.

        With `keys` the store is sealed.
        """
        self._keys = keys
        self._rng = random.Random(seed)
        self._is_slow = is_slow
        self.volume = MemoryVolume(rng=random.Random(seed))
        self.promises: dict[int, Promise] = {}
        self.states: dict[bytes, _State] = {}
        self.points = 0
        self.capacity_bytes = CAPACITY_BYTES
        self._most = most
        self._at = "start"
        self._held: dict[int, tuple[SlotRef, Record]] = {}
        self._dropped: list[int] = []

    def _record(self) -> None:
        if self._is_slow and self._rng.random() > _SLOW_SHARE:
            return
        self.points += 1
        told = repr(sorted((n, p.value) for n, p in self.promises.items())).encode()
        for image in self.volume.crash_states(self._most):
            key = image.digest() + told
            if key not in self.states:
                self.states[key] = _State(image, dict(self.promises), self.capacity_bytes, self._at, self._keys)

    async def run(self, steps: Sequence[Step]) -> None:
        """Do the steps one after the other while every crash state is recorded."""
        self.volume.on_step = self._record
        store = await self._open()
        for number, step in enumerate(steps):
            self._at = f"step {number} {step}"
            if step.kind == "reopen":
                await self._close(store)
                self.volume = self.volume.kill()
                self.volume.on_step = self._record
                store = await self._open()
            else:
                await _STEPS[step.kind](self, store, step.numbers)
        self._at = "close"
        await self._close(store)

    async def _open(self) -> RecordStore:
        if self._is_slow:
            self.volume.latency_s = lambda *_: self._rng.random() ** 4 * _SLOWEST_S
        store = await open_store(self.volume, self.capacity_bytes, keys=self._keys)
        store._state.table.target_bytes = _SEGMENT_BYTES
        self._held = {}
        async for slot, made in store.recover():
            number = int.from_bytes(made.key.digest, "big")
            if number in self._held:
                store.drop(slot)
            else:
                self._held[number] = (slot, made)
                self.promises[number] = Promise.HELD
        return store

    async def _close(self, store: RecordStore) -> None:
        await store.close()
        self._settle_drops()

    def _settle_drops(self) -> None:
        for number in self._dropped:
            if self.promises.get(number) is Promise.OPEN and number not in self._held:
                self.promises[number] = Promise.GONE
        self._dropped = []

    async def put(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Write blocks at the same time."""
        await asyncio.gather(*(self._put(store, n) for n in numbers))

    async def _put(self, store: RecordStore, number: int) -> None:
        scope = BOB if number % 7 == 0 else ANNA
        try:
            slot = store.reserve(scope, BLOCK_BYTES)
        except TierFullError:
            return
        stored = content(number, BLOCK_BYTES)
        made = record(number, stored, slot, scope)
        if self.promises.get(number) is not Promise.HELD:
            self.promises[number] = Promise.OPEN
        await store.write(slot, made, stored)
        old = self._held.pop(number, None)
        self._held[number] = (slot, made)
        self.promises[number] = Promise.HELD
        if old is not None:
            store.drop(old[0])

    async def drop(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Drop blocks without waiting."""
        for number in numbers:
            if number in self._held:
                store.drop(self._held.pop(number)[0])
                self.promises[number] = Promise.OPEN
                self._dropped.append(number)

    async def bury(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Let drops become durable."""
        del store, numbers
        before, self._dropped = self._dropped, []
        await asyncio.sleep(HOLD_S + _SETTLED_S * (_SLOW_FACTOR if self._is_slow else 1))
        self._dropped += before
        self._settle_drops()

    async def index(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Write an index, while blocks are put."""
        await asyncio.gather(store.write_index(), self.put(store, numbers))

    async def late(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Write an index some turns of the loop (the first number) after blocks began to be put."""
        putting = asyncio.ensure_future(self.put(store, numbers[1:]))
        for _ in range(numbers[0]):
            await asyncio.sleep(0)
        await store.write_index()
        await putting

    async def move(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """What garbage collection does: read a block, write it elsewhere, drop the first copy."""
        for number in numbers:
            if number in self._held:
                slot, made = self._held[number]
                await store.read(slot, made, memoryview(bytearray(BLOCK_BYTES)))
                await self._put(store, number)

    async def collect(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Close sparse segments and move their blocks."""
        del numbers
        await self._empty(store, store.compact())

    async def resize(self, store: RecordStore, numbers: tuple[int, ...]) -> None:
        """Set the capacity in KiB; blocks of closing segments are moved, or dropped where there is no room."""
        closing = await store.resize(numbers[0] << 10)
        await self._empty(store, closing)
        await self.bury(store, ())
        self.capacity_bytes = numbers[0] << 10

    async def _empty(self, store: RecordStore, closing: frozenset[int]) -> None:
        for number, (slot, _) in list(self._held.items()):
            if slot.extent not in closing:
                continue
            await self.move(store, (number,))
            if self._held[number][0] == slot:
                await self.drop(store, (number,))


_STEPS: Final[dict[str, Callable[[Recording, RecordStore, tuple[int, ...]], Coroutine[Any, Any, None]]]] = {
    "put": Recording.put,
    "drop": Recording.drop,
    "bury": Recording.bury,
    "index": Recording.index,
    "late": Recording.late,
    "move": Recording.move,
    "collect": Recording.collect,
    "resize": Recording.resize,
}


def replay(
    steps: Sequence[Step], *, most: int = 4096, seed: int = 0, is_slow: bool = False, is_sealed: bool = False
) -> Findings:
    """Run the steps, then recover every crash state and compare it with what was promised."""
    keys = KeyRing(ANNA, BOB) if is_sealed else None
    recording = Recording(most=most, seed=seed, is_slow=is_slow, keys=keys)
    run_virtually(recording.run(steps))
    findings = Findings(len(recording.states), recording.points)
    if recording.volume.peak_bytes > CAPACITY_BYTES and not any(s.kind == "resize" for s in steps):
        findings.violations.append(f"{_told(steps)}: {recording.volume.peak_bytes} B of {CAPACITY_BYTES} B taken")
    for state in recording.states.values():
        wrong = run_virtually(_check(state))
        findings.violations += [f"{_told(steps)} at {state.at}: {w}" for w in wrong]
    return findings


def _told(steps: Sequence[Step]) -> str:
    return " ".join(map(str, steps))


async def _check(state: _State) -> list[str]:
    volume = MemoryVolume(state.image)
    wrong: list[str] = []
    async with _recovered(volume, state) as (_, first):
        wrong += _compare(first, state.promises)
    again = volume.kill()
    async with _recovered(again, state) as (store, second):
        readable = {n for n, is_right in first.items() if is_right}
        if {n for n, is_right in second.items() if is_right} != readable:
            wrong.append(f"a second start finds {sorted(second)}, the first found {sorted(first)}")
        with suppress(TierFullError):
            slot = store.reserve(ANNA, BLOCK_BYTES)
            stored = content(999, BLOCK_BYTES)
            await store.write(slot, record(999, stored, slot), stored)
    for name, seen in (("first", volume), ("second", again)):
        if seen.peak_bytes > state.capacity_bytes:
            wrong.append(f"{seen.peak_bytes} B of {state.capacity_bytes} B after the {name} start")
    return wrong


@asynccontextmanager
async def _recovered(volume: MemoryVolume, state: _State) -> AsyncIterator[tuple[RecordStore, dict[int, bool]]]:
    """Open a store and read everything that it finds: block number -> its bytes are right (False: detected)."""
    store = await open_store(volume, state.capacity_bytes, keys=state.keys)
    found: dict[int, bool] = {}
    async for slot, made in store.recover():
        number = int.from_bytes(made.key.digest, "big")
        into = bytearray(BLOCK_BYTES)
        try:
            await store.read(slot, made, memoryview(into))
        except (BlockCorruptError, BackendFailedError):
            found.setdefault(number, False)
            continue
        assert into == content(number, BLOCK_BYTES), f"block {number} was served with other bytes"
        found[number] = True
    yield store, found


def _compare(found: dict[int, bool], promises: dict[int, Promise]) -> list[str]:
    wrong = []
    for number, promise in promises.items():
        if promise is Promise.HELD and not found.get(number):
            wrong.append(f"block {number} was synced and is {'corrupt' if number in found else 'lost'}")
        if promise is Promise.GONE and number in found:
            wrong.append(f"block {number} was dropped for good and is back")
    wrong += [f"block {n} was never written" for n in found if n not in promises]
    return wrong
