"""The catalogue of log events is what the code logs, and the code logs nothing else at warning and above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata_telemetry.log_events import EVENTS

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {
    "agent/kvstrata_agent": "agent",
    "agent/kvstrata_node": "node",
    "metadata/kvstrata_metadata": "metadata",
    "operator/kvstrata_operator": "operator",
    "crds/kvstrata_kube": "",
}
"""Packages and the process that each is; the last one is of several."""
LEVELS = {"warning": ("warning", False), "error": ("error", False), "exception": ("error", True)}
Logged = tuple[str, str, bool]
"""Event, level, and whether a traceback comes with it."""


def fields_of(call: ast.Call) -> set[str] | None:
    """Names that `extra` gives; None where it is no literal."""
    given = [k.value for k in call.keywords if k.arg == "extra"]
    if not given:
        return set()
    if not isinstance(given[0], ast.Dict) or None in given[0].keys:
        return None
    return {ast.literal_eval(key) for key in given[0].keys if key is not None}


def logged() -> Iterator[tuple[Logged, str, set[str] | None]]:
    """What each call logs, its process and its fields."""
    for folder, process in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if node.func.attr in LEVELS and ast.unparse(node.func.value) in ("log", "_log"):
                    level, has_traceback = LEVELS[node.func.attr]
                    has_traceback |= any(k.arg == "exc_info" for k in node.keywords)
                    yield (ast.literal_eval(node.args[0]), level, has_traceback), process, fields_of(node)


def test_the_catalogue_has_every_event_and_no_other() -> None:
    known = [(e.event, e.level, e.has_traceback) for e in EVENTS]

    assert sorted(known) == sorted({what for what, _, _ in logged()})
    assert [e.event for e in EVENTS] == sorted(e.event for e in EVENTS)


def test_processes_and_fields_are_those_of_the_code() -> None:
    by_event = {(e.event, e.level, e.has_traceback): e for e in EVENTS}
    fields: dict[Logged, set[str]] = {}
    unknown: set[Logged] = set()
    for what, process, names in logged():
        assert not process or process in by_event[what].processes, (what, process)
        fields.setdefault(what, set()).update(names or ())
        if names is None:
            unknown.add(what)

    for what, names in fields.items():
        said = set(by_event[what].fields)
        assert names <= said if what in unknown else names == said, what


def test_each_says_what_it_means_in_sentences() -> None:
    assert [e.event for e in EVENTS if not e.help.endswith((".", "?"))] == []
