"""Claim `stale`."""

from adversity.prove_storms import prove
from support.runner.outcome import Outcome, Scale


def run(scale: Scale) -> Outcome:
    """Run the storms."""
    return prove("stale", scale, "remembers-lists")
