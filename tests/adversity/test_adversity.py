"""Two of the claims, shortened: seconds each. `make adversity FULL=1` runs all of them at full counts."""

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

from adversity.registry import runner
from adversity.simulated import run
from support.runner.alone import process
from support.runner.outcome import Outcome, Scale

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def alone() -> Iterator[Executor]:
    """A process of its own: seeded defects change the product in it, and the control plane ends with it."""
    with process() as executor:
        yield executor


def prove(claim: str) -> Outcome:
    return runner(claim)(Scale(is_full=False))


@pytest.mark.parametrize("claim", ["sequences"])
def test_the_claim_holds_and_its_control_is_caught(alone: Executor, claim: str) -> None:
    outcome = alone.submit(prove, claim).result()

    assert outcome.n > 0
    assert not outcome.violations
    assert outcome.is_control_caught


@pytest.mark.parametrize("seed", range(8))
def test_a_simulated_sequence_ends_where_its_objects_from_scratch_end(seed: int) -> None:
    assert run(seed).violations == ()
