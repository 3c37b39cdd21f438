"""A disk with sealed blocks of several scopes, and what somebody can do to it who may write every byte of it.

The attacker has the whole medium, its history included: the store's secret, every tag that it keys, every older record.
What the attacker lacks are the data keys of the scopes.
"""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace
from sim.volume import MemoryVolume
from sim.volume_image import Image

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.file.claim import STORE_FILE
from kvstrata_agent.backends.file.index_format import SegmentName, parse_name
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.record.layout import HEADER_BYTES, pack_header
from kvstrata_api.blocks import ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BOB, record

CAROL: Final = ScopeId("domain/carol/77aa/v3")
SCOPES: Final = (ANNA, BOB, CAROL)
BLOCK_BYTES: Final = 4096
SLOT_BYTES: Final = HEADER_BYTES + BLOCK_BYTES
CAPACITY_BYTES: Final = 4 << 20
BLOCKS: Final = 60
USED_HEADER_BYTES: Final = 242
"""Of a header page; behind it are zeros that nobody reads."""

_LOCK: Final = slice(48, 96)
"""Salt and tag of the payload."""
_PLACE: Final = slice(16, 40)
"""Segment, offset and stamp."""
_SCOPE_TAG: Final = slice(40, 48)


def text(number: int, version: int = 0) -> bytes:
    """Bytes of a block, different for every number and version."""
    return (b"canary %d of %d;" % (number, version) * BLOCK_BYTES)[:BLOCK_BYTES]


@dataclass(frozen=True, slots=True)
class Block:
    """One block where it lies."""

    slot: SlotRef
    record: Record
    content: bytes


@dataclass(slots=True)
class SealedDisk:
    """A store that is up, what it holds, and what it held before."""

    volume: MemoryVolume
    store: RecordStore
    keys: KeyRing | None
    secret: bytes
    held: list[Block] = field(default_factory=list)
    written: dict[Record, bytes] = field(default_factory=dict)
    older: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    """What earlier uses left in a slot, by segment and offset."""

    def name(self, extent: int) -> str:
        """File of a segment."""
        segments = (n for n in map(parse_name, self.volume.image.names) if isinstance(n, SegmentName))
        return next(str(n) for n in segments if n.id == extent)

    def peek(self, slot: SlotRef) -> bytes:
        """What lies in a slot."""
        return self.volume.peek(self.name(slot.extent), slot.offset, SLOT_BYTES)

    def poke(self, slot: SlotRef, content: bytes) -> None:
        """Put something into a slot."""
        self.volume.poke(self.name(slot.extent), slot.offset, content)

    async def put(self, number: int, version: int, scope: ScopeId) -> None:
        """Store a block; its key follows from the number alone."""
        content = text(number, version)
        slot = self.store.reserve(scope, BLOCK_BYTES)
        made = record(number, memoryview(content), slot, scope, epoch=version + 1)
        made = replace(made, parent=b"" if number % 5 == 0 else made.parent)
        await self.store.write(slot, made, memoryview(content))
        self.held.append(Block(slot, made, content))
        self.written[made] = content

    def image(self) -> Image:
        """Copy of everything on the medium."""
        return self.volume.image.copy()


async def make(rng: random.Random, keys: KeyRing | None) -> SealedDisk:
    """Fill a store, drop half of it, store the same keys and others again where they lay, and write the index."""
    volume = MemoryVolume(rng=rng)
    store = await open_store(volume, CAPACITY_BYTES, keys=keys)
    said = json.loads(volume.peek(STORE_FILE, 0, 4096))
    disk = SealedDisk(volume, store, keys, bytes.fromhex(said["secret"]))
    for number in range(BLOCKS):
        await disk.put(number, 0, SCOPES[number % len(SCOPES)])
    await store.write_index()
    going = rng.sample(disk.held, BLOCKS // 2)
    for block in going:
        disk.older.setdefault((block.slot.extent, block.slot.offset), []).append(disk.peek(block.slot))
        store.drop(block.slot)
        disk.held.remove(block)
    for block in going:
        number = int.from_bytes(block.record.key.digest, "big")
        await disk.put(rng.choice((number, number + 1000)), 1, block.record.key.scope)
    return disk


Attack = Callable[[SealedDisk, Block, random.Random], bytes]
"""What the attacker puts into the slot of a block."""


def _flip(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    whole = bytearray(disk.peek(block.slot))
    at = rng.choice((rng.randrange(USED_HEADER_BYTES), HEADER_BYTES + rng.randrange(BLOCK_BYTES)))
    whole[at] ^= 1 << rng.randrange(8)
    return bytes(whole)


def _other(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    return disk.peek(rng.choice([b for b in disk.held if b is not block]).slot)


def _swap(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """Another block's record, or its header or payload alone."""
    mine, its = disk.peek(block.slot), _other(disk, block, rng)
    return rng.choice((its, its[:HEADER_BYTES] + mine[HEADER_BYTES:], mine[:HEADER_BYTES] + its[HEADER_BYTES:]))


def _rehome(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """Another block's record that says to be this one's: place, stamp, and the tag of its scope."""
    mine, its = disk.peek(block.slot), bytearray(_other(disk, block, rng))
    its[_PLACE] = mine[_PLACE]
    if rng.random() < 0.5:
        its[_SCOPE_TAG] = mine[_SCOPE_TAG]
    return bytes(its)


def _relock(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """Another block's ciphertext, and what opens it, behind this one's header."""
    mine, its = bytearray(disk.peek(block.slot)), _other(disk, block, rng)
    mine[_LOCK] = its[_LOCK]
    mine[HEADER_BYTES:] = its[HEADER_BYTES:]
    return bytes(mine)


def _replay(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """What lay in the slot before, whole or in part."""
    mine = disk.peek(block.slot)
    old = rng.choice(disk.older.get((block.slot.extent, block.slot.offset), [_other(disk, block, rng)]))
    parts = (old, old[:HEADER_BYTES] + mine[HEADER_BYTES:], mine[:HEADER_BYTES] + old[HEADER_BYTES:])
    return rng.choice(parts)


def _stamped(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """An older record of the slot that says to be of its present use."""
    mine, old = disk.peek(block.slot), bytearray(_replay(disk, block, rng))
    old[_PLACE] = mine[_PLACE]
    return bytes(old)


def forged_record(disk: SealedDisk, block: Block, content: bytes, scope: ScopeId) -> bytes:
    """A record in the clear with a right checksum and a right tag: the store's secret lies on the disk."""
    said = replace(
        block.record,
        key=replace(block.record.key, scope=scope),
        checksum=checksum(content, block.record.key.digest, block.record.epoch, block.slot.stamp),
    )
    return pack_header(said, block.slot, disk.secret) + content


def _forge(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """Bytes of the attacker's own, or of another scope, with everything recomputed that needs no data key."""
    content = rng.choice((rng.randbytes(BLOCK_BYTES), _other(disk, block, rng)[HEADER_BYTES:]))
    return forged_record(disk, block, content, rng.choice(SCOPES))


def _guess(disk: SealedDisk, block: Block, rng: random.Random) -> bytes:
    """Another salt, tag or payload, drawn or zero."""
    mine = bytearray(disk.peek(block.slot))
    first, last = rng.choice(((48, 80), (80, 96), (96, USED_HEADER_BYTES), (HEADER_BYTES, SLOT_BYTES)))
    mine[first:last] = rng.choice((bytes(last - first), rng.randbytes(last - first)))
    return bytes(mine)


ATTACKS: Final[tuple[Attack, ...]] = (_flip, _swap, _rehome, _relock, _replay, _stamped, _forge, _guess)


async def read(store: RecordStore, slot: SlotRef, made: Record) -> tuple[bytes | None, bytes]:
    """What a read serves, or None, and what it left in the reader's buffer."""
    into = bytearray(BLOCK_BYTES)
    with suppress(BlockCorruptError, BackendFailedError):
        await store.read(slot, made, memoryview(into))
        return bytes(into), b""
    return None, bytes(into)
