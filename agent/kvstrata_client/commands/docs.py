"""Command that prints the documents of this version: docs. They are in the wheel, or around the code in its tree."""

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.commands import output
from kvstrata_client.commands.output import table

_PACKED: Final = Path(__file__).resolve().parents[1] / "pages"
_TREE: Final = Path(__file__).resolve().parents[3]
_LEFT_OUT: Final = ("build", "dist")
"""Folders of a tree whose pages are others', as are those in hidden ones."""


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata docs KvstrataRedisDown"
    found.add_argument(
        "page", nargs="?", help="page to print, such as install or KvstrataRedisDown; a list without one"
    )
    found.add_argument("--search", metavar="WORDS", help="lines that have all of these words, with their pages")
    output.add_option(found, names="pages")
    found.set_defaults(run=_docs)


def _docs(given: argparse.Namespace) -> int:
    """Print a page, what a search finds, or the list; 1 for a search that finds nothing."""
    if given.page is not None and given.search is not None:
        raise InvalidInputError("give a page or --search, not both")
    pages = dict(_pages())
    if given.page is not None:
        sys.stdout.write(_found(given.page, pages).read_text(encoding="utf-8"))
        return 0
    if given.search is None:
        titles = {name: _title(path) for name, path in pages.items()}
        output.show(given.output, titles, table(("PAGE", "TITLE"), list(titles.items())), titles)
        return 0
    hits = list(_hits(given.search, pages))
    data = [{"page": name, "line": number, "text": line} for name, number, line in hits]
    lines = (f"{name}:{number}: {line}" for name, number, line in hits)
    output.show(given.output, data, lines, dict.fromkeys(name for name, _, _ in hits))
    return int(not hits)


def _pages() -> Iterator[tuple[str, Path]]:
    """Every page, by its path in the tree."""
    root = _PACKED if _PACKED.exists() else _TREE
    for path in sorted(root.rglob("*.md")):
        parts = path.relative_to(root).parts
        if not any(part in _LEFT_OUT or part.startswith(".") for part in parts):
            yield path.relative_to(root).as_posix(), path


def _found(asked: str, pages: dict[str, Path]) -> Path:
    """The page of that path, or the one of that name. Raises `InvalidInputError` with names that are alike."""
    wanted = asked.removesuffix(".md")
    by_name = [name for name in pages if name.removesuffix(".md") == wanted]
    by_name = by_name or [name for name in pages if Path(name).stem.lower() == wanted.lower()]
    if len(by_name) == 1:
        return pages[by_name[0]]
    names = {Path(name).stem: name for name in pages}
    alike = by_name or [names[stem] for stem in difflib.get_close_matches(wanted, names)]
    meant = f"; did you mean {', '.join(alike)}?" if alike else ""
    raise InvalidInputError(f"{asked}: {len(by_name)} pages have this name, 1 wanted{meant}")


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")


def _hits(words: str, pages: dict[str, Path]) -> Iterator[tuple[str, int, str]]:
    wanted = words.lower().split()
    for name, path in pages.items():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if all(word in line.lower() for word in wanted):
                yield name, number, line.strip()
