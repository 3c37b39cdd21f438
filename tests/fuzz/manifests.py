"""Manifests of every kind, as text and as objects: what is wrong is named by its field, what is good is read alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from fuzz.target import TEXT_BYTES, Form, Target, expect
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.manifest_text import Placed, read
from kvstrata_api.schema_kinds import BY_NAME
from kvstrata_api.validate import every_problem, parse, validate

_EXAMPLES: Final = Path(__file__).resolve().parents[2] / "crds" / "examples"
_YAML: Final = (
    *TEXT_BYTES, b"&a ", b"*a", b"!!int ", b"!!set ", b"!!binary ", b"!!timestamp ", b"!!omap ", b"<<: ", b"? ", b"- ",
    b"---\n", b"0x" + b"f" * 4000, b"9" * 4400, b"items:\n- ", b"~: ", b"1: ", b"kind: KVPool\n", b"[" * 600,
)  # fmt: skip
_JSON: Final = (*TEXT_BYTES, b'"a":', b"{}", b"[]", b"true", b'"1Gi"', b'"9Ei"', b'"spec":', b'"1"', b"9" * 4400)


def _examples() -> list[bytes]:
    return [path.read_bytes() for path in sorted(_EXAMPLES.glob("*.yaml"))]


def _texts() -> list[bytes]:
    """Short ones as well, of which a session tries a hundred times as many."""
    return [*_examples(), b"kind: KVPool\nmetadata: {name: a, labels: {b: 1}}\n---\nitems:\n- 'c'\n- &d [e]\n- *d\n"]


def _objects() -> list[bytes]:
    return [msgspec.json.encode(obj) for text in _examples() for obj in yaml.safe_load_all(text) if obj]


def _is_good(obj: Mapping[str, Any]) -> bool:
    problems = every_problem(obj)
    for one in problems:
        # Rules cannot blame metadata (CEL), and a name may be empty.
        is_named = bool(one.field) or one.message.startswith(("metadata.name ", 'unknown field ""'))
        expect(is_named and len(one.value) <= 80, "a problem names its field and shows its value", one)
    expect(bool(validate(obj)) == bool(problems), "both ways to validate have one verdict", obj)
    kind = str(obj.get("kind"))
    if problems:
        if kind in BY_NAME:
            _check_refused(kind, obj)
        return False
    try:
        typed = parse(kind, obj)
    except InvalidInputError as e:
        expect(": metadata." in str(e), "a good manifest is parsed; metadata is the API server's to check", str(e))
        return False
    written = typed.to_json()
    again = parse(kind, written)
    expect(again == typed, "what was written from a manifest is read alike", typed, again)
    expect(again.to_json() == written, "and written alike", written)
    return True


def _check_refused(kind: str, obj: Mapping[str, Any]) -> None:
    if validate(dict(obj) | {"kind": kind, "apiVersion": obj.get("apiVersion", "kvstrata.io/v1alpha1")}):
        try:
            parse(kind, obj)
        except InvalidInputError as e:
            expect(kind in str(e), "an error names the kind", str(e))
        else:
            expect(False, "what has problems is not parsed", obj)  # noqa: FBT003


def _check_object(document: bytes) -> bool:
    try:
        obj = msgspec.json.decode(document)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return isinstance(obj, dict) and _is_good(obj)


def _check_text(document: bytes) -> bool:
    is_good = False
    try:
        for placed in read(document.decode("utf-8", "replace")):
            _check_placed(placed)
            is_good |= _is_good(placed.obj)
    except InvalidInputError as e:
        line = str(e).partition(":")[0]
        expect(line.isdecimal() and int(line) >= 1, "what is no YAML is named by its line", str(e))
        return False
    return is_good


def _check_placed(placed: Placed) -> None:
    for one in every_problem(placed.obj):
        expect(placed.line(one.field) >= 1, "every problem has a line", one)
        placed.text(one.field)
    for path, line in placed.repeated():
        expect(line >= 1, "a repeated key has a line", path)


TARGETS: Final = (
    Target("manifest-texts", "YAML of every kind", _texts, _check_text, tokens=_YAML, bytes_max=8192),
    Target(
        "manifest-objects", "JSON of every kind", _objects, _check_object, tokens=_JSON, form=Form.JSON, bytes_max=8192
    ),
)
