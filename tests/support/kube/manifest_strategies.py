"""Manifests of the right shape, drawn from the schemas: hypothesis strategies for both validations."""

from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import strategies as st

from kvstrata_api.schema import node_at, object_schema
from kvstrata_api.schema_kinds import BY_NAME
from kvstrata_api.validate_structure import check
from support.kube.bad_manifests import GONE, Json, Path_, examples, with_value

ITEMS_MAX = 3
"""Lists and maps stay short: rules look at pairs, and three items have them all."""


def shaped(schema: Json) -> st.SearchStrategy[Any]:
    """Values that fit a schema."""
    if schema.get("x-kubernetes-int-or-string"):
        texts = st.builds("{}{}".format, st.integers(1, 900), st.sampled_from(["", "k", "Ki", "Mi", "M", "Gi", "Ti"]))
        return texts | st.integers(1, 1 << 40)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    made: st.SearchStrategy[Any] = _BY_TYPE[schema["type"]](schema)
    return made


def _integers(schema: Json) -> st.SearchStrategy[Any]:
    least = schema["minimum"]
    return st.integers(least, schema["maximum"]) | st.integers(least, min(least + 3, schema["maximum"]))


def _objects(schema: Json) -> st.SearchStrategy[Any]:
    if "additionalProperties" in schema:
        values = shaped(schema["additionalProperties"])
        return st.dictionaries(st.sampled_from(["app", "kvstrata.io/pool", "zone"]), values, max_size=ITEMS_MAX)
    fields = {name: shaped(child) for name, child in schema["properties"].items()}
    required = {name: fields[name] for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional={n: f for n, f in fields.items() if n not in required})


def _arrays(schema: Json) -> st.SearchStrategy[Any]:
    unique: dict[str, Any] = {}
    if schema.get("x-kubernetes-list-type") == "set":
        unique = {"unique": True}
    if schema.get("x-kubernetes-list-type") == "map":
        keys = schema["x-kubernetes-list-map-keys"]
        unique = {"unique_by": lambda item: tuple(item[k] for k in keys)}
    return st.lists(shaped(schema["items"]), min_size=schema.get("minItems", 0), max_size=ITEMS_MAX, **unique)


def _strings(schema: Json) -> st.SearchStrategy[Any]:
    if schema.get("format") == "date-time":
        return st.sampled_from(["2027-01-01T00:00:00Z", "2027-01-01T12:30:00.5+01:00"])
    if "pattern" in schema:
        pattern = schema["pattern"].removesuffix("$") + r"\Z"
        drawn = st.from_regex(pattern).filter(lambda text: _fits(schema, text))
        short = [text for text in ("a", "b", "/a", "/b", "s3://a", "0" * 64, "file:///a") if _fits(schema, text)]
        return st.sampled_from(short) | drawn if short else drawn
    alphabet = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])
    return st.text(alphabet, min_size=schema.get("minLength", 0), max_size=min(schema["maxLength"], 12))


_BY_TYPE: dict[str, Callable[[Json], st.SearchStrategy[Any]]] = {
    "object": _objects,
    "array": _arrays,
    "string": _strings,
    "integer": _integers,
    "boolean": lambda _: st.booleans(),
}


def _fits(schema: Json, text: str) -> bool:
    return not list(check(schema, text, "x"))


def _places(schema: Json, value: Any, path: Path_) -> list[tuple[Path_, bool]]:
    """Every place inside a value: its path, and whether it may be removed."""
    found: list[tuple[Path_, bool]] = []
    if isinstance(value, list):
        for index, item in enumerate(value):
            found.append(((*path, index), len(value) > schema.get("minItems", 0)))
            found += _places(schema["items"], item, (*path, index))
    if isinstance(value, dict) and "properties" in schema:
        for name, child in schema["properties"].items():
            found.append(((*path, name), name in value and name not in schema.get("required", ())))
            if name in value:
                found += _places(child, value[name], (*path, name))
    return found


@cache
def _spec_schema(kind: str) -> Json:
    """Schema of a kind's spec."""
    spec: Json = object_schema(BY_NAME[kind])["properties"]["spec"]
    return spec


@cache
def _drawn(kind: str, path: str) -> st.SearchStrategy[Any]:
    """Values of one field, made once: building them costs more than drawing."""
    return shaped(node_at(_spec_schema(kind), path))


def _rule_path(path: Path_) -> str:
    """Path of a place below spec, the way rules write it."""
    parts = [f".{part}" if isinstance(part, str) else "[]" for part in path[1:]]
    return "".join(parts).removeprefix(".")


@st.composite
def variants(draw: st.DrawFn, stem: str, changes_max: int = 4) -> Json:
    """A good example with some places of its spec replaced, added or removed, always of the right shape."""
    made = examples()[stem]
    for _ in range(draw(st.integers(1, changes_max))):
        path, is_removable = draw(st.sampled_from(_places(_spec_schema(made["kind"]), made["spec"], ("spec",))))
        gone = is_removable and draw(st.booleans())
        changed = with_value(made, path, GONE if gone else draw(_drawn(made["kind"], _rule_path(path))))
        # An item of a set that is replaced by its neighbour is not of the right shape.
        if all(p.message != "Duplicate value" for p in check(_spec_schema(made["kind"]), changed["spec"], "spec")):
            made = changed
    return made


STEMS = (
    "kvpool", "kvpool-minimal", "kvpool-all-fields", "kvpoolnode", "kvtenant", "kvtrustdomain", "kvprefixshare",
    "kvoperation", "kvmodelcache",
)  # fmt: skip
"""Examples to vary."""

any_variant: st.SearchStrategy[Json] = st.sampled_from(STEMS).flatmap(variants)
