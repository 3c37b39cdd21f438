"""The page of a proof, its line in the index of evidence, and its results, which another machine goes on with."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from proof.campaign import Ran, State
from proof.steps import ROOT, Command, Step

EVIDENCE: Final = ROOT / "docs/evidence"
_COUNTS_MAX: Final = 8
"""Figures of a step that stand in its row; all are in the state folder."""


def write(state: State, steps: Sequence[Step], folder: Path = EVIDENCE) -> Path:
    """Write the page of what ran so far and its results, newly each time, and put the page into the index once."""
    path = next(folder.glob(f"*-proof-{state.commit}.md"), folder / f"{datetime.now(UTC):%F}-proof-{state.commit}.md")
    path.write_text(page(state, steps))
    tries = {
        f"{step.name}/{c.name}": [asdict(each) for each in found]
        for step in steps
        for c in step.commands
        if (found := state.tries(step, c))
    }
    path.with_suffix(".json").write_text(json.dumps(tries, indent=1) + "\n")
    index = folder / "README.md"
    text = index.read_text()
    if path.name not in text:
        head = "|---|---|---|---|---|---|\n"
        at = text.index(head) + len(head)
        index.write_text(text[:at] + _row(state, steps, path.name) + text[at:])
    return path


def kept(commit: str, folder: Path = EVIDENCE) -> dict[str, list[Ran]]:
    """What `write` kept of a commit, on this machine or another one: tries by `STEP/COMMAND`."""
    return {
        name: [Ran(**each) for each in tries]
        for path in folder.glob(f"*-proof-{commit}.json")
        for name, tries in json.loads(path.read_text()).items()
    }


def page(state: State, steps: Sequence[Step]) -> str:
    """Commit, machines, a row for each step, each command that failed, and what was not run and why."""
    ran = [each for step in steps for c in step.commands if (each := state.last(step, c)) is not None]
    began, ended = min((r.began for r in ran), default="-"), max((r.ended for r in ran), default="-")
    loads = [r.load for r in ran] or [0.0]
    lines = [
        f"# Proof of commit {state.commit}",
        "",
        f"`python -m proof` on a clean checkout of {state.commit}, {began} to {ended}, in one sitting or several.",
        "",
        *(f"- {count} commands on {name}" for name, count in Counter(each.machine for each in ran).items()),
        "",
        f"Load {min(loads)} to {max(loads)} at the ends of commands.",
        "",
        "| step | what | commands held | counts | seconds | result |",
        "|---|---|--:|---|--:|---|",
    ]
    lines += [_step_row(state, step) for step in steps]
    failed = [
        f"- `{c.text}`: {_how(each)}, {each.began}, {each.seconds:.0f} s"
        for step in steps
        for c in step.commands
        for each in state.tries(step, c)
        if not each.is_held
    ]
    lines += ["", "## What failed", "", *(failed or ["Nothing that ran."])]
    lines += ["", "## What was not run", "", *(_left_out(state, steps) or ["Nothing."])]
    lines += ["", "## Commands that ran, with `PYTHONPATH=tests`", ""]
    lines += [
        f"- `{_typed(step, c)}`: {each.began}, {each.seconds:.0f} s, exit status {each.exit}"
        for step in steps
        for c in step.commands
        if (each := state.last(step, c)) is not None
    ]
    return "\n".join(lines) + "\n"


def result(state: State, step: Step) -> str:
    """`held`, `FAILED`, `open`, `not run`, or which goal was not reached."""
    done = _done(state, step)
    if any(not ran.is_held for ran in done):
        return "FAILED"
    if not done:
        return "not run"
    if any(ran.is_empty for ran in done):
        return "left out in part"
    if len(done) < len(step.commands):
        return "open"
    short = _short(state.counts(step), step.goals)
    return f"short of {short}" if short else "held"


def _short(counts: Mapping[str, float], goals: Mapping[str, int]) -> str:
    return ", ".join(f"{goal:,} {name}" for name, goal in goals.items() if counts.get(name, 0) < goal)


def _done(state: State, step: Step) -> list[Ran]:
    return [ran for command in step.commands if (ran := state.last(step, command)) is not None]


def _step_row(state: State, step: Step) -> str:
    done = _done(state, step)
    held = sum(ran.is_held and not ran.is_empty for ran in done)
    seconds = f"{sum(ran.seconds for ran in done):,.0f}" if done else "-"
    return (
        f"| {step.name} | {step.shows} | {held} of {len(step.commands)} | {_counts(state, step)} | {seconds} "
        f"| {result(state, step)} |"
    )


def _counts(state: State, step: Step) -> str:
    """The step's goals first, then what is left of the first figures that are not nothing."""
    counts = state.counts(step)
    goals = [f"{name} {counts[name]:,.0f} of {goal:,}" for name, goal in step.goals.items()]
    if goals:
        return ", ".join([*goals, f"violations {counts['violations']:,.0f}"])
    each = [
        f"{c.name} {ran.counts['n']:,.0f}"
        for c in step.commands
        if (ran := state.last(step, c)) is not None and "n" in ran.counts
    ]
    others = Counter(
        {name: value for name, value in counts.items() if name in ("caught", "total", "passed", "skipped")}
    )
    return ", ".join([*each, *(f"{name} {value:,.0f}" for name, value in others.items())]) or _first(counts)


def _first(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.6g}" for name, value in list(counts.items())[:_COUNTS_MAX]) or "-"


def _left_out(state: State, steps: Sequence[Step]) -> list[str]:
    lines = []
    for step in steps:
        missing = [c for c in step.commands if state.last(step, c) is None]
        if lack := step.lacks():
            lines.append(f"- {step.name}: {lack}")
        elif missing:
            lines.append(f"- {step.name}: {len(missing)} of {len(step.commands)} commands are open: {_names(missing)}")
        for command in step.commands:
            ran = state.last(step, command)
            if ran is not None and ran.is_empty:
                lines.append(f"- {step.name}/{command.name}: its tests left themselves out; the log says why")
            elif ran is not None and ran.counts.get("skipped"):
                lines.append(
                    f"- {step.name}/{command.name}: {ran.counts['skipped']:,.0f} tests left out; the log says why"
                )
    return lines


def _names(commands: Sequence[Command]) -> str:
    names = [command.name for command in commands]
    return ", ".join(names) if len(names) <= _COUNTS_MAX else f"{names[0]} to {names[-1]}"


def _typed(step: Step, command: Command) -> str:
    settings = [f"{name}={value}" for name, value in step.environment.items()]
    return " ".join((*settings, command.text))


def _how(ran: Ran) -> str:
    return ran.why or f"exit status {ran.exit}"


def _row(state: State, steps: Sequence[Step], name: str) -> str:
    held = [step.name for step in steps if result(state, step) == "held"]
    shown = f"held: {', '.join(held)}" if held else "the page says what"
    return (
        f"| {datetime.now(UTC):%F} | `make proof` | {state.commit} | the page says it | {shown} | [proof]({name}) |\n"
    )
