"""CRDs are upgraded in place under stored objects, so a later schema takes whatever an earlier one took.

`tests/recorded_schemas.json` has each kind's schema as it was first declared, without descriptions.
"""

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, Final

import pytest

from kvstrata_api.schema import object_schema
from kvstrata_api.schema_kinds import BY_NAME
from support.kube.bad_manifests import with_value

pytestmark = pytest.mark.unit

Schema = dict[str, Any]

RECORDED: Final[dict[str, Schema]] = json.loads(
    (Path(__file__).resolve().parents[2] / "recorded_schemas.json").read_text()
)

_SAME: Final = ("type", "pattern", "format", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")
_LEAST: Final = ("minimum", "minLength", "minItems", "minProperties")
_MOST: Final = ("maximum", "maxLength", "maxItems", "maxProperties")

KNOWN: Final = {
    "KVPool.spec: tenancy is gone",
    "KVPool.spec.tiers[].hbm: devices is gone",
    "KVPoolNode.spec.tiers[].hbm: devices is gone",
    "KVPoolNode.status.tiers[].devices: maxItems 64 is 16 now",
    "KVPoolNode.status.tiers[].devices[]: type 'string' is 'object' now",
    "KVPoolNode.status.tiers[].devices[]: required has ['name'] now",
}
"""What did change. Devices: agents write the whole list anew when they start, nothing reads it from an earlier one.
`tenancy.defaultAccess` had no effect with any value (docs/decisions/009), `hbm.devices` had one value
(docs/decisions/159); stored objects lose them."""


def narrowed(path: str, old: Schema, new: Schema) -> Iterator[str]:
    """Everything that `old` takes and `new` may not."""
    yield from _itself(path, old, new)
    for name, child in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{path}: {name} is gone"
        else:
            yield from narrowed(f"{path}.{name}", child, new["properties"][name])
    for inner in ("items", "additionalProperties"):
        if isinstance(old.get(inner), dict):
            yield from narrowed(f"{path}[]", old[inner], new[inner])


def _itself(path: str, old: Schema, new: Schema) -> Iterator[str]:
    """The same of one place, without what lies below."""
    for key in _SAME:
        if key in new and new[key] != old.get(key):
            yield f"{path}: {key} {old.get(key)!r} is {new[key]!r} now"
    higher = [key for key in _LEAST if key in new and new[key] > old.get(key, -inf)]
    lower = [key for key in _MOST if key in new and new[key] < old.get(key, inf)]
    for key in (*higher, *lower):
        yield f"{path}: {key} {old.get(key)} is {new[key]} now"
    if "enum" in new and (gone := sorted(set(old.get("enum", ["any"])) - set(new["enum"]))):
        yield f"{path}: enum lacks {gone} now"
    if required := sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        yield f"{path}: required has {required} now"


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_a_schema_takes_what_the_first_one_took(kind: str) -> None:
    found = set(narrowed(kind, RECORDED[kind], object_schema(BY_NAME[kind])))

    assert found - KNOWN == set()


def test_every_kind_has_a_recorded_schema_and_known_changes_are_there() -> None:
    assert RECORDED.keys() == BY_NAME.keys()
    found = {line for kind in RECORDED for line in narrowed(kind, RECORDED[kind], object_schema(BY_NAME[kind]))}
    assert found >= KNOWN, "what is not true any more is not known either"


_TIMEOUT = ("properties", "spec", "properties", "updateStrategy", "properties", "drain", "properties")


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ((*_TIMEOUT, "timeoutSeconds", "maximum"), 1, "timeoutSeconds: maximum"),
        ((*_TIMEOUT, "timeoutSeconds", "minimum"), 1, "timeoutSeconds: minimum"),
        ((*_TIMEOUT, "timeoutSeconds", "type"), "string", "timeoutSeconds: type"),
        ((*_TIMEOUT, "mode", "enum"), ["Drop"], "mode: enum lacks"),
        (_TIMEOUT, {}, "timeoutSeconds is gone"),
        (("properties", "spec", "required"), ["nodeSelector"], "spec: required"),
    ],
)
def test_a_narrower_schema_is_found_and_named(path: tuple[str, ...], value: Any, told: str) -> None:
    old = {**RECORDED["KVPool"]}
    spec = with_value(old, ("properties", "spec", "required"), [])
    bent = with_value(spec, path, value)

    assert any(told in line for line in narrowed("KVPool", spec, bent))
