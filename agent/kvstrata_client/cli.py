"""The `kvstrata` command: runs or shows an agent, shows the fleet, checks manifests, names prefixes and readers.

It also looks at a cluster before an installation and afterwards, says how much KV a model makes, replays recorded
requests, calibrates codecs on captured KV, and serves a page with dashboards and a map.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from kvstrata_api import __version__
from kvstrata_api.errors import KvStrataError, UnsupportedError
from kvstrata_client.commands import of_agent
from kvstrata_client.commands.output import Parser, UsageError

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
"""The command was understood and the answer is no, or the agent could not give one."""
EXIT_USAGE: Final = 2

PLUGIN: Final = "kubectl-kvstrata"
"""The same program, where kubectl finds it: `kubectl kvstrata status`."""
SHELLS: Final = ("bash", "zsh", "tcsh")

COMMANDS: Final = {
    "status": ("status.status_options", "pools, tiers, tenants, weights and operations of a cluster at a glance"),
    "top": ("top.options", "the same and more of a cluster, live"),
    "tenants": ("status.tenants_options", "tenants with what they use, may use and read"),
    "models": ("status.models_options", "weights of models on nodes, how far they are, and where engines use them"),
    "stats": ("agent.stats_options", "tiers and counters of an agent"),
    "explain": ("agent.explain_options", "why a block or a session is where it is"),
    "session": (
        "agent.session_options",
        "the life of one session: where its blocks are, what it read from where, waited for and left to compute",
    ),
    "lookup": ("agent.lookup_options", "how much of a prompt is cached, in every scope"),
    "route-hint": (
        "agent.route_hint_options",
        "which nodes have most of a prompt, and which would have it soonest, in every scope",
    ),
    "why-miss": ("agent.why_miss_options", "why a prompt is not cached, or not all of it, in every scope"),
    "fleet": ("fleet.options", "pools, agents, Redis and leader, as the metadata service sees them"),
    "validate": ("validate.options", "check manifests as the API server would, without one"),
    "who-can-read": (
        "manifests.who_can_read_options",
        "who may read a prefix, or the blocks of a tenant, domain or share, and why others may not",
    ),
    "install": ("install.options", "whether the chart will work on a cluster, and what mends what will not"),
    "doctor": ("doctor.options", "what is wrong with a release that runs, worst first, and what mends it"),
    "probe": ("probe.options", "stores, finds and reads prompts of its own, and says how much each tier kept"),
    "support-bundle": ("bundle.options", "an archive of what somebody who helps needs to see, without secrets"),
    "capacity": ("capacity.options", "how many bytes of KV a model makes of a token, and what a tier holds of it"),
    "digest": ("digest.options", "digest and token count of a prefix, as YAML for a KVPrefixShare"),
    "calibrate": ("calibrate.options", "forms for captured KV under a permitted error, as YAML for a KVPool"),
    "conformance": (
        "conformance.options",
        "try a client of the protocol in another language, or an engine's own",
    ),
    "docs": ("docs.options", "the documents of this version: a list, a page, or the lines with some words"),
}
"""What gives each command its options, in `commands`, and what it is for. It is imported once the command is chosen."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 for success, 1 for a failure, 2 for wrong usage."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    top = parser(next((word for word in words if not word.startswith("-")), ""))
    given, given_rest = top.parse_known_args(words)
    if given_rest and given.command not in of_agent.COMMANDS:
        top.error(f"unrecognized arguments: {' '.join(given_rest)}")
    given.rest = given_rest
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        sys.exit(run(given))
    except UsageError as e:
        sys.stderr.write(f"kvstrata {given.command}: {e}\n")
        sys.exit(EXIT_USAGE)
    except KvStrataError as e:
        sys.stderr.write(f"kvstrata: {e}\n")
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:
        sys.exit(EXIT_FAILED)


def parser(chosen: str = "", *, is_whole: bool = False) -> argparse.ArgumentParser:
    """Build the parser: every command by its name, the one that was chosen, or all, with their options."""
    is_plugin = Path(sys.argv[0]).name == PLUGIN
    top = argparse.ArgumentParser(prog=PLUGIN.replace("-", " ") if is_plugin else "kvstrata", description=__doc__)
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command", parser_class=Parser)
    for name, (place, said) in COMMANDS.items():
        found = commands.add_parser(name, help=said, description=f"{said[0].upper()}{said[1:]}.")
        if is_whole or name == chosen:
            module, _, options = place.partition(".")
            getattr(import_module(f"kvstrata_client.commands.{module}"), options)(found)
    of_agent.add(commands)
    completion = commands.add_parser("completion", help="print what a shell completes this command by")
    completion.description = "Prints a script for a shell, which completes commands and options."
    completion.epilog = 'example: eval "$(kvstrata completion bash)"'
    completion.add_argument("shell", choices=SHELLS, help="that reads the script")
    completion.set_defaults(run=print_completion)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=print_version)
    return top


def print_completion(given: argparse.Namespace) -> int:
    """Print a script of shtab's. Raises `UnsupportedError` without it."""
    try:
        import shtab
    except ImportError as e:
        raise UnsupportedError("it needs the package shtab: pip install 'kvstrata[cli]'") from e
    sys.stdout.write(shtab.complete(parser(is_whole=True), given.shell))
    return EXIT_OK


def print_version(_: argparse.Namespace) -> int:
    """Print the version."""
    sys.stdout.write(f"kvstrata {__version__}\n")
    return EXIT_OK


if __name__ == "__main__":
    main()
