"""Laws of the reuse curve: it says how often a cache of any size would have been right, from a few samples."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_agent.policy.reuse_curve import ASKED_BLOCKS_MIN, ReuseCurve
from kvstrata_api import wire
from kvstrata_api.models.pool import KVPoolSpec
from support.agent.doubles import SCOPE, Clock, digest, dram_tier, make_core, pool_spec
from support.agent.engine import Engine, close

pytestmark = pytest.mark.unit

SCALED = {"minPerNode": "4Ki", "maxPerNode": "64Mi"}


def key(number: int) -> bytes:
    return random.Random(number).randbytes(20)


def lru_hit_ratio(uses: list[int], blocks: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for use in uses:
        hits += use in cache
        cache[use] = None
        cache.move_to_end(use)
        if len(cache) > blocks:
            cache.popitem(last=False)
    return hits / len(uses)


def measured(uses: list[int], samples_max: int) -> ReuseCurve:
    curve = ReuseCurve(samples_max)
    for at_s, use in enumerate(uses):
        curve.note([key(use)], 10.0 * at_s)
    return curve


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=50, max_size=400), st.sampled_from([4, 8, 16, 32, 64]))
def test_unsampled_it_is_what_a_least_recently_used_cache_finds(uses: list[int], blocks: int) -> None:
    assert measured(uses, 1000).hit_ratio(blocks) == pytest.approx(lru_hit_ratio(uses, blocks), abs=0.15)


def test_from_a_sixteenth_of_the_keys_it_is_nearly_the_same() -> None:
    chance = random.Random(7)
    uses = [int(chance.paretovariate(0.6)) % 8000 for _ in range(60_000)]
    curve = measured(uses, 500)

    assert len(curve._last) <= 500
    for blocks in (256, 1024, 4096):
        assert curve.hit_ratio(blocks) == pytest.approx(lru_hit_ratio(uses, blocks), abs=0.06)


def test_a_lookup_and_its_load_are_one_use_and_what_is_made_is_none() -> None:
    curve = ReuseCurve()
    curve.note([key(1)], 0.0, is_asked=False)
    assert curve.asked_blocks == 0
    curve.note([key(1)], 10.0)
    curve.note([key(1)], 10.5)
    assert curve.asked_blocks == 1
    assert curve.hit_ratio(2) == 1.0


def test_what_is_asked_for_each_second_is_used_all_the_time() -> None:
    curve = ReuseCurve()
    for second in range(1000):
        curve.note([key(5000)], float(second))
        curve.note([key(second)], float(second))

    assert curve.asked_blocks == 1000 + 500, "of two uses within two seconds one may be the load of the other"
    assert curve.hit_ratio(3) == pytest.approx(499 / 1500, abs=0.01)


def test_a_node_tells_of_tiers_that_scale_alone_and_says_the_same_while_nobody_asks() -> None:
    clock = Clock()
    core = make_core([dram_tier(256 * 4096)], clock)
    keys = [key(n) for n in range(300)]
    assert core.cache.demand.of_tiers() == {}
    core.cache.demand.note(keys, is_asked=True)
    assert not core.cache.demand.is_followed

    spec = pool_spec().to_json()
    spec["tiers"][0]["autoscale"] = SCALED
    core.node.spec, core.node.block_bytes = KVPoolSpec.model_validate(spec), 4096
    assert core.cache.demand.of_tiers() == {}
    for _ in range(ASKED_BLOCKS_MIN // 300 + 2):
        clock.now_s += 10
        core.cache.demand.note(keys, is_asked=True)
    told = core.cache.demand.of_tiers()
    assert told["dram"].gain_permille > 800, "all 300 blocks come again, and 256 have room"
    assert told["dram"].loss_permille == 0
    clock.now_s += 86_400
    assert core.cache.demand.of_tiers() == told


async def test_what_a_writer_looks_up_is_not_asked_for() -> None:
    engine = await Engine().attach()
    spec = engine.core.node.spec.to_json()
    spec["tiers"][0]["autoscale"] = SCALED
    engine.core.node.spec = KVPoolSpec.model_validate(spec)
    demand = engine.core.cache.demand
    demand.of_tiers()

    await engine.ask(wire.Lookup(1, SCOPE, digest(1), is_use=False))
    await engine.ask(wire.Reserve(2, SCOPE, b"", digest(1)))
    assert demand._curve is not None
    assert demand._curve.asked_blocks == 0
    engine.clock.now_s += 60.0
    await engine.ask(wire.Lookup(3, SCOPE, digest(1)))
    await engine.acquire(2)
    assert demand._curve.asked_blocks == 2
    await close(engine)
