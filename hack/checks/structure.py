"""Print how the product is built: files, floors, circles and flat modules of each package. No gate.

A floor is the longest chain of imports below a file, a circle is a set of files that import each other, and imports
that only type checkers see count like others. The last line is one JSON object.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TOPS: Final = ("crds", "dashboards", "metadata", "operator", "agent")
SMALL_LINES: Final = 60

Graph = Mapping[str, frozenset[str]]


def main() -> int:
    """Print a line for each package and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout; default: this one")
    given = parser.parse_args()
    files = dict(_modules(given.root))
    graph = {name: _imports(path, files) for name, path in files.items()}
    circles = [sorted(circle) for circle in _circles(graph) if len(circle) > 1]
    small = [name for name, path in files.items() if _lines(path) <= SMALL_LINES]
    sys.stdout.write("package             files  small  flat  packages  floors\n")
    packages = sorted({name.partition(".")[0] for name in files})
    for package in packages:
        of_it = {name for name in files if name.partition(".")[0] == package}
        inner = {name: graph[name] & of_it for name in of_it}
        flat = sum(name.count(".") == 1 for name in of_it)
        folders = len({name.split(".")[1] for name in of_it if name.count(".") > 1})
        floors = 0 if any(set(c) <= of_it for c in circles) else _floors(inner)
        of_them = len(of_it.intersection(small))
        sys.stdout.write(f"{package:<18} {len(of_it):>6} {of_them:>6} {flat:>5} {folders:>9} {floors or 'circle':>7}\n")
    sys.stdout.write(json.dumps({"files": len(files), "small": len(small), "circles": circles}) + "\n")
    return 0


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for top in TOPS:
        for path in sorted((root / top).rglob("*.py")):
            if path.name != "__init__.py":
                yield ".".join(path.relative_to(root / top).with_suffix("").parts), path


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _imports(path: Path, files: Mapping[str, Path]) -> frozenset[str]:
    """Modules of the product that a file names in its imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name in files and files[name] != path)


def _floors(graph: Graph) -> int:
    """Files on the longest chain of imports; the graph has no circle."""

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(below) for below in graph[name]), default=0)

    return max(map(floor, graph))


def _circles(graph: Graph) -> Iterator[set[str]]:
    """Strongly connected components: files that all reach each other."""
    left = dict(graph)
    while left:
        start = next(iter(left))
        below = _reached(start, left)
        above = _reached(start, {name: frozenset(n for n in left if name in left[n]) for name in left})
        circle = below & above
        yield circle
        for name in circle:
            del left[name]


def _reached(start: str, graph: Graph) -> set[str]:
    seen, due = {start}, [start]
    while due:
        for name in graph[due.pop()]:
            if name in graph and name not in seen:
                seen.add(name)
                due.append(name)
    return seen


if __name__ == "__main__":
    sys.exit(main())
