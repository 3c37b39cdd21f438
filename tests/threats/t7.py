"""T7: forged, swapped and replayed blocks are never served, by somebody who may write every byte of the medium.

Each case changes one record, or the index, of a disk with blocks of three scopes and looks at what is served: by the
store that is up, by one that starts on the disk, and from an object store. A whole older record that is put back into
its own slot is found by a start without an index; it is what was sealed under this key, and only that may be served.
"""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from sim.volume import MemoryVolume

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.index_format import (
    BODY_OFFSET,
    Body,
    Kinds,
    Listed,
    SegmentName,
    body_head,
    pack_map,
    parse_name,
    seal,
    sealed_bytes,
)
from kvstrata_agent.backends.file.record_store import open_store
from kvstrata_agent.backends.file.segment import SlotNotes, Traits
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_agent.backends.record.layout import HEADER_BYTES, SealedForm
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from support.agent.scope_keys import KeyRing
from support.backends.contract import record
from support.runner.outcome import Outcome, Scale
from support.runner.virtual_loop import run_virtually
from threats.sealed_disk import ATTACKS, BLOCK_BYTES, CAPACITY_BYTES, SCOPES, SealedDisk, make, read, text

_CASES_EACH: Final = 3_000
"""Cases on one disk before another one is made."""

_OBJECTS: Final = 24

Held = tuple[SlotRef, Record]


def run(scale: Scale) -> Outcome:
    """Attack a million times; then see that the same attacks succeed without what is to stop them."""
    seed = scale.first_seed
    cases, wrong = _all(seed, scale.of(940_000, 4_000), _attack_live)
    started, more = _all(seed, scale.of(50_000, 1_500), _attack_started)
    in_objects = scale.of(10_000, 300)
    rotten = asyncio.run(_attack_objects(random.Random(seed), in_objects))
    values = {"live": cases, "after_restart": started, "in_objects": in_objects}
    is_caught = _are_controls_caught(seed)
    return Outcome(cases + started + in_objects, "attacks", (*wrong, *more, *rotten), is_caught, values)


def _all(first_seed: int, wanted: int, attack: Any) -> tuple[int, list[str]]:
    done, seed, wrong = 0, first_seed, []
    while done < wanted:
        count = min(_CASES_EACH, wanted - done)
        tried, found = run_virtually(attack(random.Random(seed), count, KeyRing(*SCOPES)))
        wrong += [f"seed {seed}: {w}" for w in found]
        done, seed = done + tried, seed + 1
        if wanted > 50_000 and (seed - first_seed) % 10 == 0:
            sys.stderr.write(f"T7: {done:,} of {wanted:,} {attack.__name__}, {len(wrong)} served\n")
    return done, wrong


async def _attack_live(rng: random.Random, count: int, keys: KeyRing | None) -> tuple[int, list[str]]:
    """Change one slot, read its block, put the slot back."""
    disk, wrong = await make(rng, keys), []
    for _ in range(count):
        block, attack = rng.choice(disk.held), rng.choice(ATTACKS)
        before = disk.peek(block.slot)
        changed = attack(disk, block, rng)
        if changed == before:
            continue
        disk.poke(block.slot, changed)
        served, left = await read(disk.store, block.slot, block.record)
        disk.poke(block.slot, before)
        if served not in (None, block.content):
            wrong.append(f"{attack.__name__} was served")
        if any(left):
            wrong.append(f"{attack.__name__}: {left[:24]!r} was left in the reader's buffer")
    for block in disk.held:
        served, _ = await read(disk.store, block.slot, block.record)
        if served != block.content:
            wrong.append("an untouched block is not served any more")
    return count, wrong


async def _attack_started(rng: random.Random, count: int, keys: KeyRing | None) -> tuple[int, list[str]]:
    """Change every slot and the index, start, and read everything."""
    disk = await make(rng, keys)
    await disk.store.close()
    image, tried = disk.image(), 0
    wrong: list[str] = []
    while tried < count:
        disk.volume = MemoryVolume(image.copy(), rng)
        for block in disk.held:
            disk.poke(block.slot, rng.choice(ATTACKS)(disk, block, rng))
        await _attack_index(disk, rng)
        tried += len(disk.held) + 1
        wrong += await _served_after_start(disk)
    return tried, wrong


async def _served_after_start(disk: SealedDisk) -> list[str]:
    store, wrong = await open_store(disk.volume.kill(), CAPACITY_BYTES, keys=disk.keys), []
    async for slot, found in store.recover():
        served, left = await read(store, slot, found)
        if served is not None and disk.written.get(found) != served:
            wrong.append(f"{found.key.scope}: {served[:24]!r} was served as block {found.key}")
        if any(left):
            wrong.append(f"{found.key.scope}: {left[:24]!r} was left in the reader's buffer")
    await store.close()
    return wrong


async def _attack_index(disk: SealedDisk, rng: random.Random) -> None:
    """Leave the index, remove it, flip a bit, tell of an older generation, or list what pleases the attacker."""
    kind = rng.randrange(4)
    if kind == 0:
        return
    size_bytes = (await disk.volume.names())[INDEX_FILE]
    if kind == 1:
        disk.volume.flip(INDEX_FILE, rng.randrange(size_bytes), 1 << rng.randrange(8))
        return
    await disk.volume.unlink(INDEX_FILE)
    if kind == 2:
        return
    whole = _forged_index(disk, rng)
    file = await disk.volume.create(INDEX_FILE, len(whole))
    await file.write(0, lambda: [memoryview(whole)])
    await file.close()


def _forged_index(disk: SealedDisk, rng: random.Random) -> bytes:
    """An index in the clear with right tags that lists records of any scope with checksums of what lies there."""
    kinds, listed = Kinds(), []
    traits = Traits(kinds)
    names = [n for n in map(parse_name, disk.volume.image.names) if isinstance(n, SegmentName)]
    for name in names:
        notes, stamps = SlotNotes(name.slots), [0] * name.slots
        for block in (b for b in disk.held if b.slot.extent == name.id):
            lying = memoryview(disk.peek(block.slot)[HEADER_BYTES:])
            number = int.from_bytes(block.record.key.digest, "big")
            made = record(number, lying, block.slot, block.record.key.scope)
            at = block.slot.offset // name.stride_bytes
            assert notes.set(at, made, traits)
            stamps[at] = block.slot.stamp
        listed.append(Listed(name, rng.choice(SCOPES), notes.entries(stamps, traits)))
    body = Body(1 << 33, max(n.id for n in names) + 1, tuple(kinds.known), tuple(listed))
    head = body_head(body)
    said = bytearray(head + b"".join(s.entries for s in listed) + bytes(16))
    assert len(said) == sealed_bytes(head)
    seal(memoryview(said), disk.secret)
    maps = b"".join(pack_map(1 << 33, 1, b"", copy, disk.secret) for copy in range(2))
    return (maps + bytes(said)).ljust(round_up(BODY_OFFSET + len(said), 4096), b"\0")


async def _attack_objects(rng: random.Random, count: int) -> list[str]:
    """Put other bytes, whole or in part, into the place of an object."""
    client, wrong = ObjectClient("memory://"), []
    tier = await open_object_tier(client, "p", "n", CAPACITY_BYTES, keys=KeyRing(*SCOPES))
    held: list[Held] = []
    for number in range(_OBJECTS):
        content, scope = text(number), SCOPES[number % len(SCOPES)]
        slot = tier.reserve(scope, BLOCK_BYTES)
        made = record(number, memoryview(content), slot, scope)
        await tier.write(slot, made, memoryview(content))
        held.append((slot, made))
    for _ in range(count):
        slot, made = rng.choice(held)
        path = tier._paths[slot.stamp]
        before = bytes(await client.get(path, 0, HEADER_BYTES + BLOCK_BYTES))
        its = bytes(await client.get(tier._paths[rng.choice(held)[0].stamp], 0, HEADER_BYTES + BLOCK_BYTES))
        changed = _changed_object(before, its, rng)
        await client.put(path, [changed])
        into = bytearray(BLOCK_BYTES)
        with suppress(BlockCorruptError, BackendFailedError):
            await tier.read(slot, made, memoryview(into))
            if changed != before:
                wrong.append(f"object {path}: {bytes(into[:24])!r} was served")
        await client.put(path, [before])
    await tier.close()
    return wrong


def _changed_object(mine: bytes, its: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(mine)
    flipped[rng.choice((rng.randrange(48, 96), HEADER_BYTES + rng.randrange(BLOCK_BYTES)))] ^= 1 << rng.randrange(8)
    relocked = mine[:48] + its[48:96] + mine[96:HEADER_BYTES] + its[HEADER_BYTES:]
    return rng.choice((bytes(flipped), its, relocked, mine[:HEADER_BYTES] + its[HEADER_BYTES:], mine[:-1]))


def _are_controls_caught(seed: int) -> bool:
    """Swaps are served when nothing binds a payload, and forged records where nothing is sealed."""
    with _unbound():
        swapped = run_virtually(_attack_live(random.Random(seed), 400, KeyRing(*SCOPES)))[1]
    forged = run_virtually(_attack_started(random.Random(seed), 400, None))[1]
    return any("was served" in w for w in swapped) and any("was served as block" in w for w in forged)


@contextmanager
def _unbound() -> Iterator[None]:
    """Seeded defect: the tag of a payload is bound to nothing."""
    kept = SealedForm._bound
    SealedForm._bound = lambda *_: b""  # type: ignore[method-assign]
    try:
        yield
    finally:
        SealedForm._bound = kept  # type: ignore[method-assign]
