"""Run every benchmark, one after the other; the table and the last line of each."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench import figures

BENCHES: Final = (
    "local", "nvme", "remote", "layers", "handover", "directory", "startup", "isolation", "encryption", "codec", "l2",
    "offload", "pressure", "operator", "scale",
)  # fmt: skip
"""Modules of this package; each is a command line of its own."""


def main() -> int:
    """Return 1 when one of them failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run; default: {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="small sets and few repeats")
    parser.add_argument(
        "--save", action="store_true", help="keep the last line of each in bench/results, with the commit"
    )
    given = parser.parse_args()
    if given.save and given.quick:
        parser.error("--save: figures of a quick run are not kept")
    try:
        commit = figures.clean_commit() if given.save else ""
    except ValueError as e:
        parser.error(str(e))
    codes = [_run(name, commit, is_quick=given.quick) for name in given.names or BENCHES]
    return int(any(codes))


def _run(name: str, commit: str, *, is_quick: bool) -> int:
    """Run one; what it ends with is kept when there is a commit for it."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        line = Path(folder) / "line.json"
        command = (sys.executable, "-m", f"bench.{name}", "--json", str(line), *(("--quick",) if is_quick else ()))
        code = subprocess.run(command, check=False).returncode
        if commit and code == 0:
            kept = figures.save(line.read_text(), commit).relative_to(figures.ROOT)
            print(f"kept in {kept}; `make generate` brings README.md up to date")
    return code


if __name__ == "__main__":
    sys.exit(main())
