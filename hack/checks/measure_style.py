"""Measures the product's Python against the project's limits on sizes, nesting and names.

`python -m checks.measure_style [--json] [FOLDER ...]`; folders default to the product's. Exit
status 1 when a limit is broken.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from checks.style_facts import FileFacts, FunctionFacts, facts, percentile

ROOT: Final = Path(__file__).resolve().parents[2]
PRODUCT: Final = ("crds", "dashboards", "metadata", "operator", "agent")
_SHOWN: Final = 10
"""Offenders that are printed for each check."""


@dataclass(frozen=True, slots=True)
class Row:
    """One check."""

    check: str
    measured: float
    limit: float
    offenders: tuple[str, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether the limit holds."""
        return self.measured <= self.limit


def rows(files: Sequence[FileFacts]) -> list[Row]:
    """Every check over all files."""
    functions = [function for file in files for function in file.functions]
    handlers = [function for function in functions if function.is_handler]
    banned = [f"{file.path}:{found}" for file in files for found in file.banned]
    broad = [f"{file.path}:{line}" for file in files for line in file.broad_excepts]
    todos = [f"{file.path}:{line}" for file in files for line in file.todos]
    lines = [function.lines for function in functions]
    file_lines = [file.lines for file in files]
    depths = [function.nesting for function in functions]
    return [
        Row("function lines, median", percentile(lines, 0.5), 10),
        Row("function lines, p90", percentile(lines, 0.9), 30),
        Row("function lines, max", max(lines, default=0), 60, _over(functions, "lines", 60)),
        Row("file lines, median", percentile(file_lines, 0.5), 120),
        Row("file lines, max", max(file_lines, default=0), 400, _long(files, 400)),
        Row("nesting, p90", percentile(depths, 0.9), 2),
        Row("nesting, max", max(depths, default=0), 3, _over(functions, "nesting", 3)),
        Row("handler lines, max", max((h.lines for h in handlers), default=0), 12, _over(handlers, "lines", 12)),
        Row("banned names", len(banned), 0, tuple(banned)),
        Row("TODOs", len(todos), 0, tuple(todos)),
        # Task roots may catch everything; each is looked at by a person, so the number is shown and not limited.
        Row("broad excepts that go on", len(broad), float("inf"), tuple(broad)),
    ]


def _over(functions: Iterable[FunctionFacts], what: str, limit: int) -> tuple[str, ...]:
    found = sorted((f for f in functions if getattr(f, what) > limit), key=lambda f: -getattr(f, what))
    return tuple(f"{f.path}:{f.line} {f.name} {getattr(f, what)}" for f in found)


def _long(files: Iterable[FileFacts], limit: int) -> tuple[str, ...]:
    found = sorted((f for f in files if f.lines > limit), key=lambda f: -f.lines)
    return tuple(f"{f.path} {f.lines}" for f in found)


def read(folders: Iterable[str]) -> list[FileFacts]:
    """Facts of every Python file under the folders, relative to the tree."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [facts(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]


def table(measured: Sequence[Row]) -> str:
    """The rows for people, with the first offenders under each broken limit."""
    out = [f"{'check':28}{'measured':>10}{'limit':>8}"]
    for row in measured:
        limit = "-" if row.limit == float("inf") else f"{row.limit:g}"
        out.append(f"{row.check:28}{row.measured:>10g}{limit:>8}  {'ok' if row.is_kept else 'over'}")
        out += [f"    {offender}" for offender in row.offenders[:_SHOWN] if not row.is_kept]
    return "\n".join(out)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, all offenders included")
    parser.add_argument("folders", nargs="*", default=PRODUCT)
    given = parser.parse_args()
    files = read(given.folders)
    measured = rows(files)
    if given.json:
        checks = [{**asdict(row), "limit": None if row.limit == float("inf") else row.limit} for row in measured]
        print(json.dumps({"files": len(files), "checks": checks}, indent=2))
    else:
        print(table(measured))
        print(f"style: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
