"""What a soak draws and judges, without a fleet."""

from random import Random

import pytest
from soak import faults
from soak.script import deck
from soak.watch import GROWTH_SAMPLES_MIN, Held, grown

pytestmark = pytest.mark.unit

MIB = 1 << 20


def test_every_fault_comes_once_before_any_comes_again() -> None:
    for seed in range(20):
        drawn, seen = deck(Random(seed), faults.possible()), list[str]()
        while len(seen) < len(faults.possible()):
            seen += next(drawn)
        assert sorted(seen) == sorted(faults.possible())


def test_the_same_seed_draws_the_same_faults() -> None:
    one, other = deck(Random(5), "abc"), deck(Random(5), "abc")

    assert [next(one) for _ in range(30)] == [next(other) for _ in range(30)]


def life(*memory_mib: int, descriptors: int = 40, step: int = 0) -> list[Held]:
    return [Held(m * MIB, descriptors + step * n, 12) for n, m in enumerate(memory_mib)]


def test_a_process_that_holds_steady_has_not_grown_and_one_that_fills_its_caches_first_neither() -> None:
    assert grown(life(*[100] * 40)) == []
    assert grown(life(60, 80, 95, *[100] * 37)) == []


def test_memory_that_grows_in_every_round_is_told() -> None:
    (line,) = grown(life(*range(100, 400, 3)))

    assert line.startswith("memory_bytes grew from ")


def test_descriptors_that_grow_by_one_a_round_are_told() -> None:
    (line,) = grown(life(*[100] * 200, step=1))

    assert line.startswith("descriptors grew from ")


def test_a_short_life_says_nothing() -> None:
    assert grown(life(*[1, 10_000] * (GROWTH_SAMPLES_MIN // 2))[: GROWTH_SAMPLES_MIN - 1]) == []
