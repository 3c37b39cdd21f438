"""`python -m proof`: run every full count on this commit; stop it at any time, and call it again to go on.

Exit 0 when all that ran held, 1 when something failed, 2 for wrong usage, 130 when it was stopped.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from proof import report
from proof.campaign import ProofError, State, check_tree, head, open_commands, run
from proof.steps import ROOT, SOAK_MINUTES, Step, steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run, list or report."""
    given = _parser().parse_args(argv)
    for signum in (signal.SIGINT, signal.SIGTERM):  # A shell's background job would ignore the first.
        signal.signal(signum, signal.default_int_handler)
    try:
        chosen = choose(steps(given.minutes), given.only)
        commit = head()
        state = State(given.state or ROOT / "build/proof" / commit, commit, report.kept(commit))
        if given.list:
            _list(state, chosen)
            return 0
        if given.report:
            sys.stdout.write(f"{report.write(state, steps(given.minutes))}\n")
            return 0
        check_tree(commit)
        with state.locked(chosen):
            return int(not run(state, chosen, hours=given.hours, again=given.again))
    except ProofError as e:
        sys.stderr.write(f"proof: {e}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("proof: stopped; the same command goes on from here\n")
        return 130


def choose(known: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """Steps and commands by name: `threats`, or `threats/T5`. Raises `ProofError` for one that is not known."""
    if not only:
        return list(known)
    chosen: dict[str, Step] = {}
    by_name = {step.name: step for step in known}
    for asked in only:
        name, _, part = asked.partition("/")
        if name not in by_name:
            raise ProofError(f"--only {asked}: one of {', '.join(by_name)} is wanted")
        step = by_name[name]
        commands = tuple(c for c in step.commands if c.name == part) if part else step.commands
        if not commands:
            raise ProofError(f"--only {asked}: {name} has {', '.join(c.name for c in step.commands)}")
        before = chosen[name].commands if name in chosen else ()
        chosen[name] = replace(step, commands=(*before, *(c for c in commands if c not in before)))
    return list(chosen.values())


def _list(state: State, chosen: Sequence[Step]) -> None:
    for step in chosen:
        todo = open_commands(state, [step], again=False)
        left_s = sum(state.expected_s(*each) for each in todo)
        standing = step.lacks() or f"{report.result(state, step)}, {len(todo)} of {len(step.commands)} open"
        sys.stdout.write(f"{step.name:<15} {left_s / 3600:>5.1f} h  {standing:<28}  {step.shows}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STEP", help="steps to run, or STEP/COMMAND; default: all"
    )
    parser.add_argument("--list", action="store_true", help="say what there is and what is open, and run nothing")
    parser.add_argument("--hours", type=float, metavar="N", help="run what fits into N hours; the rest stays open")
    parser.add_argument("--minutes", type=int, default=SOAK_MINUTES, help="of the soak; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="run what failed once more; every try stays in the report")
    parser.add_argument(
        "--report", action="store_true", help="write docs/evidence/DATE-proof-COMMIT.md and .json, and run nothing"
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help="where results are kept; default: build/proof/COMMIT")
    return parser


if __name__ == "__main__":
    sys.exit(main())
