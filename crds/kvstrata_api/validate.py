"""Our own validation of manifests: the same checks as the API server's, in the same words, without one. Pure."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.base import ApiModel
from kvstrata_api.rules.rule import Rule, Transition, places
from kvstrata_api.schema import Schema, object_schema
from kvstrata_api.schema_kinds import BY_NAME, Kind
from kvstrata_api.validate_structure import Problem, check, present, problem

PROBLEMS_MAX: Final = 8
"""Problems that an error message lists; the rest is counted."""

M = TypeVar("M", bound=ApiModel)


def validate(obj: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[Problem]:
    """Return everything that is wrong with a manifest, sorted by field; an empty list when it is good.

    `old` is the object before an update; with it the rules about changes are checked as well. Like the API
    server, rules are checked only when every field has the right shape.
    """
    kind = BY_NAME.get(str(obj.get("kind")))
    if kind is None:
        return [problem("kind", f"supported values: {', '.join(sorted(BY_NAME))}", obj.get("kind"))]
    if obj.get("apiVersion") != names.API_VERSION:
        return [problem("apiVersion", f"supported values: {names.API_VERSION}", obj.get("apiVersion"))]
    found = sorted({*_structure(kind, obj)})
    return found or sorted({*_broken_rules(kind, obj, old)})


def every_problem(obj: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with a manifest at once: `validate`, and the rules over what has the right shape.

    The API server would tell of those once the shape is right; its verdict is the same.
    """
    found = validate(obj)
    kind = BY_NAME.get(str(obj.get("kind")))
    if kind is None or not found:
        return found
    shape = {*_structure(kind, obj)}  # Of another version `validate` has not looked at it.
    bent = [p.field for p in shape if not p.message.startswith("unknown field")]
    more = (p for p in _broken_rules(kind, obj, None, skip=lambda where: any(_overlap(where, at) for at in bent)))
    return sorted({*found, *shape, *more})


def _overlap(one: str, other: str) -> bool:
    """Whether one path lies in the other, or is the other."""
    short, long = sorted((one, other), key=len)
    return not short or long == short or long.startswith((f"{short}.", f"{short}["))


def parse(kind: str, obj: Mapping[str, Any]) -> ApiModel:
    """Return the typed value of a manifest of a known kind.

    Raises `InvalidInputError` naming each field, its value and its limit.
    """
    found = validate(dict(obj) | {"kind": kind, "apiVersion": obj.get("apiVersion", names.API_VERSION)})
    if found:
        more = f"; and {len(found) - PROBLEMS_MAX} more" if len(found) > PROBLEMS_MAX else ""
        raise InvalidInputError(f"{kind}: " + "; ".join(str(p) for p in found[:PROBLEMS_MAX]) + more)
    return parse_as(BY_NAME[kind].model, without_nulls(kind, obj))


def without_nulls(kind: str, obj: Mapping[str, Any]) -> dict[str, Any]:
    """Return a good manifest of a known kind as the API server would store it: a field that is null is absent."""
    metadata = {name: value for name, value in obj["metadata"].items() if value is not None}
    found: dict[str, Any] = present(_schema(kind), dict(obj)) | {"metadata": metadata}
    return found


def parse_as(model: type[M], obj: Mapping[str, Any]) -> M:
    """Parse without the rules, as for objects that the API server has accepted.

    Raises `InvalidInputError` naming the first field that does not fit.
    """
    try:
        return model.model_validate(obj)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{model.__name__}: {where}: {first['input']!r:.80}: {first['msg']}") from e


def _structure(kind: Kind, obj: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of shape. Metadata other than the name is the API server's business."""
    metadata = obj.get("metadata")
    if not isinstance(metadata, Mapping) or metadata.get("name") is None:
        yield Problem("metadata.name", "Required value")
        metadata = {}
    named = {key: metadata[key] for key in ("name",) if key in metadata}
    yield from check(_schema(kind.name), dict(obj) | {"metadata": named}, "")


@cache
def _schema(kind: str) -> Schema:
    """Schema of a kind, made once: that takes ten times as long as checking an object."""
    return object_schema(BY_NAME[kind])


def _broken_rules(
    kind: Kind,
    obj: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    skip: Callable[[str], bool] = lambda _where: False,
) -> Iterator[Problem]:
    """Rules that do not hold, but for the places to skip: rules ask for the right shape."""
    obj = present(_schema(kind.name), dict(obj))
    old = present(_schema(kind.name), dict(old)) if old is not None else None
    for rule in kind.rules:
        before = dict(places(old, rule.path)) if old is not None else {}
        for where, value in places(obj, rule.path):
            if skip(where):
                continue
            holds = rule.holds(value) if isinstance(rule, Rule) else _holds_since(rule, value, before.get(where))
            if not holds:
                yield problem(_blamed(where, rule.field), rule.message, _value_at(value, rule.field))


def _holds_since(rule: Transition, new: Any, old: Any) -> bool:
    """Whether a change is allowed; what is new breaks nothing."""
    return old is None or rule.holds(new, old)


def _blamed(where: str, field: str) -> str:
    """Path of the field that a rule blames."""
    return ".".join(part for part in (where, field) if part)


def _value_at(value: Any, field: str) -> Any:
    """Value of the blamed field, None when it is absent; the object itself when no field is blamed."""
    for name in field.split(".") if field else ():
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
