"""The `kvstrata` command: runs or shows an agent, shows the fleet, checks manifests, names prefixes and readers.

It also replays recorded requests, calibrates codecs on captured KV, and serves a page with dashboards and a map.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata_api import __version__
from kvstrata_api.errors import KvStrataError
from kvstrata_client.commands import agent, calibrate, conformance, digest, fleet, install, manifests, of_agent

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
"""The command was understood and the answer is no, or the agent could not give one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 for success, 1 for a failure, 2 for wrong usage."""
    top = parser()
    given, given_rest = top.parse_known_args(arguments)
    if given_rest and given.command not in of_agent.COMMANDS:
        top.error(f"unrecognized arguments: {' '.join(given_rest)}")
    given.rest = given_rest
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        sys.exit(run(given))
    except KvStrataError as e:
        sys.stderr.write(f"kvstrata: {type(e).__name__}: {e}\n")
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:
        sys.exit(EXIT_FAILED)


def parser() -> argparse.ArgumentParser:
    """Build the parser with every command."""
    top = argparse.ArgumentParser(prog="kvstrata", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    agent.add(commands)
    fleet.add(commands)
    manifests.add_validate(commands)
    digest.add(commands)
    calibrate.add(commands)
    of_agent.add(commands)
    conformance.add(commands)
    manifests.add_who_can_read(commands)
    install.add(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=print_version)
    return top


def print_version(_: argparse.Namespace) -> int:
    """Print the version."""
    sys.stdout.write(f"kvstrata {__version__}\n")
    return EXIT_OK


if __name__ == "__main__":
    main()
