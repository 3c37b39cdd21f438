"""I2: no slot is freed or overwritten while it is leased, whatever fails in a simulated fleet."""

from typing import Final

from sim.campaign import is_caught, prove
from sim.run import Plan

from support.runner.outcome import Outcome, Scale

SEEDS: Final = 10_000
SEEDS_SHORT: Final = 6


def run(scale: Scale) -> Outcome:
    """Run seeds of 1,000 operations; books of leases and slots that do not trust the agent's own are kept beside it."""
    proof = prove(scale.first_seed, scale.of(SEEDS, SEEDS_SHORT), Plan(), reads=scale.of(10_000_000, 0))
    crashes = proof.tally.agent_crashes + proof.tally.engine_crashes + proof.tally.power_losses
    return Outcome(
        n=proof.seeds,
        unit="seeds of 1,000 operations",
        violations=proof.of("I2", "I3"),
        is_control_caught=is_caught("leased blocks are evicted") and is_caught("leases end before their time"),
        values={"operations": proof.tally.operations, "crashes": crashes, "late_writes": proof.tally.late_writes},
    )
