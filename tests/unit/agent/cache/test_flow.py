"""Laws of the core's verbs over a real memory tier and a dict tier below it."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvstrata import Lease
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.leases import Stray
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.cache import eviction
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_agent.cache.load import AcquireCall, Read
from kvstrata_agent.cache.store import PUBLISHED, REFUSED
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.admission import CHECK_EVERY
from kvstrata_api.blocks import ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_client.verbs.copying import copy_verified, is_intact
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    OTHER_SCOPE,
    SCOPE,
    Clock,
    DictBackend,
    FakeAuthenticator,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_core,
    secret,
)

pytestmark = pytest.mark.unit

SLOTS = 16


def place(owner: int = 1, scope: ScopeId = SCOPE) -> RequestContext:
    return RequestContext(owner, "a", secret(scope), LAYOUT_ID, BLOCK_BYTES)


async def store(
    core: AgentParts, numbers: Sequence[int], parent: bytes = b"", at: RequestContext | None = None
) -> bytes:
    """Reserve, write and publish blocks as a chain; returns the results."""
    made, *_ = await core.cache.writer.reserve(at or place(), parent, [digest(n) for n in numbers])
    fresh = [(r, n) for r, n in zip(made, numbers, strict=False) if r is not None]
    sums = []
    for reservation, number in fresh:
        mappable = reservation.tier.backend.mappable
        assert mappable is not None
        mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(number)
        sums.append(checksum(bytes_of(number), digest(number), core.node.epoch, reservation.slot.stamp))
    return core.cache.writer.publish_now((at or place()).owner, [r.id for r, _ in fresh], sums)


def lease_of(core: AgentParts, read: Read) -> Lease:
    """The lease as a client sees it."""
    tier, slot, record = read.lease.residence
    assert tier.backend.mappable is not None
    view = tier.backend.mappable.view(slot)[: record.stored_bytes].toreadonly()
    return Lease(read.lease.id, record.key.digest, record.epoch, slot.stamp, record.checksum, "dram", 1, view)


def bytes_read(core: AgentParts, read: Read) -> bytes:
    tier, slot, record = read.lease.residence
    mappable = tier.backend.mappable
    assert mappable is not None
    content = bytes(mappable.view(slot)[: record.raw_bytes])
    assert checksum(content, read.lease.entry.digest, core.node.epoch, slot.stamp) == record.checksum
    return content


async def load(core: AgentParts, numbers: Sequence[int], at: RequestContext | None = None) -> list[Read]:
    return (await core.cache.reader.acquire(AcquireCall(at or place(), [digest(n) for n in numbers], 30.0, 1.0))).reads


@pytest.fixture
async def core() -> AsyncIterator[AgentParts]:
    made = make_core([dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)], Clock())
    yield made
    await made.close()
    for tier in made.node.tiers:
        await tier.backend.close()


def used(core: AgentParts, name: str) -> int:
    tier = core.node.tier(name)
    assert tier is not None
    return tier.backend.used_bytes


async def test_what_was_published_is_read_back(core: AgentParts) -> None:
    assert await store(core, [1, 2, 3]) == bytes([PUBLISHED] * 3)

    reads = await load(core, [1, 2, 3, 4])

    assert [bytes_read(core, r) for r in reads] == [bytes_of(n) for n in (1, 2, 3)]
    assert {r.source for r in reads} == {"dram"}


async def test_nothing_can_be_read_before_it_is_published(core: AgentParts) -> None:
    await core.cache.writer.reserve(place(), b"", [digest(1)])

    assert await load(core, [1]) == []


async def test_wrong_bytes_are_refused_and_their_slot_is_given_back(core: AgentParts) -> None:
    made = core.cache.writer.reserve_now(place(), b"", [digest(1)])
    assert made[0] is not None

    assert core.cache.writer.publish_now(1, [made[0].id], [b"0" * 16]) == bytes([REFUSED])
    assert used(core, "dram") == 0
    assert len(core.node.index) == 0


async def write_wrong(core: AgentParts, number: int, owner: int = 1) -> bytes:
    """Publish a block with the checksum of other bytes."""
    (made,) = core.cache.writer.reserve_now(place(owner), b"", [digest(number)])
    assert made is not None
    return core.cache.writer.publish_now(owner, [made.id], [b"0" * 16])


async def test_a_wrong_block_that_is_not_checked_is_a_miss_that_its_reader_reports(core: AgentParts) -> None:
    await store(core, [1])  # The first block of a connection is checked.

    assert await write_wrong(core, 2) == bytes([PUBLISHED])
    (read,) = await load(core, [2])
    assert not copy_verified(lease_of(core, read), memoryview(bytearray(BLOCK_BYTES)))
    assert not is_intact(lease_of(core, read))
    assert core.cache.reader.inspect(1, [read.lease.id]) == 1
    assert await load(core, [2]) == []


async def test_a_writer_that_was_wrong_once_is_checked_for_as_long_as_it_is_connected(core: AgentParts) -> None:
    for number in range(2 * CHECK_EVERY):
        assert await write_wrong(core, number + 1) == bytes([REFUSED])

    assert len(core.node.index) == 0
    core.node.end_owner(1)
    await store(core, [1])
    assert await write_wrong(core, 2) == bytes([PUBLISHED]), "another connection of that number"


async def test_a_full_tier_makes_room_for_a_chain_without_the_chain_itself() -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], Clock())
    for first in range(1, 10 * SLOTS, SLOTS // 2):
        numbers = range(first, first + SLOTS // 2)
        half = len(numbers) // 2
        await store(core, numbers[:half])
        await store(core, numbers[half:], digest(numbers[half - 1]))

        assert len(await load(core, numbers)) == len(numbers)
        core.node.end_owner(1)
    assert len(core.cache.evictor._tasks) == 0, "nothing was waited for"
    await core.close()
    await core.node.tiers[0].backend.close()


async def test_what_comes_while_a_lone_tier_is_full_does_not_leave_before_what_is_older() -> None:
    clock = Clock()
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], clock)
    for number in range(1, SLOTS + 1):  # Chains of one block; the last ones come above the high watermark.
        await store(core, [number])
        clock.now_s += 1.0

    await core.cache.evictor.trim(core.node.tiers[0])
    left = sorted(number for number in range(1, SLOTS + 1) if core.node.index.find(SCOPE, digest(number)))
    assert 0 < len(left) < SLOTS
    assert left == list(range(SLOTS + 1 - len(left), SLOTS + 1))
    await core.close()
    await core.node.tiers[0].backend.close()


async def test_a_slot_is_given_back_whatever_its_write_failed_of(
    core: AgentParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def puzzle(*_: object) -> None:
        raise ValueError("not an errno")

    await store(core, [1])
    (entry,) = core.node.index
    fast, slow = core.node.tiers
    with monkeypatch.context() as patched:
        patched.setattr(slow.backend, "write", puzzle)
        with pytest.raises(ValueError, match="not an errno"):
            await core.cache.demoter.demote_to(entry, fast, slow, Priority.DEMOTE)

    assert used(core, "nvme") == 0
    assert slow.tenant_bytes == {}
    assert await core.cache.demoter.demote_to(entry, fast, slow, Priority.DEMOTE)


async def test_a_block_that_exists_is_not_reserved_again(core: AgentParts) -> None:
    await store(core, [1])

    made = core.cache.writer.reserve_now(place(2), b"", [digest(1), digest(2)])

    assert made[0] is None
    assert made[1] is not None


async def test_a_reservation_of_somebody_else_cannot_be_published(core: AgentParts) -> None:
    made = core.cache.writer.reserve_now(place(1), b"", [digest(1)])
    assert made[0] is not None

    assert core.cache.writer.publish_now(2, [made[0].id], [b"0" * 16]) == bytes([REFUSED])
    assert len(core.node.reservations) == 1


async def test_blocks_beyond_memory_are_demoted_and_come_back_the_same(core: AgentParts) -> None:
    numbers = list(range(1, 41))
    for n in numbers:
        assert await store(core, [n], digest(n - 1) if n > 1 else b"") == bytes([PUBLISHED])

    for first in range(0, 40, 8):
        reads = await load(core, numbers[: first + 8])
        assert [bytes_read(core, r) for r in reads][first:] == [bytes_of(n) for n in numbers[first : first + 8]][
            : max(0, len(reads) - first)
        ]
        core.cache.release(1, [r.lease.id for r in reads])
    assert len(core.node.index) == 40


async def test_a_leased_block_stays_where_it_is(core: AgentParts) -> None:
    await store(core, [1])
    read = (await load(core, [1]))[0]

    for n in range(2, 40):
        await store(core, [n])

    assert bytes_read(core, read) == bytes_of(1)


async def test_a_full_tier_of_leased_blocks_gives_no_slot_and_waits_no_longer_than_its_bound(core: AgentParts) -> None:
    await store(core, list(range(1, SLOTS + 1)))
    await load(core, list(range(1, SLOTS + 1)))

    assert await store(core, [99]) == b""


async def test_the_end_of_a_connection_releases_everything(core: AgentParts) -> None:
    await store(core, [1, 2])
    await load(core, [1, 2])
    core.cache.writer.reserve_now(place(), b"", [digest(3), digest(4)])
    before = used(core, "dram")

    core.node.end_owner(1)

    assert len(core.node.leases) == 0
    assert len(core.node.reservations) == 0
    assert used(core, "dram") == before - 2 * BLOCK_BYTES


async def test_another_scope_gets_an_extent_when_the_tier_is_full(core: AgentParts) -> None:
    await store(core, list(range(1, SLOTS + 1)))

    assert await store(core, [77], at=place(2, OTHER_SCOPE)) == bytes([PUBLISHED])
    assert len(core.node.index) == SLOTS + 1


async def test_scopes_do_not_see_each_other(core: AgentParts) -> None:
    await store(core, [1])

    assert core.cache.reader.lookup_now(place(2, OTHER_SCOPE), [digest(1)]) == [None]
    assert await load(core, [1], place(2, OTHER_SCOPE)) == []


async def test_one_pass_over_the_watermark_takes_a_whole_chain_from_its_end(core: AgentParts) -> None:
    await store(core, list(range(1, SLOTS + 1)))
    dram = core.node.tiers[0]

    await core.cache.evictor.trim(dram)

    policy = core.node.spec.policy.eviction
    assert dram.fill_ratio * 100 <= policy.low_watermark_percent
    stayed = sorted(int.from_bytes(e.digest, "big") for e in core.node.contents(dram).residents())
    assert stayed == list(range(1, len(stayed) + 1))


async def test_nothing_is_evicted_for_a_watermark_while_earlier_blocks_are_entered(core: AgentParts) -> None:
    await store(core, list(range(1, SLOTS + 1)))
    dram, sweeper = core.node.tiers[0], Sweeper(core.cache, FakeAuthenticator())
    dram.is_recovering = True
    await sweeper._tend()
    assert core.node.contents(dram).blocks == SLOTS

    dram.is_recovering = False
    await sweeper._tend()
    assert core.node.contents(dram).blocks < SLOTS


async def test_a_corrupt_copy_below_is_a_miss_and_goes_away(core: AgentParts) -> None:
    for n in range(1, 41):
        await store(core, [n], digest(n - 1) if n > 1 else b"")
    nvme = core.node.tier("nvme")
    assert nvme is not None
    assert isinstance(nvme.backend, DictBackend)
    low = next(e for e in core.node.index if e.residences[0].tier is nvme)
    nvme.backend.stored[low.residences[0].slot.stamp] = b"x" * BLOCK_BYTES

    reads = (await core.cache.reader.acquire(AcquireCall(place(), [low.digest], 30.0, 1.0))).reads

    assert reads == []
    assert core.node.index.find(SCOPE, low.digest) is None


async def test_a_failing_lower_tier_costs_blocks_but_no_writer(core: AgentParts) -> None:
    nvme = core.node.tier("nvme")
    assert nvme is not None
    assert isinstance(nvme.backend, DictBackend)
    nvme.backend.fails_writes = True

    for n in range(1, 41):
        assert await store(core, [n], digest(n - 1) if n % 4 != 1 else b"") == bytes([PUBLISHED])

    assert nvme.backend.used_bytes == 0
    assert nvme.last_error == "No space left on device"


async def test_where_nothing_is_below_no_chain_loses_its_end_to_what_continues_it() -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], Clock())
    await store(core, range(1, SLOTS - 1))
    made, refusal, _ = await core.cache.writer.reserve(place(), digest(SLOTS - 2), [digest(n) for n in range(15, 19)])

    assert len(made) == 2
    assert "2 blocks were refused" in refusal
    assert all(core.node.index.find(SCOPE, digest(n)) for n in range(1, SLOTS - 1))
    await core.close()


async def test_a_message_that_comes_twice_or_late_is_carried_out_once(core: AgentParts) -> None:
    made, *_ = await core.cache.writer.reserve(place(), b"", [digest(1), digest(2)])
    ids, sums = [], []
    for number, reservation in enumerate(made, start=1):
        assert reservation is not None
        assert reservation.tier.backend.mappable is not None
        reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(number)
        ids.append(reservation.id)
        sums.append(checksum(bytes_of(number), digest(number), core.node.epoch, reservation.slot.stamp))

    assert core.cache.writer.publish_now(1, [ids[0], ids[0]], [sums[0], sums[0]]) == bytes([PUBLISHED, PUBLISHED])
    assert core.cache.writer.publish_now(2, ids, sums) == bytes([REFUSED, REFUSED]), "another's"
    assert core.cache.abandon(1, ids) == 1, "what is published cannot be given back"
    assert core.cache.abandon(1, ids) == 0
    assert core.cache.writer.publish_now(1, ids, sums) == bytes([PUBLISHED, REFUSED]), (
        "as before, and after the abandon"
    )
    assert len(core.node.reservations) == 0
    assert [len(await load(core, [1, 2]))] == [1]


async def test_releases_tell_what_was_wrong_with_them(core: AgentParts) -> None:
    await store(core, [1, 2])
    reads = await load(core, [1, 2])
    ids = [r.lease.id for r in reads]
    table, now_s = core.node.leases, core.node.clock()

    assert table.release(2, ids, now_s).strays == {Stray.FOREIGN: 2}
    assert table.release(1, [ids[0], ids[0], 10_000, 0], now_s).strays == {Stray.DOUBLE: 1, Stray.UNKNOWN: 2}
    assert table.release(2, ids[:1], now_s).strays == {Stray.FOREIGN: 1}
    late = table.release(1, ids[1:], now_s + 30.0)
    assert (late.valid, len(late.late), late.strays) == ((), 1, {Stray.LATE: 1})
    assert table.release(1, ids[1:], now_s).strays == {Stray.LATE: 1}
    assert len(table) == 0


async def test_a_corrupt_block_in_memory_goes_when_its_reader_says_so(core: AgentParts) -> None:
    await store(core, [1])
    (read,) = await load(core, [1])
    tier, slot, _ = read.lease.residence
    assert core.cache.reader.inspect(1, [read.lease.id]) == 0, "nothing is wrong with it"
    assert tier.backend.mappable is not None
    tier.backend.mappable.view(slot)[0] ^= 1
    assert core.cache.reader.inspect(2, [read.lease.id]) == 0, "another's lease"
    assert core.cache.reader.inspect(1, [read.lease.id]) == 1
    assert core.node.index.find(SCOPE, digest(1)) is None
    assert core.cache.release(1, [read.lease.id]) == 1
    assert await store(core, [1]) == bytes([PUBLISHED])


async def test_a_slot_waits_for_the_readers_of_its_own_copy_alone(core: AgentParts) -> None:
    await store(core, [1])
    (read,) = await load(core, [1])
    entry = read.lease.entry
    low = core.node.tiers[1]
    await core.cache.demoter.demote_to(entry, core.node.tiers[0], low, Priority.DEMOTE)
    copy = entry.residence(low)
    assert copy is not None
    core.node.copy_failed(entry, copy, is_corrupt=True)
    assert low.backend.used_bytes == 0, "nobody reads the lower copy"
    core.node.drop_block(entry, "erased")
    assert core.node.tiers[0].backend.used_bytes == BLOCK_BYTES
    core.cache.release(1, [read.lease.id])
    assert core.node.tiers[0].backend.used_bytes == 0
    assert not core.node.deferred_frees


async def test_a_block_that_is_erased_before_its_transfer_begins_is_a_miss(core: AgentParts) -> None:
    await store(core, [1])
    entry = core.cache.reader.lookup_now(place(), [digest(1)])[0]
    assert entry is not None
    memory = core.node.tier("dram")
    assert memory is not None
    assert await core.cache.demoter.demote_to(entry, memory, core.node.tiers[1], Priority.DEMOTE)
    core.node.evict([entry], memory, "room")

    assert core.cache.promoter.start_prefetch(entry)
    core.node.drop_scope(SCOPE)

    assert await load(core, [1]) == []
    await asyncio.sleep(0)  # Transfers begin together, in the next step of the loop.
    await asyncio.gather(*core.cache.promoter._tasks)
    assert entry.move is None
    assert used(core, "dram") == used(core, "nvme") == 0


@pytest.fixture
async def crossed() -> AsyncIterator[AgentParts]:
    """Four chains with three blocks in memory, two below, and the end in memory again; both tiers are full."""
    tiers = [dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", 8 * BLOCK_BYTES, 1, 2)]
    core = make_core(tiers, clock := Clock(), policy={"eviction": {"type": "LeafLRU"}})
    memory, below = core.node.tiers
    for first in (100, 200, 300, 400):
        await store(core, range(first, first + 5))
        for number in (first + 3, first + 4):
            entry = entry_of(core, number)
            assert await core.cache.demoter.demote_to(entry, memory, below, Priority.DEMOTE)
            core.node.evict([entry], memory, "room")
    for first in (100, 200, 300, 400):
        clock.now_s += 10.0
        await store(core, [first + 5], digest(first + 4))
    assert (used(core, "dram"), used(core, "nvme")) == (SLOTS * BLOCK_BYTES, 8 * BLOCK_BYTES)
    yield core
    await core.close()
    for tier in core.node.tiers:
        await tier.backend.close()


def entry_of(core: AgentParts, number: int) -> Entry:
    entry = core.node.index.find(SCOPE, digest(number))
    assert entry is not None
    return entry


async def test_a_tier_that_nothing_can_leave_is_asked_twice_for_all_that_would_go_there(
    crossed: AgentParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    demoter, asked = crossed.cache.demoter, list[bool]()
    make_room = demoter._make_room

    async def counted(request: SlotRequest, attempt: int) -> bool:
        asked.append(await make_room(request, attempt))
        return asked[-1]

    monkeypatch.setattr(demoter, "_make_room", counted)
    heads = [entry_of(crossed, first + i) for first in (100, 200, 300, 400) for i in (2, 1, 0)]

    lost = await demoter.demote(heads, crossed.node.tiers[0], Priority.ROOM)

    assert {*lost} == {*heads}
    assert asked == [False, False]


async def test_ends_of_chains_are_lost_where_all_that_is_below_is_continued_here(crossed: AgentParts) -> None:
    memory = crossed.node.tiers[0]
    for first in (100, 200, 300, 400):
        for i, used_at_s in ((0, 1.0), (1, 1.0), (2, 1.0), (5, 2.0)):  # The beginnings before all ends.
            entry_of(crossed, first + i).used_at_s = used_at_s
            crossed.node.contents(memory).age(entry_of(crossed, first + i))

    freed_bytes = await crossed.cache.evictor.evict(memory, EvictionRequest(BLOCK_BYTES, "room"))

    assert freed_bytes == BLOCK_BYTES
    gone = [n for first in (100, 200, 300, 400) for n in range(first, first + 6) if not is_there(crossed, n)]
    assert len(gone) == 1
    assert gone[0] % 100 == 5


def is_there(core: AgentParts, number: int) -> bool:
    return core.node.index.find(SCOPE, digest(number)) is not None


async def test_room_after_a_tier_was_made_smaller_is_made_by_looking_at_what_lies_there_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, looked = 512, 0
    core = make_core([dram_tier(slots * BLOCK_BYTES)], policy={"eviction": {"type": "ReuseAware"}})
    (tier,) = core.node.tiers
    for first in range(0, slots, 8):
        await store(core, range(first, first + 8))
    assert core.node.contents(tier).blocks == slots
    per_extent = max(map(len, core.node.contents(tier).extents.values()))
    assert per_extent <= slots // 8
    pop = TierCandidates.pop

    def counted(candidates: TierCandidates) -> Entry | None:
        nonlocal looked
        looked += 1
        return pop(candidates)

    monkeypatch.setattr(TierCandidates, "pop", counted)
    await tier.backend.resize(slots * BLOCK_BYTES // 2)
    request = SlotRequest(tier, SCOPE, "a", BLOCK_BYTES, "a")

    assert await core.cache.evictor.make_room(request, 1)  # By whole extents.

    assert slots // 2 - 2 * per_extent <= core.node.contents(tier).blocks <= slots // 2
    assert looked <= slots
    await core.close()
    await tier.backend.close()


@pytest.mark.parametrize("reason", ["drain", "watermark"])
async def test_who_waits_for_room_has_it_before_all_have_left_that_are_to(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(eviction, "TURN_BYTES", 2 * BLOCK_BYTES)
    watermarks = {"eviction": {"type": "LeafLRU", "highWatermarkPercent": 90, "lowWatermarkPercent": 1}}
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)], policy=watermarks)
    memory, evictor = core.node.tiers[0], core.cache.evictor
    for first in range(0, SLOTS, 4):
        await store(core, range(first, first + 4))
    whole = EvictionRequest(SLOTS * BLOCK_BYTES, reason, Priority.DEMOTE)
    leaving = asyncio.create_task(evictor.trim(memory) if reason == "watermark" else evictor.evict(memory, whole))
    await asyncio.sleep(0)  # Its first turn has begun.

    slot = await evictor.reserve(SlotRequest(memory, SCOPE, "a", BLOCK_BYTES), core.node.clock() + 5.0)

    assert core.node.contents(memory).blocks >= SLOTS // 2
    assert await leaving >= (SLOTS - 1) * BLOCK_BYTES
    assert core.node.contents(memory).blocks <= 1
    core.node.free(memory, slot, "a")
    await core.close()
    for tier in core.node.tiers:
        await tier.backend.close()
