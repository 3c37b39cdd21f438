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


class Parser(argparse.ArgumentParser):
    """Names everything that is missing at once: what is required, and what the default `missing` finds out.

    argparse itself stops at the first kind of it, and knows nothing of options that only some need.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `ArgumentParser.parse_known_args`."""
        # argparse calls a positional of any number required, too.
        wanted = [action for action in self._actions if action.required and action.nargs != argparse.ZERO_OR_MORE]
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        for action in wanted:
            action.required = False
        for group in groups:
            group.required = False
        given, rest = super().parse_known_args(args, namespace)
        missing = [_called(action) for action in wanted if not getattr(given, action.dest, None)]
        for group in groups:
            actions = group._group_actions  # noqa: SLF001  There is no other way to them.
            if not any(getattr(given, action.dest, None) for action in actions):
                missing.append(f"one of {' '.join(map(_called, actions))}")
        find = getattr(given, "missing", None)
        missing += find(given) if find is not None else ()
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return given, rest


def _called(action: argparse.Action) -> str:
    """What an option or a positional is called in messages."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


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
