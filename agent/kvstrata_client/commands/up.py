"""Command that runs an agent on this machine: up. The agent is a package of its own, with its own command line."""

import argparse

from kvstrata_api import entry


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; its options are the agent's (`parse_known_args` leaves them over)."""
    found = commands.add_parser("up", add_help=False, help="an agent on this machine, without Kubernetes or Redis")
    found.set_defaults(run=_up)


def _up(given: argparse.Namespace) -> int:
    """Serve until a signal. Exits with what to install where the agent is not."""
    return entry.up(given.rest)
