"""Console entry points. The wheel installs all commands; a process whose extra is missing names it."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any


def _run(module: str, extra: str, command: str = "") -> None:
    _main(module, extra, command)()


def _main(module: str, extra: str, command: str = "") -> Any:
    try:
        return import_module(module).main
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0].startswith("kvstrata_"):
            raise
        sys.exit(f"{command or f'kvstrata-{extra}'} needs the package {e.name}: pip install 'kvstrata[{extra}]'")


def agent() -> None:
    """Run the agent, or exit with what to install."""
    _run("kvstrata_agent.app.main", "agent")


def up(arguments: Sequence[str]) -> int:
    """Run `kvstrata up` and return its exit status, or exit with what to install."""
    status: int = _main("kvstrata_agent.app.standalone.main", "agent", "kvstrata up")(arguments)
    return status


def replay(arguments: Sequence[str]) -> int:
    """Run `kvstrata replay` and return its exit status."""
    status: int = _main("kvstrata_agent.replay.main", "agent", "kvstrata replay")(arguments)
    return status


def plan(arguments: Sequence[str]) -> int:
    """Run `kvstrata plan` and return its exit status."""
    status: int = _main("kvstrata_agent.replay.plan", "agent", "kvstrata plan")(arguments)
    return status


def ui(arguments: Sequence[str]) -> int:
    """Run `kvstrata ui` and return its exit status, or exit with what to install."""
    status: int = _main("kvstrata_ui.main", "ui", "kvstrata ui")(arguments)
    return status


def node() -> None:
    """Run node preparation, or exit with what to install."""
    _run("kvstrata_node.main", "agent", "kvstrata-node")


def metadata() -> None:
    """Run the metadata service, or exit with what to install."""
    _run("kvstrata_metadata.service.main", "metadata")


def operator() -> None:
    """Run the operator, or exit with what to install."""
    _run("kvstrata_operator.app.main", "operator")
