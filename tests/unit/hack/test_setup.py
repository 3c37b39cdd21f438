"""What a first run tells, and how it ends when something is missing."""

import io
import time
from collections.abc import Callable

import pytest

import setup
from setup import Progress, SetupError, Step, run

pytestmark = pytest.mark.unit


def step(name: str, do: Callable[[], None] = lambda: None, usual_s: float = 1.0) -> Step:
    return Step(name, usual_s, do)


def test_chains_run_beside_each_other_and_their_steps_in_order() -> None:
    done: list[str] = []
    todo = [[step(f"{chain}{i}", lambda n=f"{chain}{i}": done.append(n)) for i in range(3)] for chain in "ab"]  # type: ignore[misc]
    run(todo)
    assert [name for name in done if name[0] == "a"] == ["a0", "a1", "a2"]
    assert [name for name in done if name[0] == "b"] == ["b0", "b1", "b2"]


def test_a_step_that_fails_is_named_and_nothing_after_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[str] = []

    def fail() -> None:
        time.sleep(0.05)
        raise SetupError("no `go` on PATH")

    def slow() -> None:
        time.sleep(0.3)

    todo = [[step("building helm", fail), step("never", lambda: begun.append("never"))], [step("slow", slow)]]
    todo[1].append(step("late", lambda: begun.append("late")))
    with pytest.raises(SetupError, match=r"building helm: no `go` on PATH\nthe whole output is in build/setup.log"):
        run(todo)
    assert begun == []
    assert "ready" not in capsys.readouterr().err


def test_an_estimate_follows_the_pace_of_what_is_done() -> None:
    now_s = time.monotonic()
    done = Step("packages", 100.0, lambda: None, began_s=now_s - 200.0, took_s=200.0)
    running = Step("kube-apiserver", 200.0, lambda: None, began_s=now_s - 100.0)
    progress = Progress([[done], [running, step("helm", usual_s=50.0)]])

    assert progress.line() == "1 of 3 done; kube-apiserver (100 s); about 7 min left", "twice as slow: 300 + 100 s"


def test_nothing_to_do_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run([])
    assert capsys.readouterr().err == ""


def test_the_digest_covers_what_is_installed() -> None:
    assert all((setup.ROOT / name).is_file() for name in setup.SOURCES)
    assert setup.digest() == setup.digest()


def test_a_browser_that_cannot_be_installed_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    setup.install_browser(io.StringIO())

    assert "without chromium, tests of the page are skipped: programs are missing" in capsys.readouterr().err


def test_only_tests_need_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("controlplane.assets.missing_tools", lambda _: [])

    def steps(tools: dict[str, int]) -> list[str]:
        return [step.name for chain in setup.chains(tools, io.StringIO()) for step in chain]

    assert "chromium" in steps(setup.TESTS)
    assert "chromium" not in steps(setup.DEMO)
