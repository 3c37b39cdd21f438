"""Starts a cluster of real nodes in a state folder, or refers to one that runs there."""

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from controlplane import ControlPlane, StateDirError
from controlplane import attach as attach_plane
from controlplane import start as start_plane
from controlplane.assets import find_tools
from controlplane.plane import READY_S
from nodes import machine
from nodes.cluster import Cluster
from nodes.configs import corefile
from nodes.errors import NodesError, UnavailableError
from nodes.images import pause_archive
from nodes.layout import HOST_ADDRESS, RECORD, STATE_PLACES, node_layouts
from nodes.packages import Packages, node_packages
from nodes.provisioning import write_node
from nodes.rights import DNS_USER, bindings

_PROGRAMS: Final = ("ip", "nsenter", "unshare", "apt-get", "dpkg", "cc")
TOOLS: Final = ("kubelet", "kube-proxy", "coredns")


def missing() -> str | None:
    """What this machine lacks for real nodes, or None."""
    if os.geteuid() != 0:
        return "real nodes need root: they have namespaces, mounts and control groups of their own"
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"real nodes need {', '.join(absent)}"
    if not machine.hierarchies("cgroup"):
        return "real nodes need control groups of version 1 (a hybrid set-up serves); version 2 alone is not supported"
    return None


def start(state_dir: Path | str, *, nodes: int = 2, huge_pages: int = 0, owner_pid: int | None = None) -> Cluster:
    """Start a control plane with `nodes` real nodes and return when all are Ready.

    `huge_pages` of 2 MiB more are asked of the kernel first: all nodes show the machine's. Everything ends, and the
    machine is as before, with the process `owner_pid` (default: the caller), however that ends. Raises
    `UnavailableError`, `NodesError` and what `controlplane.start` raises; nothing is left behind then.
    """
    if lack := missing():
        raise UnavailableError(lack)
    root = Path(state_dir).resolve()
    if any(root.is_relative_to(place) for place in STATE_PLACES):
        raise StateDirError(f"{root} lies below one of {', '.join(STATE_PLACES)}, which nodes have of their own")
    binaries, packages = find_tools(TOOLS), node_packages()
    _claim_machine(root)
    plane: ControlPlane | None = None
    try:
        _reserve(huge_pages)
        machine.add_bridge()
        plane = start_plane(root, kwok=False, advertise_address=HOST_ADDRESS, owner_pid=owner_pid)
        plane.supervision.call("at_end", argv=[sys.executable, "-m", "nodes.machine"])
        return _bring_up(plane, nodes, binaries, packages)
    except BaseException:
        if plane is not None:
            plane.stop()
        machine.sweep()
        raise


def attach(state_dir: Path | str) -> Cluster:
    """Refer to the cluster that runs in `state_dir`. Raises `StateDirError` when there is none."""
    plane = attach_plane(state_dir)
    folders = [path for path in (plane.state_dir / "nodes").glob("node-*") if path.is_dir()]
    return Cluster(plane, node_layouts(plane.state_dir, len(folders)), node_packages())


def _claim_machine(root: Path) -> None:
    """Take this machine for one cluster; what a killed one has left is removed first."""
    if (other := machine.recorded()) is not None:
        if lives(other):
            raise NodesError(f"this machine has a cluster of real nodes in {other} ({RECORD})")
        machine.sweep()
    machine.claim(root)


def _reserve(huge_pages: int) -> None:
    given = machine.reserve_huge_pages(huge_pages)
    if given < huge_pages:
        raise UnavailableError(f"{huge_pages} huge pages of 2 MiB asked for, the kernel gave {given}")


def lives(state_dir: Path) -> bool:
    """Whether somebody owns the processes of the cluster in a state folder."""
    try:
        attach_plane(state_dir).status()
    except StateDirError:
        return False
    return True


def _bring_up(plane: ControlPlane, count: int, binaries: dict[str, Path], packages: Packages) -> Cluster:
    """Start names and nodes, and give each node the image that every pod needs."""
    for path, body in bindings():
        plane.api.post(path, body)
    dns = plane.client_kubeconfig(DNS_USER, (), plane.state_dir / "kubeconfig" / "coredns")
    settings = plane.state_dir / "Corefile"
    settings.write_text(corefile(dns))
    cluster = Cluster(plane, node_layouts(plane.state_dir, count), packages)
    cluster.spawn("coredns", [str(binaries["coredns"]), "-conf", str(settings)])
    for node in cluster.nodes:
        machine.mount_images(node)
        write_node(plane, node, binaries, packages)
    cluster.connect()
    for node in cluster.nodes:
        cluster.boot(node.name)
    cluster.load_image(pause_archive(plane.state_dir))
    cluster.wait_ready(READY_S)
    return cluster
