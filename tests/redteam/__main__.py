"""`python -m redteam`: attacks on kvstrata and on what it is compared with; the last line is one JSON object.

Exit 1 when one harms kvstrata, or could not be carried out on it; what it does to others is told and no failure."""

import argparse
import json
import os
import platform
import re
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
from redteam import report
from redteam.attacks import ATTACKS, DISK_BYTES, HARM, Arena, Result, Seen
from redteam.systems import SYSTEMS, AbsentError, Entry

Json = dict[str, Any]
PACKAGES: Final = {"lmcache": "lmcache", "mooncake": "mooncake-transfer-engine-non-cuda"}
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
    for name in names:
        if entry.attacks and name not in entry.attacks:
            yield name, Result(Seen.ABSENT, entry.why), 0.0
    names = [name for name in names if not entry.attacks or name in entry.attacks]
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


def run(system: str, attacks: list[str], scale: int) -> Json:
    """Attacks on one system, by name; a line for each as it comes."""
    entry = SYSTEMS[system]
    rows: Json = {}
    for name, result, took_s in attack(entry, attacks, scale):
        rows[name] = {
            "seen": str(result.seen),
            "evidence": result.evidence,
            "seconds": round(took_s, 1),
            "commit": about()["commit"],
            **({"outside": entry.outside[name]} if name in entry.outside else {}),
            **({"values": dict(result.values)} if result.values else {}),
        }
        sys.stdout.write(f"{system:16} {name:8} {result.seen:15} {took_s:6.1f} s  {result.evidence}\n")
        sys.stdout.flush()
    return {**about(), "version": version(entry), "attacks": rows}


def version(entry: Entry) -> str:
    """Of the package that was attacked, as its environment is pinned; our own is the commit."""
    if entry.is_ours:
        return "this repository"
    pins = (ROOT / "requirements" / f"peers-{entry.peer}.txt").read_text()
    found = re.search(rf"^({PACKAGES[entry.peer]})==(\S+)", pins, re.MULTILINE)
    assert found is not None, "what an environment is named for is pinned"
    return f"{found[1]} {found[2]}"


def about() -> Json:
    """What was run, and on what."""
    commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    return {"commit": commit.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine}


def kept(file: Path) -> Json:
    """What a file tells of earlier runs, by system."""
    return dict(json.loads(file.read_text())["redteam"]) if file.exists() else {}


def merged(before: Json, ran: Json) -> Json:
    """What was seen last of every attack on every system, in the order of the table."""
    found = dict(before)
    for system, said in ran.items():
        rows = {**before.get(system, {}).get("attacks", {}), **said["attacks"]}
        found[system] = {**said, "attacks": {name: rows[name] for name in ATTACKS if name in rows}}
    return {name: found[name] for name in SYSTEMS if name in found}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; 1 when an attack harms kvstrata, or could not be carried out on it."""
    parser = argparse.ArgumentParser(prog="redteam", description=__doc__)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="default: all")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS, help="default: all")
    parser.add_argument("--full", action="store_true", help="twice the counts; default: short")
    parser.add_argument("--json", type=Path, help="put what was seen into this file; what was seen else stays")
    parser.add_argument("--page", type=Path, help="put the table of all that the file of --json tells into this page")
    given = parser.parse_args(argv)
    if given.page and not given.json:
        parser.error("--page: needs --json, whose file it shows")
    end_on_sigterm()
    ran = {}
    for system in given.systems:
        ran[system] = run(system, given.attacks, 2 if given.full else 1)
        if given.json:
            given.json.write_text(json.dumps({"redteam": merged(kept(given.json), ran)}, indent=1) + "\n")
    if given.page:
        report.write(given.page, kept(given.json))
    sys.stdout.write(json.dumps({"redteam": ran}) + "\n")
    ours = [row["seen"] for name, said in ran.items() if SYSTEMS[name].is_ours for row in said["attacks"].values()]
    return int(any(seen in HARM or seen == Seen.FAILED for seen in ours))


if __name__ == "__main__":
    sys.exit(main())
