"""What each verb promises, spoken to the verbs themselves without a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.request import Caller, RequestContext
from kvstrata_agent.blocks.reservations import RESERVATION_S
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.path import REMEASURED_S, Priority
from kvstrata_agent.policy.recompute import ENGINE_S
from kvstrata_agent.serve.authorization import Attachment
from kvstrata_agent.serve.session_verbs import contexts_of
from kvstrata_agent.serve.verbs import LEASE_S_MAX
from kvstrata_api import wire
from kvstrata_api.blocks import Layout, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    InvalidInputError,
    KvStrataError,
    UnauthenticatedError,
)
from kvstrata_api.models.poolnode import TierProbe
from kvstrata_api.tiers import Lookup
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT,
    LAYOUT_ID,
    SCOPE,
    DictBackend,
    bytes_of,
    caller,
    digest,
    secret,
)
from support.agent.engine import Engine, close, steps_until

pytestmark = pytest.mark.unit


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = await Engine().attach()
    yield made
    await close(made)


async def test_a_lookup_tells_hits_pending_ones_and_misses_apart(engine: Engine) -> None:
    await engine.store(1, 2)
    await engine.ask(wire.Reserve(2, SCOPE, digest(2), digest(3)))

    found = await engine.ask(wire.Lookup(9, SCOPE, b"".join(map(digest, (1, 2, 3, 4)))))

    assert found.states == bytes([Lookup.HIT, Lookup.HIT, Lookup.PENDING, Lookup.MISS])
    assert (found.prefix_blocks, found.places, found.tier_names) == (2, bytes(2), ("dram",))


async def test_the_hit_ratio_counts_lookups_and_loads_once_and_probes_never(engine: Engine) -> None:
    await engine.store(1, 2)
    counters = engine.core.node.counters
    keys = b"".join(map(digest, (1, 2, 3)))

    await engine.ask(wire.Lookup(9, SCOPE, keys, is_probe=True))
    await engine.acquire(1, 2)
    assert (counters.blocks_queried, counters.blocks_hit) == (0, 0)
    await engine.ask(wire.Lookup(9, SCOPE, keys))
    assert (counters.blocks_queried, counters.blocks_hit) == (3, 2)
    await engine.ask(wire.CountLoad(9, 5, 4))
    assert (counters.blocks_queried, counters.blocks_hit) == (8, 6)


@pytest.mark.parametrize(("wanted", "loaded"), [(1, 2), (-1, -1), (wire.KEYS_MAX + 1, 0)])
async def test_a_load_that_cannot_be_is_not_counted(engine: Engine, wanted: int, loaded: int) -> None:
    with pytest.raises(InvalidInputError, match="wanted_blocks"):
        await engine.ask(wire.CountLoad(9, wanted, loaded))


async def test_of_two_layouts_at_once_a_connection_gets_one() -> None:
    engine = Engine()
    layouts = (LAYOUT, replace(LAYOUT, layers=2))

    done = await asyncio.gather(
        *(engine.ask(wire.Attach(i, "a", "pool", layout)) for i, layout in enumerate(layouts)), return_exceptions=True
    )

    assert sum(isinstance(answer, wire.Granted) for answer in done) == 1
    assert sum(isinstance(answer, InvalidInputError) for answer in done) == 1
    await close(engine)


async def test_an_attach_is_refused_for_good_or_unknown_just_then() -> None:
    engine = Engine()
    engine.authenticator.callers["other"] = caller("other")

    def counted() -> dict[str, float]:
        families = engine.core.node.counters._instruments.registry.collect()
        return {s.labels["result"]: s.value for f in families for s in f.samples if s.name == "kvstrata_attach_total"}

    async def ends_as(token: str, pool: str = "pool", layout: Layout = LAYOUT) -> str:
        """The result that one more attach has."""
        before = counted()
        with suppress(KvStrataError):
            await engine.ask(wire.Attach(1, token, pool, layout))
        (result,) = [result for result, attaches in counted().items() if attaches > before.get(result, 0)]
        return result

    assert await ends_as("forged") == "refused"
    assert await ends_as("a", "elsewhere") == "refused"
    assert await ends_as("a", layout=replace(LAYOUT, dtype="fp8")) == "refused"
    assert await ends_as("a") == "ok"
    assert await ends_as("other") == "refused", "another identity on the same connection"

    async def away(token: str) -> Caller:
        raise ApiServerAwayError(f"{token}: the API server does not answer")

    engine.authenticator.authenticate = away  # type: ignore[method-assign]
    assert await ends_as("a") == "unknown"
    await close(engine)


async def test_a_lease_is_never_longer_than_its_bound(engine: Engine) -> None:
    await engine.store(1)
    await engine.acquire(1, lease_s=1e9)
    engine.clock.now_s += LEASE_S_MAX
    Sweeper(engine.core.cache, engine.authenticator).expire()

    assert len(engine.core.node.leases) == 0


async def test_blocks_that_come_too_late_are_left_out_and_there_for_the_next_one(engine: Engine) -> None:
    await engine.store(1, 2, 3)
    await engine.push_down()
    slow = SlowReads(engine.low)

    assert (await engine.acquire(1, 2, 3, deadline_s=0.05)).blocks == ()
    slow.limiter.set()
    acquired = await engine.acquire(1, 2, 3, deadline_s=5.0)

    assert len(acquired.blocks) == 3
    assert slow.reads == 3
    assert len(engine.core.node.leases) == 3


class SlowReads:
    """Makes a dict tier wait before each read."""

    def __init__(self, backend: DictBackend) -> None:
        self.limiter = asyncio.Event()
        self.reads = 0
        self._read = backend.read
        backend.read = self.read  # type: ignore[method-assign]

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        self.reads += 1
        await self.limiter.wait()
        await self._read(slot, record, into)


async def test_a_prefetch_brings_blocks_up_before_they_are_asked_for(engine: Engine) -> None:
    await engine.store(1, 2, 3)
    await engine.push_down()

    assert (await engine.ask(wire.Prefetch(1, SCOPE, b"".join(map(digest, (1, 2, 3)))))).count == 3
    await asyncio.sleep(0)  # Transfers begin together, in the next step of the loop.
    await asyncio.gather(*engine.core.cache.promoter._tasks)

    assert {b.source for b in (await engine.acquire(1, 2, 3)).blocks} == {"dram"}


async def test_a_prefetch_stays_within_the_pools_bytes_in_flight() -> None:
    engine = await Engine(prefetch={"maxInflightBytes": 2 * BLOCK_BYTES}).attach()
    await engine.store(1, 2, 3, 4, 5)
    await engine.push_down()
    mover, asked = engine.core.cache.mover, wire.Prefetch(1, SCOPE, b"".join(map(digest, range(1, 6))))

    assert (await engine.ask(asked)).count == 2
    assert mover.bytes_under_way == 2 * BLOCK_BYTES, "they begin in the next step of the loop"
    assert (await engine.ask(asked)).count == 0
    await steps_until(lambda: not mover.bytes_under_way)
    assert (await engine.ask(asked)).count == 2
    await steps_until(lambda: not mover.bytes_under_way)
    assert engine.core.node.contents(engine.core.node.tiers[0]).blocks == 4
    await close(engine)


async def test_pinned_blocks_stay_until_the_pin_runs_out(engine: Engine) -> None:
    await engine.store(1, 2)
    assert (await engine.ask(wire.Pin(1, SCOPE, digest(1) + digest(2), 60.0))).count == 2
    for n in range(100, 140):
        await engine.store(n)
    assert {b.source for b in (await engine.acquire(1, 2)).blocks} == {"dram"}
    engine.core.node.end_leases(engine.core.node.leases.end_owner(1))

    engine.clock.now_s += 60.0
    Sweeper(engine.core.cache, engine.authenticator).expire()
    for n in range(200, 240):
        await engine.store(n)
    assert {b.source for b in (await engine.acquire(1, 2)).blocks} == {"nvme"}


async def test_an_unpin_takes_the_pins_of_the_connection_back(engine: Engine) -> None:
    await engine.store(1)
    await engine.ask(wire.Pin(1, SCOPE, digest(1), 60.0))
    await engine.ask(wire.Pin(1, SCOPE, digest(1), 60.0))

    assert (await engine.ask(wire.Unpin(1, SCOPE, digest(1)))).count == 1
    assert len(engine.core.node.pins) == 0


async def test_a_touch_makes_blocks_the_last_to_leave_and_moves_nothing(engine: Engine) -> None:
    await engine.store(1)
    for n in range(100, 180, 2):  # No two of them are of one chain.
        engine.clock.now_s += 1.0
        await engine.store(n)
        assert (await engine.ask(wire.Touch(1, SCOPE, digest(1) + digest(2)))).count == 1

    assert (await engine.ask(wire.Touch(1, SCOPE, digest(100)))).count == 1
    assert [(await engine.acquire(n)).blocks[0].source for n in (1, 100)] == ["dram", "nvme"]


async def test_a_drop_removes_every_copy_of_what_nobody_holds_and_reports_what_stayed(engine: Engine) -> None:
    await engine.store(1, 2, 3)
    await engine.push_down()
    await engine.acquire(1)  # A copy in each tier, and a lease on the head.

    dropped = await engine.ask(wire.Drop(1, SCOPE, b"".join(map(digest, (1, 2, 3, 4)))))

    assert dropped.states == bytes([Lookup.HIT, Lookup.MISS, Lookup.MISS, Lookup.MISS])
    engine.core.node.end_leases(engine.core.node.leases.end_owner(1))
    assert (await engine.ask(wire.Drop(1, SCOPE, digest(1)))).states == bytes([Lookup.MISS])
    assert all(not tier.tenant_bytes for tier in engine.core.node.tiers)


async def test_a_drop_leaves_the_head_of_a_chain_that_goes_on(engine: Engine) -> None:
    await engine.store(1, 2, 3)

    assert (await engine.ask(wire.Drop(1, SCOPE, digest(1) + digest(2)))).states == bytes([Lookup.HIT] * 2)
    assert (await engine.ask(wire.Drop(1, SCOPE, digest(2) + digest(3)))).states == bytes([Lookup.MISS] * 2)


async def test_a_drop_leaves_what_is_pinned_or_decoded_from(engine: Engine) -> None:
    await engine.store(1)
    await engine.ask(wire.Pin(1, SCOPE, digest(1), 60.0))
    assert (await engine.ask(wire.Drop(1, SCOPE, digest(1)))).states == bytes([Lookup.HIT])
    await engine.ask(wire.Unpin(1, SCOPE, digest(1)))
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.ask(wire.Release(1, tuple(b.lease for b in (await engine.acquire(1, session="s")).blocks)))
    await engine.ask(wire.TouchSession(1, "s", "decoding"))
    assert (await engine.ask(wire.Drop(1, SCOPE, digest(1)))).states == bytes([Lookup.HIT])

    await engine.ask(wire.CloseSession(1, "s", archive=False))
    assert (await engine.ask(wire.Drop(1, SCOPE, digest(1)))).states == bytes([Lookup.MISS])


async def test_a_block_with_two_copies_is_one_eviction() -> None:
    engine = await Engine().attach()
    await engine.store(1)
    await engine.push_down()
    await engine.release(await engine.acquire(1, deadline_s=5.0))
    entry, counters = engine.core.node.index.find(*engine.key(1)), engine.core.node.counters
    assert entry is not None
    assert [r.tier.name for r in entry.residences] == ["dram", "nvme"]

    await engine.ask(wire.Drop(1, SCOPE, digest(1)))

    family = next(f for f in counters._instruments.registry.collect() if f.name == "kvstrata_evicted_blocks")
    assert {s.labels["tier"]: s.value for s in family.samples} == {"nvme": 1.0}
    assert counters.evicted_blocks == 1
    await close(engine)


async def test_a_drop_in_a_shared_scope_is_forbidden_to_whoever_may_write_there(engine: Engine) -> None:
    domain = ScopeId("domain/d/uid-d/v1")
    own = Access(SCOPE, ScopeKind.TENANT, "a", can_write=True)
    shared = Access(domain, ScopeKind.DOMAIN, "d", can_write=True)
    member = Caller(Identity("ns", "a"), Grants("a", (shared, own), domain), (secret(domain), secret(SCOPE)), 600.0)
    engine.authenticator.callers["member"] = member
    await engine.ask(wire.Attach(1, "member", "pool", LAYOUT))
    assert len((await engine.ask(wire.Reserve(2, domain, b"", digest(1)))).slots) == 1

    with pytest.raises(ForbiddenError, match="drop: the blocks of a shared scope are its other readers' as well"):
        await engine.ask(wire.Drop(3, domain, digest(1)))
    assert (await engine.ask(wire.Touch(4, domain, digest(1)))).count == 0, "what is being written is not here yet"


async def test_a_tenant_is_told_exactly_what_is_on_its_own_account(engine: Engine) -> None:
    before = json.loads((await engine.ask(wire.Stats(1))).json)["tenant"]
    await engine.store(1, 2, 3)
    after = json.loads((await engine.ask(wire.Stats(1))).json)["tenant"]

    capacities = sum(t.backend.capacity_bytes for t in engine.core.node.tiers)
    assert (before["used_bytes"], before["limit_bytes"]) == (0, capacities)
    layouts = [LAYOUT.layout_id().hex()]
    counted = {"used_bytes": 3 * BLOCK_BYTES, "limit_bytes": capacities}
    assert after == {**counted, "prefill_tokens_per_s": None, "layouts": layouts}
    assert before["layouts"] == []


async def test_a_stretch_that_is_cheaper_to_compute_is_not_fetched() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100_000_000}).attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=1000, read_latency_microseconds=50_000)

    assert (await engine.acquire(1, 2, 3)).blocks == ()
    told = json.loads((await engine.ask(wire.Explain(1, SCOPE, digest(1)))).json)
    assert told["read"]["choice"] == "recompute"
    assert told["read"]["alternatives"]["fetch_s"] > told["read"]["alternatives"]["recompute_s"]
    await close(engine)


async def test_an_engines_own_speed_and_queue_decide_what_it_computes() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100}).attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=1_000_000, read_latency_microseconds=50_000)
    context = next(iter(contexts_of(engine.at)))
    run = [engine.core.node.index.find(*engine.key(n)) for n in (1, 2, 3)]
    reader = engine.core.cache.reader

    assert reader.worth_fetching(context, run) == 3
    assert (await engine.ask(wire.ReportEngine(9, 1e8))).count == 1
    assert reader.worth_fetching(context, run) == 0
    await engine.ask(wire.ReportEngine(9, 1e8, 10**8, 4))  # A second waits before them.
    assert reader.worth_fetching(context, run) == 3
    await engine.ask(wire.ReportEngine(9, 1e8))
    engine.clock.now_s += ENGINE_S
    assert reader.worth_fetching(context, run) == 3, "an old report counts"
    engine.verbs.end(engine.at)
    assert not engine.core.node.engines, "a tenant whose connections have ended is remembered"
    await close(engine)


async def test_as_much_of_a_slow_prefix_is_fetched_as_comes_while_the_engine_computes_others() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100}).attach()
    await engine.store(1, 2, 3, 4)
    await engine.push_down()
    entry, tokens = engine.core.node.index.find(*engine.key(1)), engine.core.node.spec.compatibility.block_tokens
    assert entry is not None
    stored_bytes = entry.residences[0].record.stored_bytes
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=stored_bytes, read_latency_microseconds=0)
    await engine.ask(wire.ReportEngine(9, 100.0 * tokens, 250 * tokens))  # 2.5 s of queue, and 10 ms for each block.

    acquired = await engine.acquire(1, 2, 3, 4, deadline_s=5.0)
    assert len(acquired.blocks) == 2, "each block takes a second"
    await close(engine)


async def test_a_load_is_accounted_by_what_was_held_captured_and_delivered() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100}).attach()
    await engine.store(1, 2, 3, 4)
    await engine.push_down()
    entry, tokens = engine.core.node.index.find(*engine.key(1)), engine.core.node.spec.compatibility.block_tokens
    assert entry is not None
    stored_bytes = entry.residences[0].record.stored_bytes
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=stored_bytes, read_latency_microseconds=0)
    await engine.ask(wire.ReportEngine(9, 100.0 * tokens, 250 * tokens))  # Each block takes a second; 2.5 s of queue.

    acquired = await engine.acquire(1, 2, 3, 4, 5, deadline_s=5.0)
    engine.clock.now_s += 0.25
    await engine.release(acquired)
    await engine.ask(wire.CountLoad(9, 5, 2))

    def counted(name: str, **labels: str) -> float | None:
        registry, own = engine.core.node.counters._instruments.registry, {"pool": "pool", "node": "node", "tenant": "a"}
        return registry.get_sample_value(f"kvstrata_load_{name}_total", {**own, **labels})

    place = engine.core.node.tiers[1].name
    shown = {stage: counted("tokens", tier=place, stage=stage) for stage in ("held", "captured", "delivered")}
    assert shown == {"held": 4 * tokens, "captured": 4 * tokens, "delivered": 2 * tokens}
    assert counted("saved_prefill_seconds") == counted("saved_gpu_seconds") == pytest.approx(0.02)
    rated = "kvstrata_load_saved_prefill_tokens_total"
    registry, node = engine.core.node.counters._instruments.registry, {"pool": "pool", "node": "node"}
    assert registry.get_sample_value(rated, node) == 2 * tokens
    assert counted("seconds") == pytest.approx(0.25)
    await close(engine)


async def test_shards_of_one_engine_count_its_tokens_once_and_its_gpus_each() -> None:
    """Each of two tensor ranks loads its half of every block."""
    layout = replace(LAYOUT, tp_size=2)
    engine = Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": LAYOUT.block_tokens})
    await engine.ask(wire.Attach(1, "a", "pool", layout))
    for _ in range(2):
        await engine.ask(wire.CountLoad(9, 3, 3))

    registry, own = engine.core.node.counters._instruments.registry, {"pool": "pool", "node": "node", "tenant": "a"}
    delivered = registry.get_sample_value(
        "kvstrata_load_tokens_total", {**own, "tier": "unknown", "stage": "delivered"}
    )
    assert delivered == 3 * LAYOUT.block_tokens
    assert registry.get_sample_value("kvstrata_load_saved_prefill_seconds_total", own) == 3.0
    rated, node = "kvstrata_load_saved_prefill_tokens_total", {"pool": "pool", "node": "node"}
    assert registry.get_sample_value(rated, node) == 3 * LAYOUT.block_tokens
    assert registry.get_sample_value("kvstrata_load_saved_gpu_seconds_total", own) == 6.0
    await close(engine)


async def test_a_choice_is_held_against_what_came_of_it_and_shown() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100_000_000}).attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=10_000, read_latency_microseconds=50_000)

    assert (await engine.acquire(1, 2, 3)).blocks == ()
    engine.clock.now_s += 30.0  # So long the engine takes.
    await engine.ask(wire.Reserve(2, SCOPE, b"", b"".join(map(digest, (1, 2, 3))), ""))
    told = json.loads((await engine.ask(wire.Explain(1, SCOPE, digest(1)))).json)["last_choice"]
    assert (told["source"], told["took_s"]) == ("recompute", 30.0)
    assert told["regret_s"] == pytest.approx(30.0 - told["other_s"])
    counted = engine.core.node.counters._instruments.registry
    assert counted.get_sample_value(
        "kvstrata_load_regret_seconds_total", {"pool": "pool", "node": "node", "choice": "recompute"}
    ) == pytest.approx(told["regret_s"])
    await close(engine)


async def test_blocks_of_other_agents_are_weighed_against_an_engines_own_word_and_tried_again() -> None:
    engine = await Engine(recompute={"type": "CostModel", "prefillTokensPerSecond": 100_000_000}).attach()
    context = next(iter(contexts_of(engine.at)))
    reader, elsewhere = engine.core.cache.reader, [None, None, None]
    speed = reader._mover.scheduler.paths.between("remote", "dram").speed
    speed.begin(engine.clock.now_s)
    engine.clock.now_s += 10.0
    speed.end(engine.clock.now_s, 3 * BLOCK_BYTES)

    assert reader.worth_fetching(context, elsewhere) == 3, "the pool's assumption does not stand against them"
    await engine.ask(wire.ReportEngine(9, 1e6))
    assert reader.worth_fetching(context, elsewhere) == 0
    engine.clock.now_s += REMEASURED_S + 1.0
    await engine.ask(wire.ReportEngine(9, 1e6))
    assert reader.worth_fetching(context, elsewhere) == 3, "nobody has measured it of late"
    await close(engine)


async def test_blocks_that_are_not_admitted_go_down_at_once() -> None:
    engine = await Engine(admission={"type": "Never"}).attach()
    work = asyncio.create_task(engine.core.cache.archiver.run())
    await engine.store(1, 2)
    await steps_until(lambda: engine.core.node.contents(engine.core.node.tiers[1]).blocks == 2)
    work.cancel()
    await close(engine)


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
async def test_what_is_not_admitted_leaves_memory_first_and_slower_tiers_when_it_is_old(eviction: str) -> None:
    engine = await Engine(admission={"type": "Never"}, eviction={"type": eviction}).attach()
    node = engine.core.node
    memory, files = node.tiers
    work = asyncio.create_task(engine.core.cache.archiver.run())

    def first_to_leave(tier: Tier) -> Entry | None:
        returns = node.returns if node.returns.are_followed else None
        return TierCandidates(node.index, tier, EvictionRequest(1, "room"), node.clock(), returns).pop()

    await engine.store(2)
    await steps_until(lambda: node.contents(files).blocks == 1)
    engine.clock.now_s += 1.0
    await engine.release(await engine.acquire(2))
    engine.clock.now_s += 1.0
    await engine.store(4)
    await steps_until(lambda: node.contents(files).blocks == 2)
    old, new = (node.index.find(*engine.key(number)) for number in (2, 4))
    assert new is not None
    assert (first_to_leave(memory), first_to_leave(files)) == (new, old)
    assert "first to leave dram" in node.returns.explain(new)["reason"]

    node.contents(memory).offer(new)  # It was taken out.
    engine.clock.now_s += 1.0
    await engine.release(await engine.acquire(4))
    assert first_to_leave(memory) is old, "it was used since"
    work.cancel()
    await close(engine)


async def test_stats_and_explain_tell_what_is_there_and_nothing_of_others(engine: Engine) -> None:
    await engine.store(1, 2)
    stats = json.loads((await engine.ask(wire.Stats(1))).json)
    assert [t["name"] for t in stats["tiers"]] == ["dram", "nvme"]

    told = json.loads((await engine.ask(wire.Explain(1, SCOPE, digest(1)))).json)
    assert told["copies"][0]["eviction"]["inputs"] == {"children_here_or_faster": 1, "is_held": False}
    assert told["copies"][0]["eviction"]["choice"] == "stays"
    assert told["copies"][0]["placement"]["target"] == "nvme"

    others = await engine.ask(wire.Explain(1, "tenant/b/uid-b/v1", digest(1)))
    absent = await engine.ask(wire.Explain(1, SCOPE, digest(77)))
    assert others == absent


async def counts_of(engine: Engine) -> tuple[int, int]:
    stats = json.loads((await engine.ask(wire.Stats(1))).json)
    return stats["leases"], stats["reservations"]


async def test_stats_count_the_leases_and_reservations_of_the_connection_that_asks(engine: Engine) -> None:
    await engine.store(1, 2)
    await engine.acquire(1, 2)
    await engine.ask_to_store(3)
    other = Attachment(2)
    engine.at, first = other, engine.at
    await engine.attach()
    assert await counts_of(engine) == (0, 0)
    engine.at = first
    assert await counts_of(engine) == (2, 1)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (wire.TouchSession(1, "s", "dancing"), "state"),
        (wire.TouchSession(1, "s", "idle", urgency=101), "urgency"),
        (wire.OpenSession(1, ""), "session"),
        (wire.OpenSession(1, "s", parent="p" * 129), "parent"),
        (wire.Explain(1), "explain"),
        (wire.Explain(1, SCOPE, b"short"), "digest"),
        (wire.Reserve(1, SCOPE, b"short", bytes(20)), "parent"),
        (wire.Publish(1, (1,), ()), "checksums"),
        (wire.Hello(1, 99, "x"), "version"),
        (wire.Attach(1, "a", "other", LAYOUT), "pool"),
    ],
)
async def test_arguments_out_of_bounds_are_refused_by_name(
    engine: Engine, request_: wire.AnyRequest, field: str
) -> None:
    with pytest.raises(InvalidInputError, match=field):
        await engine.ask(request_)


async def test_an_api_server_that_is_away_takes_no_rights_and_a_refused_token_takes_them_all(engine: Engine) -> None:
    await engine.store(1)
    await engine.acquire(1)

    async def away(token: str) -> Any:
        raise ApiServerAwayError(f"no answer about a token of {len(token)} characters")

    known, engine.authenticator.authenticate = engine.authenticator.authenticate, away  # type: ignore[method-assign]
    with pytest.raises(ApiServerAwayError):
        await engine.ask(wire.Attach(1, "a", "pool", LAYOUT))
    assert len((await engine.acquire(1)).blocks) == 1

    engine.authenticator.authenticate = known  # type: ignore[method-assign]
    with pytest.raises(UnauthenticatedError):
        await engine.ask(wire.Attach(1, "forged", "pool", LAYOUT))
    with pytest.raises(UnauthenticatedError):
        await engine.acquire(1)
    assert len(engine.core.node.leases) == 0


async def test_a_relocated_block_has_its_own_checksum(engine: Engine) -> None:
    await engine.store(1)
    entry = engine.core.node.index.find(SCOPE, digest(1))
    assert entry is not None
    before = entry.residences[0]
    tier = engine.core.node.tiers[0]

    assert await engine.core.cache.demoter.relocate(entry, tier)

    after = entry.residences[0]
    assert after.slot != before.slot
    assert after.record.checksum == checksum(bytes_of(1), digest(1), engine.core.node.epoch, after.slot.stamp)
    assert tier.backend.used_bytes == BLOCK_BYTES
    assert await engine.release(await engine.acquire(1)) == 1
    assert Priority.ONBOARD < Priority.DEMOTE


async def test_a_lease_that_was_waited_for_too_long_is_not_handed_out(engine: Engine) -> None:
    await engine.store(1, 2)
    context, reader = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES), engine.core.cache.reader
    short, long = (AcquireCall(context, [digest(1), digest(2)], lease_s, 1.0) for lease_s in (5.0, 9.0))
    reads = reader.acquire_now(short).reads
    assert [r.lease.id for r in reader.live(long, reads)] == [r.lease.id for r in reads]
    engine.clock.now_s += 6.0
    assert len(reader.live(short, reads)) == 2, "they were renewed"
    engine.clock.now_s += 5.0
    assert reader.live(short, reads) == []
    assert len(engine.core.node.leases) == 0


async def test_reservations_that_expired_while_the_rest_was_waited_for_are_not_handed_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, node = engine.core.cache.writer, engine.core.node
    now, later = writer.reserve_now, writer.reserve

    async def stopped(*given: Any, **more: Any) -> Any:
        engine.clock.now_s += RESERVATION_S
        Sweeper(engine.core.cache, engine.authenticator).expire()
        node.tiers[0].backend.compact()
        return await later(*given, **more)

    monkeypatch.setattr(writer, "reserve_now", lambda place, parent, digests: now(place, parent, digests[:1]))
    monkeypatch.setattr(writer, "reserve", stopped)
    reserved = await engine.ask(wire.Reserve(2, SCOPE, b"", digest(1) + digest(2)))

    assert (reserved.slots, reserved.extents) == ((), ())
    assert len(node.reservations) == 0


async def test_a_connection_that_ends_no_lease_gets_no_more_of_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one client could fill the agent's memory with leases."""
    monkeypatch.setattr("kvstrata_agent.serve.verbs.LEASES_MAX", 5)
    await engine.store(1, 2, 3)

    held = await engine.acquire(1, 2, 3)
    assert len(held.blocks) == 3
    assert len((await engine.acquire(1, 2, 3)).blocks) == 2
    assert (await engine.acquire(1, 2, 3)).blocks == ()
    await engine.release(held)
    assert len((await engine.acquire(1, 2, 3)).blocks) == 3
