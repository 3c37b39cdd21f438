"""No crash state of short operation sequences loses a synced block, serves wrong bytes or takes too much room."""

import pytest
from crash.replay import Findings, Step, replay
from crash.sequences import SCRIPTED, generated
from hypothesis import given, settings
from sim.volume import MemoryVolume

from kvstrata_agent.backends.file.index_file import IndexFile
from kvstrata_agent.backends.file.segment import Segment

pytestmark = pytest.mark.contract

SHORT = 300
"""More images at one point than that are not all tried; the full run of I9 tries up to 2,000."""


@pytest.mark.parametrize("told", SCRIPTED)
def test_every_crash_state_of_a_sequence_keeps_what_was_promised(told: str) -> None:
    findings = replay(SCRIPTED[told], most=SHORT)

    assert findings.states > findings.points / 3
    assert findings.violations == []


@pytest.mark.parametrize("told", list(SCRIPTED)[::3])
def test_sealed_stores_keep_the_same_promises(told: str) -> None:
    findings = replay(SCRIPTED[told], most=60, is_sealed=True)

    assert findings.states > findings.points / 3
    assert findings.violations == []


@settings(max_examples=12, deadline=None)
@given(generated)
def test_every_crash_state_of_generated_sequences_keeps_what_was_promised(steps: tuple[Step, ...]) -> None:
    assert replay(steps, most=40).violations == []


def run_all() -> Findings:
    """Run the scripted sequences until one of them finds something."""
    total = Findings()
    for steps in SCRIPTED.values():
        found = replay(steps, most=100)
        total.states += found.states
        if found.violations:
            return found
    return total


async def _nothing(*_: object) -> None:
    """Skip what should be done."""


def test_an_index_that_is_not_marked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexFile, "touch", _nothing)

    assert run_all().violations


def test_names_that_are_not_synced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryVolume, "sync", _nothing)

    assert run_all().violations


def test_drops_that_are_not_buried_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "punch", _nothing)

    assert run_all().violations
