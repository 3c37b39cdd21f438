"""Laws of the queues that carry a fleet, and of what follows from measured costs."""

from dataclasses import replace

import pytest

from bench.scale.__main__ import CELLS, FLEET, LAYOUTS
from bench.scale.model import (
    LIMIT,
    Burst,
    Costs,
    Station,
    grown,
    memory_fill,
    nodes_at_limit,
    queueing_error,
    reports,
    shares,
    stations,
    waits,
)

pytestmark = pytest.mark.unit

COSTS = Costs(
    announce_s=5e-6, flush_s=2e-4, lookup_s=4e-4, remove_s=1e-6, beat_s=5e-5, location_bytes=130.0, renew_s=2e-3,
    status_s=6e-3, list_s=7e-5, parse_s=2e-5, plan_s=4e-4,
)  # fmt: skip


def test_queues_wait_as_long_as_queueing_theory_says() -> None:
    assert queueing_error(1) < 0.05


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fleet_of_the_size_at_the_limit_is_at_the_limit(name: str) -> None:
    layout = LAYOUTS[name]
    limits = nodes_at_limit(COSTS, FLEET, layout)

    # In proportion: what grows with nodes, with tenants as they are.
    for one in stations(COSTS, FLEET, layout):
        assert one.utilisation * limits[one.name] / FLEET.nodes == pytest.approx(LIMIT)
    assert all(limit > 0 for limit in limits.values())


def test_twice_the_nodes_are_at_least_as_busy_and_a_directory_for_each_cell_is_no_busier() -> None:
    layout = LAYOUTS[CELLS]
    few, many = (stations(COSTS, grown(FLEET, n), layout) for n in (10_000, 20_000))
    for a, b in zip(few, many, strict=True):
        assert b.utilisation >= a.utilisation * 1.5
    shared = {s.name: s.utilisation for s in stations(COSTS, FLEET, replace(layout, directories=1))}
    for one in stations(COSTS, FLEET, layout):
        assert one.utilisation <= shared[one.name] + 1e-9


def test_every_location_is_on_some_primary_and_no_scope_on_more_than_its_shards() -> None:
    for primaries in (1, 8, 64):
        assert shares(FLEET, primaries).sum() == pytest.approx(1.0)
    alone = shares(replace(FLEET, tenants=1), 64)
    assert (alone > 0).sum() <= 16
    assert memory_fill(COSTS, FLEET, LAYOUTS["one cluster, one Redis"]) == pytest.approx(
        1e10 * 130 / LAYOUTS["one cluster, one Redis"].redis_bytes
    )


def test_a_pause_is_caught_up_with_as_fast_as_there_is_time_left() -> None:
    station = Station("one", 500.0, 1e-3)

    one = waits(station, 120.0, 1, paused=(10.0, 10.0))

    assert one.worst_s == pytest.approx(10.0, abs=0.2)
    assert one.caught_up_s == pytest.approx(10.0 / (1 - station.utilisation), rel=0.1)


def test_more_than_a_server_can_do_is_never_caught_up_with() -> None:
    one = waits(Station("one", 990.0, 1e-3), 60.0, 1, burst=Burst(5.0, 30.0, 1e-3, 1.0))

    assert one.caught_up_s == float("inf")
    assert waits(Station("none", 0.0, 0.0), 60.0, 1).p99_s == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_paced_reports_let_others_through_and_take_at_most_twice_as_long(seed: int) -> None:
    busy = Station("primary", 100.0, 2e-3)
    rushed = reports(busy, 400, 8_000, 5e-6, seed=seed, round_changes=4_000)
    paced = reports(busy, 400, 8_000, 5e-6, seed=seed, round_changes=None)

    assert rushed.p99_s > 5.0
    assert paced.p99_s < 0.5
    assert paced.turn_s < 1.0
    assert paced.finished_s < rushed.finished_s * 2.0


def test_one_agent_alone_is_held_up_by_nothing() -> None:
    alone = reports(Station("primary", 1.0, 1e-4), 1, 200_000, 5e-6, seed=1, round_changes=None)

    assert alone.finished_s < 200_000 * 5e-6 + 2.0 + 0.1
