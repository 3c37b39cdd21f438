"""One node's data path: local-put, local-get, hit-check; ours through the real agent and client.

The limit is a copy of the same blocks by one thread (numpy's, which is glibc's memcpy; `nt` with non-temporal stores)
and a Python dict for lookups. Peers: LMCache's LocalCPU backend, Mooncake's store, raw Redis values. Everybody takes
turns in every repeat, every load is compared with what was stored, and one client is one copying thread.
Overhead is the time of blocks of 4 KiB in batches of 16 beyond their memcpy.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.harness import cases, common
from bench.harness.cases import Plan
from bench.harness.common import Result, Sample, beyond, publish, rate_ratio, table
from bench.harness.drivers import Driver
from bench.harness.participants import (
    LMCACHE,
    MEMCPY,
    MOONCAKE,
    NON_TEMPORAL,
    OURS,
    REDIS,
    Field,
    more,
    start,
    with_full_tier,
)
from bench.harness.rounds import Rounds, Turns

ALL_PEERS = (LMCACHE, MOONCAKE, REDIS)
KEYED_PEERS = (LMCACHE, MOONCAKE)
"""Peers whose ratios have keys in the last line."""
KEYED_SIZE = "2MiB"

_STARTED_S = time.perf_counter()


@dataclass(slots=True)
class Figures:
    """What came out, on its way to the table and the last line."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def row(self, what: str, who: str, sample: Sample, scale: float, limit: Sample | None) -> None:
        """Add one line of the table; rates are divided by `scale`."""
        spread = (f"{v / scale:.2f}" for v in sample.spread)
        share = rate_ratio(sample, limit)
        self.rows.append((what, who, *spread, "" if share is None else f"{share:.2f}"))


def measure(plan: Plan, made: Field) -> Figures:
    """Run the plan."""
    rounds, figures = Rounds(made), Figures()
    say(f"overhead and lookups: {plan.small.blocks} blocks of {plan.small.size}")
    small = rounds.store_and_load(plan.small, _one_each(made))
    note_overhead(figures, small)
    note_lookups(figures, rounds.lookups(plan.small, plan.lookup_rounds))
    say(f"a full tier: {plan.small.blocks} blocks of {plan.small.size} in place of the oldest")
    with with_full_tier(plan.full_bytes) as ours:
        note_full(figures, rounds.store_into_full(plan.small, {OURS: (ours,), MEMCPY: (made.present[MEMCPY],)}))
    for case in plan.one_client:
        say(f"one client: {case.blocks} blocks of {case.size}, {case.repeats} repeats")
        turns = rounds.store_and_load(case, _one_each(made))
        note_rates(figures, turns)
        if case.size == KEYED_SIZE:
            note_parts(figures, turns)
    for case in plan.many_clients:
        say(f"{case.clients} clients: {case.blocks} blocks of {case.size} each, {case.repeats} repeats")
        with more(made, OURS, case.clients) as ours, more(made, MEMCPY, case.clients) as copies:
            note_rates(figures, rounds.store_and_load(case, {OURS: ours, MEMCPY: copies}))
    return figures


def _one_each(made: Field) -> dict[str, tuple[Driver, ...]]:
    return {name: (driver,) for name, driver in made.present.items()}


def note_overhead(figures: Figures, turns: Turns) -> None:
    """Microseconds per block beyond the copy."""
    for work in ("put", "get"):
        ours, copies = turns.seconds(work, OURS), turns.seconds(work, MEMCPY)
        assert ours is not None
        assert copies is not None
        figures.values[f"{work}_overhead_us_per_block"] = beyond(ours, copies) * 1e6 / turns.case.blocks
    for work in ("put", "get"):
        for who in (*turns.put,):
            seconds = turns.seconds(work, who)
            if seconds is not None and who not in {MEMCPY, NON_TEMPORAL}:
                per_block = Sample(tuple(s * 1e6 / turns.case.blocks for s in seconds.values))
                figures.row(f"{work} {turns.case.size}, us/block", who, per_block, 1.0, None)


def note_full(figures: Figures, turns: Turns) -> None:
    """Microseconds per block where every block that is stored takes the place of an older one."""
    ours, copies = turns.seconds("put", OURS), turns.seconds("put", MEMCPY)
    assert ours is not None
    assert copies is not None
    figures.values["put_full_overhead_us_per_block"] = beyond(ours, copies) * 1e6 / turns.case.blocks
    per_block = Sample(tuple(s * 1e6 / turns.case.blocks for s in ours.values))
    figures.row(f"put {turns.case.size} into a full tier, us/block", OURS, per_block, 1.0, None)


def note_lookups(figures: Figures, rates: Mapping[str, Sample]) -> None:
    """Keys per second, against the dict and the peers."""
    for who, sample in rates.items():
        name = "dict" if who == MEMCPY else who
        figures.row("hit-check, Mkeys/s", name, sample, 1e6, rates[MEMCPY])
    figures.values["lookup_keys_per_s"] = median(rates[OURS].values)
    for peer in (*KEYED_PEERS, REDIS):
        figures.ratios[f"lookup_vs_{peer}"] = rate_ratio(rates[OURS], rates.get(peer))
    figures.ratios["lookup_vs_dict"] = rate_ratio(rates[OURS], rates[MEMCPY])


def note_rates(figures: Figures, turns: Turns) -> None:
    """Bytes per second of everybody, and our ratios to the limit and the peers."""
    case = turns.case
    many = f"_{case.clients}_clients" if case.clients > 1 else ""
    for work in ("put", "get"):
        ours, limit = turns.rate(work, OURS), turns.rate(work, MEMCPY)
        assert ours is not None
        for who in turns.put:
            sample = turns.rate(work, who)
            if sample is not None:
                clients = f", {case.clients} clients" if many else ""
                figures.row(f"{work} {case.size}{clients}, GB/s", who, sample, 1e9, limit)
        figures.values[f"{work}_{case.size}{many}_bytes_per_s"] = median(ours.values)
        figures.ratios[f"{work}_{case.size}{many}_vs_memcpy"] = rate_ratio(ours, limit)
        for peer in () if many else (*KEYED_PEERS, REDIS):
            figures.ratios[f"{work}_{case.size}_vs_{peer}"] = rate_ratio(ours, turns.rate(work, peer))


def note_parts(figures: Figures, turns: Turns) -> None:
    """Microseconds per block that one client spends in each verb."""
    for part in turns.parts[0]:
        taken_us = median(p[part] for p in turns.parts) * 1e6 / turns.case.blocks
        figures.values[f"{turns.case.size}_{part}_us_per_block"] = taken_us


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.local {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def choose(arguments: Sequence[str] | None) -> tuple[Plan, argparse.Namespace]:
    """Parse the command line into a plan."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--peers", default=",".join(ALL_PEERS), help="peers to compare with, comma-separated; or none")
    chosen = parser.parse_args(arguments)
    chosen.peers = [] if chosen.peers == "none" else chosen.peers.split(",")
    if unknown := set(chosen.peers) - set(ALL_PEERS):
        parser.error(f"--peers {','.join(sorted(unknown))}: there are {','.join(ALL_PEERS)}")
    plan = cases.tiny() if chosen.tiny else cases.quick() if chosen.quick else cases.full()
    return plan, chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    plan, chosen = choose(arguments)
    say("starting the agent, clients, limits and peers")
    with start(plan.capacity_bytes, chosen.peers, say) as made:
        figures = measure(plan, made)
    print(table(("what", "who", "min", "median", "max", "of limit"), figures.rows))
    for name, why in made.absent.items():
        print(f"absent: {name}: {why}")
    print(f"agent memory: {made.agent_facts['medium']} {made.agent_facts['fallback']}".rstrip())
    say("done")
    quick = bool(chosen.quick or chosen.tiny)
    publish(Result("local", quick, made.versions, figures.ratios, figures.values), chosen.json)


if __name__ == "__main__":
    main()
