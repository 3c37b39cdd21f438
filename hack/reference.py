"""Writes the pages of reference that are made from the code: custom resources, command line, errors, runbooks.

`hack/reference.py --write | --check`
"""

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

import yaml

from kvstrata_api import errors
from kvstrata_api.errors import KvStrataError
from kvstrata_client import cli
from kvstrata_client.commands import of_agent
from kvstrata_telemetry import generated

Json = Mapping[str, Any]

REFERENCE: Final = generated.ROOT / "docs" / "reference"
RUNBOOKS: Final = generated.ROOT / "docs" / "runbooks"
_CRDS: Final = generated.ROOT / "crds"
_ALERTS: Final = generated.ROOT / "dashboards" / "alerts.yaml"
_MEANS: Final = re.compile(r"\*\*Means\*\*: (.+?)\n\n", re.DOTALL)
_DEFAULT: Final = re.compile(r"\s*Default: (.+?)\.?$")
_KINDS: Final = (
    "KVPool",
    "KVTenant",
    "KVTrustDomain",
    "KVPrefixShare",
    "KVOperation",
    "KVModelCache",
    "KVPoolNode",
)
"""In the order in which somebody meets them."""
_FROM_ENVIRONMENT: Final = ("NODE_NAME", "POD_NAMESPACE", "KUBECONFIG", "XDG_STATE_HOME", "REDIS_URL")
"""What defaults of options come from: not from that of whoever runs this."""
PROCESSES: Final = {
    "kvstrata up": "kvstrata_agent.app.standalone.main",
    "kvstrata replay": "kvstrata_agent.replay.main",
    "kvstrata plan": "kvstrata_agent.replay.plan",
    "kvstrata ui": "kvstrata_ui.main",
    "kvstrata-agent": "kvstrata_agent.app.config",
    "kvstrata-operator": "kvstrata_operator.app.options",
    "kvstrata-metadata": "kvstrata_metadata.service.main",
    "kvstrata-node": "kvstrata_node.config",
}
"""Modules that have the command lines of processes, each in `_parser`."""

_CRDS_HEAD: Final = """\
# Custom resources

Made from the models in `crds/kvstrata_api/models/` by `make generate`; the same words as `kubectl explain`. Group
`kvstrata.io`, version `v1alpha1`. An absent field has its default, null is absent, and nothing writes defaults into
your objects. Examples of each kind: [crds](../../crds/README.md).

`[]` is a list, `{}` a map. A quantity is a positive whole number of bytes, as an integer or with k, M, G, T, P, Ki, Mi,
Gi, Ti, Pi, Ei. Rules over several fields stand below each table, in the words in which they are refused.
"""
_CLI_HEAD: Final = """\
# Command line

Made from the commands themselves by `make generate`. Exit status: 0 done, 1 the answer is no or could not be had, 2
wrong usage. By task: [operations](../operations.md). As a plug-in of kubectl: a link `kubectl-kvstrata` to `kvstrata`
in PATH.
"""
_ERRORS_HEAD: Final = """\
# Errors

Made from `crds/kvstrata_api/errors.py` by `make generate`. All of them say value, limit and id. The client raises them
with `strict=True` alone, otherwise each is a miss ([API](../api.md#errors)). What processes log:
[warnings and errors](../logs.md).

| error | branch | means |
|---|---|---|
"""
_RUNBOOKS_HEAD: Final = """\
# Runbooks

Made from `dashboards/alerts.yaml` and the pages by `make generate`: one page for each alert, with what it means, what
it harms, where to look and what to do.

| alert | severity | after | means |
|---|---|---|---|
"""


def crds() -> str:
    """Every field of every kind: type, default, limits, description."""
    found = {
        body["spec"]["names"]["kind"]: body["spec"] for body in map(_yaml, sorted(_CRDS.glob("kvstrata.io_*.yaml")))
    }
    assert found.keys() == set(_KINDS)
    return _CRDS_HEAD + "".join(_kind(found[kind]) for kind in _KINDS)


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _kind(spec: Json) -> str:
    names, version = spec["names"], spec["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    columns = ", ".join(c["name"] for c in version.get("additionalPrinterColumns", ()))
    text = f"\n## {names['kind']}\n\n{schema.get('description', '')}\n\n"
    text += f"Short name `{names['shortNames'][0]}`, {spec['scope'].lower()}. Columns of `kubectl get`: {columns}.\n"
    for part in ("spec", "status"):
        if part in schema["properties"]:
            text += f"\n### {names['kind']} {part}\n\n| field | type | default, limits | what |\n|---|---|---|---|\n"
            text += "".join(_rows(schema["properties"][part], "", part == "spec"))
            rules = [
                *_rules(schema["properties"][part], part),
                *(_rules(schema, "", own=True) if part == "spec" else ()),
            ]
            if rules:
                text += "\nRules:\n\n" + "".join(f"- `{where}`: {_cell(said)}\n" for where, said in rules)
    return text


def _rows(schema: Json, prefix: str, is_spec: bool) -> Iterator[str]:  # noqa: FBT001  Two tables, one walk.
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        path, inner = f"{prefix}{name}", field
        while inner.get("type") == "array" or isinstance(inner.get("additionalProperties"), dict):
            path += "[]" if inner.get("type") == "array" else "{}"
            inner = inner["items"] if inner.get("type") == "array" else inner["additionalProperties"]
        said = field.get("description", "")
        default = _DEFAULT.search(said)
        bounds = [f"`{default[1]}`"] if default else ["required"] if is_spec and name in required else []
        bounds += [*_bounds(field), *(_bounds(inner) if inner is not field else ())]
        words = _cell(_DEFAULT.sub("", said)) if default else _cell(said)
        yield f"| `{path}` | {_type(field)} | {', '.join(bounds)} | {words} |\n"
        yield from _rows(inner, f"{path}.", is_spec)


def _type(schema: Json) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'])}"
    return str(schema.get("format") if schema.get("format") == "date-time" else schema.get("type", "any"))


def _bounds(schema: Json) -> Iterator[str]:
    """Limits of one value, in words; those of quantities are in the page's head."""
    if schema.get("x-kubernetes-int-or-string"):
        return
    for low, high, unit in (
        ("minimum", "maximum", ""), ("minLength", "maxLength", " characters"), ("minItems", "maxItems", " items"),
        ("minProperties", "maxProperties", " entries"),
    ):  # fmt: skip
        if low in schema and high in schema:
            yield f"{schema[low]} to {schema[high]}{unit}"
        elif low in schema:
            yield f"from {schema[low]}{unit}"
        elif high in schema:
            yield f"up to {schema[high]}{unit}"
    if "pattern" in schema:
        yield f"`{_cell(schema['pattern'])}`"


def _rules(schema: Json, path: str, *, own: bool = False) -> Iterator[tuple[str, str]]:
    """Where a rule over several fields stands, and what it says; with `own`, not those of fields."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path or "(the object)", rule.get("message", rule["rule"])
    if own:
        return
    for name, field in schema.get("properties", {}).items():
        yield from _rules(field, f"{path}.{name}")
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _cell(text: str) -> str:
    """Words as they may stand in a cell of a table, or in a list."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def command_line() -> str:
    """Arguments of every command and process."""
    parsers = command_parsers()
    commands = "".join(_section(f"kvstrata {name}", parser) for name, parser in sorted(parsers.items()))
    said = {name: parser.description or "" for name, parser in parsers.items()}
    said |= {name: words for name, (_, words) in cli.COMMANDS.items()}
    listed = [(f"kvstrata {name}", words) for name, words in sorted(said.items())]
    listed += [(f"kvstrata {name}", words) for name, (words, _) in of_agent.COMMANDS.items()]
    listed += [(name, "a process of the chart") for name in PROCESSES if name.startswith("kvstrata-")]
    rows = "".join(f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(words)} |\n" for name, words in listed)
    processes = "".join(_section(name, parser) for name, parser in process_parsers().items())
    return f"{_CLI_HEAD}\n| command | what |\n|---|---|\n{rows}{commands}{processes}"


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands of `kvstrata` that have no command line of their own, by name."""
    actions = cli.parser(is_whole=True)._actions  # noqa: SLF001  argparse has no other way to its subparsers.
    (choices,) = (action.choices for action in actions if isinstance(action.choices, dict))
    return {name: parser for name, parser in choices.items() if name not in of_agent.COMMANDS and name != "version"}


def process_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of what has a command line of its own, by name."""
    with mock.patch.dict(os.environ):
        for name in _FROM_ENVIRONMENT:
            os.environ.pop(name, None)
        return {name: vars(import_module(module))["_parser"]() for name, module in PROCESSES.items()}


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    """One command: not its own help, whose form differs between versions of Python."""
    rows = [
        (_option(action), "yes" if action.required and action.option_strings else "", _help(action))
        for action in parser._actions  # noqa: SLF001  argparse has no other way to what it was given.
        if not isinstance(action, argparse._HelpAction | argparse._VersionAction)  # noqa: SLF001
    ]
    table = "| argument | required | what |\n|---|---|---|\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    words = "\n\n".join(_cell(text) for text in (parser.description, parser.epilog) if text)
    return f"\n## {name}\n\n{words}\n\n{table if rows else ''}"


def _option(action: argparse.Action) -> str:
    choices = [str(choice) for choice in action.choices] if action.choices is not None else []
    value = action.metavar or ("\\|".join(choices) if choices else (action.dest or "").upper().replace("-", "_"))
    shown = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{shown if action.nargs not in ('?', '*') else f'[{shown}]'}`"
    return f"`{', '.join(action.option_strings)}{'' if action.nargs == 0 else ' ' + shown}`"


def _help(action: argparse.Action) -> str:
    said = (action.help or "") % {**vars(action), "prog": ""}
    return _cell(said)


def failures() -> str:
    """Every error that is raised on purpose, with its branch."""
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    rows = ""
    for node in classes:
        kind = getattr(errors, node.name)
        branch = next((b.__name__ for b in (errors.RetryableError, errors.PermanentError) if issubclass(kind, b)), "-")
        if issubclass(kind, KvStrataError):
            rows += f"| `{node.name}` | {branch} | {_cell(ast.get_docstring(node) or '')} |\n"
    return _ERRORS_HEAD + rows


def runbooks() -> str:
    """Index of the runbooks, by how bad their alerts are."""
    rules = [rule for group in _yaml(_ALERTS)["groups"] for rule in group["rules"]]
    rows = [
        (
            f"[{rule['alert']}]({rule['alert']}.md)",
            rule["labels"]["severity"],
            rule.get("for", "0m"),
            _means(rule["alert"]),
        )
        for rule in sorted(rules, key=lambda rule: (rule["labels"]["severity"], rule["alert"]))
    ]
    return _RUNBOOKS_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _means(alert: str) -> str:
    found = _MEANS.search((RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8"))
    assert found is not None, f"{alert}.md says not what it means"
    return " ".join(found[1].split())


def files() -> generated.Files:
    """Every page by its path."""
    return {
        REFERENCE / "crds.md": crds(),
        REFERENCE / "cli.md": command_line(),
        REFERENCE / "errors.md": failures(),
        RUNBOOKS / "README.md": runbooks(),
    }


if __name__ == "__main__":
    sys.exit(generated.run(files, __doc__))
