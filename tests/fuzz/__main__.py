"""Fuzz everything that comes from outside: `python -m fuzz` (`make fuzz`).

Each target runs in processes of its own (`fuzz.session`), one target after the other, and goes on with the corpus that
was found before. What was executed is counted in build/fuzz/executions.json for each target and commit; inputs that
went new ways are kept in build/fuzz/corpus, and those that break a promise in build/fuzz/defects, each of which
`--replay FILE` tries once more. Exit status 1 where any was found. `--keep` puts the count, and the fewest inputs that
go all known ways, into tests/fuzz/found.tar.xz, which is committed: a new checkout goes on with that.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fuzz import registry

ROOT: Final = Path(__file__).resolve().parents[2]
CORPUS: Final = Path(__file__).parent / "corpus"
BUILD: Final = ROOT / "build" / "fuzz"
LEDGER: Final = BUILD / "executions.json"
KEPT: Final = Path(__file__).parent / "found.tar.xz"
NOTE_S: Final = 10.0
"""Between two notes in the file: a session that is killed loses no more."""
SECONDS: Final = 60.0
_PULSE: Final = re.compile(rb"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)")
_EXECUTED: Final = re.compile(rb"^stat::number_of_executed_units: (\d+)")


@dataclass(slots=True)
class Process:
    """One process of a session, and what it has reported."""

    running: "subprocess.Popen[bytes]"
    log: Path
    executions: int = 0
    coverage: int = 0
    features: int = 0
    corpus: int = 0
    _read: int = 0

    def look(self) -> None:
        """Read what libFuzzer has printed since."""
        with self.log.open("rb") as printed:
            printed.seek(self._read)
            lines = printed.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._read += len(line)
            if found := _PULSE.match(line):
                self.executions, self.coverage, self.features, self.corpus = map(int, found.groups())
            elif found := _EXECUTED.match(line):
                self.executions = int(found[1])


@dataclass(slots=True)
class Ledger:
    """What was executed so far, by target and commit."""

    path: Path
    counts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @staticmethod
    def load(path: Path) -> "Ledger":
        """Read the file; empty where there is none."""
        return Ledger(path, json.loads(path.read_text()) if path.exists() else {})

    def total(self, name: str) -> int:
        """Executions of a target at all commits."""
        return sum(int(entry["executions"]) for entry in self.counts.get(name, {}).values())

    def note(
        self, name: str, commit: str, before: dict[str, Any], processes: Sequence[Process], seconds: float
    ) -> None:
        """Put what processes have reported on top of what was there `before` them."""
        entry = {
            "executions": before.get("executions", 0) + sum(p.executions for p in processes),
            "seconds": round(before.get("seconds", 0.0) + seconds, 1),
            "coverage": max([before.get("coverage", 0), *(p.coverage for p in processes)]),
            "features": max([before.get("features", 0), *(p.features for p in processes)]),
            "corpus": max([before.get("corpus", 0), *(p.corpus for p in processes)]),
        }
        self.counts.setdefault(name, {})[commit] = entry
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(self.counts, indent=1, sort_keys=True) + "\n")
        written.replace(self.path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the targets that are asked for; 0 where none broke a promise."""
    given = _parser().parse_args(arguments)
    unknown = set(given.target or ()) - set(registry.NAMES)
    if unknown:
        sys.stderr.write(f"--target {', '.join(sorted(unknown))}: must be one of {', '.join(registry.NAMES)}\n")
        return 2
    names = tuple(given.target or registry.NAMES)
    if given.replay is not None:
        return _replay(names, given.replay)
    take_up()
    ledger = Ledger.load(LEDGER)
    if given.list:
        _list(ledger, names)
        return 0
    if given.keep:
        if not LEDGER.exists():
            sys.stderr.write("--keep: nothing was executed here yet; run some targets first\n")
            return 2
        keep([path for name in registry.NAMES for path in _fewest(name)])
        return 0
    seconds = given.seconds / len(names) if given.seconds else 0.0 if given.runs else SECONDS
    failed = [name for name in names if not _fuzz(name, seconds, given.runs, given.jobs, ledger)]
    _list(ledger, names)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", metavar="NAME", help="a target; may be given several times; all")
    parser.add_argument("--seconds", type=float, default=0.0, help=f"for all targets together ({SECONDS:.0f} for each)")
    parser.add_argument("--runs", type=int, default=0, help="executions of each process; without end")
    parser.add_argument("--jobs", type=int, default=1, help="processes of a target at a time, which share a corpus (1)")
    parser.add_argument("--list", action="store_true", help="print the targets, and what was executed so far")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.relative_to(ROOT)}, and run nothing else")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try one input on the target that is given, once")
    return parser


def take_up() -> None:
    """Begin with what was kept, where nothing has been executed yet."""
    BUILD.mkdir(parents=True, exist_ok=True)
    if KEPT.exists() and not LEDGER.exists():
        with tarfile.open(KEPT) as kept:
            kept.extractall(BUILD, filter="data")


def keep(inputs: Sequence[Path]) -> None:
    """Write these inputs and the count of executions into the archive; the same files make the same archive."""
    written = KEPT.with_suffix(".new")
    with tarfile.open(written, "w:xz") as kept:
        for path in (LEDGER, *inputs):
            entry = tarfile.TarInfo(str(path.relative_to(BUILD)))
            entry.size = path.stat().st_size
            with path.open("rb") as content:
                kept.addfile(entry, content)
    written.replace(KEPT)
    _say(f"{len(inputs)} inputs, {KEPT.stat().st_size:,} B, in {KEPT.relative_to(ROOT)}")


def _fewest(name: str) -> list[Path]:
    """The inputs of a target without those that go no way of their own."""
    inputs = sorted((BUILD / "corpus" / name).glob("*"), key=lambda path: (path.stat().st_size, path.name))
    ways = BUILD / f"{name}.ways"
    ways.write_text("".join(f"{line}\n" for line in (len(inputs), 0, *inputs)))
    with (BUILD / f"{name}-ways.log").open("wb") as printed:
        # The inner half of libFuzzer's merge: it executes what the file lists, and adds the features of each.
        subprocess.run(
            [*_session(name), f"-merge_control_file={ways}", "-merge_inner=1"],
            check=True, stdout=printed, stderr=printed, cwd=BUILD, env=_environment(),
        )  # fmt: skip
    return new_ways(inputs, ways.read_text().splitlines()[2 + len(inputs) :])


def new_ways(inputs: Sequence[Path], lines: Sequence[str]) -> list[Path]:
    """Inputs that go a way which none before them goes, by lines `FT NUMBER FEATURE...` of libFuzzer's merge."""
    seen: set[str] = set()
    found = []
    for what, number, *ways in map(str.split, lines):
        if what == "FT" and not seen.issuperset(ways):
            seen.update(ways)
            found.append(inputs[int(number)])
    return found


def _session(name: str) -> list[str]:
    return [sys.executable, "-m", "fuzz.session", name]


def _fuzz(name: str, seconds: float, runs: int, jobs: int, ledger: Ledger) -> bool:
    """Run one target; False where an input broke a promise."""
    corpus, defects = BUILD / "corpus" / name, BUILD / "defects" / name
    for folder in (corpus, defects):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-c", f"from fuzz.registry import write_seeds; write_seeds({name!r}, {str(corpus)!r})"],
        check=True, env=_environment(),
    )  # fmt: skip
    committed = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    options = [f"-artifact_prefix={defects}/", *([f"-max_total_time={max(1, round(seconds))}"] if seconds else [])]
    options += [f"-runs={runs}"] if runs else []
    command = [*_session(name), str(corpus), *committed, *options, "-reload=1"]
    known = _broken(defects)
    processes: list[Process] = []
    for job in range(jobs):
        log = BUILD / f"{name}-{job}.log"
        with log.open("wb") as printed:
            running = subprocess.Popen(command, stderr=printed, stdout=printed, cwd=BUILD, env=_environment())
        processes.append(Process(running, log))
    _follow(name, processes, ledger)
    found = sorted(_broken(defects) - known)
    for file in found:
        _say(f"{name}: python -m fuzz --target {name} --replay {(defects / file).relative_to(ROOT)}")
    ended_badly = [p for p in processes if p.running.returncode]
    for process in ended_badly:
        _say(f"{name}: status {process.running.returncode}, see {process.log.relative_to(ROOT)}")
    return not found and not ended_badly


def _broken(defects: Path) -> set[str]:
    """Inputs that broke a promise; libFuzzer leaves slow ones there as well, which a busy machine has many of."""
    return {path.name for path in defects.iterdir() if not path.name.startswith("slow-unit-")}


def _follow(name: str, processes: Sequence[Process], ledger: Ledger) -> None:
    """Wait for processes and note what they report; an interrupt ends them."""
    commit = _commit()
    before = dict(ledger.counts.get(name, {}).get(commit, {}))
    began_s = noted_s = time.monotonic()
    try:
        while any(p.running.poll() is None for p in processes):
            time.sleep(0.2)
            if time.monotonic() - noted_s >= NOTE_S:
                noted_s = time.monotonic()
                for process in processes:
                    process.look()
                ledger.note(name, commit, before, processes, noted_s - began_s)
                _report(name, processes, noted_s - began_s, ledger)
    finally:
        for process in processes:
            if process.running.poll() is None:
                process.running.terminate()
            process.running.wait()
            process.look()
        ledger.note(name, commit, before, processes, time.monotonic() - began_s)
        _report(name, processes, time.monotonic() - began_s, ledger)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _report(name: str, processes: Sequence[Process], seconds: float, ledger: Ledger) -> None:
    done = sum(p.executions for p in processes)
    coverage = max(p.coverage for p in processes)
    _say(
        f"{name}: {done:,} executions in {seconds:.0f} s ({done / max(seconds, 0.1):,.0f}/s), {coverage} edges, "
        f"{max(p.corpus for p in processes)} inputs; {ledger.total(name):,} in all",
    )


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _list(ledger: Ledger, names: Sequence[str]) -> None:
    for name in names:
        latest = list(ledger.counts.get(name, {}).values())
        edges = max((entry["coverage"] for entry in latest), default=0)
        _say(f"{name:18} {ledger.total(name):>14,} executions {edges:>6} edges  {registry.target(name).what}")
    _say(f"{'all':18} {sum(map(ledger.total, names)):>14,} executions")


def _replay(names: Sequence[str], path: Path) -> int:
    if len(names) != 1:
        sys.stderr.write("--replay: say of which --target\n")
        return 2
    is_taken = registry.target(names[0]).check(path.read_bytes())
    _say(f"{names[0]}: {'taken' if is_taken else 'refused'}, as promised")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # So that sessions end with us.
    sys.exit(main())
