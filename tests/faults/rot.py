"""Damage to what a record store has on its medium: one fault for each slot, then a start, then a read of everything."""

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from sim.volume import MemoryVolume
from sim.volume_image import Image

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.file.claim import STORE_FILE
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.index_format import SegmentName, parse_name
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BOB, content, record

CAPACITY_BYTES: Final = 2 << 20
BLOCK_BYTES: Final = 8192
_SLOT_BYTES: Final = BLOCK_BYTES + 4096
_SECTOR_BYTES: Final = 512
_BLOCKS: Final = 96
_EVERY_SCOPE: Final = (ANNA, BOB)


@dataclass(slots=True)
class Medium:
    """A store that was closed, an older state of the same files, and all records that were ever written."""

    image: Image
    older: Image
    keys: KeyRing | None = None
    """Of a store that is sealed."""
    written: set[Record] = field(default_factory=set)

    @property
    def slots(self) -> list[tuple[str, int]]:
        """File and offset of every slot."""
        return [
            (name, index * segment.stride_bytes)
            for name, segment in ((n, parse_name(n)) for n in sorted(self.image.names))
            if isinstance(segment, SegmentName)
            for index in range(segment.slots)
        ]


async def made(rng: random.Random, *, is_sealed: bool = False) -> Medium:
    """A store whose slots were used twice, with an index of the second use; `older` has the first."""
    volume = MemoryVolume(rng=rng)
    medium = Medium(volume.image, volume.image, KeyRing(*_EVERY_SCOPE) if is_sealed else None)
    store = await open_store(volume, CAPACITY_BYTES, keys=medium.keys)
    held = [await _put(store, n, medium) for n in range(_BLOCKS)]
    await store.write_index()
    medium.older = volume.image.copy()
    for slot in rng.sample(held, _BLOCKS // 2):
        store.drop(slot)
        await _put(store, _BLOCKS + rng.randrange(1 << 20), medium)
    await store.close()
    medium.image = volume.image.copy()
    return medium


async def _put(store: RecordStore, number: int, medium: Medium) -> SlotRef:
    scope = _EVERY_SCOPE[number % 2]
    slot = store.reserve(scope, BLOCK_BYTES)
    stored = content(number, BLOCK_BYTES)
    written = record(number, stored, slot, scope)
    await store.write(slot, written, stored)
    medium.written.add(written)
    return slot


Damage = Callable[[MemoryVolume, Medium, str, int, random.Random], None]


def _flip_header(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    volume.flip(name, offset + rng.randrange(700), 1 << rng.randrange(8))


def _flip_payload(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    volume.flip(name, offset + 4096 + rng.randrange(BLOCK_BYTES), 1 << rng.randrange(8))


def _tear(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    """Sectors from some boundary on, or up to it, are still those of the slot's first use."""
    cut = rng.randrange(1, _SLOT_BYTES // _SECTOR_BYTES) * _SECTOR_BYTES
    first, last = rng.choice(((0, cut), (cut, _SLOT_BYTES)))
    volume.poke(name, offset + first, _older(medium, name, offset + first, last - first))


def _stale_sector(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    at = offset + rng.randrange(_SLOT_BYTES // _SECTOR_BYTES) * _SECTOR_BYTES
    volume.poke(name, at, _older(medium, name, at, _SECTOR_BYTES))


def _older(medium: Medium, name: str, offset: int, size_bytes: int) -> bytes:
    if name not in medium.older.names:
        return bytes(size_bytes)
    return MemoryVolume(medium.older).peek(name, offset, size_bytes)


def _swap(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    """Two slots, or only their headers or payloads, lie where the other one belongs."""
    other, at = rng.choice(medium.slots)
    first, last = rng.choice(((0, _SLOT_BYTES), (0, 4096), (4096, _SLOT_BYTES)))
    mine, its = (volume.peek(n, o + first, last - first) for n, o in ((name, offset), (other, at)))
    volume.poke(name, offset + first, its)
    volume.poke(other, at + first, mine)


def _misdirect(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    """A whole record lands on another slot, and its own place keeps what was there."""
    other, at = rng.choice(medium.slots)
    volume.poke(other, at, volume.peek(name, offset, _SLOT_BYTES))


def _lose(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    """The whole write never happened."""
    volume.poke(name, offset, _older(medium, name, offset, _SLOT_BYTES))


def _scramble(volume: MemoryVolume, medium: Medium, name: str, offset: int, rng: random.Random) -> None:
    at = rng.randrange(_SLOT_BYTES // _SECTOR_BYTES) * _SECTOR_BYTES
    volume.poke(name, offset + at, rng.choice((bytes(_SECTOR_BYTES), rng.randbytes(_SECTOR_BYTES))))


SLOT_DAMAGE: Final[tuple[Damage, ...]] = (
    _flip_header, _flip_payload, _tear, _stale_sector, _swap, _misdirect, _lose, _scramble,
)  # fmt: skip


def damage_index(volume: MemoryVolume, medium: Medium, rng: random.Random) -> int:
    """Leave the index out, as it is, as it was before, torn between both, or with flipped bits; how many faults."""
    kind = rng.randrange(5)
    size_bytes = volume.image.files[volume.image.names[INDEX_FILE]].size_bytes
    if kind == 0:
        volume.image.names.pop(INDEX_FILE)
        volume.disk.names.pop(INDEX_FILE)
        return 1
    if kind == 1:
        return 0
    older = _older(medium, INDEX_FILE, 0, size_bytes)
    if kind == 2:
        volume.poke(INDEX_FILE, 0, older)
    elif kind == 3:
        cut = rng.randrange(size_bytes // _SECTOR_BYTES) * _SECTOR_BYTES
        volume.poke(INDEX_FILE, cut, older[cut:])
    else:
        volume.flip(INDEX_FILE, rng.randrange(size_bytes), 1 << rng.randrange(8))
    return 1


async def damaged_round(medium: Medium, rng: random.Random) -> tuple[int, list[str]]:
    """Damage every slot once and the index, start, read everything: number of faults and what was served wrongly."""
    volume = MemoryVolume(medium.image.copy(), rng)
    faults = damage_index(volume, medium, rng)
    for name, offset in medium.slots:
        rng.choice(SLOT_DAMAGE)(volume, medium, name, offset, rng)
        faults += 1
    return faults, await wrongly_served(volume, medium)


async def damaged_claim(medium: Medium, rng: random.Random) -> tuple[int, list[str]]:
    """Flip one bit of the store's marker: it is refused, or everything is as before."""
    volume = MemoryVolume(medium.image.copy(), rng)
    said = volume.peek(STORE_FILE, 0, 4096).rstrip()
    volume.flip(STORE_FILE, rng.randrange(len(said)), 1 << rng.randrange(8))
    try:
        return 1, await wrongly_served(volume, medium, is_whole=True)
    except InvalidInputError:
        return 1, []


async def _recovered(store: RecordStore, wrong: list[str]) -> AsyncIterator[tuple[SlotRef, Record]]:
    try:
        async for slot, found in store.recover():
            yield slot, found
    except ValueError as e:
        wrong.append(f"a header that nobody wrote broke the start: {e}")


async def wrongly_served(volume: MemoryVolume, medium: Medium, *, is_whole: bool = False) -> list[str]:
    """Start and read everything; what was found that was never written so, or came back with other bytes."""
    store = await open_store(volume, CAPACITY_BYTES, keys=medium.keys)
    wrong: list[str] = []
    count = 0
    into = bytearray(BLOCK_BYTES)
    async for slot, found in _recovered(store, wrong):
        number = int.from_bytes(found.key.digest, "big")
        try:
            await store.read(slot, found, memoryview(into))
        except (BlockCorruptError, BackendFailedError):
            continue
        count += 1
        if found not in medium.written:
            wrong.append(f"a record of block {number} that nobody wrote")
        if into != content(number, BLOCK_BYTES):
            wrong.append(f"block {number} with other bytes")
    if is_whole and count != _BLOCKS:
        wrong.append(f"{count} of {_BLOCKS} blocks after a change that was not refused")
    return wrong
