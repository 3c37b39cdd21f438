"""Command that tries a client of the protocol, or a library of the offload interface: conformance."""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Final

from kvstrata_api.errors import UnsupportedError
from kvstrata_client.commands.output import UsageError, table
from kvstrata_client.conformance import offload
from kvstrata_client.conformance.scenarios import SCENARIOS, Outcome, demand, run
from kvstrata_client.conformance.stage import Stage
from kvstrata_native.offload import OffloadError, load_api

REFERENCE: Final = (sys.executable, "-m", "kvstrata_client.conformance.reference")
ANSWER_S: Final = 30.0


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata conformance --scenario vectors -- ./my-client"
    found.description = (
        "Starts an agent of its own in a temporary folder (needs the extra `agent`), starts COMMAND for "
        "each scenario, and asks it for operations: one JSON object a line on its standard input, one answer a line on "
        "its standard output (docs/protocol.md has them). Prints a table, and as its last line one JSON object. The "
        "exit status is 0 when every scenario passed. With --offload it tries a shared library of the offload "
        "interface instead (docs/offload.md), each check in a process of its own, without an agent."
    )
    found.add_argument("--offload", type=Path, metavar="LIBRARY", help="try this library and no client")
    found.add_argument(
        "--scenario",
        action="append",
        choices=[*SCENARIOS, *offload.CHECKS],
        metavar="NAME",
        help="only this one, of those that --list prints; may be given again",
    )
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
    known, says = (offload.CHECKS, offload.demand) if given.offload is not None else (SCENARIOS, demand)
    names = given.scenario or list(known)
    strange = [name for name in names if name not in known]
    if strange:
        raise UsageError(f"--scenario {strange[0]}: is {'not ' if given.offload else ''}one of --offload")
    if given.list:
        sys.stdout.write("".join(f"{line}\n" for line in table(("scenario", "demands"), [(n, says(n)) for n in names])))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # The agent and its folder go as with Ctrl-C.
    if given.offload is not None:
        _refuse_other(given.offload)
        outcomes = [offload.run(given.offload, name, given.answer_s) for name in names]
    else:
        with Stage(given.command_line or REFERENCE, given.answer_s) as stage:
            outcomes = [run(stage, name) for name in names]
    sys.stdout.write(
        "".join(f"{line}\n" for line in table(("scenario", "outcome", "took", "why"), map(_row, outcomes)))
    )
    failed = {o.name: o.failure for o in outcomes if o.failure}
    told = {"passed": len(outcomes) - len(failed), "failed": len(failed), "failures": failed}
    sys.stdout.write(json.dumps({"conformance": told}) + "\n")
    return int(bool(failed))


def _refuse_other(library: Path) -> None:
    """Raise `UnsupportedError` for what has no such interface, before anything is tried."""
    try:
        load_api(library)
    except OffloadError as e:
        raise UnsupportedError(str(e)) from e


def _row(outcome: Outcome) -> tuple[str, str, str, str]:
    is_good = not outcome.failure
    why = outcome.demand if is_good else outcome.failure
    return outcome.name, "passed" if is_good else "FAILED", f"{outcome.duration_s:.1f} s", why
