"""Are two samples of times from one distribution? Kolmogorov-Smirnov and the area under the curve, with numpy alone."""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_TERMS: Final = 100
"""Of a series that falls like exp(-k^2)."""

Sample = NDArray[np.float64]


def ks_p(first: Sample, second: Sample) -> float:
    """Probability of a difference like this one, or a larger one, between two samples of one distribution.

    Two-sided, by the asymptotic distribution with Stephens' correction (good from some ten values a sample on).
    """
    values = np.sort(np.concatenate([first, second]))
    below_first = np.searchsorted(np.sort(first), values, side="right") / len(first)
    below_second = np.searchsorted(np.sort(second), values, side="right") / len(second)
    distance = float(np.abs(below_first - below_second).max())
    effective = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (effective + 0.12 + 0.11 / effective) * distance
    if scaled < 0.2:
        return 1.0  # The series converges slowly there, to 1 within 1e-12.
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _TERMS))
    return min(1.0, max(0.0, 2.0 * float(sum(terms))))


def auc(first: Sample, second: Sample) -> float:
    """Chance that a value of `first` is above one of `second`, ties counting half: 0.5 tells nothing."""
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, side="left")
    at_most = np.searchsorted(ordered, first, side="right")
    return float((below + at_most).mean() / 2 / len(second))
