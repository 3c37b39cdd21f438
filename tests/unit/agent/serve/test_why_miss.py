"""Why a prompt is a miss, through the verbs: each cause by its name, and nothing of what is not the caller's."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstrata_agent.blocks.reservations import RESERVATION_S
from kvstrata_agent.blocks.tier_contents import QueueKey
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, Fate
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.poolnode import TierProbe
from support.agent.doubles import BLOCK_BYTES, SCOPE, digest
from support.agent.engine import SLOTS, Engine, close
from support.agent.pair import FakeDirectory

pytestmark = pytest.mark.unit

OTHERS = ScopeId("tenant/b/uid-b/v1")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = await Engine().attach()
    yield made
    await close(made)


async def why(engine: Engine, *numbers: int, scope: ScopeId = SCOPE) -> dict[str, Any]:
    answer = await engine.ask(wire.WhyMiss(9, scope, b"".join(map(digest, numbers))))
    told: dict[str, Any] = json.loads(answer.json)
    return told


async def evict(engine: Engine, blocks: int, reason: str = "room") -> None:
    """Take blocks away for good, as where no slower tier takes any."""
    request = EvictionRequest(blocks * BLOCK_BYTES, reason, fate=Fate.DROP)
    await engine.core.cache.evictor.evict(engine.core.node.tiers[0], request)


async def test_what_is_found_is_no_miss(engine: Engine) -> None:
    await engine.store(1, 2)

    assert (await why(engine, 1, 2)).items() >= {"reason": "hit", "blocks": 2, "hit_blocks": 2}.items()


@pytest.mark.parametrize("policy", ["ReuseAware", "LeafLRU"])
async def test_an_eviction_is_told_with_policy_reason_and_what_stayed(policy: str) -> None:
    engine = await Engine(eviction={"type": policy}).attach()
    await engine.store(1, 2, 3)
    engine.clock.now_s += 50.0
    await engine.store(11, 12)
    engine.clock.now_s += 10.0
    await evict(engine, 1, "watermark")
    engine.clock.now_s += 5.0

    told = await why(engine, 1, 2, 3, 4)

    (event,) = told["history"]
    assert (told["reason"], told["hit_blocks"], told["blocks"]) == ("evicted", 2, 4)
    assert (event["tier"], event["reason"], event["policy"]) == ("dram", "watermark", policy)
    assert event["ago_s"] == pytest.approx(5.0)
    assert event["idle_s"] == pytest.approx(60.01)
    assert event["kept_instead"]["idle_s"] == event["idle_s"], "the block before it would have been next"
    assert ("uses_per_s" in event) == (policy == "ReuseAware")
    assert "block 3 was evicted from tier dram 5.0 s ago because the tier was above its high watermark" in told["said"]

    await evict(engine, 2)
    (event,) = (await why(engine, 1, 2))["history"]
    assert event["kept_instead"]["idle_s"] == pytest.approx(15.0), "the younger chain stayed"
    await close(engine)


async def test_what_stayed_is_told_only_where_it_is_of_the_same_tenant_and_scope(engine: Engine) -> None:
    node = engine.core.node
    await engine.store(1)
    engine.clock.now_s += 1.0
    await engine.store(11)
    stays = node.index.find(*engine.key(11))
    assert stays is not None
    stays.tenant = "b"
    queues = node.contents(node.tiers[0]).queues
    queue = queues[QueueKey(SCOPE, "a", stays.priority, is_double=False)]
    queues[QueueKey(SCOPE, "b", stays.priority, is_double=False)] = queue
    await evict(engine, 1)

    (event,) = (await why(engine, 1))["history"]
    assert "kept_instead" not in event


async def test_the_way_down_and_out_is_told_the_latest_first(engine: Engine) -> None:
    await engine.store(1)
    await engine.push_down()
    low = engine.core.node.tiers[1]
    await engine.core.cache.evictor.evict(low, EvictionRequest(BLOCK_BYTES, "room", fate=Fate.DROP))

    assert [(e["what"], e["tier"]) for e in (await why(engine, 1))["history"]] == [
        ("evicted", "nvme"),
        ("demoted", "dram"),
    ]
    told = json.loads((await engine.ask(wire.Explain(1, SCOPE, digest(1)))).json)
    assert told["state"] == "absent"
    assert [e["what"] for e in told["history"]] == ["evicted", "demoted"]


async def test_a_block_that_would_be_computed_says_so_with_both_times() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100_000_000}).attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=1000, read_latency_microseconds=50_000)

    told = await why(engine, 1, 2, 3)

    assert (told["reason"], told["hit_blocks"]) == ("recompute", 0)
    assert told["inputs"]["fetch_s"] > told["inputs"]["recompute_s"]
    assert "block 1 lies in nvme" in told["said"]
    await close(engine)


async def test_a_refused_block_says_why_there_was_no_room(engine: Engine) -> None:
    held = range(1, SLOTS + 1)
    await engine.store(*held)
    await engine.acquire(*held, lease_s=60.0)
    engine.core.node.tiers[1].drain(is_wanted=True)  # Takes nothing now.
    engine.core.node.is_draining = True
    reserved = await engine.ask(wire.Reserve(2, SCOPE, digest(SLOTS), digest(SLOTS + 1)))
    assert reserved.slots == ()
    engine.core.node.is_draining = False

    told = await why(engine, *held, SLOTS + 1)
    assert (told["reason"], told["hit_blocks"]) == ("refused", SLOTS)
    assert reserved.refusal in told["said"]


@pytest.mark.parametrize("end", ["expired", "disconnected", "given back"])
async def test_a_block_that_was_never_filled_says_how_that_ended(engine: Engine, end: str) -> None:
    reserved = await engine.ask_to_store(5)
    assert (await why(engine, 5))["reason"] == "pending"
    node = engine.core.node
    if end == "expired":
        engine.clock.now_s += RESERVATION_S + 1.0
        node.abandon(node.reservations.sweep(engine.clock.now_s), "its reservation expired")
    elif end == "disconnected":
        node.end_owner(engine.at.owner)
    else:
        await engine.ask(wire.Abandon(3, tuple(s.reservation for s in reserved.slots)))

    told = await why(engine, 5)
    assert told["reason"] == "unpublished"
    assert end in told["said"]


async def test_what_its_tenant_dropped_and_what_was_corrupt_are_told_apart(engine: Engine) -> None:
    await engine.store(1, 2)
    await engine.ask(wire.Drop(3, SCOPE, digest(2)))
    entry = engine.core.node.index.find(*engine.key(1))
    assert entry is not None

    assert "its tenant dropped it" in (await why(engine, 1, 2))["said"]
    engine.core.node.copy_failed(entry, entry.residences[0], is_corrupt=True)
    assert "did not match their checksum" in (await why(engine, 1, 2))["said"]


async def test_another_layout_is_named(engine: Engine) -> None:
    await engine.store(1)
    entry = engine.core.node.index.find(*engine.key(1))
    assert entry is not None
    entry.layout_id = type(entry.layout_id)(b"other" + entry.layout_id[5:])

    assert (await why(engine, 1))["reason"] == "layout"


async def test_never_stored_not_yours_and_erased_have_one_answer(engine: Engine) -> None:
    node = engine.core.node
    await engine.store(1, 2)
    await evict(engine, 2)
    never = await engine.ask(wire.WhyMiss(9, SCOPE, digest(77)))
    assert (await why(engine, 1))["reason"] == "evicted"

    mine = node.history.of(SCOPE, digest(1))
    node.history.note(OTHERS, mine[0])  # As if the other tenant's block of that digest had been evicted.
    assert await engine.ask(wire.WhyMiss(9, OTHERS, digest(1))) == never
    assert await engine.ask(wire.Explain(9, OTHERS, digest(1))) == await engine.ask(wire.Explain(9, SCOPE, digest(77)))
    node.drop_scope(SCOPE)
    assert await engine.ask(wire.WhyMiss(9, SCOPE, digest(1))) == never
    assert "never stored, is not yours to read, or went longer ago" in json.loads(never.json)["said"]


@pytest.mark.parametrize("verb", [wire.Lookup, wire.WhyMiss, wire.RouteHint])
async def test_what_is_erased_while_others_are_asked_is_answered_like_what_never_was(
    verb: type[wire.Lookup | wire.WhyMiss | wire.RouteHint], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = FakeDirectory({}, "pool.node")
    engine = await Engine(directory).attach()
    await engine.store(1)
    locate = directory.locate

    async def locate_late(*args: Any, **named: Any) -> Any:
        engine.core.node.erase(SCOPE)
        return await locate(*args, **named)

    monkeypatch.setattr(directory, "locate", locate_late)
    asked = verb(9, SCOPE, digest(1) + digest(77))
    told = await engine.ask(asked)
    assert len(engine.core.node.index) == 1, "it is still to be dropped"
    assert told == await engine.ask(asked)
    await close(engine)


async def test_asking_why_is_no_use_and_counts_nothing(engine: Engine) -> None:
    await engine.store(1)
    entry = engine.core.node.index.find(*engine.key(1))
    assert entry is not None
    before = entry.used_at_s, entry.mark, engine.core.node.counters.blocks_queried
    engine.clock.now_s += 100.0
    await why(engine, 1, 2)

    assert (entry.used_at_s, entry.mark, engine.core.node.counters.blocks_queried) == before


async def test_a_question_without_keys_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="digests of 0 B"):
        await engine.ask(wire.WhyMiss(9, SCOPE, b""))
