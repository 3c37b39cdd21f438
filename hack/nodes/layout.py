"""Names, addresses and paths of a cluster's nodes. Pure.

One cluster of real nodes at a time on one machine: addresses and names of network interfaces are fixed, so what a
killed one has left behind can be found and removed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

BRIDGE: Final = "kvstrata-nodes"
"""Interface that stands for the network between nodes; at most 15 bytes (linux/if.h, IFNAMSIZ)."""
HOST_ADDRESS: Final = "10.88.0.1"
"""This machine on that network: API server and names are served here."""
HOST_NETWORK: Final = f"{HOST_ADDRESS}/24"
POD_NETWORK: Final = "10.244.0.0/16"
NODES_MAX: Final = 9
"""Bounds addresses and what is looked for when a cluster is removed; two cores serve three nodes at most."""

RECORD: Final = Path("/run/kvstrata-nodes.json")
"""Says which cluster this machine has, and how many huge pages it asked for."""

STATE_PLACES: Final = ("/run", "/var/lib", "/var/log", "/mnt")
"""Directories that each node has of its own; a state folder must not lie below one."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """One node: `number` counts from 1."""

    number: int
    root: Path
    """Folder of this node below the state folder of the plane."""

    @property
    def name(self) -> str:
        """Name of the Node object, of the network namespace's suffix and of the control group."""
        return f"node-{self.number}"

    @property
    def component(self) -> str:
        """Name of the process that is this node, at the plane's supervisor."""
        return self.name

    @property
    def namespace(self) -> str:
        """Network namespace, as `ip netns` knows it."""
        return f"kvstrata-{self.name}"

    @property
    def interface(self) -> str:
        """The bridge's end of this node's cable."""
        return f"kvnode{self.number}"

    @property
    def address(self) -> str:
        """Address of the node."""
        return f"10.88.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        """Addresses of the node's pods."""
        return f"10.244.{self.number}.0/24"

    @property
    def cgroup(self) -> str:
        """Root of the node's control groups."""
        return f"/kvstrata-{self.name}"

    @property
    def disk(self) -> Path:
        """What outlives a reboot, on the machine's disk: bound over directories such as /var/lib inside the node."""
        return self.root / "disk"

    @property
    def images(self) -> Path:
        """Memory that holds the node's images and the root file systems of its pods; outlives a reboot too."""
        return self.root / "images"

    def config(self, name: str) -> Path:
        """Return the path of one configuration file."""
        return self.root / "config" / name


def node_layouts(state_dir: Path, count: int) -> tuple[NodeLayout, ...]:
    """The nodes of a cluster of `count`. Raises `ValueError` outside of 1..`NODES_MAX`."""
    if not 1 <= count <= NODES_MAX:
        raise ValueError(f"{count} nodes; at least 1 and at most {NODES_MAX}")
    return tuple(NodeLayout(number, state_dir / "nodes" / f"node-{number}") for number in range(1, count + 1))
