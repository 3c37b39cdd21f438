"""How long to wait after failures. Pure; the caller brings the chance."""

from typing import Final

FIRST_S: Final = 0.2
"""After one failure: long enough for an API server to hand over its port, short enough not to be noticed."""

LONGEST_S: Final = 10.0
"""Bound of one wait, so that a fleet of agents is back at most this long after the API server is."""

_DOUBLINGS_MAX: Final = 16  # Keeps the power small; the bound is reached long before.


def delay_s(failures: int, chance: float, longest_s: float = LONGEST_S) -> float:
    """Seconds to wait after `failures` (>= 1) in a row; `chance` in [0, 1) spreads a fleet over the upper half."""
    assert failures >= 1
    assert 0 <= chance < 1
    ceiling_s = min(longest_s, FIRST_S * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))
    return ceiling_s * (0.5 + chance / 2)
