"""Claim `faults`."""

from adversity.prove_storms import prove
from support.runner.outcome import Outcome, Scale


def run(scale: Scale) -> Outcome:
    """Run the storms."""
    return prove("faults", scale, "tries-once")
