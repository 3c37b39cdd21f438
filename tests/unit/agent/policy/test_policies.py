"""Laws of placement, admission and recompute-or-fetch."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.admission import CHECK_EVERY, AdmissionInputs, must_check, passing_bytes
from kvstrata_agent.policy.placement import (
    CopyFacts,
    CopyPath,
    Price,
    TierFacts,
    by_reuse_interval,
    copy_path,
    next_lower,
)
from kvstrata_agent.policy.recompute import (
    ENGINE_S,
    HELD_UP,
    LOCATE_S_MAX,
    LOCATE_S_MIN,
    REFUSED_S,
    CostInputs,
    EngineLoad,
    Source,
    choose,
    congestion_s,
    load_of,
    locate_s,
    split,
)
from kvstrata_agent.provision.plan import Close, Open, Resize, grant, plan
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType

pytestmark = pytest.mark.unit

facts = st.lists(
    st.builds(TierFacts, st.just(""), st.just(0), st.booleans(), st.booleans(), st.booleans()), max_size=8
).map(
    lambda drawn: [TierFacts(f"t{i}", i, f.takes_writes, f.survives_restart, f.is_memory) for i, f in enumerate(drawn)]
)


@given(tiers=facts, level=st.integers(0, 8), must_survive=st.booleans())
def test_a_block_goes_to_the_fastest_slower_tier_that_may_take_it(
    tiers: list[TierFacts], level: int, *, must_survive: bool
) -> None:
    fit = [
        t
        for t in tiers
        if t.level > level and t.takes_writes and (not must_survive or (t.survives_restart and not t.is_memory))
    ]
    assert next_lower(tiers, level, must_survive=must_survive).target == (fit[0].name if fit else None)


def _priced(*prices_per_s: float) -> list[TierFacts]:
    names = ("dram", "cxl", "nvme", "object")
    return [
        TierFacts(names[i], i, takes_writes=True, survives_restart=i > 1, is_memory=i < 2, price_per_s=price)
        for i, price in enumerate((9.0, *prices_per_s))
    ]


@pytest.mark.parametrize(("uses_per_s", "target"), [(0.2, "cxl"), (0.05, "nvme"), (0.005, "object"), (-1.0, "object")])
def test_a_block_goes_where_it_is_worth_more_than_what_leaves(uses_per_s: float, target: str) -> None:
    assert by_reuse_interval(_priced(0.1, 0.01, 0.0), 0, uses_per_s).target == target


def test_tiers_that_have_room_are_used_in_their_order() -> None:
    tiers = _priced(0.0, 0.0, 0.0)

    assert by_reuse_interval(tiers, 0, -1.0) == next_lower(tiers, 0)
    assert by_reuse_interval(tiers, 3, 0.3) == next_lower(tiers, 3)


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.floats(-1, 1e6))
def test_what_is_passed_over_costs_more_than_the_block_is_worth(prices: list[float], uses_per_s: float) -> None:
    tiers = _priced(*prices)

    chosen = next(t for t in tiers if t.name == by_reuse_interval(tiers, 0, uses_per_s).target)
    assert all(t.price_per_s > max(0.0, uses_per_s) for t in tiers[1 : chosen.level])
    assert chosen.price_per_s <= max(0.0, uses_per_s) or chosen.level == 3


@given(st.lists(st.floats(-1, 1e3), min_size=1, max_size=50))
def test_a_price_lies_between_what_was_free_and_what_was_worth_most(worths: list[float]) -> None:
    price = Price()
    for uses_per_s in worths:
        price.paid(uses_per_s)

    assert 0.0 <= price.per_s <= max(0.0, *worths)


@given(st.builds(CopyFacts, **{name: st.booleans() for name in CopyFacts.__dataclass_fields__}))
def test_a_block_moves_with_others_only_between_mapped_memory_and_a_medium_that_takes_groups(facts: CopyFacts) -> None:
    may_go_up = facts.is_source_grouped and facts.fills_mapped_slot
    may_go_down = facts.is_source_mapped and facts.is_target_grouped and not facts.is_source_grouped
    path = copy_path(facts)

    assert path is CopyPath.SINGLE or may_go_up or may_go_down
    if path is CopyPath.RAW_GROUP:
        assert not facts.is_encoded, "what went through a codec is decoded before anybody maps it"


@given(
    new=st.integers(1, 99), before=st.integers(0, 99), high=st.integers(0, 99), turns=st.integers(0, 5),
    has_lower=st.booleans(), continues=st.booleans(),
)  # fmt: skip
def test_of_first_turns_what_is_above_the_watermark_is_sent_down_and_only_where_there_is_a_below(
    new: int, before: int, high: int, turns: int, *, has_lower: bool, continues: bool
) -> None:
    def sent_down(policy: str) -> int:
        return passing_bytes(AdmissionInputs(policy, new, before + new, high, turns, has_lower, continues))

    above = new if continues else len(range(max(before, high), before + new))
    assert sent_down("Auto") == (above if has_lower and turns == 0 else 0)
    assert sent_down("Always") == 0
    assert sent_down("Never") == (new if has_lower else 0)


@given(st.integers(0, 1 << 40))
def test_a_writer_is_checked_at_its_first_block_then_now_and_then_and_always_once_it_erred(written: int) -> None:
    run = range(written, written + CHECK_EVERY)

    assert must_check(0, has_erred=False)
    assert sum(must_check(i, has_erred=False) for i in run) == 1
    assert all(must_check(i, has_erred=True) for i in run)


costs = st.builds(
    CostInputs,
    policy=st.sampled_from(["CostModel", "AlwaysFetch"]),
    blocks=st.integers(1, 1000),
    block_tokens=st.integers(1, 256),
    stored_bytes=st.integers(1, 1 << 32),
    queued_bytes=st.integers(0, 1 << 32),
    read_latency_s=st.floats(0, 1),
    read_bytes_per_s=st.floats(0, 1e11),
    engine=st.builds(EngineLoad, st.floats(1, 1e6), st.integers(0, 10_000)),
)


@given(costs)
def test_the_cheaper_source_is_taken_and_an_unmeasured_tier_is_fetched_from(inputs: CostInputs) -> None:
    choice = choose(inputs)
    if inputs.policy == "AlwaysFetch" or inputs.read_bytes_per_s <= 0:
        assert choice.source is Source.FETCH
    else:
        assert (choice.source is Source.FETCH) == (choice.fetch_s <= choice.recompute_s)


@given(costs, st.integers(1, 1 << 32))
def test_a_longer_queue_never_makes_fetching_cheaper(inputs: CostInputs, more_bytes: int) -> None:
    longer = dataclasses.replace(inputs, queued_bytes=inputs.queued_bytes + more_bytes)
    assert choose(longer).fetch_s >= choose(inputs).fetch_s


@given(costs)
def test_a_path_is_said_to_be_busy_only_where_its_queue_makes_the_difference(inputs: CostInputs) -> None:
    cost, alone = choose(inputs), choose(dataclasses.replace(inputs, queued_bytes=0))
    wait_s = congestion_s(inputs, is_full=False)
    if wait_s:
        assert alone.fetch_s <= cost.recompute_s * (1 + 1e-9)
        assert cost.fetch_s > cost.recompute_s
    assert congestion_s(dataclasses.replace(inputs, queued_bytes=0), is_full=False) == 0.0
    assert congestion_s(inputs, is_full=True) >= max(wait_s, REFUSED_S)


@given(costs, st.integers(1, 100_000))
def test_a_longer_queue_of_the_engine_never_makes_computing_cheaper(inputs: CostInputs, more_tokens: int) -> None:
    load = dataclasses.replace(inputs.engine, queued_tokens=inputs.engine.queued_tokens + more_tokens)
    assert choose(dataclasses.replace(inputs, engine=load)).recompute_s > choose(inputs).recompute_s


segments = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(["nvme", "object", ""]), st.floats(0, 2), st.floats(1e3, 1e7)),
    min_size=1,
    max_size=5,
)
engines = st.builds(
    EngineLoad,
    st.floats(100, 1e5),
    st.sampled_from([0, 1000, 100_000]),
    half_rate_tokens=st.sampled_from([0, 100, 10_000]),
)
SPLIT_TOKENS, SPLIT_BYTES = 16, 1000


def _runs(drawn: list[tuple[int, str, float, float]], engine: EngineLoad) -> list[CostInputs]:
    runs, before = [], 0
    for blocks, path, latency_s, rate in drawn:
        runs.append(
            CostInputs(
                "CostModel", blocks, SPLIT_TOKENS, blocks * SPLIT_BYTES, 0, latency_s if path else 0.0,
                rate if path else 0.0, engine, before, path,
            )
        )  # fmt: skip
        before += blocks * SPLIT_TOKENS
    return runs


def _done_s(runs: list[CostInputs], blocks: int) -> float:
    """When the prefix is done if so many blocks are fetched, block by block; computing counts as the rule says."""
    engine, busy_s, at = runs[0].engine, dict[str, float](), 0
    fetched_s = computed_s = 0.0
    for run in runs:
        here = min(run.blocks, max(0, blocks - at))
        if here and run.path:
            begins_s = max(busy_s.get(run.path, 0.0), run.read_latency_s)
            fetched_s = max(fetched_s, begins_s + here * SPLIT_BYTES / run.read_bytes_per_s)
            busy_s[run.path] = begins_s + run.blocks * SPLIT_BYTES / run.read_bytes_per_s
        for i in range(here, run.blocks):
            computed_s += engine.compute_s(run.context_tokens + i * SPLIT_TOKENS, SPLIT_TOKENS)
        at += run.blocks
    return max(engine.wait_s, fetched_s) + (HELD_UP if engine.wait_s else 1.0) * computed_s


@given(segments, engines)
def test_no_other_split_is_done_sooner(drawn: list[tuple[int, str, float, float]], engine: EngineLoad) -> None:
    runs = _runs(drawn, engine)
    found = split(runs)

    everywhere = [_done_s(runs, n) for n in range(sum(run.blocks for run in runs) + 1)]
    assert _done_s(runs, found.blocks) == pytest.approx(min(everywhere), rel=1e-6)
    assert found.ready_s >= engine.wait_s


@given(segments, engines)
def test_always_fetch_splits_nothing(drawn: list[tuple[int, str, float, float]], engine: EngineLoad) -> None:
    runs = [dataclasses.replace(run, policy="AlwaysFetch") for run in _runs(drawn, engine)]

    assert split(runs).blocks == sum(run.blocks for run in runs)


def test_what_arrives_while_others_are_computed_is_fetched_and_the_rest_computed() -> None:
    engine = EngineLoad(1000.0, 1000)  # A second waits before; each block takes 0.016 s to compute.
    slow = CostInputs("CostModel", 100, 16, 100_000, 0, 0.0, 20_000.0, engine, path="object")

    assert split([slow]).blocks == 20  # Each takes 0.05 s, so 20 come within that second.
    assert split([dataclasses.replace(slow, queued_bytes=10_000)]).blocks == 10, "the path's queue counts"
    assert split([dataclasses.replace(slow, engine=EngineLoad(1000.0))]).blocks == 0


def test_attention_makes_late_tokens_worth_fetching() -> None:
    near = CostInputs("CostModel", 100, 16, 100_000, 0, 0.0, 40_000.0, EngineLoad(1000.0, half_rate_tokens=2000))

    assert choose(near).source is Source.RECOMPUTE
    assert choose(dataclasses.replace(near, context_tokens=8000)).source is Source.FETCH


def test_an_engine_is_taken_at_its_own_word_then_at_its_tenants_and_then_at_the_pools() -> None:
    assumed, now_s = EngineLoad(12_000.0), 100.0
    told = {1: EngineLoad(1000.0, 10, 1, now_s), 2: EngineLoad(3000.0, 30, 3, now_s - ENGINE_S / 2)}

    assert load_of(told, 1, assumed, now_s) == told[1]
    assert load_of(told, 3, assumed, now_s) == EngineLoad(2000.0, 20, 2, now_s)
    assert load_of(told, 2, assumed, now_s + ENGINE_S / 2) == EngineLoad(1000.0, 10, 1, now_s)
    assert load_of(told, 1, assumed, now_s + ENGINE_S) == assumed


@given(st.integers(0, 1 << 20), st.floats(1, 1e8), st.floats(0, 60))
def test_the_directory_is_waited_for_as_long_as_what_it_may_save_is_worth(
    tokens: int, speed: float, left_s: float
) -> None:
    wait_s = locate_s(tokens, speed, left_s)

    assert LOCATE_S_MIN <= wait_s <= LOCATE_S_MAX
    assert wait_s <= max(LOCATE_S_MIN, min(left_s, tokens / speed / 4))
    assert wait_s <= locate_s(2 * tokens, speed, left_s)
    assert locate_s(1_792, 500.0, 10.0) == pytest.approx(0.896)


def dram(name: str, capacity_bytes: int) -> NodeTier:
    return NodeTier(name=name, type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=HostDramTier())


def nvme(name: str, capacity_bytes: int, path: str = "/data") -> NodeTier:
    return NodeTier(name=name, type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=NvmeTier(path=path))


sizes = st.integers(1, 1 << 44)
wishes = st.lists(
    st.one_of(
        st.builds(dram, st.sampled_from("abc"), sizes),
        st.builds(nvme, st.sampled_from("abc"), sizes, st.sampled_from(["/x", "/y"])),
    ),
    max_size=3,
    unique_by=lambda t: t.name,
)


@given(wishes, sizes, sizes)
def test_no_tier_gets_more_than_it_wants_or_the_machine_has(wish: list[NodeTier], memory: int, disk: int) -> None:
    limits = grant(wish, memory, {t.name: disk for t in wish if t.type is TierType.NVME})
    assert sum(limits[t.name].granted_bytes for t in wish if t.type is TierType.HOST_DRAM) <= memory
    for tier in wish:
        limit = limits[tier.name]
        assert 0 <= limit.granted_bytes <= tier.capacity_bytes
        assert bool(limit.message) == (limit.granted_bytes < tier.capacity_bytes)
        assert tier.type is not TierType.NVME or limit.granted_bytes <= disk


@given(wishes, wishes)
def test_a_plan_reaches_the_wish_and_is_then_empty(wanted: list[NodeTier], have: list[NodeTier]) -> None:
    up = {t.name: t for t in have}
    steps = plan(wanted, up)
    kinds = [type(s) for s in steps]
    assert kinds == sorted(kinds, key=[Close, Resize, Open].index)
    for step in steps:
        match step:
            case Close(name):
                del up[name]
            case Resize(spec):
                up[spec.name] = up[spec.name].model_copy(update={"capacity_bytes": spec.capacity_bytes})
            case Open(spec):
                assert spec.name not in up
                up[spec.name] = spec
    assert up == {t.name: t for t in wanted}
    assert plan(wanted, up) == ()


@given(wishes)
def test_a_tier_that_is_down_is_opened_again_only_when_a_retry_is_due(wanted: list[NodeTier]) -> None:
    assert plan(wanted, {}, is_retry_due=False) == ()
    assert plan(wanted, {}) == tuple(Open(t) for t in wanted)
