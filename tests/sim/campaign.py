"""Runs many seeds, in several processes, and adds up what happened."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final

from sim import defects
from sim.run import Plan, Ran, run_seed
from sim.tally import Tally

JOBS: Final = 2
TELL_S: Final = 30.0
"""Between two lines of progress."""
CONTROL: Final = Plan(operations=400, has_damage=True)
CONTROL_SEEDS: Final = 30
"""A seeded defect that so many seeds do not show was not caught."""


def run_all(seeds: range, plan: Plan, jobs: int = JOBS) -> Iterator[Ran]:
    """Run seeds; results come in their order."""
    one = partial(run_seed, plan=plan)
    if jobs <= 1 or len(seeds) <= 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(one, seeds, chunksize=max(1, min(4, len(seeds) // (2 * jobs))))


@dataclass(slots=True)
class Proof:
    """Results of a campaign."""

    seeds: int = 0
    tally: Tally = field(default_factory=Tally)
    broken: list[str] = field(default_factory=list)

    def of(self, *invariants: str) -> tuple[str, ...]:
        """What broke one of these, each with the seed that shows it again."""
        return tuple(line for line in self.broken if line.split(": ", 1)[1].startswith(invariants))


@cache
def prove(first_seed: int, seeds: int, plan: Plan, reads: int = 0) -> Proof:
    """Run so many seeds, and more until there were `reads`; the same campaign is run only once in a process."""
    proof, told_s, first = Proof(), time.monotonic(), first_seed
    while proof.seeds < seeds or proof.tally.reads < reads:
        count = max(1, seeds - proof.seeds) if proof.seeds < seeds else 4 * JOBS
        for ran in run_all(range(first, first + count), plan):
            proof.seeds += 1
            proof.tally.add(ran.tally)
            broken = [f"seed {ran.seed}: {violation}" for violation in ran.violations]
            proof.broken += broken
            sys.stderr.writelines(f"sim: {line}\n" for line in broken)
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                sys.stderr.write(
                    f"sim: {proof.seeds:,} seeds, {proof.tally.reads:,} reads, {len(proof.broken)} broken\n"
                )
        first += count
    return proof


def is_caught(what: str) -> bool:
    """Break the product in this process; true when some seed breaks the invariant that the defect is about."""
    with defects.broken(what) as invariant:
        found = (run_seed(seed, CONTROL).violations for seed in range(CONTROL_SEEDS))
        return any(violation.startswith(invariant) for violations in found for violation in violations)
