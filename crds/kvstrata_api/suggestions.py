"""What a user may have meant by a field or a value that no schema knows. Pure."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Final

from kvstrata_api.schema import Schema, object_schema
from kvstrata_api.schema_kinds import BY_NAME
from kvstrata_api.validate_structure import Problem

_VALUE_CUTOFF: Final = 0.5
"""Values are short words: `Spred` for `Spread` has 0.9, `Redis` for `External` 0.3."""


def suggestion(kind: str, problem: Problem, written: str) -> str:
    """The field or value that comes close to what was written, in words; empty when none does."""
    if problem.field == "kind":
        return _meant(_close(written, BY_NAME))
    if problem.field == "apiVersion" or kind not in BY_NAME:
        return ""
    schema = object_schema(BY_NAME[kind])
    node, left = _walk(schema, problem.field)
    if left and problem.message.startswith("unknown field"):
        return _meant(_close(left, node.get("properties", ()))) or _elsewhere(schema, left)
    return _meant(_close(written, node.get("enum", ()), _VALUE_CUTOFF))


def _meant(found: str) -> str:
    return f"did you mean {found}?" if found else ""


def _close(written: str, choices: Iterable[Any], cutoff: float = 0.6) -> str:
    """The choice that differs by its case alone, or else by little."""
    known = {str(choice).casefold(): str(choice) for choice in choices}
    near = get_close_matches(written.casefold(), known, n=1, cutoff=cutoff)
    return known[near[0]] if near else ""


def _elsewhere(schema: Schema, name: str) -> str:
    """Where else the kind has a field of this name, below the spec."""
    places = [path for path in _paths(schema["properties"]["spec"], "spec") if path.rpartition(".")[2] == name]
    return f"there is {places[0]}" if len(places) == 1 else ""


def _paths(node: Schema, path: str) -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _paths(child, f"{path}.{name}")
    if "items" in node:
        yield from _paths(node["items"], f"{path}[]")


def _walk(schema: Schema, path: str) -> tuple[Schema, str]:
    """Follow a path such as `spec.tiers[0].type` as far as the schema goes; what is left of it."""
    node, rest = schema, path
    while rest:
        if rest.startswith("[") and "items" in node:
            node, rest = node["items"], rest.partition("]")[2].removeprefix(".")
            continue
        head = rest.split(".")[0].split("[")[0]
        if head not in node.get("properties", {}):
            break
        node, rest = node["properties"][head], rest.removeprefix(head).removeprefix(".")
    return node, rest
