"""I4: no reference is negative or forgotten: all tables agree after every single step."""

from typing import Final

from sim.campaign import is_caught, prove
from sim.run import Plan

from support.runner.outcome import Outcome, Scale

STEPS: Final = 1_000
"""Of one seed."""
SEEDS: Final = 1_000
SEEDS_SHORT: Final = 4


def run(scale: Scale) -> Outcome:
    """Hold the tables against each other after each verb, while messages come twice and late."""
    plan = Plan(STEPS, check_every=1, has_repeats=True)
    proof = prove(scale.first_seed, scale.of(SEEDS, SEEDS_SHORT), plan)
    tally = proof.tally
    return Outcome(
        n=tally.operations,
        unit="steps",
        violations=proof.of("I4", "I5", "directory", "bug"),
        is_control_caught=is_caught("the end of a lease forgets its block")
        and is_caught("slots of reservations are never given back"),
        values={"checks": tally.checks, "repeated": tally.frames_repeated, "late": tally.frames_reordered},
    )
