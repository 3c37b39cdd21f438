"""Groups of blocks between memory and a record store: what fails fails alone, and nothing is believed unseen."""

import asyncio
import errno
import mmap
from collections.abc import Sequence

import pytest
from sim.volume import Fault, MemoryVolume

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import ExpectedChecksum, Reading, Record, TierBackend, Writing
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.placement import CopyPath
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError, TierFullError
from kvstrata_api.units import MIB
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
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


async def core_on(volume: MemoryVolume, capacity_bytes: int = 16 * MIB) -> AgentParts:
    """A core with a memory tier above a record store, and a chain of blocks in memory."""
    return await core_above(await open_store(volume, capacity_bytes), "None")


async def core_above(backend: TierBackend, compression: str) -> AgentParts:
    """The same above another backend."""
    below = Tier(dict_tier("below", backend.capacity_bytes, 1, 2).spec, 1, backend, 2)
    core = make_core([dram_tier(32 * BLOCK_BYTES), below], policy={"compression": {"mode": compression}})
    assert await store_chain(core, PLACE, range(COUNT)) == COUNT
    return core


def entries_of(core: AgentParts) -> list[Entry]:
    found = [core.node.index.find(SCOPE, digest(n)) for n in range(COUNT)]
    return [e for e in found if e is not None]


async def push_down(core: AgentParts, entries: Sequence[Entry]) -> list[bool]:
    """Copy blocks down as one group."""
    moves = [core.cache.mover.plan(entry, entry.residences[0], core.node.tiers[1]) for entry in entries]
    assert all(m.path is not CopyPath.SINGLE for m in moves)
    return await core.cache.mover.copy_all(moves, core.node.tiers[1], Priority.DEMOTE)


async def with_blocks_below(volume: MemoryVolume) -> tuple[AgentParts, list[Entry]]:
    core = await core_on(volume)
    entries = entries_of(core)
    assert await push_down(core, entries) == [True] * COUNT
    core.node.evict(list(reversed(entries)), core.node.tiers[0], "room")
    return core, entries


async def loaded(core: AgentParts) -> list[int]:
    """Numbers of the leading blocks that come up, each with its own bytes."""
    numbers = []
    acquired = await core.cache.reader.acquire(AcquireCall(PLACE, [digest(n) for n in range(COUNT)], 30.0, 5.0))
    for number, read in enumerate(acquired.reads):
        residence = read.lease.residence
        assert residence.tier.backend.mappable is not None
        assert residence.tier.backend.mappable.view(residence.slot)[:BLOCK_BYTES] == bytes_of(number)
        numbers.append(number)
    return numbers


async def test_a_group_goes_down_in_one_write_and_comes_up_in_one_read() -> None:
    volume = MemoryVolume()
    core = await core_on(volume)
    before = volume.calls["write"]

    assert await push_down(core, entries_of(core)) == [True] * COUNT
    assert volume.calls["write"] - before == 1
    core.node.evict(list(reversed(entries_of(core))), core.node.tiers[0], "room")
    assert await loaded(core) == list(range(COUNT))
    assert volume.calls["read"] == COUNT  # One block of this size for each of 16 transfers: nothing waits for another.
    await core.close()


async def test_a_group_that_moved_is_counted_by_blocks_and_timed_as_one() -> None:
    """From both a plan has what a transfer takes beyond its bytes: a group's time is not that of each of its blocks."""
    core = await core_on(MemoryVolume())
    assert await push_down(core, entries_of(core)) == [True] * COUNT

    registry, path = core.node.counters._instruments.registry, {"source": "dram", "target": "below"}
    names = {"kvstrata_moved_blocks_total": COUNT, "kvstrata_move_duration_seconds_count": 1}
    assert {name: registry.get_sample_value(name, {"pool": "pool", "node": "node", **path}) for name in names} == names
    await core.close()


async def test_groups_go_into_device_memory_as_they_are_whatever_the_pool_compresses() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    from kvstrata_agent.backends.device.hbm import PIECES, HbmTier
    from support.backends.late_device import LateQueue

    queue = LateQueue()
    core = await core_above(HbmTier([queue], 4 * MIB, threads=1), "Lossless")

    assert await push_down(core, entries_of(core)) == [True] * COUNT
    assert queue.most_under_way >= PIECES
    core.node.evict(list(reversed(entries_of(core))), core.node.tiers[0], "room")
    assert await loaded(core) == list(range(COUNT))
    await core.close()


async def test_every_block_of_a_group_that_was_acknowledged_survives_a_power_loss() -> None:
    volume = MemoryVolume()
    core = await core_on(volume)
    assert await push_down(core, entries_of(core)) == [True] * COUNT

    for image in volume.crash_states(16):
        again = await open_store(MemoryVolume(image), 16 * MIB)
        found = {record.key.digest: (slot, record) async for slot, record in again.recover()}
        assert set(found) == {digest(n) for n in range(COUNT)}
        for slot, record in found.values():
            await again.read(slot, record, memoryview(bytearray(BLOCK_BYTES)))
        await again.close()
    await core.close()


async def test_a_block_that_was_spoilt_in_memory_goes_and_the_others_go_down() -> None:
    core = await core_on(MemoryVolume())
    entries = entries_of(core)
    spoilt = entries[3].residences[0]
    assert spoilt.tier.backend.mappable is not None
    spoilt.tier.backend.mappable.view(spoilt.slot)[:4] = b"late"

    assert await push_down(core, entries) == [n != 3 for n in range(COUNT)]
    assert entries[3].residences == ()
    assert core.node.contents(core.node.tiers[1]).blocks == COUNT - 1
    await core.close()


async def test_a_block_that_leaves_memory_while_it_is_written_is_not_entered_below() -> None:
    volume = MemoryVolume()
    core = await core_on(volume)
    entries = entries_of(core)

    def leave() -> None:
        if entries[-1].residences:
            core.node.drop_copy(entries[-1], core.node.tiers[0])

    volume.on_step = leave
    made = await push_down(core, entries)

    volume.on_step = None
    assert made == [True] * (COUNT - 1) + [False]
    assert core.node.tiers[1].backend.used_bytes == (COUNT - 1) * entries[0].residences[1].slot.size_bytes
    await core.close()


async def test_a_failed_write_of_a_group_leaves_all_where_they_were_and_pauses_the_tier_once() -> None:
    volume = MemoryVolume()
    core = await core_on(volume)
    volume.fail("write", errno.EIO, name="seg-")

    assert await push_down(core, entries_of(core)) == [False] * COUNT
    assert core.node.tiers[1].failures == 1
    assert core.node.tiers[1].backend.used_bytes == 0
    assert await loaded(core) == list(range(COUNT))
    await core.close()


async def test_what_finds_no_room_stays_and_the_others_go_down() -> None:
    core = await core_on(MemoryVolume(), capacity_bytes=60 << 10)
    entries = entries_of(core)

    made = await push_down(core, entries)

    assert 0 < made.count(True) < COUNT
    assert made == sorted(made, reverse=True)
    with pytest.raises(TierFullError):
        await push_down(core, [e for e in entries if len(e.residences) == 1])
    await core.close()


async def test_one_rotten_record_of_a_group_is_one_miss() -> None:
    volume = MemoryVolume()
    core, entries = await with_blocks_below(volume)
    rotten = entries[5].residences[0]
    store = core.node.tiers[1].backend
    assert isinstance(store, RecordStore)
    volume.flip(str(store._state.segments[rotten.slot.extent].name), rotten.slot.offset + 4096 + 7, 1)

    ends = await read_group(core, entries)

    assert [isinstance(end, bytes) for end in ends] == [n != 5 for n in range(COUNT)]
    assert await loaded(core) == list(range(5))
    assert entries[5].residences == ()
    await core.close()


async def read_group(core: AgentParts, entries: Sequence[Entry]) -> Sequence[bytes | KvStrataError]:
    group = core.node.tiers[1].backend.group
    assert group is not None
    readings = [
        Reading(e.residences[0].slot, e.residences[0].record, _page_aligned(), (7, 1000 + n))
        for n, e in enumerate(entries)
    ]
    return await group.read_group(readings)


def _page_aligned() -> memoryview:
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))


async def test_one_bad_sector_costs_one_block_of_a_group() -> None:
    volume = MemoryVolume()
    core, entries = await with_blocks_below(volume)
    volume.faults.append(Fault("read", errno.EIO))  # The group's own read.
    volume.faults.append(Fault("read", errno.EIO, skip=2))  # And that of its third block.

    ends = await read_group(core, entries)

    assert [isinstance(end, bytes) for end in ends] == [n != 2 for n in range(COUNT)]
    await core.close()


async def test_nothing_that_was_not_verified_gets_into_memory_that_engines_map() -> None:
    volume = MemoryVolume()
    core, entries = await with_blocks_below(volume)
    store = core.node.tiers[1].backend
    assert isinstance(store, RecordStore)
    for entry in entries:
        rotten = entry.residences[0].slot
        volume.flip(str(store._state.segments[rotten.extent].name), rotten.offset + 4096 + 7, 1)
    targets = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in entries]

    ends = await store.read_group([
        Reading(e.residences[0].slot, e.residences[0].record, into, (7, 1000 + n))
        for n, (e, into) in enumerate(zip(entries, targets, strict=True))
    ])  # fmt: skip

    assert all(isinstance(end, BlockCorruptError) for end in ends)
    assert all(into == b"\xee" * BLOCK_BYTES for into in targets)
    await core.close()


def test_a_reader_that_has_left_a_hung_medium_finds_its_memory_as_it_was() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        core, entries = await with_blocks_below(volume)
        store, copy = core.node.tiers[1].backend, entries[0].residences[0]
        into = memoryview(bytearray(b"\xee" * BLOCK_BYTES))
        hung = volume.hold("read")
        reading = asyncio.create_task(store.read(copy.slot, copy.record, into))
        await asyncio.sleep(1)
        reading.cancel()
        await asyncio.wait([reading])
        hung.set()
        await asyncio.sleep(1)

        assert reading.cancelled()
        assert into == b"\xee" * BLOCK_BYTES
        await core.close()

    run_virtually(scenario())


def test_reads_that_a_hung_device_never_answers_are_misses_and_its_tier_says_so() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        core, entries = await with_blocks_below(volume)
        hung = volume.hold("read")

        ends = await read_group(core, entries)
        assert all(isinstance(end, BackendFailedError) for end in ends)
        assert await core.cache.promoter.promote(entries[0], "a") is None
        assert "no answer" in core.node.tiers[1].last_error
        assert entries[0].residences == ()
        hung.set()
        await core.close()

    run_virtually(scenario())


async def test_more_records_than_buffers_go_through_buffers_at_once() -> None:
    store = await open_store(MemoryVolume(), 16 * MIB)
    memory = bytearray(40 * BLOCK_BYTES + 1)
    writings = []
    for n in range(40):
        stored = memoryview(memory)[n * BLOCK_BYTES + 1 : (n + 1) * BLOCK_BYTES + 1]  # Not where O_DIRECT wants it.
        slot = store.reserve(SCOPE, BLOCK_BYTES)
        made = Record(BlockKey(SCOPE, digest(n)), b"", LAYOUT_ID, "raw", BLOCK_BYTES, BLOCK_BYTES, b"", 7)
        writings.append(Writing(slot, stored, made, ExpectedChecksum(checksum(stored, digest(n), 1, 2), (1, 2))))

    async with asyncio.timeout(10):
        ends = await store.write_group(writings)
        readings = [
            Reading(w.slot, end, memoryview(bytearray(BLOCK_BYTES)))
            for w, end in zip(writings, ends, strict=True)
            if isinstance(end, Record)
        ]
        assert len(readings) == 40
        assert await store.read_group(readings) == [r.record.checksum for r in readings]
    await store.close()


async def test_records_of_a_group_carry_checksums_for_their_new_slots() -> None:
    core = await core_on(MemoryVolume())
    entries = entries_of(core)
    await push_down(core, entries)

    ends = await read_group_below(core, entries)

    assert ends == [True] * COUNT
    await core.close()


async def read_group_below(core: AgentParts, entries: Sequence[Entry]) -> list[bool]:
    """Whether a plain read of each verifies."""
    done = []
    for entry in entries:
        copy = entry.residences[1]
        assert isinstance(copy.record, Record)
        into = memoryview(bytearray(BLOCK_BYTES))
        await copy.tier.backend.read(copy.slot, copy.record, into)
        done.append(into == entry_bytes(entry))
    return done


def entry_bytes(entry: Entry) -> bytes:
    return bytes_of(int.from_bytes(entry.digest, "big"))
