"""Commands that the agent's package has, with command lines of its own: up, replay, plan, ui."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstrata_api import entry

if TYPE_CHECKING:
    from kvstrata_client.commands.output import Parser

COMMANDS: Final[dict[str, tuple[str, Callable[[Sequence[str]], int]]]] = {
    "up": ("an agent on this machine, without Kubernetes or Redis", entry.up),
    "replay": ("what recorded requests would find in caches of given sizes", entry.replay),
    "plan": ("what a pool would do for recorded requests, at what cost, and which sizes are better", entry.plan),
    "ui": ("a page with the dashboards and a map of the fleet, from Prometheus", entry.ui),
}


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add them; their options are their own (`parse_known_args` leaves them over)."""
    for name, (said, _) in COMMANDS.items():
        commands.add_parser(name, add_help=False, help=said).set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    """Run one. Exits with what to install where its package lacks something."""
    return COMMANDS[given.command][1](given.rest)
