"""How every command prints its answer: `-o table|json|yaml|name`, and what is wrong with the command line."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError

TABLE: Final = "table"
_STRUCTURED: Final = ("json", "yaml")


class UsageError(InvalidInputError):
    """The command line is wrong, not what it was about; exit status 2. Names every option that is missing."""


def add_option(found: argparse.ArgumentParser, *, names: str = "", default: str = TABLE) -> None:
    """Add `-o`. `names` says what `name` prints, one a line, where the answer has things with names."""
    forms = [*dict.fromkeys((default, *_STRUCTURED)), *(["name"] if names else [])]
    said = f"name: {names}, one a line; " if names else ""
    found.add_argument("-o", "--output", choices=forms, default=default, help=f"{said}default: %(default)s")


def show(form: str, data: Any, lines: Iterable[str] = (), names: Iterable[str] = ()) -> None:
    """Print an answer in the form that was chosen: `data` (JSON's types), `lines` of a table, or `names`."""
    if form == "json":
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    elif form == "yaml":
        import yaml  # A tenth of a second, for this form alone.

        sys.stdout.write(
            yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, allow_unicode=True, width=10_000_000)
        )
    else:
        sys.stdout.write("".join(f"{line}\n" for line in (lines if form == TABLE else names)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their longest cell."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
