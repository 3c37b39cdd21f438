"""Command line of the real nodes: results on standard output, progress and errors beside it."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from controlplane import ControlPlaneError
from controlplane import attach as attach_plane
from nodes import machine
from nodes.starting import attach, lives, start


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; return the exit status."""
    given = _parser().parse_args(argv)
    try:
        return int(given.run(given))
    except ControlPlaneError as e:
        print(f"nodes: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    parser = argparse.ArgumentParser(prog="nodes", description="Real Kubernetes nodes on this machine; needs root.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start a control plane with real nodes; prints the path of its kubeconfig")
    _add_state(up)
    up.add_argument("--nodes", type=int, default=2, help="default: %(default)s")
    up.add_argument("--huge-pages", type=int, default=0, help="of 2 MiB, asked of the kernel; default: none")
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="end a cluster, or remove what a killed one has left")
    _add_state(down)
    down.set_defaults(run=_down)
    load = commands.add_parser("load", help="give every node the images of OCI archives")
    _add_state(load)
    load.add_argument("archives", nargs="+", type=Path, metavar="TAR")
    load.set_defaults(run=_load)
    run = commands.add_parser("run", help="run a program inside a node")
    _add_state(run)
    run.add_argument("node")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="PROGRAM ...")
    run.set_defaults(run=_run)
    return parser


def _add_state(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a cluster."""
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="state folder of the cluster")


def _up(given: argparse.Namespace) -> int:
    """Start a cluster that outlives this command."""
    began_s = time.monotonic()
    cluster = start(given.state, nodes=given.nodes, huge_pages=given.huge_pages, owner_pid=os.getpid())
    cluster.plane.detach()
    print(f"nodes: {given.nodes} ready after {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    print(cluster.plane.kubeconfig)
    return 0


def _down(given: argparse.Namespace) -> int:
    """End a cluster; a supervisor that was killed has left its network and files."""
    plane = attach_plane(given.state)
    if not lives(given.state) and machine.recorded() == given.state.resolve():
        machine.sweep()  # First: what is mounted holds the folder.
    plane.stop()
    return 0


def _load(given: argparse.Namespace) -> int:
    """Load images."""
    cluster = attach(given.state)
    for archive in given.archives:
        cluster.load_image(archive.resolve())
    return 0


def _run(given: argparse.Namespace) -> int:
    """Run a program inside a node."""
    print(attach(given.state).run(given.node, *given.argv), end="")
    return 0
