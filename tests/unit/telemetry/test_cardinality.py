"""How many series agents have when all has happened to them, and 5,000 of them together."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_telemetry.agent_metrics import OTHERS, TENANTS_NAMED_MAX, Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments, Kind, Metric

pytestmark = pytest.mark.unit

NODES = 5_000
TIERS_MOST, TENANTS_MOST = 8, TENANTS_NAMED_MAX + 100
TIERS_USUAL, TENANTS_USUAL = 4, 10
AGENT_SERIES_MAX = 25_000
FLEET_SERIES_MAX = 11_100_000
"""Of agents with the usual tiers and tenants, had each counted everything that can be."""
OTHER_VALUES = 4
"""Of a label whose values are words of the program: verbs, reasons, results."""


def labels_of(metric: Metric, tenants: int, tiers: int) -> Iterator[dict[str, str]]:
    wide = {"tenant": tenants, "tier": tiers, "device": 2 * tiers, "source": tiers + 1, "target": tiers + 1}
    names = [name for name in metric.labels if name not in {"pool", "node"}]
    counts = [wide.get(name, OTHER_VALUES) for name in names]
    for values in product(*(range(count) for count in counts)):
        yield {name: f"{name}-{value}" for name, value in zip(names, values, strict=True)}


def series_of_an_agent(tenants: int, tiers: int) -> tuple[int, set[str]]:
    """Series of an agent that has counted everything for everybody, and the tenants that they name."""
    registry = CollectorRegistry()
    counters = Counters(Instruments(AGENT, registry), "pool", "node")
    count: dict[Kind, Callable[..., None]] = {
        Kind.COUNTER: counters.add, Kind.GAUGE: counters.set, Kind.HISTOGRAM: counters.observe,
    }  # fmt: skip
    for metric in AGENT:
        for labels in labels_of(metric, tenants, tiers):
            count[metric.kind](metric.name, 1, **labels)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return len(samples), {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels}


@pytest.mark.slow
def test_tenants_that_come_and_go_do_not_make_series_without_end() -> None:
    few, _ = series_of_an_agent(TENANTS_NAMED_MAX, TIERS_MOST)
    many, named = series_of_an_agent(TENANTS_MOST, TIERS_MOST)

    assert len(named) == TENANTS_NAMED_MAX + 1
    assert OTHERS in named
    assert few < many < few + 1_000
    assert many <= AGENT_SERIES_MAX


def test_a_fleet_with_a_few_tenants_for_each_node_stays_within_its_budget() -> None:
    series, _ = series_of_an_agent(TENANTS_USUAL, TIERS_USUAL)

    assert NODES * series <= FLEET_SERIES_MAX


def test_what_is_counted_for_others_is_in_the_sum() -> None:
    registry = CollectorRegistry()
    counters = Counters(Instruments(AGENT, registry), "pool", "node")
    for number in range(TENANTS_MOST):
        counters.looked_up(f"tenant-{number}", 3, 1)

    found = {
        sample.labels["tenant"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "kvstrata_lookup_blocks_total" and sample.labels["result"] == "hit"
    }
    assert sum(found.values()) == TENANTS_MOST
    assert found[OTHERS] == TENANTS_MOST - TENANTS_NAMED_MAX
