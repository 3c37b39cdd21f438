"""Claim `simulated`."""

import sys
import time
from unittest import mock

from adversity import defects, simulated
from kvstrata_operator.decide.pools import lifecycle
from support.runner.outcome import Outcome, Scale

FULL_SEEDS = 3_000
SHORT_SEEDS = 20
CONTROL_SEEDS = 60
TELL_S = 10.0


def run(scale: Scale) -> Outcome:
    """Run drawn sequences, and a few with a seeded defect that only a crash brings out."""
    seeds = range(scale.first_seed, scale.first_seed + scale.of(FULL_SEEDS, SHORT_SEEDS))
    violations, changes, crashes, told_s = list[str](), 0, 0, time.monotonic()
    for done, ran in enumerate(simulated.sweep(seeds), 1):
        violations += [f"seed {ran.seed}: {line}" for line in ran.violations]
        changes, crashes = changes + ran.changes, crashes + ran.crashes
        if time.monotonic() - told_s > TELL_S:
            told_s = time.monotonic()
            sys.stderr.write(f"    {done:,} sequences, {len(violations)} broken\n")
    return Outcome(
        len(seeds), "sequences", tuple(violations), _is_control_caught(), {"changes": changes, "crashes": crashes}
    )


def _is_control_caught() -> bool:
    with mock.patch.object(lifecycle, "answering", lifecycle.answering):  # Put back at the end.
        defects.inject("needs-a-lease")
        return any(ran.violations for ran in simulated.sweep(range(CONTROL_SEEDS)))
