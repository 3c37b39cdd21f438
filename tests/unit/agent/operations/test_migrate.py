"""Laws of a migration: no block is ever without a copy, only what its tenant may have arrives, readers go on."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.fleet.peers.client import Offer, Taken
from kvstrata_agent.operations import migrate as migrating
from kvstrata_agent.operations import warm as warming
from kvstrata_agent.policy.quota import Bound, Rules
from kvstrata_api.models.poolnode import MigrateOrder, NodeOrder, OrderAnswer
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    OTHER_SCOPE,
    SCOPE,
    bytes_of,
    caller,
    digest,
    secret,
    store_chain,
)
from support.agent.engine import steps_until
from support.agent.pair import Pair, held, load, tenants

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(migrating, "POLL_INTERVAL_S", 0.0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Node `a` of one pool has blocks, node `b` takes them."""
    made = Pair()
    made.peers.taker = made.b
    for core in (made.a, made.b):
        core.cache.tenancy.follow(tenants())
    yield made
    await made.close()


def begin(pair: Pair, **more: object) -> None:
    wanted = MigrateOrder.model_validate({"to": "other", "nodes": ["n1", "n2"], **more})
    pair.a.orders.follow([NodeOrder(uid="u", type="Migrate", migrate=wanted)], [])


async def ended(pair: Pair) -> OrderAnswer:
    await steps_until(lambda: pair.a.orders.answers()[0].phase != "Running")
    return pair.a.orders.answers()[0]


async def migrated(pair: Pair, **more: object) -> OrderAnswer:
    begin(pair, **more)
    return await ended(pair)


async def branch(pair: Pair) -> None:
    """Two chains with a common beginning: 1 2 3 4 5 6 and 1 2 3 14."""
    await pair.store(range(1, 7))
    await store_chain(pair.a, RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES), [14], parent=3)
    pair.a.node.announcer.flush()


async def test_blocks_go_to_a_tier_that_survives_and_leave_where_they_were(pair: Pair) -> None:
    await branch(pair)
    answer = await migrated(pair)

    assert (answer.phase, answer.blocks_done, answer.blocks_total) == ("Done", 7, 7)
    assert answer.bytes_done == answer.bytes_total == 7 * BLOCK_BYTES
    assert held(pair.b, "nvme") == [1, 2, 3, 4, 5, 6, 14]
    assert len(pair.a.node.index) == 0
    assert await load(pair.b, range(1, 7)) == [(bytes_of(n), "dram") for n in range(1, 7)]
    assert sum(len(offer.digests) for _, offer in pair.peers.offers) == 7, "what two chains share is offered once"
    assert {agent for agent, _ in pair.peers.offers} == {"other.n1"}


async def test_the_source_may_be_kept(pair: Pair) -> None:
    await branch(pair)
    answer = await migrated(pair, keep_source=True)

    assert (answer.phase, answer.blocks_done) == ("Done", 7)
    assert held(pair.a, "dram") == held(pair.b, "nvme")


async def test_no_block_is_without_a_copy_at_any_moment(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await branch(pair)
    drop = pair.a.node.drop_block

    def checked(entry: object, reason: str) -> None:
        number = int.from_bytes(entry.digest, "big")  # type: ignore[attr-defined]
        assert number in held(pair.b, "nvme"), "dropped before the other pool had it"
        drop(entry, reason)  # type: ignore[arg-type]

    monkeypatch.setattr(type(pair.a.node), "drop_block", lambda _, entry, reason: checked(entry, reason))
    answer = await migrated(pair)

    assert (answer.phase, answer.message) == ("Done", "7 of 7 blocks are in pool other")


async def test_what_does_not_arrive_stays(pair: Pair) -> None:
    await pair.store(range(1, 7))
    pair.peers.lost = {digest(4)}
    answer = await migrated(pair)

    assert (answer.phase, answer.reason, answer.blocks_done) == ("Failed", "NotMigrated", 3)
    assert "NotFetched" in answer.message
    assert held(pair.a, "dram") == [1, 2, 3, 4, 5, 6], "what stands before them stays with them"


async def test_nothing_lands_where_its_tenant_has_no_right(pair: Pair) -> None:
    declared = tenants(version=2)
    del declared.callers["b"]
    pair.b.cache.tenancy.follow(declared)
    await store_chain(pair.a, RequestContext(1, "b", secret(OTHER_SCOPE), LAYOUT_ID, BLOCK_BYTES), range(1, 5))
    await pair.store(range(1, 3))
    answer = await migrated(pair)

    assert (answer.reason, "NoRight" in answer.message) == ("NotMigrated", True)
    assert (held(pair.b, "nvme"), held(pair.b, "nvme", OTHER_SCOPE)) == ([1, 2], [])
    assert held(pair.a, "dram", OTHER_SCOPE) == [1, 2, 3, 4]


@pytest.mark.parametrize(("can_write", "taken"), [(True, Taken(4)), (False, Taken(0, "NoRight"))])
async def test_who_may_only_read_a_scope_brings_nothing_into_it(pair: Pair, taken: Taken, *, can_write: bool) -> None:
    declared = tenants(version=2)
    declared.callers["a"] = caller("a", (OTHER_SCOPE, can_write))
    pair.b.cache.tenancy.follow(declared)
    await store_chain(pair.a, RequestContext(1, "b", secret(OTHER_SCOPE), LAYOUT_ID, BLOCK_BYTES), range(1, 5))
    pair.a.node.announcer.flush()
    chain = tuple(digest(n) for n in range(1, 5))

    assert await pair.b.adopter.adopt(Offer(OTHER_SCOPE, "a", LAYOUT_ID, BLOCK_BYTES, chain, b"")) == taken
    assert held(pair.b, "nvme", OTHER_SCOPE) == ([1, 2, 3, 4] if can_write else [])


async def test_one_tenants_blocks_may_be_meant_alone(pair: Pair) -> None:
    await store_chain(pair.a, RequestContext(1, "b", secret(OTHER_SCOPE), LAYOUT_ID, BLOCK_BYTES), range(1, 5))
    await pair.store(range(1, 3))
    answer = await migrated(pair, tenant="a")

    assert (answer.phase, answer.blocks_total) == ("Done", 2)
    assert held(pair.a, "dram", OTHER_SCOPE) == [1, 2, 3, 4]


async def test_a_quota_there_bounds_what_comes_and_the_rest_stays(pair: Pair) -> None:
    await pair.store(range(1, 7))
    pair.b.node.tenants.set_rules({"a": Rules(bounds={"nvme": Bound(3 * BLOCK_BYTES)})})
    answer = await migrated(pair)

    assert (answer.reason, "NoRoom" in answer.message) == ("NotMigrated", True)
    assert pair.b.node.tiers[1].tenant_bytes.get("a", 0) <= 3 * BLOCK_BYTES
    assert held(pair.a, "dram") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("hold", ["lease", "guard"])
async def test_what_is_read_or_decoded_from_is_copied_and_stays_until_nobody_holds_it(pair: Pair, hold: str) -> None:
    await pair.store(range(1, 4))
    entry = pair.a.node.index.find(SCOPE, digest(3))
    assert entry is not None
    if hold == "lease":
        pair.a.node.leases.grant(9, entry, entry.residences[0], pair.a.node.clock() + 60)
    else:
        entry.guards = {"session"}
    begin(pair)
    await steps_until(lambda: pair.a.orders.answers()[0].reason == "BlocksHeld")
    assert held(pair.a, "dram") == [1, 2, 3]
    assert held(pair.b, "nvme") == [1, 2, 3]

    pair.a.node.end_owner(9)
    entry.guards = None
    assert (await ended(pair)).phase == "Done"
    assert held(pair.a, "dram") == []


async def test_agents_that_do_not_answer_are_waited_for_and_a_withdrawn_order_asks_no_more(pair: Pair) -> None:
    await pair.store(range(1, 4))
    pair.peers.taker = None
    begin(pair)
    await steps_until(lambda: pair.a.orders.answers()[0].reason == "TargetsAway")
    assert {agent for agent, _ in pair.peers.offers} == {"other.n1", "other.n2"}
    pair.a.orders.follow([], [])
    await asyncio.sleep(0)
    asked = len(pair.peers.offers)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(pair.peers.offers) == asked
    assert held(pair.a, "dram") == [1, 2, 3]

    pair.peers.taker = pair.b
    assert (await migrated(pair)).blocks_done == 3


async def test_one_that_begins_anew_offers_what_is_left_and_what_is_there_is_not_fetched_again(pair: Pair) -> None:
    await pair.store(range(1, 4))
    assert (await migrated(pair, keep_source=True)).phase == "Done"
    pair.a.orders.follow([], [])
    pair.peers.lost = {digest(n) for n in range(1, 4)}
    answer = await migrated(pair)

    assert (answer.phase, answer.blocks_done, held(pair.a, "dram")) == ("Done", 3, [])


async def test_what_came_before_does_not_give_way_to_what_comes_next(pair: Pair) -> None:
    nvme = pair.b.node.tiers[1]
    mine = RequestContext(1, "b", secret(OTHER_SCOPE), LAYOUT_ID, BLOCK_BYTES)
    for first in range(1, 57, 14):
        await store_chain(pair.b, mine, range(first, first + 14), parent=first - 1)
        for _ in range(4):
            pair.b.node.is_draining = True
            await pair.b.cache.evictor.drain(pair.b.node.tiers[0])
            pair.b.node.is_draining = False
    there = held(pair.b, "nvme", OTHER_SCOPE)
    await pair.store(range(1, 7))
    answer = await migrated(pair)

    assert nvme.fill_ratio > 0.85
    assert (answer.reason, "NoRoom" in answer.message) == ("NotMigrated", True)
    assert (held(pair.b, "nvme", OTHER_SCOPE), held(pair.a, "dram")) == (there, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tier": "cold"}, "TierAbsent"),
        ({"tenant": "nobody"}, "NoRight"),
        ({"scope": OTHER_SCOPE}, "NoRight"),
        ({}, "Draining"),
    ],
)
async def test_a_refused_offer_says_why(pair: Pair, change: dict[str, str], reason: str) -> None:
    await pair.store([1])
    pair.b.node.is_draining = reason == "Draining"
    place = {"scope": SCOPE, "tenant": "a", "layout_id": LAYOUT_ID, "raw_bytes": BLOCK_BYTES, "before": b""}
    offer = Offer(**(place | {"digests": (digest(1),)} | change))  # type: ignore[arg-type]

    assert await pair.b.adopter.adopt(offer) == Taken(0, reason)
