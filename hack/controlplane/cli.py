"""Command line of the embedded control plane: results on standard output, progress and errors beside it."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import controlplane
from controlplane.assets import find_tools
from controlplane.errors import ControlPlaneError
from controlplane.pins import DEFAULT_TOOLS, TOOLS
from controlplane.supervision import ComponentStatus


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; return the exit status."""
    given = _parser().parse_args(argv)
    try:
        return int(given.run(given))
    except ControlPlaneError as e:
        print(f"controlplane: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    parser = argparse.ArgumentParser(prog="controlplane", description="Embedded Kubernetes control plane.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a control plane; prints the path of its kubeconfig")
    _add_state(up)
    up.add_argument("--no-kwok", action="store_true", help="leave out kwok, which plays the fake nodes")
    up.add_argument("--no-controllers", action="store_true", help="leave out controller manager and scheduler")
    up.add_argument("--tied-to", type=int, metavar="PID", help="end with this process; default: run until `down`")
    up.add_argument("--advertise-address", metavar="IP", help="serve real nodes too, at this address")
    up.set_defaults(run=_up)

    for name, run, what in (
        ("down", _down, "stop a control plane and remove its folder"),
        ("kubeconfig", _kubeconfig, "print the path of the administrator's kubeconfig"),
        ("status", _status, "list the components with state, process id and memory"),
    ):
        command = commands.add_parser(name, help=what)
        _add_state(command)
        command.set_defaults(run=run)

    build = commands.add_parser("build", help="find or build the binaries; prints their paths")
    build.add_argument("tools", nargs="*", metavar="TOOL", help=f"default: {' '.join(DEFAULT_TOOLS)}")
    build.set_defaults(run=_build)
    return parser


def _add_state(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a control plane."""
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="state folder of the control plane")


def _up(given: argparse.Namespace) -> int:
    """Start a control plane that outlives this command."""
    began_s = time.monotonic()
    plane = controlplane.start(
        given.state,
        kwok=not given.no_kwok,
        controllers=not given.no_controllers,
        advertise_address=given.advertise_address,
        owner_pid=given.tied_to or os.getpid(),
    )
    if given.tied_to is None:
        plane.detach()
    print(f"controlplane: ready after {time.monotonic() - began_s:.1f} s at {plane.server}", file=sys.stderr)
    print(plane.kubeconfig)
    return 0


def _down(given: argparse.Namespace) -> int:
    """Stop a control plane."""
    controlplane.attach(given.state).stop()
    return 0


def _kubeconfig(given: argparse.Namespace) -> int:
    """Print where the administrator's kubeconfig is."""
    print(controlplane.attach(given.state).kubeconfig)
    return 0


def _status(given: argparse.Namespace) -> int:
    """List the components; the exit status is 1 unless all run and the API server is ready."""
    plane = controlplane.attach(given.state)
    components = plane.status().values()
    for component in components:
        print(_row(component))
    ready = plane.is_ready()
    print(f"{plane.server} is {'ready' if ready else 'not ready'}")
    return 0 if ready and all(c.state == "running" for c in components) else 1


def _build(given: argparse.Namespace) -> int:
    """Find or build tools."""
    names = given.tools or DEFAULT_TOOLS
    if unknown := sorted(set(names) - TOOLS.keys()):
        print(f"controlplane: no such tool: {', '.join(unknown)}; there are {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    for path in find_tools(names).values():
        print(path)
    return 0


def _row(component: ComponentStatus) -> str:
    """Return one line about a component."""
    memory = f"{_resident_mib(component.pid):.0f} MiB" if component.state != "exited" else f"exit {component.exit_code}"
    return f"{component.name:<24} {component.state:<8} pid {component.pid:<8} {memory:>9}  starts {component.starts}"


def _resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
