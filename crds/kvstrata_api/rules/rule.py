"""What a rule is. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata_api import units
from kvstrata_api.errors import InvalidInputError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A law about one object inside a manifest, checked whenever that object is written."""

    path: str
    """Where the object lies: field names joined by dots, `[]` behind a list means each of its items."""
    cel: str
    """True when the law holds; `self` is the object."""
    message: str
    """What a user reads when it does not; begins with the field's name."""
    holds: Callable[[Any], bool]
    """The same law over the manifest's JSON, which has the right shape already."""
    field: str = ""
    """Field below `path` that is to blame; empty: the object itself."""

    @property
    def validation(self) -> Json:
        """Entry of `x-kubernetes-validations`."""
        blamed = {"fieldPath": f".{self.field}"} if self.field else {}
        return {"rule": self.cel, "message": self.message} | blamed


@dataclass(frozen=True, slots=True)
class Transition:
    """A law about a change, checked when an object is updated."""

    path: str
    cel: str
    """True when the law holds; `oldSelf` is the object before."""
    message: str
    holds: Callable[[Any, Any], bool]
    """The same law; takes the new and the old object."""
    field: str = ""

    @property
    def validation(self) -> Json:
        """Entry of `x-kubernetes-validations`."""
        blamed = {"fieldPath": f".{self.field}"} if self.field else {}
        return {"rule": self.cel, "message": self.message} | blamed


AnyRule = Rule | Transition


def places(obj: Any, path: str, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (field path, value) of everything that `path` names inside `obj`; nothing where it is absent."""
    if not path:
        yield at, obj
        return
    head, _, rest = path.partition(".")
    name = head.removesuffix("[]")
    value = obj.get(name) if isinstance(obj, Mapping) else None
    if value is None:
        return
    where = f"{at}.{name}" if at else name
    if not head.endswith("[]"):
        yield from places(value, rest, where)
        return
    for index, item in enumerate(value if isinstance(value, list | tuple) else ()):
        yield from places(item, rest, f"{where}[{index}]")


def exactly_when(field: str, cel_condition: str, words: str, condition: Callable[[Json], bool], path: str) -> Rule:
    """Make the rule that `field` is set exactly when a condition over its siblings holds."""
    return Rule(
        path,
        f"has(self.{field}) == ({cel_condition})",
        f"{field} must be set exactly when {words}",
        lambda obj: (field in obj) == condition(obj),
        field,
    )


def only_when(field: str, cel_condition: str, words: str, condition: Callable[[Json], bool], path: str) -> Rule:
    """Make the rule that `field` is set where a condition over its siblings holds, if at all."""
    return Rule(
        path,
        f"!has(self.{field}) || {cel_condition}",
        f"{field} may be set only when {words}",
        lambda obj: field not in obj or condition(obj),
        field,
    )


def unique(path: str, list_field: str, keys: tuple[str, ...], words: str) -> Rule:
    """Make the rule that no two items of a list agree in all of `keys` (required fields of its items)."""
    same = " && ".join(f"a.{k} == b.{k}" for k in keys)
    return Rule(
        path,
        f"!has(self.{list_field}) || self.{list_field}.all(a, self.{list_field}.exists_one(b, {same}))",
        f"{list_field} must have unique {words}",
        lambda obj: _all_differ([tuple(i[k] for k in keys) for i in obj.get(list_field, ())]),
        list_field,
    )


def size_bytes(quantity: Any) -> int:
    """Bytes of a quantity of the right form; 0 for one that is out of range, which another check refuses."""
    try:
        return units.parse_quantity(quantity)
    except InvalidInputError:
        return 0


def _all_differ(values: list[tuple[Any, ...]]) -> bool:
    """True when no value occurs twice."""
    return len(set(values)) == len(values)
