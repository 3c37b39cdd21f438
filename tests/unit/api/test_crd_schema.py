"""Laws of the generated CRDs: current, described, bounded, and understood by our own validation."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvstrata_api import names, schema, validate_structure
from kvstrata_api.schema_kinds import KINDS, Kind

pytestmark = pytest.mark.unit

Json = dict[str, Any]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


def nodes(node: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every schema below spec and status, by path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in node:
            yield from nodes(node[key], path + mark)


def own_nodes(kind: Kind) -> list[tuple[str, Json]]:
    """Nodes that the models describe."""
    whole = schema.object_schema(kind)
    return [found for part in ("spec", "status") for found in nodes(whole["properties"][part], part)]


def test_the_files_say_what_the_models_say() -> None:
    assert schema.stale(schema.CRD_DIR) == []


def test_a_file_that_differs_is_missing_or_belongs_to_no_kind_is_named(tmp_path: Any) -> None:
    schema.write(tmp_path)
    assert schema.stale(tmp_path) == []

    (tmp_path / "kvstrata.io_kvpools.yaml").write_text("old")
    (tmp_path / "kvstrata.io_kvtenants.yaml").unlink()
    (tmp_path / "kvstrata.io_gone.yaml").write_text("")
    assert schema.stale(tmp_path) == ["kvstrata.io_gone.yaml", "kvstrata.io_kvpools.yaml", "kvstrata.io_kvtenants.yaml"]


@every_kind
def test_every_field_has_a_description_that_ends_like_a_sentence(kind: Kind) -> None:
    bare = [path for path, node in own_nodes(kind) if path.rsplit(".")[-1].isidentifier() and not node["description"]]
    loose = [path for path, node in own_nodes(kind) if not node.get("description", ".").endswith((".", "s"))]

    assert not bare
    assert not loose


@every_kind
def test_every_field_of_an_object_is_described(kind: Kind) -> None:
    for path, node in own_nodes(kind):
        for name, child in node.get("properties", {}).items():
            assert child.get("description"), f"{path}.{name}"


def explained(description: str) -> set[str]:
    """Values that a description explains: `A: what it does.`, or `A and B: what both do.`"""
    heads = re.findall(r"(?:^|(?<=[.;] ))((?:\w+, )*\w+(?: and \w+)?): ", description)
    return {value for head in heads for value in re.split(", | and ", head)}


@every_kind
def test_every_value_of_an_enumeration_says_what_it_does(kind: Kind) -> None:
    bare = {
        path: missing
        for path, node in own_nodes(kind)
        if "enum" in node and (missing := set(node["enum"]) - explained(node["description"]))
    }
    assert bare == {}


@every_kind
def test_every_string_list_map_and_number_is_bounded(kind: Kind) -> None:
    for path, node in own_nodes(kind):
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "integer":
            assert {"minimum", "maximum", "format"} <= node.keys(), path
        if node.get("x-kubernetes-int-or-string"):
            assert {"minimum", "maxLength", "pattern"} <= node.keys(), path


@every_kind
def test_nothing_in_a_schema_is_unknown_to_our_own_validation(kind: Kind) -> None:
    known = {*schema._KEPT, "properties", "additionalProperties", "x-kubernetes-validations"}
    for path, node in own_nodes(kind):
        assert node.keys() <= known, path
        assert node.get("type", "string") in validate_structure._CHECKS, path


@every_kind
def test_no_default_is_written_into_stored_objects(kind: Kind) -> None:
    assert not [path for path, node in own_nodes(kind) if "default" in node or "nullable" in node]


@every_kind
def test_lists_are_atomic_unless_several_may_add_to_them(kind: Kind) -> None:
    shared = {
        "spec.serviceAccounts",
        "spec.acceptSharesFrom",
        "spec.priorityClasses",
        "spec.tenants",
        "spec.publishers",
        "spec.prefixes",
        "spec.tiers[].nvme.paths",
        "status.conditions",
    }
    for path, node in own_nodes(kind):
        if node.get("type") == "array":
            assert (node["x-kubernetes-list-type"] == "atomic") == (path not in shared), path


def test_conventions_of_names_hold() -> None:
    assert {k.name: k.short for k in KINDS} == {
        "KVPool": "kvp",
        "KVPoolNode": "kvpn",
        "KVTenant": "kvt",
        "KVTrustDomain": "kvtd",
        "KVPrefixShare": "kvps",
        "KVOperation": "kvop",
        "KVModelCache": "kvmc",
    }
    for kind in KINDS:
        spec = schema.crd(kind)["spec"]
        assert spec["names"]["categories"] == [names.CATEGORY]
        assert spec["versions"][0]["subresources"] == {"status": {}}
        assert spec["scope"] == ("Namespaced" if kind.name == "KVPrefixShare" else "Cluster")


@every_kind
def test_every_column_shows_a_field_that_exists(kind: Kind) -> None:
    whole = schema.object_schema(kind)
    for column in kind.columns:
        if column.path.startswith((".spec", ".status")) and "[?" not in column.path:
            assert schema.node_at(whole, column.path.removeprefix("."))
        if "[?" in column.path:
            head, _, field = column.path.partition("[?")
            items = schema.node_at(whole, head.removeprefix(".") + "[]")
            assert field.rpartition(".")[2] in items["properties"], column.path


@every_kind
def test_the_rendered_file_is_the_definition(kind: Kind) -> None:
    assert yaml.safe_load(schema.render(kind)) == schema.crd(kind)


def test_optional_references_and_constants_become_plain_schemas() -> None:
    made = schema.structural(
        {
            "$defs": {"A": {"type": "object", "title": "A", "description": "An A.", "properties": {}}},
            "type": "object",
            "properties": {
                "a": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None, "description": "Mine."},
                "b": {"const": "x", "type": "string", "default": "x"},
                "c": {"type": "boolean", "default": False, "description": "C."},
            },
        }
    )

    assert made["properties"]["a"] == {"type": "object", "description": "Mine.", "properties": {}}
    assert made["properties"]["b"] == {"type": "string", "enum": ["x"], "description": "Default: x."}
    assert made["properties"]["c"]["description"] == "C. Default: false."


@every_kind
def test_columns_that_kubectl_shows_as_ages_are_of_the_past(kind: Kind) -> None:
    """Of what is to come it would print `<invalid>`."""
    ages = [column.path for column in kind.columns if column.type == "date"]

    assert all(path.rpartition(".")[2] in {"creationTimestamp", "lastTransitionTime"} for path in ages), ages
