"""`python -m redteam`: the attacks on the systems; the last line is one JSON object. Exit 1 when one harms kvstrata."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.harness.drivers import ROOT, end_on_sigterm
from bench.harness.drivers import AbsentError as PeerAbsentError
from redteam.attacks import ATTACKS, DISK_BYTES, HARM, Arena, Result, Seen
from redteam.systems import SYSTEMS, AbsentError, Entry

Json = dict[str, Any]
ABSENT: Final = (AbsentError, PeerAbsentError)


@contextmanager
def small_disk(at: Path) -> Iterator[None]:
    """A file system in memory with little room."""
    at.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(at)), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", "-l", str(at)), check=True)


@contextmanager
def arena(entry: Entry, scale: int, *, is_small: bool) -> Iterator[Arena]:
    """A system that runs. Raises `AbsentError`."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvr-")))
        disk = home / "disk"
        if is_small:
            stack.enter_context(small_disk(disk))
        system = entry.make(home, disk)
        stack.callback(system.kill)
        system.start()
        yield Arena(system, stack, scale)


def attack(entry: Entry, names: list[str], scale: int) -> Iterator[tuple[str, Result, float]]:
    """Try attacks on one system: those that may share one, then those that want one each."""
    shared = [name for name in names if not ATTACKS[name].is_alone]
    groups = [shared] if shared else []
    for group in groups + [[name] for name in names if ATTACKS[name].is_alone]:
        left = list(group)
        try:
            with arena(entry, scale, is_small=group == ["full"]) as made:
                while left:
                    yield _tried(made, left.pop(0))
        except ABSENT as e:
            yield from ((name, Result(Seen.FAILED, str(e)), 0.0) for name in left)


def _tried(made: Arena, name: str) -> tuple[str, Result, float]:
    started_s = time.monotonic()
    try:
        result = ATTACKS[name].run(made)
    except ABSENT:
        raise
    except Exception as e:  # noqa: BLE001  What stops an attack is told, and the others go on.
        result = Result(Seen.FAILED, " ".join(f"{type(e).__name__}: {e}".split())[:400])
    return name, result, time.monotonic() - started_s


def run(systems: list[str], attacks: list[str], scale: int) -> Json:
    """All attacks on all systems; a line for each as it comes."""
    rows = []
    for system in systems:
        entry = SYSTEMS[system]
        for name, result, took_s in attack(entry, attacks, scale):
            row = {
                "system": system,
                "attack": name,
                "seen": str(result.seen),
                "outside": entry.outside.get(name, ""),
                "evidence": result.evidence,
                "seconds": round(took_s, 1),
                **({"values": dict(result.values)} if result.values else {}),
            }
            rows.append(row)
            print(f"{system:18} {name:8} {result.seen:15} {took_s:6.1f} s  {result.evidence[:400]}", flush=True)
    return {"rows": rows}


def about() -> Json:
    """What was run, and on what."""
    commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        "commit": commit.strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        "versions": {"LMCache": "0.5.6", "Mooncake": "0.3.13.post1"},
    }


def main() -> int:
    """Parse the command line and run; 1 when an attack harms kvstrata."""
    parser = argparse.ArgumentParser(prog="redteam", description=__doc__)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="default: all")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS, help="default: all")
    parser.add_argument("--full", action="store_true", help="twice the counts; default: short")
    parser.add_argument("--json", type=Path, help="write the last line to this file, indented")
    given = parser.parse_args()
    end_on_sigterm()
    said = {"redteam": {**about(), **run(given.systems, given.attacks, 2 if given.full else 1)}}
    if given.json:
        given.json.write_text(json.dumps(said, indent=1) + "\n")
    print(json.dumps(said))
    harmed = [
        row for row in said["redteam"]["rows"]
        if SYSTEMS[row["system"]].is_ours and row["seen"] in (*map(str, HARM), str(Seen.FAILED))
    ]  # fmt: skip
    return int(bool(harmed))


if __name__ == "__main__":
    sys.exit(main())
