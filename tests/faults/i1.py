"""I1: no wrong or dangling location is ever served as data, whatever fails in a simulated fleet."""

from typing import Final

from sim.campaign import is_caught, prove
from sim.run import Plan

from support.runner.outcome import Outcome, Scale

READS: Final = 10_000_000
SEEDS: Final = 10_000
SEEDS_SHORT: Final = 6


def run(scale: Scale) -> Outcome:
    """Read blocks under faults, each judged against the bytes that its key stands for."""
    proof = prove(scale.first_seed, scale.of(SEEDS, SEEDS_SHORT), Plan(), reads=scale.of(READS, 0))
    tally = proof.tally
    return Outcome(
        n=tally.reads,
        unit="reads",
        violations=proof.of("I1", "I8", "bug"),
        is_control_caught=is_caught("the client skips its check") and is_caught("a peer's bytes are not checked"),
        values={"hits": tally.hits, "refused_copies": tally.corrupt, "seeds": proof.seeds},
    )
