"""Checks a manifest against a structural schema, in the words of the API server. Pure.

Only the vocabulary that `schema.structural` keeps is known here, so that a new keyword fails a test, not a user.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

from kvstrata_api.schema import Schema

_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong with a manifest."""

    field: str
    """Path of the field, such as `spec.tiers[0].capacityPerNode`."""
    message: str
    """The API server's message for it."""
    value: str = ""
    """The offending value, shortened."""

    def __str__(self) -> str:
        """Field, value and limit in one line."""
        shown = f"Invalid value: {self.value}: " if self.value else ""
        return f"{self.field}: {shown}{self.message}"


def problem(field: str, message: str, value: Any) -> Problem:
    """Make a problem that shows a shortened value."""
    try:
        shown = repr(value)[:80]
    except (RecursionError, ValueError):  # Nested too deeply, or a number of more digits than Python writes.
        shown = f"<{_type_name(value)}>"
    return Problem(field, message, shown)


def check(schema: Schema, value: Any, field: str) -> Iterator[Problem]:
    """Yield everything by which `value` breaks `schema`; nothing below a value of the wrong type is checked."""
    wanted = "integer,string" if schema.get("x-kubernetes-int-or-string") else schema["type"]
    if not _is_type(value, wanted):
        type_ = schema["format"] if wanted == "string" and "format" in schema else f'{wanted}: "{_type_name(value)}"'
        yield problem(field, f"{field} in body must be of type {type_}", value)
        return
    yield from _CHECKS[_type_name(value)](schema, value, field)
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(f'"{choice}"' for choice in schema["enum"])
        yield problem(field, f"supported values: {supported}", value)


def _is_type(value: Any, wanted: str) -> bool:
    """Whether a value has one of the types; a bool is no integer."""
    return any(
        isinstance(value, _PYTHON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in wanted.split(",")
    )


def _type_name(value: Any) -> str:
    """Name the JSON type of a value as the API server does."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    found = (name for name, types in _PYTHON_TYPES.items() if isinstance(value, types))
    return next(found, "number")


def _check_object(schema: Schema, value: dict[str, Any], field: str) -> Iterator[Problem]:
    """Required, unknown and present fields. A null means that the field is absent, as for the API server."""
    value = {name: child for name, child in value.items() if child is not None}
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield Problem(_join(field, name), "Required value")
    if len(value) > schema.get("maxProperties", len(value)):
        yield problem(field, f"must have at most {schema['maxProperties']} items", f"{len(value)} items")
    for name, child in value.items():
        if name in properties:
            yield from check(properties[name], child, _join(field, name))
        elif others is not None:
            yield from check(others, child, _join(field, name))
        else:
            yield problem(_join(field, name), f'unknown field "{_join(field, name)}"', child)


def _check_array(schema: Schema, value: list[Any], field: str) -> Iterator[Problem]:
    """Length, items and repetition."""
    if len(value) < schema.get("minItems", 0):
        yield problem(field, f"{field} in body should have at least {schema['minItems']} items", value)
    if len(value) > schema.get("maxItems", len(value)):
        yield problem(field, f"must have at most {schema['maxItems']} items", f"{len(value)} items")
        return
    for index, item in enumerate(value):
        yield from check(schema["items"], item, f"{field}[{index}]")
    yield from _repetitions(schema, value, field)


def _repetitions(schema: Schema, value: list[Any], field: str) -> Iterator[Problem]:
    """Items of a set or map list that occur twice."""
    kind = schema.get("x-kubernetes-list-type")
    if kind not in ("set", "map"):
        return
    seen = []
    for index, item in enumerate(value):
        key = item
        if kind == "map":
            key = {k: item.get(k) for k in schema["x-kubernetes-list-map-keys"]} if isinstance(item, dict) else None
        if key is not None and key in seen:
            yield problem(f"{field}[{index}]", "Duplicate value", key)
        seen.append(key)


def _check_string(schema: Schema, value: str, field: str) -> Iterator[Problem]:
    """Length, then pattern: a text that is too long or too short has no other problem reported; and the format."""
    if len(value) < schema.get("minLength", 0):
        yield problem(field, f"{field} in body should be at least {schema['minLength']} chars long", value)
    elif len(value) > schema.get("maxLength", len(value)):
        yield problem(field, f"may not be more than {schema['maxLength']} bytes", value)
    elif "pattern" in schema and not _compiled(schema["pattern"]).search(value):
        yield problem(field, f"{field} in body should match '{schema['pattern']}'", value)
    if schema.get("format") == "date-time" and not _is_date_time(value):
        yield problem(field, f'{field} in body must be of type date-time: "{value}"', value)


def _check_integer(schema: Schema, value: int, field: str) -> Iterator[Problem]:
    """Bounds."""
    if value < schema.get("minimum", value):
        yield problem(field, f"{field} in body should be greater than or equal to {schema['minimum']}", value)
    if value > schema.get("maximum", value):
        yield problem(field, f"{field} in body should be less than or equal to {schema['maximum']}", value)


def _check_nothing(_schema: Schema, _value: Any, _field: str) -> Iterator[Problem]:
    """Booleans have no bounds."""
    return iter(())


_CHECKS: Final[dict[str, Callable[[Schema, Any, str], Iterator[Problem]]]] = {
    "object": _check_object,
    "array": _check_array,
    "string": _check_string,
    "integer": _check_integer,
    "boolean": _check_nothing,
}


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile with `$` meaning the end, as in Go, and not also a place before a last line feed."""
    return re.compile(re.sub(r"\$$", r"\\Z", pattern))


def _is_date_time(value: str) -> bool:
    """Whether a text is a full RFC 3339 date and time with a zone."""
    if not re.match(r"^\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})\Z", value):
        return False
    try:
        datetime.fromisoformat(value.upper())
    except ValueError:
        return False
    return True


def present(schema: Schema, value: Any) -> Any:
    """Return a value without the nulls that stand in fields of its schema: the API server drops them before its rules.

    What the schema does not know stays as it is.
    """
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        below = ((name, child, known.get(name, others)) for name, child in value.items() if child is not None)
        return {name: child if at is None else present(at, child) for name, child, at in below}
    if isinstance(value, list) and "items" in schema:
        return [present(schema["items"], item) for item in value]
    return value


def _join(field: str, name: str) -> str:
    """Path of a field below another."""
    return f"{field}.{name}" if field else name
