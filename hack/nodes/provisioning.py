"""Writes what one node boots from: identities, settings and the plan of `boot.py`."""

import json
import shlex
from pathlib import Path
from typing import Any, Final

from controlplane import ControlPlane
from nodes import configs
from nodes.layout import NodeLayout
from nodes.packages import Packages
from nodes.rights import PROXY_USER

AGENT_USER: Final = 65532
"""User of kvstrata's pods (`podSecurityContext` of the chart): owns the huge pages and what `add_folder` makes."""
HUGE_PAGES: Final = "/mnt/huge"
"""A hugetlbfs of the node, for what outlives a pod."""

_BOUND: Final = ("/var/lib", "/var/log", "/mnt")
"""Directories that a node has on its own disk, over the machine's."""
_FORWARD: Final = {"/proc/sys/net/ipv4/ip_forward": "1"}
"""A node routes for its pods; this is of its network namespace alone."""


def write_node(plane: ControlPlane, node: NodeLayout, binaries: dict[str, Path], packages: Packages) -> None:
    """Write the files of a node that has none yet."""
    for folder in (node.disk, node.config("plan.json").parent):
        folder.mkdir(parents=True, exist_ok=True)
    plane.client_kubeconfig(f"system:node:{node.name}", ("system:nodes",), node.config("kubelet.kubeconfig"))
    plane.client_kubeconfig(PROXY_USER, (), node.config("kube-proxy.kubeconfig"))
    hosts = (node.name, node.address)
    plane.write_serving_pair(f"system:node:{node.name}", hosts, node.config("kubelet.crt"), node.config("kubelet.key"))
    node.config("containerd.toml").write_text(configs.containerd(packages.plugins))
    node.config("kubelet.yaml").write_text(configs.kubelet(node, plane.ca_file))
    node.config("kube-proxy.yaml").write_text(configs.kube_proxy(node))
    node.config("pods.conflist").write_text(configs.cni(node))
    write_plan(plane, node, binaries, packages)


def write_plan(plane: ControlPlane, node: NodeLayout, binaries: dict[str, Path], packages: Packages) -> None:
    """Write what the node's first process does."""
    own = [(str(node.disk / place.strip("/")), place) for place in _BOUND]
    plan = {
        "binds": [*own, (str(node.images), "/var/lib/containerd")],
        "memory": ["/run", "/dev/shm"],  # noqa: S108 - mount points of the node, not files of this process
        "huge_pages": [(HUGE_PAGES, AGENT_USER)],
        "settings": _FORWARD,
        "links": [(str(node.config("pods.conflist")), "/run/cni/10-pods.conflist")],
        "folders": [],
        "programs": _programs(plane, node, binaries, packages),
    }
    node.config("plan.json").write_text(json.dumps(plan, indent=2))


def add_folder(node: NodeLayout, path: str) -> None:
    """Have a directory for kvstrata's pods from the next boot on, as an administrator's configuration would."""
    at = node.config("plan.json")
    plan = json.loads(at.read_text())
    plan["folders"].append({"path": path, "owner": AGENT_USER})
    at.write_text(json.dumps(plan, indent=2))


def boot_command(node: NodeLayout, python: str) -> list[str]:
    """Return the arguments that are the node: namespaces of its own, and `boot.py` as its first process.

    `nsenter`, not `ip netns exec`: that would mount /sys anew and hide the control groups from the kubelet.
    """
    enter = f"nsenter --net=/run/netns/{node.namespace}"
    own = "unshare --mount --pid --fork --kill-child=SIGKILL --uts --ipc --mount-proc"
    script = str(Path(__file__).with_name("boot.py"))
    return [*shlex.split(f"{enter} {own}"), python, "-I", "-S", script, str(node.config("plan.json"))]


def _programs(
    plane: ControlPlane, node: NodeLayout, binaries: dict[str, Path], packages: Packages
) -> list[dict[str, Any]]:
    runtime = ["containerd", "--config", str(node.config("containerd.toml"))]
    kubelet = [
        str(binaries["kubelet"]),
        f"--config={node.config('kubelet.yaml')}",
        f"--kubeconfig={node.config('kubelet.kubeconfig')}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        "--root-dir=/var/lib/kubelet",
    ]
    proxy = [
        str(binaries["kube-proxy"]),
        f"--config={node.config('kube-proxy.yaml')}",
    ]
    named = {"containerd": runtime, "kubelet": kubelet, "kube-proxy": proxy}
    sockets = {"containerd": configs.CONTAINERD_SOCKET}
    return [
        {
            "name": name,
            "argv": argv,
            "env": packages.environment(),
            "log": str(plane.log_path(f"{node.name}-{name}")),
            "socket": sockets.get(name),
        }
        for name, argv in named.items()
    ]
