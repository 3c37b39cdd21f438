"""The chart's README: its text from README.md.in, its table of values from values.yaml and values.schema.json."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Schema = Mapping[str, Any]


def text(chart: Path) -> str:
    """README of the chart in the folder `chart`."""
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    rows = "".join(f"| `{key}` | `{default}` | {what} |\n" for key, default, what in rows_of(schema, values))
    template = (chart / "README.md.in").read_text(encoding="utf-8")
    return template.replace("@VALUES@\n", f"| value | default | what |\n|---|---|---|\n{rows}")


def rows_of(schema: Schema, values: Mapping[str, Any], prefix: str = "", root: Schema | None = None) -> Iterator[Any]:
    """Path, default as JSON and description of each value that has a default, in the order of values.yaml.

    `KeyError` when a default is not described.
    """
    root = root or schema
    for name, default in values.items():
        described = schema["properties"][name]
        target = _resolved(described, root)
        if "properties" in target and isinstance(default, dict):
            yield from rows_of(target, default, f"{prefix}{name}.", root)
        else:
            cell = json.dumps(default).replace("|", "\\|")
            yield f"{prefix}{name}", cell, described["description"].replace("|", "\\|")


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a reference into `$defs`."""
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    return root["$defs"][name] if name else schema
