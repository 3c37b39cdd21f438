"""Groups of blocks that go through a codec: each comes back as it was or not at all, whatever becomes of the others."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.volume import MemoryVolume

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.codec.base import RAW, Encoded, Shape
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.placement import CopyPath
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BlockCorruptError, TierFullError
from kvstrata_api.units import MIB
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    HalvingCodec,
    TestCodecs,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_core,
    secret,
    store_chain,
)
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

PLACE = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES)
COUNT = 8
HALF = BLOCK_BYTES // 2


async def core_on(
    volume: MemoryVolume, codec: HalvingCodec | None = None, capacity_bytes: int = 16 * MIB
) -> AgentParts:
    """A core with a memory tier above a record store, whose pool compresses, and a chain of blocks in memory."""
    backend = await open_store(volume, capacity_bytes)
    below = Tier(dict_tier("below", capacity_bytes, 1, 2).spec, 1, backend, 2)
    tiers = [dram_tier(32 * BLOCK_BYTES), below]
    core = make_core(tiers, policy={"compression": {"mode": "Lossless"}}, codecs=TestCodecs(codec))
    assert await store_chain(core, PLACE, range(COUNT)) == COUNT
    return core


def entries_of(core: AgentParts) -> list[Entry]:
    found = [core.node.index.find(SCOPE, digest(n)) for n in range(COUNT)]
    return [e for e in found if e is not None]


def memory_of(entry: Entry) -> memoryview:
    copy = entry.residences[0]
    assert copy.tier.backend.mappable is not None
    return copy.tier.backend.mappable.view(copy.slot)[:BLOCK_BYTES]


async def push_down(core: AgentParts, entries: Sequence[Entry]) -> list[bool]:
    """Copy blocks down as one group."""
    moves = [core.cache.mover.plan(entry, entry.residences[0], core.node.tiers[1]) for entry in entries]
    assert {m.path for m in moves} == {CopyPath.CODED_GROUP}
    return await core.cache.mover.copy_all(moves, core.node.tiers[1], Priority.DEMOTE)


async def pull_up(core: AgentParts, entries: Sequence[Entry]) -> list[bool]:
    """Copy blocks up as one group."""
    dram = core.node.tiers[0]
    moves = [core.cache.mover.plan(e, e.residences[0], dram, dram.allocate(SCOPE, "a", BLOCK_BYTES)) for e in entries]
    assert {m.path for m in moves} == {CopyPath.CODED_GROUP}
    return await core.cache.mover.copy_all(moves, dram, Priority.ONBOARD)


def leave_memory(core: AgentParts, entries: Sequence[Entry]) -> None:
    core.node.evict(list(reversed(entries)), core.node.tiers[0], "room")


def flip(core: AgentParts, volume: MemoryVolume, entry: Entry) -> None:
    """Spoil a byte of the record below."""
    copy, store = entry.residences[-1], core.node.tiers[1].backend
    assert isinstance(store, RecordStore)
    volume.flip(str(store._state.segments[copy.slot.extent].name), copy.slot.offset + 4096 + 7, 1)


async def test_a_coded_group_goes_down_in_one_write_and_comes_up_as_it_was() -> None:
    volume = MemoryVolume()
    core = await core_on(volume)
    entries, before = entries_of(core), volume.calls["write"]

    assert await push_down(core, entries) == [True] * COUNT
    assert volume.calls["write"] - before == 1
    assert [(r.record.codec, r.record.stored_bytes) for r in (e.residences[1] for e in entries)] == [
        ("halving", HALF)
    ] * COUNT
    assert core.node.tiers[1].stored_bytes_written == COUNT * HALF
    leave_memory(core, entries)
    assert await pull_up(core, entries) == [True] * COUNT
    assert all(memory_of(e) == bytes_of(n) for n, e in enumerate(entries))
    assert all(e.residences[0].record.codec == RAW for e in entries)
    await core.close()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["whole", "odd", "spoilt", "rotten"]), min_size=COUNT, max_size=COUNT))
def test_each_comes_back_as_it_was_or_not_at_all(fates: list[str]) -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        core = await core_on(volume, Uneven({n for n, fate in enumerate(fates) if fate == "odd"}))
        entries, dram, below = entries_of(core), *core.node.tiers
        for entry, fate in zip(entries, fates, strict=True):
            if fate == "spoilt":
                memory_of(entry)[:4] = b"late"

        assert await push_down(core, entries) == [fate != "spoilt" for fate in fates]
        there = [e for e in entries if e.residences]
        for entry in there:
            is_odd = fates[entries.index(entry)] == "odd"
            assert entry.residences[1].record.codec == (RAW if is_odd else "halving")
            if fates[entries.index(entry)] == "rotten":
                flip(core, volume, entry)
        for entry in reversed(there):
            core.node.drop_copy(entry, dram)
        made = {e: await pull_up_alone(core, e) for e in there}

        assert all(is_made == (fates[entries.index(e)] != "rotten") for e, is_made in made.items())
        assert all(memory_of(e) == bytes_of(entries.index(e)) for e, is_made in made.items() if is_made)
        assert core.node.contents(below).blocks == sum(fate in {"whole", "odd"} for fate in fates)
        await core.close()

    asyncio.run(scenario())


async def pull_up_alone(core: AgentParts, entry: Entry) -> bool:
    dram = core.node.tiers[0]
    move = core.cache.mover.plan(entry, entry.residences[0], dram, dram.allocate(SCOPE, "a", BLOCK_BYTES))
    return all(await core.cache.mover.copy_all([move], dram, Priority.ONBOARD))


class Uneven(HalvingCodec):
    """Finds nothing to gain in some blocks."""

    def __init__(self, odd: set[int]) -> None:
        self.odd = odd

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        if int.from_bytes(raw[:8], "little") not in self.odd:
            return super().encode(raw, shape, into)
        into[: len(raw)] = bytes(len(raw))  # What it made meanwhile is nobody's business.
        return Encoded(self.name, len(raw) + 8)


async def test_one_rotten_record_of_a_coded_group_is_one_miss() -> None:
    volume = MemoryVolume()
    core = await core_on(volume)
    entries = entries_of(core)
    await push_down(core, entries)
    leave_memory(core, entries)
    flip(core, volume, entries[5])

    assert await pull_up(core, entries) == [n != 5 for n in range(COUNT)]
    assert all(memory_of(e) == bytes_of(n) for n, e in enumerate(entries) if n != 5)
    assert entries[5].residences == ()
    await core.close()


class Broken(HalvingCodec):
    """Makes of one block what does not decode."""

    def decode(self, stored: memoryview, into: memoryview) -> None:
        if stored[:8] == bytes_of(2)[:8]:
            into[:] = b"\xee" * len(into)
            raise BlockCorruptError("does not fit")
        super().decode(stored, into)


async def test_a_form_that_does_not_decode_is_a_miss_and_gets_into_no_slot() -> None:
    core = await core_on(MemoryVolume(), Broken())
    entries, dram = entries_of(core), core.node.tiers[0]
    await push_down(core, entries)
    leave_memory(core, entries)
    used_bytes = dram.backend.used_bytes

    assert await pull_up(core, entries) == [n != 2 for n in range(COUNT)]
    assert entries[2].residences == ()
    assert dram.backend.used_bytes - used_bytes == (COUNT - 1) * entries[0].residences[0].slot.size_bytes
    assert dram.backend.mappable is not None
    assert all(b"\xee" not in bytes(memory_of(e)) for n, e in enumerate(entries) if n != 2)
    await core.close()


class Late(HalvingCodec):
    """Somebody writes to slots while it works."""

    def __init__(self) -> None:
        self.slots: list[memoryview] = []

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        for slot in self.slots:
            slot[:] = b"late" * (len(slot) // 4)
        return super().encode(raw, shape, into)


async def test_what_a_late_engine_writes_meanwhile_never_goes_down() -> None:
    late = Late()
    core = await core_on(MemoryVolume(), late)
    entries = entries_of(core)
    late.slots[:] = [memory_of(entries[0])]

    assert await push_down(core, entries) == [True] * COUNT
    late.slots.clear()
    leave_memory(core, entries)
    assert await pull_up(core, entries) == [True] * COUNT
    assert memory_of(entries[0]) == bytes_of(0)
    await core.close()


async def test_coded_blocks_that_find_no_room_stay_and_the_others_go_down() -> None:
    core = await core_on(MemoryVolume(), capacity_bytes=60 << 10)
    entries = entries_of(core)

    made = await push_down(core, entries)

    assert 0 < made.count(True) < COUNT
    assert made == sorted(made, reverse=True)
    with pytest.raises(TierFullError):
        await push_down(core, [e for e in entries if len(e.residences) == 1])
    await core.close()


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_coded_group_that_is_cancelled_gives_all_back(way: str) -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        core = await core_on(volume)
        entries, (dram, below) = entries_of(core), core.node.tiers
        if way == "read":
            await push_down(core, entries)
            leave_memory(core, entries)
        used = dram.backend.used_bytes, below.backend.used_bytes
        hung = volume.hold(way)
        moving = asyncio.create_task(push_down(core, entries) if way == "write" else pull_up(core, entries))
        await asyncio.sleep(1)
        moving.cancel()
        await asyncio.wait([moving])
        hung.set()
        await asyncio.sleep(5)

        assert moving.cancelled()
        assert (dram.backend.used_bytes, below.backend.used_bytes) == used
        assert all(len(e.residences) == 1 for e in entries)
        await core.close()

    run_virtually(scenario())


class Leaving(HalvingCodec):
    """A block is dropped while it works."""

    core: AgentParts | None = None
    entry: Entry | None = None

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        core, entry, self.entry = self.core, self.entry, None
        if core is not None and entry is not None:
            core.node.drop_copy(entry, core.node.tiers[0])
        return super().encode(raw, shape, into)


async def test_a_block_that_leaves_memory_while_it_is_coded_is_not_entered_below() -> None:
    leaving = Leaving()
    core = await core_on(MemoryVolume(), leaving)
    entries = entries_of(core)
    leaving.core, leaving.entry = core, entries[-1]

    assert await push_down(core, entries) == [True] * (COUNT - 1) + [False]
    assert core.node.contents(core.node.tiers[1]).blocks == COUNT - 1
    assert core.node.tiers[1].backend.used_bytes == (COUNT - 1) * entries[0].residences[1].slot.size_bytes
    await core.close()


async def test_the_checksum_of_a_block_that_came_up_is_that_of_its_slot() -> None:
    core = await core_on(MemoryVolume())
    entries = entries_of(core)
    await push_down(core, entries)
    leave_memory(core, entries)
    await pull_up(core, entries)

    for entry in entries:
        copy = entry.residences[0]
        seen = checksum(memory_of(entry), entry.digest, core.node.epoch, copy.slot.stamp)
        assert copy.record.checksum == seen
    await core.close()
