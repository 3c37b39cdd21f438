"""Replay recorded workloads through a prefix cache: our eviction, that of others, and the limit.

Hits are blocks of unbroken prefixes, in percent of all that are asked for, in caches of 1, 5, 10 and 25 % of the
different blocks of a trace. `closed` is the part of the way from leaf-LRU to the limit (Belady's with bypass) that ours
goes: with no hints, with those that the trace carries, and with those that engines can give (the session or branch is
complete; its next turn comes within a minute). Peers are made from their descriptions, see bench/policy/peers.py; where
their environment is there (`python hack/peers.py simulators`), libcachesim's own run beside them.
`--check-simulators` compares our LRU with those of libcachesim, kvcache-simulator and LMCache instead.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from bench.harness import common
from bench.harness.common import Result, publish, table
from bench.harness.drivers import AbsentError
from bench.policy import live, simulators
from bench.policy.peers import LIMIT, PEERS, TOLD_KINDS, plain_lru
from bench.policy.synthetic import synthetic
from kvstrata_agent.replay.cache import Cache, replay
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.reuse_aware import Hints, ReuseAware
from kvstrata_agent.replay.traces import TraceError, read_folder
from kvstrata_api import __version__

SIZES: Final = (1, 5, 10, 25)
"""Percent of the different blocks of a trace."""
GAP_POINTS_MIN: Final = 1.0
"""Where the limit is nearer to leaf-LRU, no part of the way means anything."""
TINY_SESSIONS: Final = 300
QUICK_SESSIONS: Final = 3000
SESSIONS: Final = 20_000
QUICK_REQUESTS: Final = 3000
LIBCACHESIM_ACCESSES_MAX: Final = 4_000_000
"""Blocks of a trace for libcachesim, which takes them one by one: 2 us each, six policies, each size."""
TIMES: Final = ("decision_us", "deciding_us", "learning_us")
BASE: Final = "leaf-LRU"
PLAIN: Final = "plain LRU"


@dataclass(slots=True)
class Cell:
    """One trace in one size: percent of hits by policy."""

    trace: str
    size_percent: int
    peers: dict[str, float] = field(default_factory=dict)
    ours: dict[Hints, float] = field(default_factory=dict)
    limit: float = 0.0
    decision_us: float = 0.0
    """Time of the replay with our policy without hints, for each block that left or was declined."""
    deciding_us: float = 0.0
    """What of it is deciding."""
    learning_us: float = 0.0
    """Time of learning, for each request."""

    @property
    def gap_points(self) -> float:
        """From leaf-LRU to the limit."""
        return self.limit - self.peers[BASE]

    def closed(self, hit_percent: float) -> float:
        """Part of the gap."""
        return (hit_percent - self.peers[BASE]) / self.gap_points

    @property
    def margin_points(self) -> float:
        """Ours over the best peer, each with what that peer is told: without hints, or with the trace's kinds."""
        told = [hits for name, hits in self.peers.items() if name in TOLD_KINDS]
        others = max(hits for name, hits in self.peers.items() if name not in TOLD_KINDS)
        return min([self.ours[Hints.NONE] - others, *(self.ours[Hints.TRACE] - hits for hits in told)])


class Timed(ReuseAware):
    """Sums up the seconds of learning, and of deciding, apart from the replay's own.

    By the clock on the wall: that of the thread costs more than a decision, so a busy machine adds to both.
    """

    def __init__(self, trace: Trace, cache: Cache, hints: Hints = Hints.NONE) -> None:
        super().__init__(trace, cache, hints)
        self.learning_s = self.deciding_s = 0.0

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Learning."""
        started_s = time.perf_counter()
        super().arrive(number, path, matched_blocks)
        self.learning_s += time.perf_counter() - started_s

    def stored(self, number: int, path: Sequence[int]) -> None:
        """Deciding, as all the rest."""
        started_s = time.perf_counter()
        super().stored(number, path)
        self.deciding_s += time.perf_counter() - started_s

    def victim(self) -> int:
        """Deciding."""
        started_s = time.perf_counter()
        run = super().victim()
        self.deciding_s += time.perf_counter() - started_s
        return run

    def became_leaf(self, run: int) -> None:
        """Deciding."""
        started_s = time.perf_counter()
        super().became_leaf(run)
        self.deciding_s += time.perf_counter() - started_s

    def gone(self, run: int) -> None:
        """Deciding."""
        started_s = time.perf_counter()
        super().gone(run)
        self.deciding_s += time.perf_counter() - started_s


def measure(trace: Trace, size_percent: int, *, has_libcachesim: bool = False) -> tuple[Cell, float]:
    """One cell, and the seconds that leaf-LRU took for it. Raises `AbsentError`."""
    blocks = max(1, trace.unique_blocks * size_percent // 100)
    cell = Cell(trace.name, size_percent)
    started_s = time.process_time()
    cell.peers[BASE] = replay(trace, blocks, PEERS[BASE]).hit_percent
    base_s = time.process_time() - started_s
    for name, make in PEERS.items():
        if name != BASE:
            cell.peers[name] = replay(trace, blocks, make).hit_percent
    cell.peers[PLAIN] = plain_lru(trace, blocks).hit_percent
    if has_libcachesim and trace.accesses <= LIBCACHESIM_ACCESSES_MAX:
        percent, _ = simulators.libcachesim(trace, blocks)
        cell.peers |= {f"libcachesim {name}": hits for name, hits in percent.items()}
    cell.limit = replay(trace, blocks, LIMIT).hit_percent
    for hints in Hints:
        made: list[Timed] = []

        def make(trace: Trace, cache: Cache, hints: Hints = hints, made: list[Timed] = made) -> Timed:
            made.append(Timed(trace, cache, hints))
            return made[0]

        started_s = time.process_time()
        outcome = replay(trace, blocks, make)
        cell.ours[hints] = outcome.hit_percent
        if hints is Hints.NONE:
            evicted = max(1, outcome.evicted_blocks)
            cell.decision_us = 1e6 * (time.process_time() - started_s) / evicted
            cell.deciding_us = 1e6 * made[0].deciding_s / evicted
            cell.learning_us = 1e6 * made[0].learning_s / len(trace.paths)
    return cell, base_s


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """The agreed figures over all cells."""
    open_cells = [c for c in cells if c.gap_points >= GAP_POINTS_MIN]
    found: dict[str, float] = {}
    for hints, name in ((Hints.NONE, "nohints"), (Hints.TRACE, "tracehints"), (Hints.ENGINE, "enginehints")):
        if open_cells:
            found[f"gap_closed_{name}_mean"] = fmean(c.closed(c.ours[hints]) for c in open_cells)
    if open_cells:
        for peer in _names(open_cells):
            found[f"gap_closed_{peer}_mean"] = fmean(c.closed(c.peers[peer]) for c in open_cells if peer in c.peers)
    found["worst_margin_points"] = min(c.margin_points for c in cells)
    for name in TIMES:
        found[name] = max(getattr(c, name) for c in cells)
    return found


def main() -> int:
    """Run it; 2 for bad input, 1 where a simulator differs."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of recordings; without it one is made")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="percent of a trace's different blocks")
    parser.add_argument("--check-simulators", action="store_true", help="compare our LRU with that of simulators")
    parser.add_argument("--live", action="store_true", help="replay through a real agent, and compare with the replay")
    parser.add_argument(
        "--speed", type=float, default=live.SPEED, metavar="N",
        help="of --live: times the recording's pace (%(default)g), as far as the agent can",
    )  # fmt: skip
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw hits over size and the part of the gap closed")
    given = parser.parse_args()
    try:
        sizes = tuple(int(size) for size in given.sizes.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= size <= 100 for size in sizes):
        parser.exit(2, f"bench.policy: --sizes {given.sizes}: whole percents of 1 to 100 are wanted, as 1,5,10,25\n")
    if not given.speed > 0:
        parser.exit(2, f"bench.policy: --speed {given.speed:g}: more than 0 is wanted\n")
    if (given.check_simulators or given.plots) and not simulators.is_ready():
        parser.exit(2, f"bench.policy: {simulators.HOW}\n")
    try:
        traces = _traces(given.traces, is_tiny=given.tiny, is_quick=given.quick)
        run = _check if given.check_simulators else _through_agent if given.live else _compare
        return run(traces, sizes, given)
    except (TraceError, AbsentError) as e:
        parser.exit(2, f"bench.policy: {e}\n")


def _compare(traces: Sequence[Trace], sizes: Sequence[int], given: argparse.Namespace) -> int:
    has_libcachesim = simulators.is_ready()
    cells, base_s, accesses = [], 0.0, 0
    for trace in traces:
        for size in sizes:
            cell, seconds = measure(trace, size, has_libcachesim=has_libcachesim)
            cells.append(cell)
            base_s += seconds
            accesses += trace.accesses
            print(f"{trace.name} {size} % done", file=sys.stderr, flush=True)
    names = _names(cells)
    header = ("trace", "size", *names, *(f"ours, {h.name.lower()}" for h in Hints), "limit", "closed", "margin")
    print(table(header, [_line(cell, names) for cell in cells]))
    ratios: dict[str, float | None] = dict(summary(cells))
    values = {k: ratios.pop(k) or 0.0 for k in (*TIMES, "worst_margin_points")}
    values |= {k: v for k, v in ratios.items() if v is not None}
    values["leaf_lru_accesses_per_s"] = accesses / max(base_s, 1e-9)
    for cell in cells:
        for hints, hit_percent in cell.ours.items():
            values[f"{cell.trace} {cell.size_percent}% ours {hints.name.lower()}"] = hit_percent
    versions = {"kvstrata": __version__, "numpy": np.__version__, "peers": "re-implemented"}
    versions["libcachesim"] = simulators.VERSION if has_libcachesim else f"absent: {simulators.HOW}"
    if given.plots:
        for path in simulators.plot(given.plots, [_drawn(cell) for cell in cells]):
            print(path)
    publish(Result("policy", given.quick or given.tiny, versions, ratios, values), given.json)
    return 0


def _through_agent(traces: Sequence[Trace], sizes: Sequence[int], given: argparse.Namespace) -> int:
    """Hits of a real agent beside those of the replay by the same times."""
    rows: list[tuple[str, ...]] = []
    values: dict[str, float] = {}
    for trace in map(live.cut, traces):
        unique = sum(trace.lengths[run] for run in {run for path in trace.paths for run in path})
        for blocks in dict.fromkeys(live.tier_blocks(unique * size // 100) for size in sizes):
            for eviction, make in live.POLICIES.items():
                hit_percent, at_s = live.run(trace, blocks, eviction, given.speed)
                replayed = replay(replace(trace, at_s=at_s), blocks, make).hit_percent
                rows.append((trace.name, f"{blocks}", eviction, f"{hit_percent:.2f}", f"{replayed:.2f}"))
                values[f"{trace.name} {blocks} {eviction} agent"] = hit_percent
                values[f"{trace.name} {blocks} {eviction} points from the replay"] = hit_percent - replayed
                print(*rows[-1], file=sys.stderr, flush=True)
    print(table(("trace", "blocks", "eviction", "agent, %", "replay, %"), rows))
    apart = {key: points for key, points in values.items() if key.endswith("replay")}
    for eviction in live.POLICIES:
        points = [p for key, p in apart.items() if f" {eviction} " in key]
        values |= {f"{eviction}_points_above_at_most": max(points), f"{eviction}_points_below_at_most": -min(points)}
    values["most_points_from_the_replay"] = max(map(abs, apart.values()))
    publish(Result("policy.live", given.quick or given.tiny, {"kvstrata": __version__}, {}, values), given.json)
    return 0


def _drawn(cell: Cell) -> dict[str, object]:
    """A cell as bench/policy/plot_process.py takes it."""
    ours = {hints.name.lower(): percent for hints, percent in cell.ours.items()}
    return {
        "trace": cell.trace, "size_percent": cell.size_percent, "peers": cell.peers, "ours": ours,
        "limit": cell.limit, "base": BASE,
    }  # fmt: skip


def _check(traces: Sequence[Trace], sizes: Sequence[int], given: argparse.Namespace) -> int:
    rows: list[simulators.Comparison] = []
    for trace in traces:
        if trace.accesses > LIBCACHESIM_ACCESSES_MAX:
            print(f"{trace.name}: {trace.accesses} blocks, left out: more than {LIBCACHESIM_ACCESSES_MAX}")
            continue
        rows += simulators.compare(trace, sizes)
    header = ("trace", "size", "simulator", "policy", "theirs %", "ours %", "difference")
    print(table(header, [
        (r.trace, f"{r.size_percent} %", r.simulator, r.policy, f"{r.theirs_percent:.3f}", f"{r.ours_percent:.3f}",
         f"{r.difference_points:+.3f}") for r in rows
    ]))  # fmt: skip
    worst = max((abs(r.difference_points) for r in rows), default=0.0)
    values = {"simulators_compared": float(len(rows)), "simulators_worst_difference_points": worst}
    publish(Result("policy", given.quick or given.tiny, {"kvstrata": __version__}, {}, values), given.json)
    return int(worst > simulators.DIFFERENCE_POINTS_MAX)


def _names(cells: Sequence[Cell]) -> list[str]:
    """Peers of any cell, in order."""
    return list(dict.fromkeys(name for cell in cells for name in cell.peers))


def _traces(folder: Path | None, *, is_tiny: bool, is_quick: bool) -> list[Trace]:
    if folder is None:
        return [synthetic(TINY_SESSIONS if is_tiny else QUICK_SESSIONS if is_quick else SESSIONS)]
    found = read_folder(folder, QUICK_REQUESTS if is_tiny or is_quick else None)
    for lengths in found.lengths:
        print(
            f"{lengths.name}: {lengths.requests} requests, {lengths.input_tokens} tokens in, "
            f"{lengths.output_tokens} out, {lengths.span_s:.0f} s: lengths alone, so there is nothing to find"
        )
    for name in found.skipped:
        print(f"{name}: in no known format, left out")
    for trace in found.traces:
        modelled = f"; modelled: {trace.models}" if trace.models else ""
        print(
            f"{trace.name}: {len(trace.paths)} requests, {trace.accesses} blocks of {trace.block_tokens} tokens, "
            f"{trace.unique_blocks} different{modelled}"
        )
    if not found.traces:
        raise TraceError(f"{folder}: no trace with content in a known format")
    return list(found.traces)


def _line(cell: Cell, names: Sequence[str]) -> tuple[str, ...]:
    is_open = cell.gap_points >= GAP_POINTS_MIN
    return (
        cell.trace,
        f"{cell.size_percent} %",
        *(f"{cell.peers[name]:.2f}" if name in cell.peers else "-" for name in names),
        *(f"{hit_percent:.2f}" for hit_percent in cell.ours.values()),
        f"{cell.limit:.2f}",
        " ".join(f"{cell.closed(cell.ours[h]):.2f}" for h in Hints) if is_open else "-",
        f"{cell.margin_points:+.2f}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
