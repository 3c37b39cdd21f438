"""`python -m sim`: run seeds; the last line is one JSON object. Exit 1 when an invariant broke."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from sim.campaign import run_all
from sim.run import Plan, Ran, run_seed
from sim.tally import Tally

HASH_SEED = "0"
TELL_S = 10.0
"""Between two lines of progress."""


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for."""
    given = _parser().parse_args(argv)
    plan = Plan(given.operations, given.check_every, has_repeats=given.repeats, has_damage=given.damage)
    if given.replay is not None:
        ran = run_seed(given.replay, replace(plan, tells=True))
        if given.verbose or ran.violations:
            _say(*ran.story[-given.lines :])
        return _report([ran], given)
    return _report(run_all(range(given.first_seed, given.first_seed + given.seeds), plan, given.jobs), given)


def _report(results: Iterable[Ran], given: argparse.Namespace) -> int:
    total, seeds, broken = Tally(), 0, 0
    started_s = told_s = time.monotonic()
    for ran in results:
        seeds += 1
        total.add(ran.tally)
        if given.hashes or given.replay is not None:
            _say(f"seed {ran.seed}: trace {ran.digest}")
        if ran.violations:
            broken += 1
            _tell(ran, given)
            if given.stop:
                break
        if time.monotonic() - told_s > TELL_S:
            told_s = time.monotonic()
            _say(f"{seeds} seeds, {total.operations:,} operations, {total.reads:,} reads, {broken} broken")
    counts = {name: round(value) for name, value in asdict(total).items()}
    took_s = time.monotonic() - started_s
    line = json.dumps({"sim": {"seeds": seeds, **counts, "violations": broken, "took_s": round(took_s, 1)}})
    if given.json:
        given.json.write_text(line + "\n")
    _say(line)
    return 1 if broken else 0


def _tell(ran: Ran, given: argparse.Namespace) -> None:
    for violation in ran.violations:
        _say(f"seed {ran.seed}: {violation}")
    same = f"--operations {given.operations} --check-every {given.check_every}"
    same += " --repeats" * given.repeats + " --damage" * given.damage
    _say(f"replay: PYTHONPATH=tests python -m sim --replay {ran.seed} {same}")


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sim", description="Simulate fleets; print the seed of whatever breaks.")
    parser.add_argument("--seeds", type=int, default=20, help="how many; default: %(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="where seeds start; default: %(default)s")
    parser.add_argument("--operations", type=int, default=1000, help="verbs of each seed; default: %(default)s")
    parser.add_argument("--check-every", type=int, default=50, help="operations between looks at all tables")
    parser.add_argument("--repeats", action="store_true", help="messages come twice and late in every seed")
    parser.add_argument("--damage", action="store_true", help="bytes are damaged often in every seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this seed alone and tell its end")
    parser.add_argument("--stop", action="store_true", help="end with the first seed that breaks")
    parser.add_argument("--verbose", action="store_true", help="with --replay: tell the story even if nothing broke")
    parser.add_argument("--lines", type=int, default=60, help="with --replay: lines of the story; default: %(default)s")
    parser.add_argument("--hashes", action="store_true", help="print the trace of each seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the last line to this file as well")
    return parser


def _fix_hashes() -> None:
    """Start this command anew with the hashes of strings that every run has: sets are walked in their order."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, (sys.executable, "-m", "sim", *sys.argv[1:]))  # noqa: S606  Of ourselves.


if __name__ == "__main__":
    _fix_hashes()
    sys.exit(main())
