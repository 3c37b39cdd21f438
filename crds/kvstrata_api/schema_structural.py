"""Structural OpenAPI schemas from pydantic's JSON schema. Pure.

References are inlined, optional means absent (never null), titles go, and so do defaults: a default in the schema
makes the API server write it into every object, so that a stored manifest is no longer what its author applied
and a later release cannot change it. The description states each default instead.
"""

from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]

INT32_MAX: Final = (1 << 31) - 1

_KEPT: Final = (
    "description",
    "enum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "pattern",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
)
"""What may stay as it is; anything else is rewritten or goes."""


def structural(schema: Schema) -> Schema:
    """Rewrite what `model_json_schema(by_alias=True)` returned."""
    return _rewrite(schema, schema.get("$defs", {}))


def _rewrite(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Rewrite one node and everything below it."""
    node = _resolved(node, definitions)
    made: Schema = {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        made["enum"] = [node["const"]]
    if "default" in node:
        made["description"] = _with_default(made.get("description", ""), node["default"])
    if "properties" in node:
        made["properties"] = {name: _rewrite(child, definitions) for name, child in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = _rewrite(node["additionalProperties"], definitions)
    if "items" in node:
        made["items"] = _rewrite(node["items"], definitions)
        made.setdefault("x-kubernetes-list-type", "atomic")
    return _typed(made)


def _resolved(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Replace references and `anyOf: [X, null]` by what they mean; what the node says itself wins."""
    own = {k: v for k, v in node.items() if k not in ("$ref", "anyOf")}
    if "$ref" in node:
        return _resolved(definitions[node["$ref"].rpartition("/")[2]], definitions) | own
    if "anyOf" in node:
        (only,) = (choice for choice in node["anyOf"] if choice.get("type") != "null")
        return _resolved(only, definitions) | own
    return node


def _typed(made: Schema) -> Schema:
    """Add the integer format that Kubernetes clients expect."""
    if made.get("type") == "integer":
        made["format"] = "int64" if made.get("maximum", 0) > INT32_MAX else "int32"
    return made


def _with_default(description: str, default: Any) -> str:
    """Append a default that a reader can use; empty and nested ones say nothing new."""
    if default in (None, "") or isinstance(default, dict | list):
        return description
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{description} Default: {shown}.".strip()
