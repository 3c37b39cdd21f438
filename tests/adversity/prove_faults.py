"""Claim `faults`."""

from outcome import Outcome, Scale

from adversity.prove_storms import prove


def run(scale: Scale) -> Outcome:
    """Run the storms."""
    return prove("faults", scale, "tries-once")
