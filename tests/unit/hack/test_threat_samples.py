"""Laws of the comparison of samples: equal ones tell nothing, and a shift is seen."""

import numpy as np
import pytest
from threats.samples import auc, ks_p

pytestmark = pytest.mark.unit


def test_samples_of_one_distribution_are_seldom_told_apart() -> None:
    rng = np.random.default_rng(1)
    found = [ks_p(rng.exponential(size=500), rng.exponential(size=500)) for _ in range(400)]

    assert 0.01 < np.mean(np.array(found) < 0.05) < 0.09


def test_a_shift_of_a_third_of_the_spread_is_seen() -> None:
    rng = np.random.default_rng(2)
    first, second = rng.normal(0.35, 1.0, 1000), rng.normal(0.0, 1.0, 1000)

    assert ks_p(first, second) < 1e-8
    assert 0.55 < auc(first, second) < 0.65


def test_a_tenth_of_outliers_is_seen_where_means_are_equal() -> None:
    first = np.concatenate([np.zeros(900), np.full(50, 9.0), np.full(50, -9.0)])
    second = np.zeros(1000)

    assert ks_p(first, second) < 0.2
    assert auc(first, second) == 0.5


@pytest.mark.parametrize(("distance", "p"), [(0.0430, 0.3095), (0.0607, 0.0489), (0.0729, 0.0098)])
def test_probabilities_are_those_of_the_tables(distance: float, p: float) -> None:
    """1.36 and 1.63 times the root of 2/n are the 5 % and 1 % points for two large samples of n."""
    shift = round(distance * 1000)
    first = np.arange(1000, dtype=np.float64)

    assert ks_p(first, first + shift) == pytest.approx(p, abs=0.012)


def test_equal_samples_have_an_even_chance() -> None:
    first = np.arange(100, dtype=np.float64)

    assert ks_p(first, first) == 1.0
    assert auc(first, first) == 0.5
