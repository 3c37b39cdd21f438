"""Console entry points. The wheel installs all commands; a process whose extra is missing names it."""

import sys
from importlib import import_module


def _run(module: str, extra: str, command: str = "") -> None:
    try:
        main = import_module(module).main
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0].startswith("kvstrata_"):
            raise
        sys.exit(f"{command or f'kvstrata-{extra}'} needs the package {e.name}: pip install 'kvstrata[{extra}]'")
    main()


def agent() -> None:
    """Run the agent, or exit with what to install."""
    _run("kvstrata_agent.app.main", "agent")


def node() -> None:
    """Run node preparation, or exit with what to install."""
    _run("kvstrata_node.main", "agent", "kvstrata-node")


def metadata() -> None:
    """Run the metadata service, or exit with what to install."""
    _run("kvstrata_metadata.service.main", "metadata")


def operator() -> None:
    """Run the operator, or exit with what to install."""
    _run("kvstrata_operator.app.main", "operator")
