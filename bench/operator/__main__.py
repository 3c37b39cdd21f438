"""The operator at the size of a fleet: how soon all nodes are ready, what a change costs, what a restart takes.

For each size an embedded API server of its own, plain Nodes, one process that plays all agents, and the real operator
under its own ServiceAccount. Beside it, in the same run: a naive kopf operator with a handler for each object, and the
same creates and status writes with nothing around them, 16 at a time, which no operator can beat on that API server.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.harness import common
from bench.harness.common import Result, publish, table
from bench.operator.cost import planner_cost
from bench.operator.run import Run, Sizes, measured
from kvstrata_api import __version__
from kvstrata_api.units import MIB

TINY: Final = (Sizes(nodes=8, changes=8, naive=4, idle_s=1.0),)
QUICK: Final = (Sizes(nodes=100, changes=100, naive=100, idle_s=3.0),)
FULL: Final = (
    Sizes(nodes=100, changes=300, naive=100, idle_s=10.0),
    Sizes(nodes=1000, changes=500, naive=1000, idle_s=10.0),
    Sizes(nodes=5000, changes=500, naive=1000, idle_s=10.0, crowd=25_000),
)

COST_TINY: Final = (10, 100)
COST_NODES: Final = (100, 1000, 5000)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    key: str
    scale: float = 1.0


ROWS: Final = (
    Row("all ready, s", "all_ready_s"),
    Row("  CPU of the operator, s", "all_ready_cpu_s"),
    Row("  CPU of the API server, s", "all_ready_server_cpu_s"),
    Row("the same writes alone, s", "raw_s"),
    Row("  CPU of the API server, s", "raw_server_cpu_s"),
    Row("naive kopf, nodes/s", "naive_nodes_per_s"),
    Row("kvstrata, nodes/s", "nodes_per_s"),
    Row("change p50, ms", "change_p50_s", 1e3),
    Row("change p99, ms", "change_p99_s", 1e3),
    Row("  CPU of the operator, ms", "cpu_per_change_s", 1e3),
    Row("  CPU of the API server, ms", "server_cpu_per_change_s", 1e3),
    Row("  API calls for a change", "requests_per_change"),
    Row("restart to synced, s", "restart_s"),
    Row("  its CPU, s", "restart_cpu_s"),
    Row("failover, s", "failover_s"),
    Row("RSS, MB", "rss_bytes", 1e-6),
    Row("writes for a node", "writes_per_node"),
    Row("idle writes, 1/s", "idle_writes_per_s"),
    Row("crowded: restart to synced, s", "crowd_restart_s"),
    Row("  its CPU, s", "crowd_restart_cpu_s"),
    Row("crowded: RSS, MB", "crowd_rss_bytes", 1e-6),
)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--sizes", help="only these sizes of the full run, such as 100,1000")
    parser.add_argument(
        "--crowd",
        type=int,
        help="KVPoolNodes in all at one more restart, at each size; 0: none; default: 25,000 at 5,000",
    )
    return parser.parse_args(arguments)


def chosen_sizes(given: argparse.Namespace) -> tuple[Sizes, ...]:
    """Sizes that the command line asks for."""
    sizes = _sizes(given)
    return sizes if given.crowd is None else tuple(replace(size, crowd=given.crowd) for size in sizes)


def _sizes(given: argparse.Namespace) -> tuple[Sizes, ...]:
    if given.tiny:
        return TINY
    if given.quick:
        return QUICK
    wanted = {int(n) for n in given.sizes.split(",")} if given.sizes else {size.nodes for size in FULL}
    return tuple(size for size in FULL if size.nodes in wanted)


def show(runs: Sequence[Run]) -> str:
    """All figures; a column for each size."""
    header = ("", *(f"{run.nodes} nodes" for run in runs))
    return table(header, [(row.name, *(_cell(run, row) for run in runs)) for row in ROWS])


def _cell(run: Run, row: Row) -> str:
    value = run.values.get(row.key)
    return "-" if value is None else f"{value * row.scale:.3g}"


def result(runs: Sequence[Run], costs: dict[str, float], *, quick: bool) -> Result:
    """Put the last line together."""
    values = {f"{key}_{run.nodes}": value for run in runs for key, value in run.values.items()}
    ratios: dict[str, float | None] = {}
    for run in runs:
        ratios[f"all_ready_{run.nodes}_vs_raw"] = run.values["raw_s"] / run.values["all_ready_s"]
        spent_s = run.values["all_ready_cpu_s"] + run.values["all_ready_server_cpu_s"]
        ratios[f"all_ready_cpu_{run.nodes}_vs_raw"] = run.values["raw_server_cpu_s"] / spent_s
        naive = run.values.get("naive_nodes_per_s")
        ratios[f"all_ready_{run.nodes}_vs_kopf"] = run.values["nodes_per_s"] / naive if naive else None
    versions = {"kvstrata": __version__, "kopf": version("kopf"), "sizes": ",".join(str(r.nodes) for r in runs)}
    ratios["converge_vs_naive"] = ratios[f"all_ready_{runs[-1].nodes}_vs_kopf"]
    return Result("operator", quick, versions, ratios, {**_largest(runs[-1]), **values, **costs})


def _largest(run: Run) -> dict[str, float]:
    """Main figures of the largest size, under names that do not tell it."""
    return {
        "nodes": float(run.nodes),
        "converge_s": run.values["all_ready_s"],
        "change_p99_s": run.values["change_p99_s"],
        "restart_s": run.values["restart_s"],
        "failover_s": run.values["failover_s"],
        "rss_mib": run.values["rss_bytes"] / MIB,
        "writes_per_s_idle": run.values["idle_writes_per_s"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    given = choose(arguments)
    costs = planner_cost(COST_TINY if given.tiny else COST_NODES)
    runs = []
    for size in chosen_sizes(given):
        with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
            runs.append(asyncio.run(measured(size, Path(name))))
    print(show(runs))
    print("planner, CPU for one changed node or pod:")
    for key, value in costs.items():
        print(f"  {key}: {value * 1e3:.3f} ms")
    publish(result(runs, costs, quick=bool(given.quick)), given.json)


if __name__ == "__main__":
    main()
