"""Command that tries a client of the protocol: conformance."""

import argparse
import json
import signal
import sys
from typing import Final

from kvstrata_client.commands.output import table
from kvstrata_client.conformance.scenarios import SCENARIOS, Outcome, demand, run
from kvstrata_client.conformance.stage import Stage

REFERENCE: Final = (sys.executable, "-m", "kvstrata_client.conformance.reference")
ANSWER_S: Final = 30.0


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata conformance --scenario vectors -- ./my-client"
    found.description = (
        "Starts an agent of its own in a temporary folder (needs the extra `agent`), starts COMMAND for "
        "each scenario, and asks it for operations: one JSON object a line on its standard input, one answer a line on "
        "its standard output (docs/protocol.md has them). Prints a table, and as its last line one JSON object. The "
        "exit status is 0 when every scenario passed."
    )
    found.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be given again")
    found.add_argument("--list", action="store_true", help="print what each scenario demands, and end")
    found.add_argument(
        "--answer-s", type=float, default=ANSWER_S, help="seconds that an answer may take; default: %(default)s"
    )
    found.add_argument(
        "command_line",
        nargs="*",
        metavar="COMMAND",
        help="after --; default: a program over the client of this package",
    )
    found.set_defaults(run=_conformance)


def _conformance(given: argparse.Namespace) -> int:
    names = given.scenario or list(SCENARIOS)
    if given.list:
        sys.stdout.write(
            "".join(f"{line}\n" for line in table(("scenario", "demands"), [(n, demand(n)) for n in names]))
        )
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # The agent and its folder go as with Ctrl-C.
    with Stage(given.command_line or REFERENCE, given.answer_s) as stage:
        outcomes = [run(stage, name) for name in names]
    sys.stdout.write(
        "".join(f"{line}\n" for line in table(("scenario", "outcome", "took", "why"), map(_row, outcomes)))
    )
    failed = {o.name: o.failure for o in outcomes if o.failure}
    told = {"passed": len(outcomes) - len(failed), "failed": len(failed), "failures": failed}
    sys.stdout.write(json.dumps({"conformance": told}) + "\n")
    return int(bool(failed))


def _row(outcome: Outcome) -> tuple[str, str, str, str]:
    is_good = not outcome.failure
    why = outcome.demand if is_good else outcome.failure
    return outcome.name, "passed" if is_good else "FAILED", f"{outcome.duration_s:.1f} s", why
