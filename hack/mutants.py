"""Mutation proof: apply each patch of tests/mutants to a copy of the tree and see that its tests fail.

A patch begins with a few lines of text: what the defect is, and `Caught-by:` with the arguments of pytest or, after
`python`, of a command that must fail. The same command must succeed without the patch, or it would prove nothing.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PATCHES: Final = ROOT / "tests/mutants"
_CAUGHT_BY: Final = re.compile(r"^Caught-by: (.+)$", re.MULTILINE)
_COPIED: Final = ("agent", "bench", "charts", "crds", "dashboards", "docs", "examples", "hack", "metadata", "operator")
_TIMEOUT_S: Final = 600.0
"""A run that hangs counts as caught: the defect made it hang, the run without it does not."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One seeded defect."""

    patch: Path
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """File name without suffix; begins with the invariant."""
        return self.patch.stem


def main() -> int:
    """Check the commands on the tree as it is, then run each mutant; the last line is one JSON object."""
    given = _parser().parse_args()
    mutants = [m for m in load() if not given.only or any(m.name.startswith(o) for o in given.only)]
    if not mutants:
        sys.stderr.write(f"mutants: no patch in tests/mutants begins with {' or '.join(given.only)}\n")
        return 2
    missed = [] if given.trust_clean else _failing_clean({m.command for m in mutants})
    for command in missed:
        sys.stdout.write(f"fails without any defect, so it proves nothing: {shlex.join(command)}\n")
    caught = [m for m in mutants if m.command not in missed and _is_caught(m)]
    line = {"caught": len(caught), "total": len(mutants), "missed": [m.name for m in mutants if m not in caught]}
    sys.stdout.write(json.dumps({"mutants": line}) + "\n")
    return 0 if len(caught) == len(mutants) else 1


def load() -> list[Mutant]:
    """Read every patch. Raises `ValueError` for one without `Caught-by:`."""
    return [_parse(path) for path in sorted(PATCHES.glob("*.patch"))]


def _parse(path: Path) -> Mutant:
    found = _CAUGHT_BY.search(path.read_text())
    if found is None:
        raise ValueError(f"{path.name}: a line `Caught-by: <pytest arguments>` is missing")
    return Mutant(path, tuple(shlex.split(found[1])))


def _failing_clean(commands: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory(prefix="kvfleet-mutant-") as folder:
        tree = _copy(Path(folder))
        return [command for command in sorted(commands) if not _passes(tree, command)]


def _is_caught(mutant: Mutant) -> bool:
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvfleet-mutant-") as folder:
        tree = _copy(Path(folder))
        apply = ["git", "apply", "--whitespace=nowarn", str(mutant.patch)]
        applied = subprocess.run(apply, cwd=tree, capture_output=True, text=True, check=False)
        if applied.returncode:
            sys.stdout.write(f"{mutant.name}: DOES NOT APPLY: {applied.stderr.strip()}\n")
            return False
        is_caught = not _passes(tree, mutant.command)
    verdict = "caught" if is_caught else "MISSED"
    sys.stdout.write(
        f"{mutant.name}: {verdict} by {shlex.join(mutant.command)} ({time.monotonic() - started_s:.1f} s)\n"
    )
    sys.stdout.flush()
    return is_caught


def _copy(folder: Path) -> Path:
    """The tree without what is built; outside any repository, so that `git apply` takes paths as they are."""
    tree = folder / "tree"
    tree.mkdir()
    for name in (*_COPIED, "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    for path in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / path, tree / path)
    return tree


def _passes(tree: Path, command: tuple[str, ...]) -> bool:
    """Run a command on a tree whose packages come before the installed ones."""
    packages = ("crds", "dashboards", "metadata", "operator", "agent", "hack", "tests", "")
    path = ":".join(str(tree / package) for package in packages)
    python = str(ROOT / ".venv/bin/python")
    arguments = command[1:] if command[0] == "python" else ("-m", "pytest", "-q", "-x", *command)
    environment = {
        "PYTHONPATH": path,
        "PATH": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    try:
        done = subprocess.run(
            [python, *arguments], cwd=tree, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="I1", help="patches whose names begin so; default: all"
    )
    parser.add_argument("--trust-clean", action="store_true", help="do not run the commands without a defect first")
    return parser


if __name__ == "__main__":
    sys.exit(main())
