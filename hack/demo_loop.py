"""Run the demo many times, alone or beside another command, and tell of each; the last line is one JSON object.

python hack/demo_loop.py --times 30 --log docs/evidence/demos.txt
python hack/demo_loop.py --times 10 --beside "make check"
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Ran:
    """One demo."""

    number: int
    status: int
    took_s: float
    load: float
    """Processes that wanted a processor in the minute before its end."""
    problem: str
    """What its last line says went wrong; empty when nothing did."""


def main() -> int:
    """Run them; 0 when none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30, help="demos; default 30")
    parser.add_argument("--beside", metavar="COMMAND", help="run this meanwhile, again and again")
    parser.add_argument("--log", type=Path, help="write the same lines to this file")
    given = parser.parse_args()
    is_over = threading.Event()
    beside = threading.Thread(target=_run_beside, args=(given.beside, is_over))
    if given.beside:
        beside.start()
    lines: list[str] = []
    try:
        ran = []
        for number in range(1, given.times + 1):
            ran.append(run(number))
            lines.append(_line(ran[-1]))
            sys.stdout.write(lines[-1])
            sys.stdout.flush()
    finally:
        is_over.set()
        if given.beside:
            beside.join()
    failed = [asdict(r) for r in ran if r.status]
    times_s = sorted(r.took_s for r in ran)
    told = {"demos": len(ran), "failed": failed, "beside": given.beside or "", "median_s": times_s[len(times_s) // 2]}
    lines.append(json.dumps(told | {"slowest_s": times_s[-1]}) + "\n")
    sys.stdout.write(lines[-1])
    if given.log is not None:
        given.log.write_text("".join(lines))
    return int(bool(failed))


def run(number: int) -> Ran:
    """Run one demo, from `make` on."""
    began_s = time.monotonic()
    done = subprocess.run(["make", "-s", "demo"], cwd=ROOT, capture_output=True, text=True, check=False)
    took_s = round(time.monotonic() - began_s, 1)
    last = (done.stdout.splitlines() or [""])[-1]
    try:
        problem = str(json.loads(last)["demo"].get("problem", ""))
    except (ValueError, KeyError):
        problem = (done.stderr.strip() or last or "no output")[-500:]
    return Ran(number, done.returncode, took_s, os.getloadavg()[0], problem if done.returncode else "")


def _line(ran: Ran) -> str:
    outcome = f"failed ({ran.status}): {ran.problem}" if ran.status else "passed"
    return f"{ran.number:3}  {ran.took_s:6.1f} s  load {ran.load:4.1f}  {outcome}\n"


def _run_beside(command: str, is_over: threading.Event) -> None:
    while not is_over.is_set():
        subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
