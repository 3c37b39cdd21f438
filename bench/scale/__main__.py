"""What breaks first when a fleet grows to 50,000 nodes and 1e10 blocks: costs measured now, queues simulated.

Costs of one node and one block are measured on this machine (or taken from a file, `--costs`), then a fleet runs on
queues: steady load, a Redis primary that stands still, a cell whose agents all start again, a zone that is lost. Three
layouts are compared: all in one Kubernetes cluster with one Redis, the same with a Redis Cluster, and cells. Besides it
says how far the queues are from M/D/1, and how far the model from a start of 5,000 nodes that was measured.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.harness import common
from bench.harness.common import Result, publish, table
from bench.scale.measure import measured
from bench.scale.model import (
    LIMIT,
    Burst,
    Costs,
    Fleet,
    Layout,
    grown,
    memory_fill,
    nodes_at_limit,
    of_directory,
    queueing_error,
    reports,
    shares,
    stations,
    waits,
)
from kvstrata_metadata.client.outbox import ROUND_CHANGES_MAX
from kvstrata_metadata.directory.shards import CHUNK, DROPPED_AT_ONCE

GIB: Final = 1 << 30
FLEET: Final = Fleet(
    nodes=50_000, blocks=1e10, stored_per_s=20.0, asked_per_s=200.0, changed_per_s=1 / 60, tenants=500, skew=1.0
)
"""200,000 blocks a node: 400 GB of 2 MiB. Each second a node announces 20 blocks as new or gone, a prompt of 8,192
tokens every 6 s, and looks up ten times as many that it has not got itself. Tenants' sizes as Zipf has them."""
CELLS: Final = "10 cells, a Redis Cluster of 8 in each"
LAYOUTS: Final = {
    "one cluster, one Redis": Layout(cells=1, api_cores=16, primaries=1, redis_bytes=48 * GIB),
    "one cluster, Redis Cluster of 64": Layout(cells=1, api_cores=16, primaries=64, redis_bytes=48 * GIB),
    "10 cells, Redis Cluster of 64": Layout(cells=10, api_cores=16, primaries=64, redis_bytes=48 * GIB),
    CELLS: Layout(cells=10, api_cores=16, primaries=80, redis_bytes=48 * GIB, directories=10),
}
"""A control plane of 16 cores is what managed Kubernetes gives clusters of 5,000 nodes. 48 GiB leave a machine of
64 GiB room for copy-on-write while a replica is filled."""
RUN_S: Final = 60.0
PAUSE_S: Final = 10.0
"""Of a primary whose replica takes over: `cluster-node-timeout` of 5 s, an election, clients that find out."""
RESTART_S: Final = 60.0
"""In which all agents of a cell come back after their node image was changed at once."""
EVENT_S: Final = 10.0
EMPTY: Final = "it comes back empty and all agents report"
ZONE: Final = "a zone is lost and its agents' locations are removed"
COARSE: Final = 50
"""Requests that go as one in runs of an hour."""
STATUSES_OF_START: Final = 4
"""That an agent writes until its tiers are up: connected, tiers, directory, ready."""
MEASURED_START_S: Final = 29.8
"""5,000 nodes from the KVPool to Ready on two idle cores (bench/README.md, 2026-11-23, machine B)."""
_STARTED_S: Final = time.perf_counter()


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.scale {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def steady(costs: Costs, fleet: Fleet) -> tuple[list[Sequence[str]], dict[str, float]]:
    """Each layout under steady load: how busy, how long one waits, and at how many nodes it is too much."""
    rows: list[Sequence[str]] = []
    values: dict[str, float] = {}
    for name, layout in LAYOUTS.items():
        limits = nodes_at_limit(costs, fleet, layout)
        for one in stations(costs, fleet, layout):
            p99 = f"{waits(one, RUN_S, 1).p99_s * 1e3:.1f}" if one.utilisation < 1 else "grows"
            rows.append((name, one.name, f"{one.utilisation:.2f}", p99, f"{limits[one.name]:,.0f}"))
        fill = memory_fill(costs, fleet, layout)
        key = "Redis, memory of the fullest primary"
        rows.append((name, key, f"{fill:.2f}", "-", f"{limits[key]:,.0f}"))
        first = min(limits, key=lambda station: limits[station])
        rows.append((name, f"breaks first: {first}", "", "", f"{limits[first]:,.0f}"))
        values[f"nodes_at_limit[{name}]"] = limits[first]
    return rows, values


def growth(costs: Costs, layout: Layout) -> list[Sequence[str]]:
    """Utilisation of a layout by nodes, with p99 waits: where the curve turns up."""
    rows: list[Sequence[str]] = []
    for nodes in (1_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000):
        fleet = grown(FLEET, nodes)
        found = stations(costs, fleet, layout)
        cells = [f"{one.utilisation:.3f}" for one in found]
        cells += [f"{waits(one, RUN_S, nodes).p99_s * 1e3:.1f}" if one.utilisation < 1 else "grows" for one in found]
        rows.append((f"{nodes:,}", *cells, f"{memory_fill(costs, fleet, layout):.2f}"))
    return rows


def events(costs: Costs, fleet: Fleet, layout: Layout) -> tuple[list[Sequence[str]], dict[str, float]]:
    """What happens at once, and when the last one waits no longer than before."""
    found = {one.name: one.coarse(COARSE) for one in stations(costs, fleet, layout)}
    busiest, api, operator = found["Redis, busiest primary"], found["API server"], found["operator"]
    of_cell = fleet.nodes / layout.cells

    def all_at_once(work_s: float, within_s: float) -> Burst:
        return Burst(EVENT_S, work_s, max(CHUNK * costs.announce_s, work_s / 100_000), within_s)

    runs = {
        f"a primary stands still for {PAUSE_S:.0f} s": waits(busiest, 600.0, 2, paused=(EVENT_S, PAUSE_S)),
        f"all agents of a cell start again within {RESTART_S:.0f} s: API server": waits(
            api, 3_600.0, 5, burst=all_at_once(of_cell * STATUSES_OF_START * costs.status_s, RESTART_S)
        ),
        "the same: operator": waits(
            operator, 3_600.0, 6, burst=all_at_once(of_cell * STATUSES_OF_START * costs.plan_s, RESTART_S)
        ),
    }
    rows: list[Sequence[str]] = []
    for name, one in runs.items():
        caught_up = "never" if math.isinf(one.caught_up_s) else f"{one.caught_up_s:.0f}"
        rows.append((name, f"{one.worst_s:.2f}", caught_up))
    return rows, {f"caught_up_s[{name}]": min(one.caught_up_s, 1e9) for name, one in runs.items()}


def rebuilt(costs: Costs, fleet: Fleet, layout: Layout) -> tuple[list[Sequence[str]], dict[str, float]]:
    """A directory that comes back empty: all agents report, unpaced and as the product does."""
    part, own = of_directory(fleet, layout)
    share = float(shares(part, own.primaries).max())
    busiest = next(s for s in stations(costs, fleet, layout) if s.name == "Redis, busiest primary").coarse(COARSE)
    changes = round(part.blocks / part.nodes)
    rows: list[Sequence[str]] = []
    values: dict[str, float] = {}
    for how, size in (("unpaced", ROUND_CHANGES_MAX), ("paced", None)):
        one = reports(busiest, part.nodes, changes, share * costs.announce_s, seed=9, round_changes=size)
        rows.append((f"{EMPTY}, {how}", f"{one.p99_s:.2f}", f"{one.turn_s:.2f}", f"{one.finished_s:.0f}"))
        values |= {f"rebuild_p99_s[{how}]": one.p99_s, f"rebuild_s[{how}]": one.finished_s}
    gone = round(part.blocks / 3 / DROPPED_AT_ONCE)
    lost = reports(
        busiest,
        DROPPED_AT_ONCE,
        gone,
        share * costs.remove_s,
        seed=9,
        round_changes=round(CHUNK / share),
    )
    rows.append((ZONE, f"{lost.p99_s:.2f}", f"{lost.turn_s:.2f}", f"{lost.finished_s:.0f}"))
    return rows, values | {"zone_p99_s": lost.p99_s, "zone_s": lost.finished_s}


def start_error(costs: Costs) -> float:
    """Predicted over measured time of a start of 5,000 nodes on two cores: a create and a status for each node."""
    return 5_000 * (2 * costs.status_s + costs.plan_s) / 2 / MEASURED_START_S


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate, print the tables and the last line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--costs", type=Path, metavar="PATH", help="costs that an earlier run wrote, in place of measuring"
    )
    parser.add_argument("--write-costs", type=Path, metavar="PATH", help="write the measured costs to PATH")
    chosen = parser.parse_args(arguments)
    costs = Costs(**json.loads(chosen.costs.read_text())) if chosen.costs else measured(is_quick=chosen.quick, say=say)
    if chosen.write_costs:
        chosen.write_costs.write_text(json.dumps(asdict(costs), indent=2) + "\n")
    print(table(("one of each", "measured"), [(name, f"{value:.3g}") for name, value in asdict(costs).items()]))
    rows, values = steady(costs, FLEET)
    print("\n" + table(("layout", "station", "busy", "p99 wait, ms", f"nodes at {LIMIT}"), rows))
    cells = LAYOUTS[CELLS]
    short = ("API", "operator", "primary", "registry")
    header = ("nodes", *(f"{n}: busy" for n in short), *(f"{n}: ms" for n in short), "memory")
    for name in (next(reversed([*LAYOUTS][:-1])), CELLS):
        print(f"\n{name}: p99 waits in ms, and how full the fullest primary is")
        print(table(header, growth(costs, LAYOUTS[name])))
    of_events, more = events(costs, FLEET, cells)
    print("\n" + table((f"{CELLS}, {FLEET.nodes:,} nodes", "worst wait, s", "caught up after, s"), of_events))
    of_rebuild, of_pace = rebuilt(costs, FLEET, cells)
    header = ("a cell's directory", "p99 wait of others, s", "longest round, s", "complete after, s")
    print("\n" + table(header, of_rebuild))
    values |= of_pace
    values |= more
    values["queueing_error"] = queueing_error(8)
    values["start_of_5000_predicted_over_measured"] = start_error(costs)
    publish(Result("scale", bool(chosen.quick), {}, {}, asdict(costs) | values), chosen.json)


if __name__ == "__main__":
    main()
