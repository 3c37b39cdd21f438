"""What the claims `faults`, `stale` and `unobserved` have in common: the scenario under a storm for each seed."""

from adversity.shared import shared
from adversity.storms import weather
from support.runner.outcome import Outcome, Scale

FULL_SEEDS = 10
"""A storm takes 10 to 20 s on idle cores and 2 min on busy ones."""
SHORT_SEEDS = 1
CONTROL_SEEDS = 3


def prove(kind: str, scale: Scale, defect: str) -> Outcome:
    """Run seeds; the control is an operator with a seeded defect under the same storms and the same bound.

    It counts as caught in a storm that it has met: a slow machine is no defect.
    """
    about = shared()
    seeds = range(scale.first_seed, scale.first_seed + scale.of(FULL_SEEDS, SHORT_SEEDS))
    violations, slowest_s, lies = list[str](), 0.0, 0
    for seed, result, injected in weather(about.stage, about.keeper, about.reference, kind, seeds):
        violations += [f"seed {seed}: {line}" for line in result.violations]
        slowest_s = max(slowest_s, result.slowest_s)
        lies += injected.total()
    with about.stage.operator(defect) as broken:
        control = weather(about.stage, broken, about.reference, kind, range(CONTROL_SEEDS))
        is_caught = any(result.violations and injected.total() for _, result, injected in control)
    values = {"lies": lies, "slowest_s": round(slowest_s, 1)}
    return Outcome(len(seeds), "storms", tuple(violations), is_caught, values)
