"""The soak in its short form: a few rounds of faults under load. `make soak` runs it for hours."""

import pytest
from soak import faults
from soak.script import Soak

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

MINUTES = 1.5
"""From the first process on: some four rounds, then the end of the one that is under way."""


def test_nothing_is_wrong_under_load_and_faults() -> None:
    soak = Soak(seed=7, say=print)

    soak.run(MINUTES)

    assert not soak.wrong, "\n".join(soak.wrong)
    assert soak.rounds >= 1
    assert soak.figures["restored_blocks"] > 0
    assert set(soak.made) <= set(faults.FAULTS)
