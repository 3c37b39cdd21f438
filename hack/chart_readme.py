"""The chart's README and its commented values.yaml: defaults from values.yaml, words from values.schema.json."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Schema = Mapping[str, Any]


def text(chart: Path) -> str:
    """README of the chart in the folder `chart`."""
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    rows = "".join(f"| `{key}` | `{default}` | {what} |\n" for key, default, what in rows_of(schema, values))
    template = (chart / "README.md.in").read_text(encoding="utf-8")
    return template.replace("@VALUES@\n", f"| value | default | what |\n|---|---|---|\n{rows}")


_COLUMNS: Final = 120
"""Width of values.yaml."""
_HEAD: Final = """\
# Defaults of the chart. Change a default here and its words in values.schema.json, then run `make generate`, which
# writes the comments and README.md. Wrong values are refused by the schema before anything reaches the cluster.
"""


def values(chart: Path) -> str:
    """values.yaml of the chart in the folder `chart`, each value with what the schema says of it."""
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    return _HEAD + "".join(_commented(schema, defaults, schema))


def _commented(schema: Schema, defaults: Mapping[str, Any], root: Schema, depth: int = 0) -> Iterator[str]:
    indent = "  " * depth
    for name, default in defaults.items():
        described = schema["properties"][name]
        target = _resolved(described, root)
        words = described["description"].replace("`", "'") + _choices(target)
        comment = textwrap.fill(words, _COLUMNS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        yield f"{'' if depth else chr(10)}{comment}\n"
        if "properties" in target and isinstance(default, dict) and default:
            yield f"{indent}{name}:\n"
            yield from _commented(target, default, root, depth + 1)
        else:
            yield f"{indent}{name}: {json.dumps(default, ensure_ascii=False)}\n"


def _choices(target: Schema) -> str:
    return f" One of {', '.join(target['enum'])}." if "enum" in target else ""


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
