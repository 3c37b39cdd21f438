"""Pages of reference have every field, command and error; that they are up to date is tested with the chart."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import reference
from kvstrata_api.schema import CRD_DIR
from kvstrata_client import cli
from kvstrata_client.commands import of_agent

pytestmark = pytest.mark.unit


def leaves(schema: dict[str, Any]) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        yield name
        yield from leaves(field)
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from leaves(inner)


def test_every_field_of_every_kind_has_a_row_with_a_type_and_words() -> None:
    rows = re.findall(
        r"^\| `(\S+?)` \| ([^|]+(?:\\\|[^|]+)*) \|(?:[^|]|\\\|)*\| (.+) \|$", reference.crds(), re.MULTILINE
    )
    schemas = [
        version["schema"]["openAPIV3Schema"]["properties"][part]
        for path in sorted(CRD_DIR.glob("*.yaml"))
        for version in yaml.safe_load(path.read_text())["spec"]["versions"]
        for part in ("spec", "status")
        if part in version["schema"]["openAPIV3Schema"]["properties"]
    ]

    assert len(rows) == sum(1 for schema in schemas for _ in leaves(schema))
    assert all(kind.strip() and said.strip() for _, kind, said in rows)


def test_every_command_has_a_section_and_a_row() -> None:
    text = reference.command_line()

    for name in (*cli.COMMANDS, *of_agent.COMMANDS):
        assert f"\n## kvstrata {name}\n" in text
        assert f"(#kvstrata-{name})" in text
    assert "| `--pool POOL` | yes |" in text


def test_the_environment_of_whoever_runs_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.command_line()
    monkeypatch.setenv("NODE_NAME", "elsewhere")
    monkeypatch.setenv("POD_NAMESPACE", "elsewhere")
    monkeypatch.setenv("COLUMNS", "40")

    assert reference.command_line() == before
