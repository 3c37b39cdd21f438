"""The conformance kit: our own client passes it, and whatever gets one thing wrong fails where it should."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata_client.conformance.driver import ConformanceError, Driver
from kvstrata_client.conformance.scenarios import SCENARIOS, run
from kvstrata_client.conformance.stage import Stage
from support.client.conformance_kit import kit
from support.client.wrong_program import WRONG
from support.runner.alone import environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PATIENT_S = 60.0


def test_our_own_client_passes() -> None:
    ended = kit("--answer-s", str(PATIENT_S))
    assert (ended.status, ended.told) == (0, {"passed": len(SCENARIOS), "failed": 0, "failures": {}}), ended.errors
    assert [row.split()[0] for row in ended.rows] == list(SCENARIOS)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Path]]:
    """One stage for all of them: the program reads what to get wrong."""
    fault = tmp_path_factory.mktemp("wrong") / "fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        command = (sys.executable, "-m", "support.client.wrong_program", str(fault))
        with Stage(command, PATIENT_S) as stage:
            yield stage, fault


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_gets_one_thing_wrong_fails_there(wrong: tuple[Stage, Path], name: str) -> None:
    stage, fault = wrong
    fault.write_text(name)
    outcome = run(stage, name)
    assert outcome.failure.startswith(ConformanceError.__name__), outcome


def test_every_scenario_has_a_program_that_fails_it() -> None:
    assert list(WRONG) == list(SCENARIOS)


def test_a_failure_is_told_by_table_json_and_exit_status() -> None:
    ended = kit("--scenario", "vectors", "--", sys.executable, "-c", "input(); print('[1]')")
    assert (ended.status, ended.told["passed"], ended.told["failed"]) == (1, 0, 1)
    assert "no JSON object" in ended.told["failures"]["vectors"]
    assert ended.rows[0].startswith("vectors   FAILED")
    listed = kit("--list")
    assert (listed.status, len(listed.rows)) == (0, len(SCENARIOS))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("input(); print('nonsense')", "is no JSON"),
        ("input(); raise SystemExit(3)", "ended, with status 3"),
        ("import time; time.sleep(600)", "no answer within"),
        ("input(); print('x' * (5 << 20))", "more than"),
    ],
)
def test_whatever_the_program_does_the_kit_says_what_was_wrong(program: str, said: str) -> None:
    with Driver((sys.executable, "-c", program), 5.0) as driver, pytest.raises(ConformanceError, match=said):
        driver.ask("keys")


def test_a_program_that_there_is_not_is_named() -> None:
    with pytest.raises(ConformanceError, match="no-such-program: No such file"):
        Driver(("no-such-program",), 2.0)
