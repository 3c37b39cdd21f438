"""The command line of every suite of proofs: rows that are run at full or at short counts, one JSON line last."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.runner.outcome import Outcome, Scale


@dataclass(frozen=True, slots=True)
class Suite:
    """A table of claims and what runs each."""

    name: str
    """Of the module, and the key of the JSON line."""
    about: str
    rows: Mapping[str, str]
    """What is claimed, by the name of the row."""
    runner: Callable[[str], Callable[[Scale], Outcome]]

    def main(self, argv: list[str] | None = None) -> int:
        """Run what was asked for, one after the other. Exit 1 when a row did not hold, 2 for one that is unknown."""
        given = self._parser().parse_args(argv)
        unknown = [name for name in given.only if name not in self.rows]
        if unknown:
            sys.stderr.write(f"{self.name}: --only {unknown[0]}: one of {', '.join(self.rows)} is wanted\n")
            return 2
        outcomes = {}
        for name in given.only or self.rows:
            started_s = time.monotonic()
            sys.stdout.write(f"{name:<3} {self.rows[name]} ...\n")
            sys.stdout.flush()
            outcome = outcomes[name] = self.runner(name)(Scale(is_full=given.full, first_seed=given.first_seed))
            _tell(name, outcome, time.monotonic() - started_s)
        line = json.dumps({self.name: {name: _json(outcome) for name, outcome in outcomes.items()}})
        if given.json:
            given.json.write_text(line + "\n")
        sys.stdout.write(line + "\n")
        return 0 if all(o.is_held for o in outcomes.values()) else 1

    def _parser(self) -> argparse.ArgumentParser:
        first = next(iter(self.rows))
        parser = argparse.ArgumentParser(prog=self.name, description=self.about)
        parser.add_argument("--full", action="store_true", help="the counts of the table; default: seconds each")
        parser.add_argument("--only", nargs="+", default=[], metavar=first, help="rows to run; default: all")
        parser.add_argument("--first-seed", type=int, default=0, help="where seeds start; default: %(default)s")
        parser.add_argument("--json", type=Path, help="write the last line to this file as well")
        return parser


def _tell(name: str, outcome: Outcome, took_s: float) -> None:
    verdict = "held" if outcome.is_held else "BROKEN"
    control = "control caught" if outcome.is_control_caught else "CONTROL NOT CAUGHT"
    values = "".join(f", {key} {value:.6g}" for key, value in outcome.values.items())
    sys.stdout.write(f"    {verdict}: {outcome.n:,} {outcome.unit}, {control}{values}, {took_s:.1f} s\n")
    for violation in outcome.violations[:10]:
        sys.stdout.write(f"    {name} broken: {violation}\n")
    sys.stdout.flush()


def _json(outcome: Outcome) -> dict[str, object]:
    return {
        "held": outcome.is_held,
        "n": outcome.n,
        "unit": outcome.unit,
        "control": outcome.is_control_caught,
        "violations": len(outcome.violations),
        **outcome.values,
    }
