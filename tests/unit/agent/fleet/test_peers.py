"""Two cores and a directory in one process: blocks travel between nodes, or do not, and nothing is left over."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.path import Priority, QueuedMove, TrafficClass
from kvstrata_agent.policy.recompute import REFUSED_S, EngineLoad
from kvstrata_api.blocks import BlockKey
from kvstrata_api.tiers import Lookup
from kvstrata_metadata.store.records import SessionRecord
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    LAYOUT_OTHER,
    OTHER_SCOPE,
    SCOPE,
    Clock,
    bytes_of,
    digest,
    dram_tier,
    make_node,
    secret,
)
from support.agent.engine import steps_until
from support.agent.pair import Pair, load, place

pytestmark = pytest.mark.unit


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    await made.close()


async def test_blocks_of_another_node_arrive_verified_and_stay(pair: Pair) -> None:
    await pair.store(range(1, 9))

    assert await load(pair.b, range(1, 9)) == [(bytes_of(n), "remote") for n in range(1, 9)]
    assert await load(pair.b, range(1, 9)) == [(bytes_of(n), "dram") for n in range(1, 9)]
    parents = [e.parent for e in sorted(pair.b.node.index, key=lambda e: e.digest)]
    assert parents == [b"", *(digest(n) for n in range(1, 8))]


@pytest.mark.parametrize(("prefill_tokens_per_s", "blocks"), [(12_000, 0), (30, 8)])
async def test_a_slow_directory_is_waited_for_where_computing_would_take_longer(
    pair: Pair, prefill_tokens_per_s: int, blocks: int
) -> None:
    await pair.store(range(1, 9))
    pair.directories["b"].answers_after_s = 0.9
    policy, recompute = pair.b.node.spec.policy, pair.b.node.spec.policy.recompute
    recompute = recompute.model_copy(update={"prefill_tokens_per_second": prefill_tokens_per_s})
    policy = policy.model_copy(update={"recompute": recompute})
    pair.b.node.spec = pair.b.node.spec.model_copy(update={"policy": policy})

    assert len(await load(pair.b, range(1, 9))) == blocks


async def test_reads_from_peers_take_their_turn_on_a_path_of_their_own(pair: Pair) -> None:
    await pair.store([1, 2, 3])
    path = pair.b.cache.mover.scheduler.paths.between("remote", "dram")
    path.limiter._width = 1

    async with path.limiter.enter(QueuedMove(Priority.DEMOTE, "z", 100, 1)):
        loading = asyncio.create_task(load(pair.b, [1, 2, 3]))
        await steps_until(
            lambda: any(item[0] is Priority.ONBOARD for item in path.limiter.queue(TrafficClass.KV)._heap)
        )
        assert path.limiter.waiting_bytes == 3 * BLOCK_BYTES

    assert [source for _, source in await loading] == ["remote"] * 3
    assert (path.limiter.waiting, path.limiter.running_bytes) == (0, 0)


async def test_reads_from_peers_that_find_too_many_waiting_are_misses_and_leave_nothing(pair: Pair) -> None:
    await pair.store([1, 2, 3])
    gate = pair.b.cache.mover.scheduler.paths.between("remote", "dram").limiter
    gate._width, gate._waiting_max = 1, 0

    async with gate.enter(QueuedMove(Priority.DEMOTE, "z", 100, 1)):
        assert await load(pair.b, [1, 2, 3]) == []

    assert len(pair.b.node.index) == 0
    assert pair.b.node.tiers[0].backend.used_bytes == 0
    assert [source for _, source in await load(pair.b, [1, 2, 3])] == ["remote"] * 3


async def test_blocks_of_another_node_are_captured_where_that_is_asked_for_them(pair: Pair) -> None:
    await pair.store([1, 2, 3])
    node, reader = pair.b.node, pair.b.cache.reader
    call, at_s = AcquireCall(place(), [digest(n) for n in (1, 2, 3)], 30.0, 2.0), node.clock()
    speed = pair.b.cache.mover.scheduler.paths.between("remote", "dram").speed
    speed.begin(at_s - 10.0)
    speed.end(at_s, 3 * BLOCK_BYTES)

    node.engines["a"] = {1: EngineLoad(1e6, reported_s=at_s)}
    left = await reader.acquire(call)
    node.engines.clear()
    brought = await reader.acquire(call)

    assert (len(left.reads), list(left.held), left.captured) == (0, ["remote"] * 3, 0)
    assert (len(brought.reads), list(brought.held), brought.captured) == (3, ["remote"] * 3, 3)
    pair.b.cache.release(1, [r.lease.id for r in brought.reads])


async def test_a_full_path_from_peers_is_told_of_and_nobodys_blocks_are_plain_misses(pair: Pair) -> None:
    await pair.store([1, 2, 3])
    gate = pair.b.cache.mover.scheduler.paths.between("remote", "dram").limiter
    gate._width, gate._waiting_max = 1, 0

    async with gate.enter(QueuedMove(Priority.DEMOTE, "z", 100, 1)):
        there = await pair.b.cache.reader.acquire(AcquireCall(place(), [digest(n) for n in (1, 2, 3)], 30.0, 2.0))
        nowhere = await pair.b.cache.reader.acquire(AcquireCall(place(), [digest(7)], 30.0, 2.0))

    assert (there.reads, there.busy_s) == ([], REFUSED_S)
    assert (nowhere.reads, nowhere.busy_s) == ([], 0.0)


async def test_a_lookup_counts_what_others_hold(pair: Pair) -> None:
    await pair.store([1, 2])
    digests = [digest(n) for n in (1, 2, 3)]
    entries = pair.b.cache.reader.lookup_now(place(), digests)

    located = await pair.b.cache.reader.locate(place(), digests, entries)

    found = pair.b.cache.reader.answer(entries, located)
    assert found.states == bytes([Lookup.HIT, Lookup.HIT, Lookup.MISS])
    assert found.places == bytes([128, 128])


async def test_the_prefix_ends_where_a_block_got_lost(pair: Pair) -> None:
    await pair.store(range(1, 7))
    pair.peers.lost = {digest(4)}

    assert len(await load(pair.b, range(1, 7))) == 3
    assert pair.b.node.index.find(SCOPE, digest(4)) is None
    assert not any(e.move for e in pair.b.node.index)


async def test_a_block_that_the_owner_no_longer_has_is_a_miss(pair: Pair) -> None:
    await pair.store([1, 2])
    pair.a.node.drop_scope(SCOPE)

    assert await load(pair.b, [1, 2]) == []
    assert [t.backend.used_bytes for t in pair.b.node.tiers] == [0, 0]


async def test_what_lies_below_memory_is_lent_as_well(pair: Pair) -> None:
    await pair.store(range(1, 31))
    nvme = pair.a.node.tier("nvme")
    assert nvme is not None
    assert pair.a.node.contents(nvme).blocks > 0

    assert len(await load(pair.b, range(1, 9))) == 8


async def test_without_the_directory_the_answer_is_that_it_cannot_be_told(pair: Pair) -> None:
    await pair.store([1])
    pair.directories["b"].is_up = False
    entries = pair.b.cache.reader.lookup_now(place(), [digest(1)])

    assert pair.b.cache.reader.answer(entries, {}).states == bytes([Lookup.RETRY])
    assert await load(pair.b, [1]) == []


async def test_two_readers_of_one_remote_block_cause_one_transfer(pair: Pair) -> None:
    await pair.store([1, 2, 3])

    first, second = await asyncio.gather(load(pair.b, [1, 2, 3]), load(pair.b, [1, 2, 3]))

    assert [b for b, _ in first] == [b for b, _ in second] == [bytes_of(n) for n in (1, 2, 3)]
    assert pair.b.node.contents(pair.b.node.tiers[0]).blocks == 3


async def test_nothing_is_lent_of_another_layout_or_scope(pair: Pair) -> None:
    await pair.store([1])
    assert await pair.a.lender.lend([BlockKey(SCOPE, digest(1))], LAYOUT_OTHER, 5.0) == [None]
    assert await pair.a.lender.lend([BlockKey(OTHER_SCOPE, digest(1))], LAYOUT_ID, 5.0) == [None]
    assert len(pair.a.node.leases) == 0


async def test_a_lent_block_stays_until_its_lease_ends(pair: Pair) -> None:
    await pair.store([1])
    (loan,) = await pair.a.lender.lend([BlockKey(SCOPE, digest(1))], LAYOUT_ID, 5.0)
    assert loan is not None
    for n in range(100, 140):
        await pair.store([n])

    assert bytes(loan.view) == bytes_of(1)
    pair.a.lender.end([loan.lease, loan.lease])
    assert len(pair.a.node.leases) == 0


async def test_holdings_are_what_was_announced(pair: Pair) -> None:
    await pair.store(range(1, 31))
    pair.a.node.announcer.flush()

    ((key, held),) = pair.a.lender.holdings()

    assert key == secret(SCOPE)
    located = await pair.directories["b"].locate(key, [a.digest for a in held])
    assert [(c[0].tier, c[0].stamp, c[0].stored_bytes) for c in located] == [
        (a.tier, a.stamp, a.stored_bytes) for a in held
    ]
    assert len(held) == 30


async def test_extents_are_registered_before_use_and_let_go_of_before_they_vanish(pair: Pair) -> None:
    await pair.store(range(1, 9))
    await load(pair.b, range(1, 9))
    assert len(pair.peers.registered) >= 8

    pair.a.node.drop_scope(SCOPE)
    pair.b.node.drop_scope(SCOPE)
    for core in (pair.a, pair.b):
        await core.node.tiers[0].backend.resize(4096)

    assert len(pair.peers.registered) <= 1


async def test_a_loan_that_nobody_waits_for_any_more_leaves_no_lease(pair: Pair) -> None:
    await pair.store(range(1, 25))
    keys = [BlockKey(SCOPE, digest(n)) for n in range(1, 25)]
    assert any(pair.a.cache.promoter.promoted(entry) is None for entry in pair.a.node.index), (
        "some have to be brought up"
    )
    holding = 0
    for steps in range(20):
        asked = asyncio.create_task(pair.a.lender.lend(keys, LAYOUT_ID, 60.0))
        for _ in range(steps):
            await asyncio.sleep(0)
        holding += bool(len(pair.a.node.leases)) and not asked.done()
        asked.cancel()
        (got,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(got, list):
            pair.a.lender.end([loan.lease for loan in got if loan is not None])
        assert len(pair.a.node.leases) == 0, f"cancelled after {steps} steps"
    assert holding, "none was cancelled while it had leases"


async def test_a_fetch_that_fails_while_it_takes_slots_leaves_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.store([1, 2, 3])
    room, tier, asked = pair.b.cache.evictor.reserve, pair.b.node.tiers[0], []

    async def reserve(want: SlotRequest, deadline_s: float) -> SlotRef:
        asked.append(want)
        if len(asked) >= 2:
            raise ValueError("not an answer")
        return await room(want, deadline_s)

    monkeypatch.setattr(pair.b.cache.evictor, "reserve", reserve)
    monkeypatch.setattr(Node, "allocate_run", lambda node, want, count: [node.allocate(want)] if count > 1 else [])

    assert await load(pair.b, [1, 2, 3]) == []
    assert len(asked) > 2, "the first one is tried once more"
    assert (tier.backend.used_bytes, tier.tenant_bytes, len(pair.b.node.index)) == (0, {}, 0)


async def test_a_session_is_taken_over_with_its_chain(pair: Pair) -> None:
    await pair.store(range(1, 9))
    told = SessionRecord("a", "batch", "archived", head=digest(8), agent="pool.a", urgency=5)
    pair.directories["b"].sessions[secret(SCOPE).tag(), "s"] = told
    session = pair.b.cache.life.open(1, "a", secret(SCOPE), "s", parent="", priority="")
    pair.b.cache.life.revive_from_directory(session, [place(OTHER_SCOPE), place()])
    await asyncio.wait(pair.b.cache.life._tasks)

    assert [h.digest for h in session.heads] == [digest(8)]
    assert (session.priority, session.turns) == ("batch", 1)
    assert await load(pair.b, range(1, 9)) == [(bytes_of(n), "dram") for n in range(1, 9)]
    assert len(pair.a.node.leases) == 0


async def test_a_session_whose_blocks_are_nowhere_is_opened_all_the_same(pair: Pair) -> None:
    told = SessionRecord("a", "", "idle", head=digest(8), agent="pool.gone")
    pair.directories["b"].sessions[secret(SCOPE).tag(), "s"] = told
    session = pair.b.cache.life.open(1, "a", secret(SCOPE), "s", parent="", priority="")
    pair.b.cache.life.revive_from_directory(session, [place()])
    await asyncio.wait(pair.b.cache.life._tasks)

    assert not session.heads
    assert not any(e.move for e in pair.b.node.index)


def test_a_store_in_its_five_thousandth_run_can_still_announce() -> None:
    tier = dram_tier(BLOCK_BYTES)
    node = make_node([tier], Clock())
    slot = SlotRef(1, 0, BLOCK_BYTES, 5_000 << 36)
    key = BlockKey(SCOPE, digest(1))
    record = Record(key, b"", LAYOUT_ID, "raw", BLOCK_BYTES, BLOCK_BYTES, bytes(16), 7)
    entry = node.index.begin(SCOPE, digest(1), b"", LAYOUT_ID, 0.0)
    node.index.add(entry, Residence(tier, slot, record))

    ((_, held),) = node.announcer.holdings()

    assert [a.stamp for a in held] == [(5_000 << 36) % (1 << 48)]
