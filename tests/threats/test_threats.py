"""Every threat, shortened: seconds each. `make threats` runs the counts of the table."""

import pytest

from support.runner.outcome import Scale
from threats.registry import RUNNABLE, runner

pytestmark = pytest.mark.system


@pytest.mark.parametrize("threat", RUNNABLE)
def test_the_threat_fails_and_its_control_succeeds(threat: str) -> None:
    outcome = runner(threat)(Scale(is_full=False))

    assert outcome.n > 0
    assert not outcome.violations
    assert outcome.is_control_caught
