"""Laws of a warming: whole prefixes arrive, of that tenant only, within bounds, behind engines' moves, and once."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.movement.path import Priority, QueuedMove, TrafficClass
from kvstrata_agent.operations import warm as warming
from kvstrata_agent.policy.operations import Chain, Count, budget_bytes, plan_warming
from kvstrata_agent.policy.quota import Bound, Rules
from kvstrata_api.blocks import BlockKey
from kvstrata_api.models.poolnode import FlushOrder, NodeOrder, OrderAnswer, WarmOrder
from kvstrata_metadata.store.records import Location
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    OTHER_SCOPE,
    SCOPE,
    bytes_of,
    digest,
    secret,
    store_chain,
)
from support.agent.engine import steps_until
from support.agent.pair import Pair, held, load, place, tenants

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "POLL_INTERVAL_S", 0.0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    for core in (made.a, made.b):
        core.cache.tenancy.follow(tenants())
    yield made
    await made.close()


def order(*numbers: int, tenant: str = "a", **more: object) -> WarmOrder:
    return WarmOrder.model_validate({"tenant": tenant, "prefixes": [digest(n).hex() for n in numbers], **more})


async def warmed(core: AgentParts, wanted: WarmOrder) -> OrderAnswer:
    """What the agent says of the order in the end."""
    uid = f"u{id(wanted)}"
    core.orders.follow([NodeOrder(uid=uid, type="Warm", warm=wanted)], [])
    await steps_until(lambda: core.orders.answers()[0].phase != "Running")
    (answer,) = core.orders.answers()
    core.orders.follow([], [])
    return answer


def small_batches(core: AgentParts, blocks: int) -> None:
    """Let the pool's policy allow so many blocks in flight."""
    spec = core.node.spec
    prefetch = spec.policy.prefetch.model_copy(update={"max_inflight_bytes": blocks * BLOCK_BYTES})
    core.node.spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"prefetch": prefetch})})


async def test_a_prefix_of_another_node_arrives_with_all_before_it_and_is_read_from_memory(pair: Pair) -> None:
    await pair.store(range(1, 9))
    answer = await warmed(pair.b, order(6))

    assert (answer.phase, answer.blocks_done, answer.blocks_total, answer.blocks_missing) == ("Done", 6, 6, 0)
    assert answer.bytes_done == 6 * BLOCK_BYTES
    assert await load(pair.b, range(1, 7)) == [(bytes_of(n), "dram") for n in range(1, 7)]
    assert held(pair.b, "dram") == [1, 2, 3, 4, 5, 6]


async def test_a_second_warming_brings_nothing_and_says_the_same(pair: Pair) -> None:
    await pair.store(range(1, 9))
    first = await warmed(pair.b, order(8))
    pair.peers.lost = {digest(n) for n in range(1, 9)}
    again = await warmed(pair.b, order(8))

    assert first.model_copy(update={"uid": again.uid}) == again
    assert again.phase == "Done"


async def test_what_lies_in_a_slower_tier_here_comes_up_in_the_same_way(pair: Pair) -> None:
    await pair.store(range(1, 5))
    for _ in range(4):
        pair.a.node.is_draining = True
        await pair.a.cache.evictor.drain(pair.a.node.tiers[0])
    pair.a.node.is_draining = False
    assert held(pair.a, "dram") == []
    answer = await warmed(pair.a, order(4))

    assert (answer.phase, answer.blocks_done) == ("Done", 4)
    assert held(pair.a, "dram") == [1, 2, 3, 4]


async def test_a_slower_tier_may_be_the_target(pair: Pair) -> None:
    await pair.store(range(1, 5))
    answer = await warmed(pair.b, order(4, tier="nvme"))

    assert (answer.phase, answer.blocks_done) == ("Done", 4)
    assert held(pair.b, "nvme") == [1, 2, 3, 4]


async def test_nobody_elses_prefix_is_found_and_the_answer_is_that_of_an_absent_one(pair: Pair) -> None:
    others = RequestContext(1, "b", secret(OTHER_SCOPE), LAYOUT_ID, BLOCK_BYTES)
    await store_chain(pair.a, others, range(1, 5))
    pair.a.node.announcer.flush()
    forbidden, absent = await warmed(pair.b, order(4)), await warmed(pair.b, order(99))

    assert forbidden.model_copy(update={"uid": absent.uid}) == absent
    assert (absent.phase, absent.reason, absent.blocks_missing) == ("Failed", "NotFound", 1)
    assert len(pair.b.node.index) == 0
    theirs = await warmed(pair.b, order(4, tenant="b"))
    assert (theirs.phase, held(pair.b, "dram", OTHER_SCOPE)) == ("Done", [1, 2, 3, 4])
    assert await load(pair.b, range(1, 5)) == []


async def test_a_prefix_whose_middle_is_nowhere_is_missing_as_a_whole(pair: Pair) -> None:
    await store_chain(pair.a, place(), [5, 6, 7], parent=4)
    pair.a.node.announcer.flush()
    answer = await warmed(pair.b, order(7))

    assert (answer.reason, len(pair.b.node.index)) == ("NotFound", 0)


async def test_found_and_missing_prefixes_are_counted_apart(pair: Pair) -> None:
    await pair.store(range(1, 4))
    answer = await warmed(pair.b, order(3, 77, 88))

    assert (answer.phase, answer.blocks_done, answer.blocks_total, answer.blocks_missing) == ("Done", 3, 5, 2)
    assert "2 prefixes are nowhere" in answer.message


async def test_what_a_peer_loses_on_the_way_is_told_and_its_place_given_back(pair: Pair) -> None:
    await pair.store(range(1, 5))
    pair.peers.lost = {digest(3)}
    answer = await warmed(pair.b, order(4))

    assert (answer.phase, answer.reason, answer.blocks_done) == ("Failed", "NotWarmed", 3)
    assert pair.b.node.tiers[0].backend.used_bytes == 3 * BLOCK_BYTES


async def test_a_peers_tale_of_another_order_of_blocks_brings_none_under_a_wrong_parent(pair: Pair) -> None:
    await pair.store(range(1, 5))

    async def liar(key: BlockKey, at: Location, most: int) -> ChainSegment | None:
        return ChainSegment(LAYOUT_ID, BLOCK_BYTES, (digest(4), digest(2), digest(3), digest(1)), b"")

    pair.peers.trace = liar  # type: ignore[method-assign]
    await warmed(pair.b, order(4))

    parents = {e.digest: e.parent for e in pair.b.node.index}
    assert all(
        parent == (digest(int.from_bytes(d, "big") - 1) if d != digest(1) else b"") for d, parent in parents.items()
    )


@pytest.mark.parametrize("told", [(digest(4), digest(3), digest(4)), (digest(9),)], ids=["ring", "another block"])
async def test_a_peers_tale_that_does_not_fit_together_is_no_chain(pair: Pair, told: tuple[bytes, ...]) -> None:
    await pair.store(range(1, 5))

    async def liar(key: BlockKey, at: Location, most: int) -> ChainSegment | None:
        return ChainSegment(LAYOUT_ID, BLOCK_BYTES, told, b"")

    pair.peers.trace = liar  # type: ignore[method-assign]
    assert (await warmed(pair.b, order(4))).reason == "NotFound"


async def test_no_more_is_brought_than_asked_and_never_what_has_to_give_way_again(pair: Pair) -> None:
    await pair.store(range(1, 15))
    few, many = await warmed(pair.b, order(14, max_bytes=4 * BLOCK_BYTES)), await warmed(pair.b, order(14))

    assert (few.phase, few.blocks_done, few.blocks_total) == ("Done", 4, 4)
    assert "10 blocks more are beyond the bound" in few.message
    assert many.blocks_done == 13, "85 % of 16 slots"
    assert held(pair.b, "dram") == list(range(1, 14))


async def test_a_tenants_quota_bounds_what_is_brought_for_it(pair: Pair) -> None:
    await pair.store(range(1, 9))
    pair.b.node.tenants.set_rules({"a": Rules(bounds={"dram": Bound(3 * BLOCK_BYTES)})})
    answer = await warmed(pair.b, order(8))

    assert answer.blocks_done == 3
    assert pair.b.node.tiers[0].tenant_bytes == {"a": 3 * BLOCK_BYTES}


async def test_what_somebody_reads_does_not_give_way(pair: Pair) -> None:
    mine = RequestContext(1, "b", secret(OTHER_SCOPE), LAYOUT_ID, BLOCK_BYTES)
    await store_chain(pair.b, mine, range(1, 15))
    leased = (await pair.b.cache.reader.acquire(AcquireCall(mine, [digest(n) for n in range(1, 15)], 30.0, 2.0))).reads
    await pair.store(range(1, 9))
    answer = await warmed(pair.b, order(8))

    assert len(leased) == 14
    assert held(pair.b, "dram", OTHER_SCOPE) == list(range(1, 15))
    assert (answer.phase, answer.reason) == ("Failed", "NotWarmed")


async def test_moves_of_a_warming_wait_behind_an_engines(pair: Pair) -> None:
    await pair.store(range(1, 4))
    path = pair.b.cache.mover.scheduler.paths.between("remote", "dram")
    path.limiter._width = 1
    async with path.limiter.enter(QueuedMove(Priority.DEMOTE, "z", 100, 1)):
        warm = asyncio.create_task(warmed(pair.b, order(3)))
        queue = path.limiter.queue(TrafficClass.KV)
        await steps_until(lambda: queue.head() is not None)
        head = queue.head()
        assert head is not None
        assert head.priority is Priority.ARCHIVE
        loading = asyncio.create_task(load(pair.b, [1, 2, 3]))
        await steps_until(lambda: (now := queue.head()) is not None and now.priority is Priority.ONBOARD)

    assert len(await loading) == 3
    assert (await warm).phase == "Done"


async def test_a_right_that_ends_on_the_way_ends_the_warming(pair: Pair) -> None:
    await pair.store(range(1, 9))
    declared = tenants(version=2)
    pair.b.cache.tenancy.follow(declared)
    small_batches(pair.b, 1)
    told: list[Count] = []

    def tell(count: Count) -> None:
        told.append(count)
        if count.blocks_done == 2:
            declared.callers = {}

    ended = await pair.b.orders._warmer.warm(order(8), tell)

    assert ended.reason == "AccessLost"
    assert [c.blocks_done for c in told] == [0, 1, 2]
    assert held(pair.b, "dram") == [1, 2]


async def test_a_flush_does_not_wait_for_a_warming_that_waits_for_the_directory(pair: Pair) -> None:
    await store_chain(pair.b, place(), [1, 2])
    pair.directories["b"].is_up = False
    wanted = [NodeOrder(uid="w", type="Warm", warm=order(9)), NodeOrder(uid="x", type="Flush", flush=FlushOrder())]
    pair.b.orders.follow(wanted, [])
    await steps_until(lambda: pair.b.orders.answers()[1].phase == "Done")

    assert [answer.phase for answer in pair.b.orders.answers()] == ["Running", "Done"]
    assert len(pair.b.node.index) == 0
    pair.directories["b"].is_up = True
    await steps_until(lambda: pair.b.orders.answers()[0].reason == "NotFound")


async def test_what_stands_behind_a_batch_that_did_not_come_is_not_brought(pair: Pair) -> None:
    await pair.store(range(1, 9))
    small_batches(pair.b, 2)
    pair.peers.lost = {digest(3)}
    answer = await warmed(pair.b, order(8))

    assert (answer.reason, answer.blocks_done) == ("NotWarmed", 3)
    assert held(pair.b, "dram") == [1, 2, 4]


async def test_one_that_is_withdrawn_ends_between_two_batches_and_leaves_whole_blocks(pair: Pair) -> None:
    await pair.store(range(1, 9))
    pair.b.orders.follow([NodeOrder(uid="u", type="Warm", warm=order(8))], [])
    await steps_until(lambda: any(e.move is not None for e in pair.b.node.index))
    pair.b.orders.follow([], [])
    await steps_until(lambda: all(e.move is None for e in pair.b.node.index))

    assert pair.b.orders.answers() == ()
    count = len(held(pair.b, "dram"))
    assert [b for b, _ in await load(pair.b, range(1, 9))] == [bytes_of(n) for n in range(1, 9)]
    assert count in (0, 8), "one batch"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [(order(1, tenant="nobody"), "TenantNotFound"), (order(1, tier="cold"), "TierAbsent")],
)
async def test_what_means_nothing_here_is_told(pair: Pair, wanted: WarmOrder, reason: str) -> None:
    answer = await warmed(pair.b, wanted)
    assert (answer.phase, answer.reason) == ("Failed", reason)


async def test_a_node_that_is_drained_takes_nothing(pair: Pair) -> None:
    await pair.store(range(1, 4))
    pair.b.node.is_draining = True
    assert (await warmed(pair.b, order(3))).reason == "Draining"
    assert len(pair.b.node.index) == 0


async def test_archived_sessions_come_up_whole_the_last_one_first(pair: Pair) -> None:
    core = pair.a
    for name, first in (("old", 1), ("new", 6)):
        numbers = range(first, first + 5)
        session = core.cache.life.open(1, "a", secret(SCOPE), name, parent="", priority="")
        await store_chain(core, RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES, session), numbers)
        entries = [core.node.index.find(SCOPE, digest(n)) for n in numbers]
        session.follow([e for e in entries if e is not None])
        session.enter(SessionState.ARCHIVED)
        core.cache.life.publish(session)
    core.node.is_draining = True
    for _ in range(6):
        await core.cache.evictor.drain(core.node.tiers[0])
    core.node.is_draining = False
    assert held(core, "dram") == []

    answer = await warmed(core, order(archived_sessions=True, max_bytes=7 * BLOCK_BYTES))
    assert (answer.phase, answer.blocks_done) == ("Done", 7)
    assert held(core, "dram") == [1, 2, 6, 7, 8, 9, 10]
    assert (await warmed(core, order(archived_sessions=True, tenant="b"))).blocks_total == 0


chains = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=5)


def chain_of(branches: Sequence[int]) -> Chain:
    """A path through a tree: equal beginnings are the same blocks."""
    digests = tuple(bytes(branches[: i + 1]).ljust(20, b"\xff") for i in range(len(branches)))
    return Chain(secret(SCOPE), LAYOUT_ID, 10, digests)


@given(chains, st.integers(0, 200))
def test_a_plan_is_closed_under_ancestors_fits_and_names_each_block_once(paths: list[list[int]], budget: int) -> None:
    made = [chain_of(path) for path in paths]
    plan = plan_warming(made, budget)
    brought: list[bytes] = []
    for portion in plan.portions:
        for at in range(portion.start, portion.end):
            block, parent = portion.link(at)
            assert not parent or parent in brought
            brought.append(block)

    everything = {d for chain in made for d in chain.digests}
    assert len(brought) == len(set(brought)) == plan.blocks
    assert plan.size_bytes == 10 * plan.blocks <= budget
    assert plan.left_out == len(everything) - plan.blocks
    assert plan.left_out == 0 or budget - plan.size_bytes < 10


@given(st.integers(1, 10**12), st.integers(1, 99), st.none() | st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_budget_is_the_smallest_of_its_bounds(capacity: int, low: int, hard: int | None, most: int) -> None:
    budget = budget_bytes(capacity, low, hard, most)

    assert budget <= capacity * low // 100
    assert hard is None or budget <= hard
    assert most == 0 or budget <= most
    assert budget in {capacity * low // 100, hard, most}
