"""Files that are made from code: written by `--write`, compared by `--check`."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The source tree. Generators run in it; an installed wheel has none."""

Files = Mapping[Path, str]
"""Wanted content by path."""


def drift(wanted: Files) -> tuple[Path, ...]:
    """Paths whose content differs from what is wanted, absent ones included."""
    return tuple(path for path, text in sorted(wanted.items()) if _read(path) != text)


def write(wanted: Files) -> None:
    """Bring every path up to date; what is equal is not touched."""
    for path in drift(wanted):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")


def run(make: Callable[[], Files], description: str | None) -> int:
    """Handle the command line of a generator; 1 when `--check` finds drift."""
    parser = argparse.ArgumentParser(description=description)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail when a file differs")
    mode.add_argument("--write", action="store_true", help="write the files")
    wanted = make()
    if parser.parse_args().write:
        write(wanted)
        return 0
    differing = drift(wanted)
    for path in differing:
        sys.stderr.write(f"{path.relative_to(ROOT)} differs from what its generator makes\n")
    return int(bool(differing))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
