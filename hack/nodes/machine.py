"""What real nodes change on this machine, and how that is undone. Everything here may be done twice.

`python -m nodes.machine` removes what is left of a cluster: the plane's supervisor runs it when all else is gone.
"""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

from nodes.layout import BRIDGE, HOST_NETWORK, NODES_MAX, RECORD, NodeLayout

_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
_COMMAND_S = 30.0
_IMAGES_BYTES = 3 << 30
"""A bound; the four images take 0.8 GiB, packed and unpacked."""
_TRIES = 40
_PAUSE_S = 0.05
"""The last processes of a control group are collected within milliseconds of their end."""


def hierarchies(*kinds: str) -> list[Path]:
    """Mount points of control groups; `cgroup` is version 1, `cgroup2` the other."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(fields[1]) for fields in mounts if fields[2] in kinds]


def connect(node: NodeLayout) -> None:
    """Give a node its network namespace and its cable."""
    disconnect(node)
    cable = ("dev", "eth0")
    _ip("netns", "add", node.namespace)
    _ip("link", "add", node.interface, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
    _ip("link", "set", node.interface, "master", BRIDGE, "up")
    for arguments in (
        ("addr", "add", f"{node.address}/24", *cable),
        ("link", "set", "eth0", "up"),
        ("link", "set", "lo", "up"),
    ):
        _ip("-n", node.namespace, *arguments)


def route(node: NodeLayout, others: list[NodeLayout]) -> None:
    """Tell a connected node where the pods of the others are, and this machine where the node's are."""
    for other in others:
        _ip("-n", node.namespace, "route", "replace", other.pods, "via", other.address)
    _ip("route", "replace", node.pods, "via", node.address)


def disconnect(node: NodeLayout) -> None:
    """Take a node from the network."""
    if Path("/run/netns", node.namespace).exists():
        _ip("netns", "del", node.namespace)
    _remove_link(node.interface)


def add_bridge() -> None:
    """Make the network between the nodes."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", HOST_NETWORK, "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")


def mount_images(node: NodeLayout) -> None:
    """Have memory for a node's images: unpacking and removing some ten thousand files takes a busy disk minutes."""
    node.images.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={_IMAGES_BYTES}", "tmpfs", str(node.images))


def _unmount(state_dir: Path) -> None:
    """Take away what is mounted below a state folder."""
    mounts = (Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines())
    for mount in sorted((path for path in mounts if path.is_relative_to(state_dir)), reverse=True):
        _run("umount", "--lazy", str(mount))


def make_cgroups(node: NodeLayout) -> None:
    """Make the root of a node's control groups in each hierarchy; those of `cpuset` begin empty and are filled."""
    for hierarchy in hierarchies("cgroup"):
        group = hierarchy / node.cgroup.strip("/")
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / name).exists():
                (group / name).write_text((hierarchy / name).read_text())


def remove_cgroups(node: NodeLayout) -> None:
    """Remove all control groups of a node whose processes have ended."""
    for hierarchy in hierarchies("cgroup", "cgroup2"):  # A runtime makes groups in all.
        group = hierarchy / node.cgroup.strip("/")
        for folder, _, _ in os.walk(group, topdown=False):
            for _ in range(_TRIES):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
                    break
                time.sleep(_PAUSE_S)


def claim(state_dir: Path) -> None:
    """Note which cluster this machine has. Raises `FileExistsError` when it has one."""
    with RECORD.open("x") as file:
        json.dump({"state_dir": str(state_dir), "huge_pages": 0}, file)


def reserve_huge_pages(count: int) -> int:
    """Ask for `count` huge pages of 2 MiB, for the cluster that has this machine; return how many the kernel gave."""
    given = _add_huge_pages(count)
    RECORD.write_text(json.dumps(json.loads(RECORD.read_text()) | {"huge_pages": given}))
    return given


def recorded() -> Path | None:
    """State folder of the cluster that this machine has, or of which something is left."""
    with contextlib.suppress(FileNotFoundError):
        return Path(json.loads(RECORD.read_text())["state_dir"])
    return None


def sweep() -> None:
    """Remove what is left of a cluster whose processes have ended: its network, control groups and huge pages."""
    for number in range(1, NODES_MAX + 1):
        node = NodeLayout(number, Path("/nonexistent"))
        disconnect(node)
        remove_cgroups(node)
    _remove_link(BRIDGE)
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(RECORD.read_text())
        _unmount(Path(found["state_dir"]))
        _add_huge_pages(-found["huge_pages"])
    RECORD.unlink(missing_ok=True)


def _add_huge_pages(count: int) -> int:
    """Change the machine's number of huge pages by `count`; return by how many it changed."""
    before = int(_HUGE_PAGES.read_text())
    _HUGE_PAGES.write_text(str(max(0, before + count)))
    return int(_HUGE_PAGES.read_text()) - before


def _remove_link(name: str) -> None:
    """Remove an interface; one end of a cable may go with the other at any moment."""
    if Path("/sys/class/net", name).exists():
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", name)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_S)


if __name__ == "__main__":
    sweep()
