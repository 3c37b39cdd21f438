"""Plans: laws of sizes, loads, intervals and money, and queues as theory has them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.replay import hardware, planning
from kvstrata_agent.replay.chains import Request, Trace, build
from kvstrata_agent.replay.hardware import Hardware, Sample
from kvstrata_agent.replay.machine import Engine, Memory
from kvstrata_agent.replay.planning import Fleet
from kvstrata_agent.replay.reuse_aware import Hints
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import KVPool
from kvstrata_api.units import GIB
from kvstrata_api.validate import validate

pytestmark = pytest.mark.unit

TIERS = {
    "HostDRAM": {"readBytesPerSecond": 50e9, "writeBytesPerSecond": 50e9, "latencySeconds": 2e-5, "room": "16Gi"},
    "NVMe": {
        "readBytesPerSecond": 7e9, "writeBytesPerSecond": 4e9, "latencySeconds": 1e-4, "room": "64Gi",
        "pricePerTibMonth": 80, "ratedWritesPerDay": 1,
    },
}  # fmt: skip


def described(**changes: Any) -> Hardware:
    """One GPU a node."""
    engine = {"kvMemory": "2Gi", **changes.pop("engine", {})}
    return Hardware.model_validate({"gpuHour": 4, "nodeGpus": 1, "tiers": TIERS, "engine": engine, **changes})


def manifest(dram: str = "2Gi", nvme: str = "8Gi", **policy: Any) -> dict[str, Any]:
    """A KVPool as it is written."""
    tiers: list[dict[str, Any]] = [
        {"type": "HostDRAM", "capacityPerNode": dram},
        {"name": "nvme", "type": "NVMe", "capacityPerNode": nvme, "nvme": {"path": "/var/lib/kvstrata/nvme"}},
    ]
    meta = {"apiVersion": "kvstrata.io/v1alpha1", "kind": "KVPool", "metadata": {"name": "demo"}}
    return {**meta, "spec": {"nodeSelector": {"pool": "demo"}, "tiers": tiers, "policy": policy}}


def fleet(dram: str = "2Gi", nvme: str = "8Gi", on: Hardware | None = None, **policy: Any) -> Fleet:
    return planning.fleet_of(KVPool.model_validate(manifest(dram, nvme, **policy)), on or described())


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Sixty sessions of five turns that grow by 1,024 tokens, and as many prompts that come once."""
    draw, requests = random.Random(4), []
    for session in range(60):
        at_s, first = session * 4.0, session * 1000
        for turn in range(5):
            requests.append(Request(at_s, range(first, first + 32 * (turn + 1)), session, output_blocks=2))
            requests.append(Request(at_s + 1, range(10**6 + first + 100 * turn, 10**6 + first + 100 * turn + 40)))
            at_s += draw.uniform(5, 60)
    return build("sessions", 32, requests)


def hit_ratio(of: Fleet, trace: Trace, rate: float = 1.0) -> float:
    outcome = planning.simulate(of, trace, rate)
    return sum(outcome.found_blocks) * trace.block_tokens / outcome.asked_tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{}, {"eviction": {"type": "LeafLRU"}}, {"placement": {"type": "Cascade"}}])
def test_more_memory_finds_no_less(trace: Trace, policy: dict[str, Any]) -> None:
    found = [
        hit_ratio(fleet(dram, nvme, **policy), trace)
        for dram, nvme in (("2Gi", "3Gi"), ("4Gi", "12Gi"), ("16Gi", "64Gi"))
    ]

    assert all(more >= less - 0.01 for less, more in pairwise(found)), found
    assert found[-1] > found[0] + 0.05


def test_nothing_stays_in_memory_where_nothing_is_admitted(trace: Trace) -> None:
    kept = planning.simulate(fleet("16Gi", "64Gi"), trace, 1.0)
    passed = planning.simulate(fleet("16Gi", "64Gi", admission={"type": "Never"}), trace, 1.0)

    assert kept.tier_found_blocks[1] > 0
    assert passed.tier_found_blocks[1] == 0
    assert passed.tier_found_blocks[2] > 0


def test_tokens_saved_are_those_asked_for_and_not_computed(trace: Trace) -> None:
    outcome = planning.simulate(fleet(), trace, 1.0)

    assert outcome.asked_tokens == trace.accesses * trace.block_tokens
    assert 0 < outcome.saved_tokens <= sum(outcome.tier_found_blocks) * trace.block_tokens
    assert sorted(outcome.numbers) == list(range(len(trace.paths)))
    assert sum(outcome.tier_found_blocks) == sum(outcome.found_blocks)


def test_hardly_any_load_waits_for_nobody(trace: Trace) -> None:
    one = fleet()
    rate = planning.ALONE_PART * planning.saturated_per_s(one, trace)
    plan = planning.plan(one, trace, rate, goal_s=60.0)

    assert plan.meets_goal
    assert 0 < plan.busy < 0.1
    assert plan.ttft_s["p50"].value < 1.0
    assert plan.gpu_s_per_request > 0
    assert plan.saved_gpu_s_per_request > 0


@pytest.mark.slow
def test_a_goal_below_the_time_of_one_prompt_is_met_by_no_load(trace: Trace) -> None:
    assert planning.rate_at(fleet(), trace, goal_s=1e-6) == 0.0


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=2).map(sorted), st.floats(1.0, 50.0))
def test_a_looser_goal_never_allows_less(goals: Sequence[float], high: float) -> None:
    """Also where waits do not grow with every step of the load."""

    def waits(rate: float) -> float:
        return rate / 5 + abs(sin(rate * 7))

    def allowed(goal: float) -> float:
        return planning.highest_rate(lambda rate: waits(rate) <= goal, high)

    tight, loose = map(allowed, goals)

    assert tight <= loose


@pytest.mark.slow
def test_the_load_at_a_goal_meets_it_and_grows_with_it(trace: Trace) -> None:
    one = fleet()
    tight, loose = (planning.rate_at(one, trace, goal_s) for goal_s in (0.5, 4.0))

    assert 0 < tight <= loose
    assert planning.plan(one, trace, tight, 0.5).meets_goal


def test_intervals_have_the_mean_of_what_was_drawn_nineteen_times_in_twenty() -> None:
    """By a series whose neighbours are alike, as waits in one queue are."""
    rng, covered = np.random.default_rng(8), 0
    for number in range(100):
        noise, series = rng.normal(size=1000), np.zeros(1000)
        for i in range(1, 1000):
            series[i] = 0.6 * series[i - 1] + noise[i]
        drawn = planning.draws(1000, seed=number, times=200)
        found = planning.interval(float(series.mean()), series[drawn].mean(axis=1))
        covered += found.low <= 0.0 <= found.high

    assert covered >= 85


def test_intervals_have_their_value(trace: Trace) -> None:
    plan = planning.plan(fleet(), trace, 0.5, goal_s=2.0)

    for found in (plan.hit_ratio, *plan.ttft_s.values()):
        assert found.low <= found.value <= found.high
    assert 0 < plan.hit_ratio.low < plan.hit_ratio.high < 1


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "load"), [((2000,), 0.3), ((2000,), 0.6), ((500, 1000, 8000), 0.5)])
def test_without_a_cache_waits_are_those_of_pollaczek_and_khinchine(lengths: tuple[int, ...], load: float) -> None:
    engine = {"stepSeconds": 0.0, "memoryBytesPerSecond": 1e17, "kvMemory": 1, "slots": 1 << 20}
    one = fleet("1Mi", "1Mi", described(engine=engine))
    draw, at_s, first, requests = random.Random(6), 0.0, 0, list[Request]()
    for _ in range(4_000):
        at_s += draw.expovariate(1.0)
        length = draw.choice(lengths)
        requests.append(Request(at_s, range(first, first + length)))
        first += length
    trace = build("poisson", 1, requests)
    each_s = np.asarray([one.engine.load.compute_s(0, sum(trace.lengths[run] for run in path)) for path in trace.paths])
    speed = load / each_s.mean() / (len(each_s) / at_s)

    outcome = planning.simulate(one, trace, speed * planning.recorded_per_s(trace), Hints.NONE)

    expected_s = load * (each_s**2).mean() / each_s.mean() / (2 * (1 - load))
    assert np.mean(outcome.ttft_s) - each_s.mean() == pytest.approx(expected_s, rel=0.1)


@given(st.floats(1e8, 1e12), st.floats(0, 1.0), st.integers(1000, 1_000_000))
def test_fetching_breaks_even_where_both_take_as_long(rate: float, latency_s: float, kv_bytes: int) -> None:
    engine, memory = Engine(kv_bytes_per_token=kv_bytes), Memory("m", 1e9, rate, rate, latency_s)
    tokens = planning.break_even_tokens(engine, memory)

    fetch_s = latency_s + tokens * kv_bytes / rate
    compute_s = (tokens + tokens * tokens / 2 / engine.half_rate_tokens) / engine.prefill_tokens_per_s
    assert tokens >= 0
    assert fetch_s == pytest.approx(compute_s, rel=1e-6, abs=1e-9)


def test_operations_outgrow_bytes_towards_a_million_tokens() -> None:
    found = planning.inversions(fleet())

    gains = [one.compute_s / one.fetch_s["nvme"] for one in found]
    assert found[-1].tokens == 1 << 20
    assert all(more > less for less, more in pairwise(gains))


def test_an_engine_on_more_gpus_has_a_larger_share_of_its_node() -> None:
    one, two = (fleet(on=described(nodeGpus=8, engine={"gpus": gpus})) for gpus in (1, 2))

    assert two.places[0].size_bytes == 2 * one.places[0].size_bytes
    assert two.places[1].memory.read_bytes_per_s == 2 * one.places[1].memory.read_bytes_per_s
    assert two.kv_bytes == 2 * one.kv_bytes
    assert two.engine.prefill_tokens_per_s == 2 * one.engine.prefill_tokens_per_s


def test_money_wear_and_fabric_add_up(trace: Trace) -> None:
    on = described(fabric={"bytesPerSecond": 50e9, "pricePerTb": 2.0})
    plan = planning.plan(fleet(on=on), trace, 0.5, goal_s=2.0)

    assert plan.served_per_s == pytest.approx(0.5, rel=0.02)
    assert plan.fabric is not None
    assert plan.fabric.bytes_per_s == pytest.approx(plan.fabric.bytes_per_request * plan.served_per_s)
    parts = 4 + sum(t.money_hour for t in plan.tiers) + plan.fabric.money_hour
    assert plan.money_hour == pytest.approx(parts)
    assert plan.money_per_million == pytest.approx(parts / plan.served_per_s / 3600 * 1e6)
    _, dram, nvme = plan.tiers
    assert dram.wear is None
    assert nvme.wear == pytest.approx(nvme.write_bytes_per_s * 86_400 / (8 * GIB))
    assert nvme.money_hour == pytest.approx(8 / 1024 * 80 / 730)


def test_the_cheapest_sizes_are_found_and_the_api_server_would_take_them() -> None:
    obj, one = manifest(), fleet()
    ladders = {place.name: planning.ladder(place) for place in one.places}

    def judge(of: Fleet) -> tuple[float, float]:
        dram, nvme = (place.declared_bytes / GIB for place in of.places)
        return 1.0, (dram - 4) ** 2 + (nvme - 32) ** 2

    *others, best = planning.cheapest(one, ladders, judge)
    change = planning.change_of(obj, KVPool.model_validate(obj), best.sizes)

    assert best.sizes == {"dram": 4 * GIB, "nvme": 32 * GIB}
    assert all(other.money_per_million > best.money_per_million for other in others)
    assert change.patch == (
        {"op": "replace", "path": "/spec/tiers/0/capacityPerNode", "value": "4Gi"},
        {"op": "replace", "path": "/spec/tiers/1/capacityPerNode", "value": "32Gi"},
    )
    assert validate(change.manifest, obj) == []
    assert obj["spec"]["tiers"][0]["capacityPerNode"] == "2Gi"


def test_where_no_size_meets_the_goal_none_is_changed() -> None:
    one = fleet()
    ladders = {place.name: planning.ladder(place) for place in one.places}

    *_, best = planning.cheapest(one, ladders, lambda _: (0.0, float("inf")))

    assert best.sizes == {"dram": 2 * GIB, "nvme": 8 * GIB}


def test_a_tier_that_scales_by_itself_has_the_size_that_it_has_come_to_and_no_change_is_made_of_it() -> None:
    obj = manifest()
    obj["spec"]["tiers"][0]["autoscale"] = {"minPerNode": "2Gi", "maxPerNode": "8Gi"}
    for at, now in ((None, 2), (4, 4), (16, 8)):
        obj["status"] = {"autoscaling": [{"tier": "dram", "capacityPerNode": at * GIB}]} if at else {}
        pool = KVPool.model_validate(obj)
        places = planning.fleet_of(pool, described()).places
        assert [place.declared_bytes for place in places] == [now * GIB, 8 * GIB]
        change = planning.change_of(obj, pool, {place.name: place.declared_bytes for place in places})
        assert change.patch == ()


def test_where_nothing_is_said_of_room_no_size_is_tried() -> None:
    place = fleet().places[0]

    assert planning.ladder(replace(place, part=place.part.model_copy(update={"room": None}))) == [2 * GIB]


def test_a_size_that_the_api_server_refuses_is_refused() -> None:
    obj = manifest()

    with pytest.raises(InvalidInputError, match="capacityPerNode"):
        planning.change_of(obj, KVPool.model_validate(obj), {"dram": GIB + 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpuHour: -1\ntiers: {NVMe: {}}", "gpuHour: -1: Input should be greater than or equal to 0"),
        ("gpuHour: 1\ntiers: {NVMe: {}}", "tiers.NVMe.readBytesPerSecond: has to be given"),
        ("gpuHour: 1\ntiers: {}", "tiers: {}"),
        ("gpuHour: 1\ngpusPerNode: 8\ntiers: {}", "gpusPerNode: unknown field"),
        (
            "gpuHour: 1\nengine: {utilization: 2}\ntiers: {}",
            "engine.utilization: 2: Input should be less than or equal to 1",
        ),
        ("gpuHour: 1\ntiers: {Tape: {}}", "tiers.Tape"),
        ("- 1", "line 1: list, a mapping wanted"),
        ("a: [", "line 1: expected the node content"),
        ("a: " + "[" * 500, "nested too deeply"),
        ("gpuHour: !!int x", "line 1: 'x' is no int"),
    ],
)
def test_bad_hardware_is_refused_by_field_value_and_limit(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        hardware.read(text, "hardware.yaml")

    assert str(refused.value).startswith("hardware.yaml: ")
    assert said in str(refused.value)


def test_a_medium_that_the_hardware_has_not_is_named() -> None:
    on = described(tiers={"HostDRAM": TIERS["HostDRAM"]})

    with pytest.raises(InvalidInputError, match="NVMe, medium of tier nvme"):
        fleet(on=on)


METRICS = """\
# TYPE kvstrata_tier_probe_bytes_per_second gauge
kvstrata_tier_probe_bytes_per_second{pool="demo",node="a",tier="nvme",direction="read"} 2e9
kvstrata_tier_probe_bytes_per_second{pool="demo",node="a",tier="nvme",direction="write"} 1e9
kvstrata_tier_probe_bytes_per_second{pool="demo",node="a",tier="dram",direction="read"} 9e10
kvstrata_tier_probe_bytes_per_second{pool="other",node="a",tier="nvme",direction="read"} 7
# TYPE kvstrata_move_duration_seconds histogram
kvstrata_move_duration_seconds_bucket{pool="demo",node="a",source="nvme",target="dram",le="+Inf"} 10
kvstrata_move_duration_seconds_sum{pool="demo",node="a",source="nvme",target="dram"} 0.5
kvstrata_move_duration_seconds_count{pool="demo",node="a",source="nvme",target="dram"} 10
# TYPE kvstrata_moved_bytes counter
kvstrata_moved_bytes_total{pool="demo",node="a",source="nvme",target="dram",traffic="kv"} 8e8
# TYPE kvstrata_stored_ratio gauge
kvstrata_stored_ratio{pool="demo",node="a",tier="nvme"} 1.25
# TYPE kvstrata_load_tokens counter
kvstrata_load_tokens_total{pool="demo",node="a",tenant="t",tier="nvme",stage="delivered"} 9000
kvstrata_load_tokens_total{pool="demo",node="a",tenant="t",tier="nvme",stage="held"} 12000
kvstrata_load_tokens_total{pool="demo",node="a",tenant="reports nothing",tier="nvme",stage="delivered"} 90000
# TYPE kvstrata_load_saved_prefill_tokens counter
kvstrata_load_saved_prefill_tokens_total{pool="demo",node="a"} 9000
# TYPE kvstrata_load_saved_prefill_seconds counter
kvstrata_load_saved_prefill_seconds_total{pool="demo",node="a",tenant="t"} 3
"""


def test_a_live_fleet_says_what_it_measured() -> None:
    pool = KVPool.model_validate(manifest())
    found, notes = hardware.calibrated(described(), pool, hardware.parse_samples(METRICS, "metrics"))

    nvme, dram = found.tiers[pool.spec.tiers[1].type], found.tiers[pool.spec.tiers[0].type]
    assert (nvme.read_bytes_per_second, nvme.write_bytes_per_second, nvme.stored_ratio) == (2e9, 1e9, 1.25)
    assert nvme.latency_seconds == pytest.approx(0.05 - 8e7 / 2e9)
    assert dram.read_bytes_per_second == 50e9
    assert found.simulated().prefill_tokens_per_s == pytest.approx(3000)
    assert any("prefillTokensPerSecond 3000" in note for note in notes)


def test_what_moves_take_beyond_their_bytes_is_in_their_rate_and_counts_once() -> None:
    """Sixteen groups of a load are under way at once: each takes as long as all, which is bandwidth, not latency."""
    pool = KVPool.model_validate(manifest())
    late = Sample("kvstrata_move_bytes_per_second", {"pool": "demo", "source": "nvme", "target": "dram"}, 1e9)
    found, _ = hardware.calibrated(described(), pool, [*hardware.parse_samples(METRICS, "metrics"), late])

    nvme = found.tiers[pool.spec.tiers[1].type]
    assert (nvme.read_bytes_per_second, nvme.latency_seconds) == (1e9, 0.0)


def test_what_was_not_measured_stays_as_the_file_says() -> None:
    pool = KVPool.model_validate(manifest())
    late = Sample("kvstrata_move_bytes_per_second", {"pool": "demo", "source": "nvme", "target": "dram"}, 3e9)
    found, notes = hardware.calibrated(described(), pool, [late])

    assert found.engine == described().engine
    assert found.tiers[pool.spec.tiers[1].type].read_bytes_per_second == 3e9
    assert any("prefill rate: not reported" in note for note in notes)


@pytest.mark.parametrize(("text", "said"), [("<html>", "Prometheus text"), ("up 1\n", "are these metrics of an agent")])
def test_what_is_no_metrics_of_an_agent_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        hardware.parse_samples(text, "x")


def test_the_example_is_read_and_has_a_medium_for_each_tier_of_its_pool() -> None:
    folder = Path(__file__).resolve().parents[4] / "examples" / "plan"
    pool = KVPool.model_validate(yaml.safe_load((folder / "pool.yaml").read_text()))
    one = planning.fleet_of(pool, hardware.read((folder / "hardware.yaml").read_text(), "hardware.yaml"))

    assert one.places[0].memory.read_bytes_per_s == pytest.approx(50e9)
    assert one.places[0].size_bytes == 32 * GIB
