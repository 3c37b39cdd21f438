"""The proof of a commit: what is kept of each command, what runs again, and what the page says of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proof import campaign, report
from proof.__main__ import choose
from proof.campaign import ProofError, Ran, State, counts_of, open_commands
from proof.steps import ROOT, Command, Step, steps

pytestmark = pytest.mark.unit

COMMIT = "0123456789"


def command(name: str, code: str) -> Command:
    return Command(name, ("python", "-c", code), 1.0)


def step(*commands: Command, **goals: int) -> Step:
    return Step("one", "something", commands, goals)


PASSES = command("passes", 'print(\'{"sim": {"seeds": 3, "reads": 10}}\')')
FAILS = command("fails", "raise SystemExit(3)")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Of a tree that stays as it is."""
    monkeypatch.setattr(campaign, "check_tree", lambda _: None)
    return State(tmp_path / "state", COMMIT)


def test_what_has_ended_is_kept_and_does_not_run_again(state: State) -> None:
    both = step(PASSES, FAILS)

    assert not campaign.run(state, [both], hours=None, again=False)

    assert open_commands(state, [both], again=False) == []
    assert [c.name for _, c in open_commands(state, [both], again=True)] == ["fails"]
    assert campaign.run(State(state.folder, COMMIT), [both], hours=None, again=False)


def test_a_command_that_was_stopped_is_open(state: State) -> None:
    stops = command("stops", "import os, signal; os.kill(os.getppid(), signal.SIGINT); input()")
    with pytest.raises(KeyboardInterrupt):
        campaign.run(state, [step(PASSES, stops)], hours=None, again=False)

    assert [c.name for _, c in open_commands(state, [step(PASSES, stops)], again=False)] == ["stops"]


def test_a_second_interrupt_leaves_no_command_behind(state: State) -> None:
    again = "signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))"
    first = "print(os.getpid(), flush=True); os.kill(os.getppid(), signal.SIGINT)"
    stops = command("stops", f"import os, signal, time; {again}; {first}\nwhile True: time.sleep(9)")
    with pytest.raises(KeyboardInterrupt):
        campaign.run(state, [step(stops)], hours=None, again=False)

    pid = int(state.log(step(stops), stops).read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_every_try_of_a_failure_is_told(state: State) -> None:
    for _ in range(2):
        campaign.run(state, [step(FAILS)], hours=None, again=True)

    failed = report.page(state, [step(FAILS)]).split("## What failed")[1].split("\n## ")[0]
    assert failed.count("exit status 3") == 2


def test_a_changed_command_is_another_one(state: State) -> None:
    campaign.run(state, [step(PASSES)], hours=None, again=False)

    assert open_commands(state, [step(replace(PASSES, argv=("python", "-V")))], again=False)


def test_what_does_not_fit_stays_open(state: State) -> None:
    long = replace(PASSES, name="long", expected_s=7_200.0)

    assert campaign.run(state, [step(long, PASSES)], hours=1.0, again=False)

    assert [c.name for _, c in open_commands(state, [step(long, PASSES)], again=False)] == ["long"]


def test_estimates_follow_what_was_measured(state: State) -> None:
    slow = step(replace(PASSES, expected_s=10.0), replace(FAILS, expected_s=30.0))
    ran = Ran(PASSES.text, "a", "b", 20.0, 0, {}, 0.0, "2 cores")
    state.add(slow, PASSES, ran)

    assert state.expected_s(slow, slow.commands[1]) == 60.0


def test_a_state_belongs_to_one_commit_and_a_step_to_one_run(state: State) -> None:
    with pytest.raises(ProofError, match="belongs to commit 0123456789"):
        State(state.folder, "abcdefabcd")
    one, other = step(PASSES), replace(step(PASSES), name="other")
    with (
        state.locked([one]),
        State(state.folder, COMMIT).locked([other]),
        pytest.raises(ProofError, match="one: another proof runs"),
        State(state.folder, COMMIT).locked([one]),
    ):
        pass


def test_a_goal_that_is_not_reached_is_no_proof(state: State) -> None:
    for wanted, said in ((10, "held"), (11, "short of 11 reads")):
        some = step(PASSES, reads=wanted)
        campaign.run(state, [some], hours=None, again=False)
        assert report.result(state, some) == said


def test_tests_that_leave_themselves_out_prove_nothing(state: State) -> None:
    empty = step(command("empty", "print('5 skipped in 0.1s')"))
    campaign.run(state, [empty], hours=None, again=False)

    assert report.result(state, empty) == "left out in part"
    assert "one/empty: its tests left themselves out" in report.page(state, [empty])


def test_the_page_says_commit_machine_results_and_what_is_open(state: State, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("| a |\n|---|---|---|---|---|---|\n| b |\n")
    some, other = step(PASSES, FAILS), replace(step(PASSES), name="other")
    campaign.run(state, [some], hours=None, again=False)

    path = report.write(state, [some, other], tmp_path)
    report.write(state, [some, other], tmp_path)

    text = path.read_text()
    assert path.name.endswith(f"-proof-{COMMIT}.md")
    assert f"- 2 commands on {len(os.sched_getaffinity(0))} cores " in text
    assert "| one | something | 1 of 2 |" in text
    assert "other: 1 of 1 commands are open: passes" in text
    assert f"- `{PASSES.text}`: 2" in text
    assert (tmp_path / "README.md").read_text().count(path.name) == 1


def test_another_machine_goes_on_with_what_a_report_kept(state: State, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("| a |\n|---|---|---|---|---|---|\n| b |\n")
    both = step(PASSES, FAILS)
    for _ in range(2):
        campaign.run(state, [both], hours=None, again=True)
    page = report.write(state, [both], tmp_path).read_text()

    other = State(tmp_path / "other", COMMIT, report.kept(COMMIT, tmp_path))

    assert open_commands(other, [both], again=False) == []
    assert report.write(other, [both], tmp_path).read_text() == page
    campaign.run(other, [both], hours=None, again=True)
    assert len(other.tries(both, FAILS)) == 3, "what is tried here comes on top"
    foreign = State(tmp_path / "foreign", "abcdefabcd", report.kept("abcdefabcd", tmp_path))
    assert len(open_commands(foreign, [both], again=False)) == 2


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ('{"faults": {"I3": {"held": true, "n": 5, "unit": "kills"}}}', {"n": 5}),
        ('{"faults": {"I1": {"n": 5}, "I2": {"n": 6}}}', {"I1.n": 5, "I2.n": 6}),
        ('{"sim": {"seeds": 2}}\nexit', {"seeds": 2}),
        ("3 passed, 1 skipped, 2 errors in 1s", {"passed": 3, "skipped": 1, "errors": 2}),
        ("nothing", {}),
    ],
)
def test_counts_come_from_the_last_line_that_has_some(output: str, counts: dict[str, float]) -> None:
    assert counts_of(output) == counts


def test_steps_and_their_commands_have_names_of_their_own_and_what_they_run_is_there() -> None:
    known = steps()
    assert len({s.name for s in known}) == len(known)
    for s in known:
        assert len({c.name for c in s.commands}) == len(s.commands)
        for part in (part for c in s.commands for part in c.argv if part.startswith(("tests/", "hack/"))):
            assert (ROOT / part).exists(), part


def test_seeds_of_fleets_follow_each_other_without_a_gap() -> None:
    for name in ("fleets", "checked-fleets"):
        end = 0
        for c in next(s for s in steps() if s.name == name).commands:
            given = dict(zip(c.argv, c.argv[1:], strict=False))
            assert int(given["--first-seed"]) == end
            end += int(given["--seeds"])


def test_a_step_or_a_command_of_it_is_chosen_by_name() -> None:
    chosen = choose(steps(), ["threats/T5", "threats/T6", "soak"])

    assert [(s.name, [c.name for c in s.commands]) for s in chosen] == [("threats", ["T5", "T6"]), ("soak", ["soak"])]
    with pytest.raises(ProofError, match=r"--only threats/T99: threats has T1, "):
        choose(steps(), ["threats/T99"])
    with pytest.raises(ProofError, match=r"--only nothing: one of tests, "):
        choose(steps(), ["nothing"])


def test_a_tree_that_is_no_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(("git", *named, *arguments), cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    commit = campaign.head()
    campaign.check_tree(commit)
    (tmp_path / "docs/evidence").mkdir(parents=True)
    for kind in ("md", "json"):
        (tmp_path / f"docs/evidence/2026-11-27-proof-{commit}.{kind}").touch()
    campaign.check_tree(commit)
    (tmp_path / "more.py").touch()
    with pytest.raises(ProofError, match=r"more\.py"):
        campaign.check_tree(commit)
    git("add", ".")
    git("commit", "-q", "-m", "second")
    with pytest.raises(ProofError, match="HEAD has moved"):
        campaign.check_tree(commit)


def test_what_is_kept_of_a_command_says_when_it_ran_and_how_it_ended(state: State) -> None:
    campaign.run(state, [step(PASSES)], hours=None, again=False)

    kept: list[dict[str, Any]] = json.loads((state.folder / "one/passes.json").read_text())
    assert kept[0]["exit"] == 0
    assert kept[0]["counts"] == {"seeds": 3, "reads": 10}
    assert kept[0]["began"] <= kept[0]["ended"]
    assert kept[0]["command"].startswith("python -c")
    assert sys.executable not in kept[0]["command"]
