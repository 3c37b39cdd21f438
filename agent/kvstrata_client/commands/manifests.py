"""Command that checks manifests before they are applied: validate."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.names import GROUP
from kvstrata_api.validate import validate


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    found = commands.add_parser("validate", help="check manifests as the API server would, without one")
    found.add_argument(
        "-f",
        "--filename",
        action="append",
        required=True,
        metavar="FILE",
        help="file, directory, or - for standard input",
    )
    found.set_defaults(run=_validate)


def _validate(given: argparse.Namespace) -> int:
    """Print every problem; 1 when there is one. Objects of other groups are passed over."""
    checked = broken = 0
    for source, number, obj in objects(given.filename):
        if not str(obj.get("apiVersion", "")).startswith(f"{GROUP}/"):
            continue
        checked += 1
        problems = validate(obj)
        broken += bool(problems)
        name = f"{obj.get('kind')}/{(obj.get('metadata') or {}).get('name')}"
        for problem in problems:
            sys.stdout.write(f"{source} object {number} ({name}): {problem}\n")
    sys.stdout.write(f"{checked} objects of {GROUP} checked, {broken} with problems\n")
    return 1 if broken or not checked else 0


def objects(sources: list[str]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Every object of every source with its place. Raises `InvalidInputError` for what is no YAML mapping."""
    for path in _files(sources):
        try:
            documents = list(yaml.safe_load_all(path.read_text()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
            raise InvalidInputError(f"{path}: {e}") from e
        for number, document in enumerate(documents, start=1):
            if document is None:
                continue
            if not isinstance(document, Mapping):
                raise InvalidInputError(f"{path} object {number}: {type(document).__name__}, a mapping wanted")
            yield str(path), number, document


def _files(sources: list[str]) -> Iterator[Path]:
    """Files that are named, with those of named directories; `-` is standard input."""
    for source in sources:
        path = Path("/dev/stdin" if source == "-" else source)
        if path.is_dir():
            yield from sorted((*path.rglob("*.yaml"), *path.rglob("*.yml")))
        else:
            yield path
