"""Every invariant, shortened: seconds each. `make proof` runs the counts of the table."""

import os
from collections.abc import Iterator

import pytest

from faults.registry import INVARIANTS, end_simulated, runner
from support.runner.outcome import Scale

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[None]:
    yield
    end_simulated()


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_the_invariant_holds_and_its_control_is_caught(invariant: str) -> None:
    outcome = runner(invariant)(Scale(is_full=False, first_seed=int(os.environ.get("KVSTRATA_FIRST_SEED", "0"))))

    assert outcome.n > 0
    assert not outcome.violations
    assert outcome.is_control_caught
