"""Simulate time to the first token with tiers behind an engine: ours against others, at several loads.

An engine with a queue computes the prompts of recorded workloads in front of HBM, DRAM, NVMe and an object store, each
with a size, a rate, a latency and a queue. What leaves, where it goes and how much of a prefix is fetched is decided by
the agent's own `policy.expected_reuse`, `policy.placement` and `policy.recompute`. Others in the same run: the engine
alone (its HBM as a prefix cache, least recently used first), write-through to all tiers and fetching always, a cascade
of leaf-LRU tiers, and a cascade with fixed times to live. The limit has all blocks in HBM.

Arrivals are those of the trace, faster: a load is the rate of its middle 80 % over what the engine alone (A), or the
engine with the cascade (C), computes when everything waits. Sizes of tiers are the machine's for each GPU, scaled so
that HBM holds `--hbm-percent` of a trace's different blocks. The machine is that of kvstrata_agent.replay.machine.

Besides, without queues: what is written to flash behind a memory of 1, 5, 10 and 25 %, see bench/tiering/flash.py.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.harness import common
from bench.harness.common import Result, publish, table
from bench.policy.synthetic import synthetic
from bench.tiering import flash
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.machine import GIGABYTE, TIERS, Engine, Machine
from kvstrata_agent.replay.planning import fitting, highest_rate, recorded_per_s
from kvstrata_agent.replay.simulation import MakeTiers, Outcome, Simulation
from kvstrata_agent.replay.tiers import FixedTtl, Ours, Tiers, WriteThrough
from kvstrata_agent.replay.traces import TraceError, read_folder
from kvstrata_api import __version__

HBM_PERCENT: Final = 0.5
"""An H100's 40 GB are 0.3 % of an hour of Mooncake's conversations."""
LOADS: Final = (("A", 0.3), ("A", 0.6), ("A", 0.9), ("C", 0.7), ("C", 0.9), ("C", 1.0))
SESSIONS: Final = 4000
QUICK_SESSIONS: Final = 1000
TINY_SESSIONS: Final = 40
REQUESTS: Final = 6000
QUICK_REQUESTS: Final = 2000
TTL_S: Final = (300.0, 300.0, 3600.0, 3600.0)
"""Of memory tiers and of the others, in the trace's time: providers' prompt caches keep for 5 minutes or an hour."""
GOAL_S: Final = 30.0
"""Bound on the time to the first token that Mooncake was operated with (2407.00079)."""
FLASH_HEADER: Final = (
    "trace", "memory", "write-through", "cascade", "ours, all", "ours", "ours, engine", "limit", "x fewer",
)  # fmt: skip
"""Blocks written / read again, and hits in percent. Last how many times fewer are written for each one read again: than
by write-through, than where all that leaves memory by ours is written, and what is possible."""
ALONE: Final = "engine alone"
CASCADE: Final = "LRU cascade"
OURS: Final = "ours"
LIMIT: Final = "limit"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to have tiers."""

    make: MakeTiers
    policy: str = "AlwaysFetch"
    has_tiers: bool = True
    is_limit: bool = False
    """Everything fits into the engine's own memory: no policy computes less."""


def contenders(speed: float) -> dict[str, Contender]:
    """All of them, for a trace that runs so many times as fast as it was recorded."""
    ttl = partial(FixedTtl, ttl_s=[ttl_s / speed for ttl_s in TTL_S])
    return {
        ALONE: Contender(Tiers, has_tiers=False),
        "always fetch": Contender(WriteThrough),
        CASCADE: Contender(Tiers),
        "fixed TTL": Contender(ttl),
        OURS: Contender(Ours, "CostModel"),
        "ours, always": Contender(Ours),
        LIMIT: Contender(Tiers, has_tiers=False, is_limit=True),
    }


PEERS: Final = (ALONE, "always fetch", CASCADE, "fixed TTL")


@dataclass(slots=True)
class Workload:
    """A trace on a machine."""

    trace: Trace
    machine: Machine
    hbm_percent: float
    left_out: int = 0
    """Requests that are longer than the model's context."""
    capacities: list[int] = field(init=False)

    def __post_init__(self) -> None:
        lengths = self.trace.lengths
        used = {run for path in self.trace.paths for run in path}
        hbm_blocks = sum(lengths[run] for run in used) * self.hbm_percent / 100
        memories = self.machine.memories
        scale = hbm_blocks / memories[0].size_bytes
        self.capacities = [max(1, round(memory.size_bytes * scale)) for memory in memories]

    def run(self, speed: float, contender: Contender) -> Outcome:
        """One simulation."""
        capacities = self.capacities if contender.has_tiers else self.capacities[:1]
        if contender.is_limit:
            capacities = [self.trace.unique_blocks]
        return Simulation(self.trace, speed, self.machine, capacities, contender.make, contender.policy).run()

    @property
    def requests_per_s(self) -> float:
        """Rate of the middle 80 % as it was recorded."""
        return recorded_per_s(self.trace)

    def saturated(self, contender: Contender) -> float:
        """Requests in a second when everything waits from the beginning."""
        outcome = self.run(1e9, contender)
        return len(outcome.ttft_s) / outcome.ends_s


@dataclass(slots=True)
class Cell:
    """One trace at one load: 99th percentile of the time to the first token, by contender."""

    trace: str
    load: str
    p99_s: dict[str, float]
    mean_s: dict[str, float]

    @property
    def best_peer(self) -> str:
        """The one with the least."""
        return min(PEERS, key=lambda name: self.p99_s[name])

    @property
    def vs_best(self) -> float:
        """Ours over the best of the others; less is better."""
        return self.p99_s[OURS] / self.p99_s[self.best_peer]

    def mean_vs_best(self, name: str) -> float:
        """Mean time of one over that of the best of the others."""
        return self.mean_s[name] / min(self.mean_s[peer] for peer in PEERS)

    @property
    def vs_alone(self) -> float:
        """Ours over the engine alone."""
        return self.p99_s[OURS] / self.p99_s[ALONE]


def measure(work: Workload) -> list[Cell]:
    """All loads of one trace."""
    reference = contenders(1.0)
    rates = {"A": work.saturated(reference[ALONE]), "C": work.saturated(reference[CASCADE])}
    cells: list[Cell] = []
    for of, load in LOADS:
        speed = load * rates[of] / work.requests_per_s
        ran = {name: work.run(speed, contender) for name, contender in contenders(speed).items()}
        p99_s = {name: outcome.ttft_percentile_s(99) for name, outcome in ran.items()}
        mean_s = {name: fmean(outcome.ttft_s) for name, outcome in ran.items()}
        cells.append(Cell(work.trace.name, f"{of} {load}", p99_s, mean_s))
        for name, outcome in ran.items():
            print(_told(work, cells[-1], name, outcome), file=sys.stderr, flush=True)
    return cells


def requests_at(work: Workload, goal_s: float, name: str) -> float:
    """Most requests in a second at which 99 % of them have their first token in time, to a hundredth part."""

    def fits(rate: float) -> bool:
        speed = rate / work.requests_per_s
        return work.run(speed, contenders(speed)[name]).ttft_percentile_s(99) <= goal_s

    return highest_rate(fits, 2.0 * work.saturated(contenders(1.0)[name]))


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """The agreed figures."""
    return {
        "p99_ttft_vs_best_peer": fmean(c.vs_best for c in cells),
        "limit_p99_ttft_vs_best_peer": fmean(c.p99_s[LIMIT] / c.p99_s[c.best_peer] for c in cells),
        "worst_p99_ttft_vs_best_peer": max(c.vs_best for c in cells),
        "worst_p99_ttft_vs_engine_alone": max(c.vs_alone for c in cells),
        "mean_ttft_vs_best_peer": fmean(c.mean_vs_best(OURS) for c in cells),
        "limit_mean_ttft_vs_best_peer": fmean(c.mean_vs_best(LIMIT) for c in cells),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 2 for bad input."""
    given = _parser().parse_args(arguments)
    machine = _machine(given)
    try:
        works = [_workload(trace, machine, given) for trace in _traces(given)]
    except TraceError as e:
        _parser().exit(2, f"bench.tiering: {e}\n")
    cells: list[Cell] = []
    values: dict[str, float] = {}
    for work in works:
        print(
            f"{work.trace.name}: {len(work.trace.paths)} requests, {work.left_out} longer than "
            f"{machine.engine.context_tokens} tokens left out; tiers of {_sizes(work)} tokens"
        )
        cells += measure(work)
        if not given.tiny:
            for name in (ALONE, CASCADE, OURS):
                rate = requests_at(work, given.goal_s, name)
                values[f"{work.trace.name} requests/s at the goal, {name}"] = rate
    names = list(contenders(1.0))
    header = ("trace", "load", *(f"p99 {name}" for name in names), "vs best", "vs alone")
    print(table(header, [_line(cell, names) for cell in cells]))
    for work in works:
        _tell_sessions(work, values, given.goal_s)
    spared = [flash.measure(work.trace, percent) for work in works for percent in flash.MEMORY_PERCENT]
    print(table(FLASH_HEADER, [_flash_line(cell) for cell in spared]))
    for spared_cell in spared:
        for name, flow in spared_cell.flows.items():
            key = f"{spared_cell.trace} {spared_cell.memory_percent}% flash, {name}"
            values |= {f"{key}, written blocks": flow.written, f"{key}, read blocks": flow.read}
            values[f"{key}, hits %"] = flow.hit_percent
    values |= flash.summary(spared)
    found = summary(cells)
    for cell in cells:
        values[f"{cell.trace} {cell.load} p99_ttft_vs_best_peer"] = cell.vs_best
    versions = {"kvstrata": __version__, "peers": "re-implemented"}
    publish(Result("tiering", given.quick or given.tiny, versions, {}, found | values), given.json)
    return 0


def _flash_line(cell: flash.Cell) -> tuple[str, ...]:
    flows = (f"{f.written} / {f.read}, {f.hit_percent:.2f}" for f in cell.flows.values())
    ratios = (
        f"{cell.spared(flash.OURS):.1f}, {cell.spared(flash.OURS, flash.ALL):.1f} of {cell.spared(flash.LIMIT):.1f}"
    )
    return (cell.trace, f"{cell.memory_percent} %", *flows, ratios)


def _tell_sessions(work: Workload, values: dict[str, float], goal_s: float) -> None:
    known = {session for session in work.trace.sessions if session is not None}
    for name in (ALONE, CASCADE, OURS):
        rate = values.get(f"{work.trace.name} requests/s at the goal, {name}")
        if rate is None:
            continue
        told = f"{work.trace.name}: p99 within {goal_s:g} s, {name}: {rate:.3f} requests/s"
        if known:
            sessions_per_hour = rate * 3600 * len(known) / len(work.trace.paths)
            values[f"{work.trace.name} sessions/h at the goal, {name}"] = sessions_per_hour
            told += f", {sessions_per_hour:.1f} sessions begun in an hour"
        print(told)


def _parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of recordings; without it one is made")
    parser.add_argument("--requests", type=_count, help=f"first requests of a trace; {REQUESTS}, or fewer when quick")
    parser.add_argument("--hbm-percent", type=_size, default=HBM_PERCENT, help="HBM's part of a trace's blocks")
    parser.add_argument("--goal-s", type=_size, default=GOAL_S, help="99 %% of first tokens come within it")
    parser.add_argument("--kv-bytes-per-token", type=_count, default=Engine().kv_bytes_per_token)
    parser.add_argument("--parameters", type=_size, default=Engine().parameters, help="of the model")
    parser.add_argument("--flops", type=_size, default=Engine().flops, help="of the GPU, dense")
    for memory in TIERS[1:]:
        parser.add_argument(
            f"--{memory.name}-gb-per-s", type=_size, default=memory.read_bytes_per_s / GIGABYTE, help="read rate"
        )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is wanted")
    return value


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: more than 0 is wanted")
    return value


def _machine(given: argparse.Namespace) -> Machine:
    engine = Engine(parameters=given.parameters, kv_bytes_per_token=given.kv_bytes_per_token, flops=given.flops)
    rates = [0.0, *(getattr(given, f"{memory.name}_gb_per_s") * GIGABYTE for memory in TIERS[1:])]
    return Machine(engine, [replace(m, read_bytes_per_s=rate) for m, rate in zip(TIERS, rates, strict=True)])


def _traces(given: argparse.Namespace) -> list[Trace]:
    if given.traces is None:
        return [synthetic(TINY_SESSIONS if given.tiny else QUICK_SESSIONS if given.quick else SESSIONS)]
    found = read_folder(given.traces).traces
    if not found:
        raise TraceError(f"{given.traces}: no trace with content in a known format")
    return list(found)


def _workload(trace: Trace, machine: Machine, given: argparse.Namespace) -> Workload:
    limit = given.requests or (QUICK_REQUESTS if given.quick or given.tiny else REQUESTS)
    kept, left_out = fitting(trace, machine.engine.context_tokens, limit)
    return Workload(kept, machine, given.hbm_percent, left_out)


def _sizes(work: Workload) -> str:
    return ", ".join(f"{blocks * work.trace.block_tokens:,}" for blocks in work.capacities)


def _told(work: Workload, cell: Cell, name: str, outcome: Outcome) -> str:
    """One line for whoever looks on."""
    tokens = work.trace.block_tokens / 1e6
    fetched = " ".join(f"{blocks * tokens:.1f}" for blocks in outcome.fetched_blocks[1:])
    return (
        f"{cell.trace} {cell.load} {name:13} p50 {outcome.ttft_percentile_s(50):.3f} p99 {cell.p99_s[name]:.3f} "
        f"mean {cell.mean_s[name]:.3f} s, computed {outcome.computed_tokens / 1e6:.1f} fetched {fetched} "
        f"lost {outcome.lost_blocks * tokens:.1f} M tokens"
    )


def _line(cell: Cell, names: Sequence[str]) -> tuple[str, ...]:
    times = (f"{cell.p99_s[name]:.2f}" for name in names)
    return (cell.trace, cell.load, *times, f"{cell.vs_best:.3f} ({cell.best_peer})", f"{cell.vs_alone:.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
