"""Run tests in several processes, once, and say where the time went.

Most tests with real servers wait for most of their time: for a Lease to run out, a process to start, a watch to break.
So three of them at a time keep two cores busy. They are handed out in runs of neighbours, which share the servers of
their file, and whoever has nothing left takes over half of what another one has still to do.

No test has a second try: what fails now and then is a defect of the product, or of the test. A test that hangs beyond
its timeout is ended with the stacks of its threads, counts as failed, and the others go on. A file that leaves a
process or a file behind, and a run that leaves a mount or huge pages, fail (tests/support/runner).
"""

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WORKERS: Final = 3
SLOWEST: Final = 10
MESSAGE_MAX: Final = 200
RESULTS: Final = Path("build/tests")


@dataclass(frozen=True, slots=True)
class Case:
    """One test that has run."""

    level: str
    """Folder below tests/."""
    name: str
    took_s: float
    """Set-up and tear-down included."""
    skipped: str
    """Why it was left out; empty when it ran."""
    failures: tuple[str, ...]
    """What failed in it, the first line of each; a test and what follows it can fail both."""


def main() -> int:
    """Run what is given; 0 when every test passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"test processes; default {WORKERS}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for a JUnit file and pytest's cache")
    parser.add_argument("--apart", nargs="*", default=[], help="files and folders for a pytest of their own, meanwhile")
    parser.add_argument("tests", nargs="+", help="files and folders, as for pytest")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    runs = {"main": ["-n", str(given.workers), "--dist", "worksteal", *given.tests]}
    if given.apart:
        runs["apart"] = given.apart
    files = {name: given.results / f"{name}.xml" for name in runs}
    for file in files.values():
        file.unlink(missing_ok=True)
    log = given.results / "apart.log"
    with log.open("w") as output:
        apart = _start(given.results, "apart", runs["apart"], output) if given.apart else None
        status = _start(given.results, "main", runs["main"], None).wait()
        if apart is not None:
            status = apart.wait() or status
            sys.stdout.write(log.read_text())
    cases = [case for file in files.values() if file.exists() for case in read(file)]
    sys.stdout.write(summary(cases))
    return status


def _start(results: Path, name: str, arguments: Sequence[str], output: object) -> subprocess.Popen[bytes]:
    fixed = ("-q", f"--junitxml={results / name}.xml", "-o", f"cache_dir={results / name}-cache")
    return subprocess.Popen([sys.executable, "-m", "pytest", *fixed, *arguments], stdout=output)  # type: ignore[call-overload,no-any-return]


def read(file: Path) -> list[Case]:
    """Cases of a JUnit file that pytest wrote itself."""
    cases = []
    for case in ET.parse(file).getroot().iter("testcase"):  # noqa: S314
        place = (case.get("classname") or "").split(".")
        skipped = case.find("skipped")
        cases.append(
            Case(
                level=place[1] if place[0] == "tests" and len(place) > 1 else place[0],
                name="::".join((".".join(place), case.get("name") or "")),
                took_s=float(case.get("time") or 0.0),
                skipped="" if skipped is None else (skipped.get("message") or "no reason"),
                failures=tuple(
                    (found.get("message") or "no message").strip().splitlines()[0][:MESSAGE_MAX]
                    for found in (*case.iter("failure"), *case.iter("error"))
                ),
            )
        )
    return cases


def summary(cases: Sequence[Case]) -> str:
    """Time and counts of each level, the slowest tests, and what was skipped with its reasons."""
    lines = ["", "level            tests  seconds (of all its tests one after the other)"]
    for level in dict.fromkeys(case.level for case in cases):
        of_it = [case for case in cases if case.level == level]
        lines.append(f"{level:<15} {len(of_it):>6} {sum(case.took_s for case in of_it):>8.0f}")
    lines += ["", f"slowest {SLOWEST}:"]
    slowest = sorted(cases, key=lambda case: -case.took_s)[:SLOWEST]
    lines += [f"{case.took_s:>8.1f} s  {case.name}" for case in slowest]
    reasons = Counter(case.skipped for case in cases if case.skipped)
    lines += ["", f"skipped: {sum(reasons.values())}", *(f"{count:>6}  {why}" for why, count in reasons.most_common())]
    failed: dict[str, list[str]] = {}
    for case in cases:
        if case.failures:
            failed.setdefault(case.name, []).extend(case.failures)
    lines += ["", f"failed: {len(failed)}"]
    for name, failures in failed.items():
        lines += [f"        {name}", *(f"            {failure}" for failure in failures)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
