"""What an engine's image installs: the base's few packages, of which nothing of the extras is imported."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import files, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
BASE = ("crds/kvstrata_api", "agent/kvstrata", "agent/kvstrata_client", "agent/kvstrata_native")
CONNECTORS = "kvstrata_client.connectors."
"""Their engines import them, and bring what they need."""
WRAPPING = "kvstrata_api.wrapping"
"""Data keys of scopes, for operator and agents: it is imported where a key is wrapped, and has `cryptography`."""
SCREEN = "kvstrata_client.commands.screen"
"""`kvstrata top` imports it, and says what to install where textual is not."""
DEVICES = "kvstrata_native.devices"
"""Memory of devices, for HBM tiers and the connectors that read it in place: these alone import it, and torch."""
IMPORT_ALL = """
import importlib, json, sys
wanted, allowed, ours = json.loads(sys.argv[1]), set(json.loads(sys.argv[2])), set(json.loads(sys.argv[3]))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        if top not in allowed | ours | sys.stdlib_module_names and not top.startswith('_sysconfigdata'):
            raise ModuleNotFoundError(f'No module named {name!r}: no part of the base', name=name)

sys.meta_path.insert(0, Refuse())
refused = {}
for name in wanted:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        refused[name] = str(e)
print(json.dumps([len(wanted), refused]))
"""


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def with_all_they_need(names: set[str]) -> set[str]:
    """Distributions that come with `names` on this platform."""
    found: set[str] = set()
    while names:
        name = names.pop()
        found.add(name)
        needed = (Requirement(line) for line in requires(name) or ())
        plain = [need for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
        names |= {canonicalize_name(need.name) for need in plain} - found
    return found


def tops(distribution: str) -> set[str]:
    """Names that it can be imported by."""
    listed = [path for path in files(distribution) or () if path.suffix in {".py", ".so"}]
    return {path.parts[0].partition(".")[0] for path in listed}


def modules() -> Iterator[str]:
    for package in BASE:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to((ROOT / package).parent).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith(CONNECTORS) and name not in (WRAPPING, SCREEN, DEVICES):
                yield name


def test_every_module_that_an_engine_imports_needs_the_base_alone() -> None:
    base = with_all_they_need({canonicalize_name(Requirement(line).name) for line in project()["dependencies"]})
    allowed = sorted(set().union(*map(tops, base)))
    ours = [Path(package).name for package in BASE]
    command = [sys.executable, "-c", IMPORT_ALL, *map(json.dumps, (list(modules()), allowed, ours))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr
    count, refused = json.loads(done.stdout)
    assert count > 50
    assert refused == {}
    assert {"numpy", "yaml"} <= set(allowed)


def test_every_extra_that_a_user_is_told_of_is_there_and_no_process_asks_for_torch() -> None:
    extras: dict[str, list[str]] = project()["optional-dependencies"]

    assert {"agent", "operator", "metadata", "cli", "ui"} <= set(extras)
    for name in ("agent", "operator", "metadata", "cli"):
        pinned = (ROOT / "requirements" / f"{name}.txt").read_text().split("\n")
        assert not [line for line in pinned if line.startswith("torch==")]
        asked = {canonicalize_name(Requirement(line).name) for line in extras[name]} - {"kvstrata"}
        assert asked <= {canonicalize_name(line.partition("==")[0]) for line in pinned if "==" in line}
