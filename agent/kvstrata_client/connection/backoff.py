"""Waiting times between attempts to reach the agent. Pure."""

import random
from collections.abc import Iterator

FIRST_S = 0.05
LAST_S = 5.0
"""Bound of the wait, and so of the time a returned agent stays unused."""


def backoff(rng: random.Random) -> Iterator[float]:
    """Yield waits in seconds: doubling from 50 ms to 5 s, each shortened by up to half.

    The jitter keeps the engines of a node from returning to a restarted agent all at once.
    """
    wait_s = FIRST_S
    while True:
        yield wait_s * rng.uniform(0.5, 1.0)
        wait_s = min(wait_s * 2, LAST_S)
