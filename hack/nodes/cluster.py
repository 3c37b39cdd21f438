"""A running cluster of real nodes: images, faults on demand, its end."""

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from controlplane import ControlPlane
from controlplane.nodes import ready_names
from controlplane.waiting import wait_until
from nodes import machine
from nodes.configs import CONTAINERD_SOCKET
from nodes.errors import NodesError
from nodes.images import image_names
from nodes.layout import NodeLayout
from nodes.packages import Packages
from nodes.provisioning import AGENT_USER, add_folder, boot_command

_CONTAINERD_S: Final = 30.0
_COMMAND_S: Final = 300.0
"""Importing an image of some hundred MB takes seconds on an idle disk."""
_END_S: Final = 10.0


class Cluster:
    """A control plane with real nodes; leaving it as a context manager ends everything."""

    def __init__(self, plane: ControlPlane, nodes: tuple[NodeLayout, ...], packages: Packages) -> None:
        """Refer to the nodes of a plane."""
        self.plane = plane
        self.nodes = nodes
        self._packages = packages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.plane.stop()

    def connect(self) -> None:
        """Give every node its cable."""
        for node in self.nodes:
            self._connect(node)

    def boot(self, name: str) -> None:
        """Start a node that was never started; return when its container runtime answers."""
        self.spawn(name, boot_command(self.node(name), sys.executable))
        self._await_containerd(name)

    def spawn(self, name: str, argv: list[str]) -> None:
        """Start a process of the cluster; its output goes to the log of that name."""
        self.plane.supervision.call("spawn", name=name, argv=argv, log=str(self.plane.log_path(name)))

    def kill_node(self, name: str) -> None:
        """Take a node's power away: every process of it is killed, its memory gone, its network down."""
        self.plane.stop_component(name, signum=signal.SIGKILL, grace_s=_END_S)
        machine.disconnect(self.node(name))
        machine.remove_cgroups(self.node(name))

    def return_node(self, name: str) -> None:
        """Boot a node that was killed, with the disk that it had; return when its container runtime answers."""
        self._connect(self.node(name))
        self.plane.supervision.call("respawn", name=name)
        self._await_containerd(name)

    def load_image(self, archive: Path) -> None:
        """Give every node the images of an OCI archive, by name and by digest."""
        client = ("ctr", "-a", CONTAINERD_SOCKET, "-n", "k8s.io", "images")
        for node in self.nodes:
            self.run(node.name, *client, "import", str(archive))
            for name, digest in image_names(archive).items():
                repository = name.rpartition(":")[0]
                self.run(node.name, *client, "tag", "--force", name, f"{repository}@{digest}")

    def make_folder(self, path: str) -> None:
        """Make a directory for kvstrata's pods on every node, now and after each boot."""
        owner = str(AGENT_USER)
        for node in self.nodes:
            add_folder(node, path)
            self.run(node.name, "install", "-d", "-m", "0770", "-o", owner, "-g", owner, path)

    def run(self, name: str, *argv: str) -> str:
        """Run a program inside a node; return its standard output. Raises `NodesError` when it fails."""
        target = ("nsenter", f"--target={self.init_pid(name)}", "--mount", "--net", "--pid")
        command = (*target, "env", *(f"{k}={v}" for k, v in self._packages.environment().items()), *argv)
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        if done.returncode != 0:
            raise NodesError(f"{name}: `{' '.join(argv)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def init_pid(self, name: str) -> int:
        """Process id, here, of the node's process 1. Raises `NodesError` when it does not run."""
        pid = self.plane.status()[name].pid
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError, IndexError) as e:
            raise NodesError(f"{name} does not run") from e

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every node is Ready. Raises `NodesError` with the end of a kubelet's log."""
        wanted = {node.name for node in self.nodes}
        if not wait_until(lambda: wanted <= ready_names(self.plane.api.get("/api/v1/nodes")["items"]), timeout_s):
            late = sorted(wanted - ready_names(self.plane.api.get("/api/v1/nodes")["items"]))
            log = self.plane.log_path(f"{late[0]}-kubelet").read_text(errors="replace")[-2000:]
            raise NodesError(f"not Ready after {timeout_s} s: {', '.join(late)}\n{log}")

    def node(self, name: str) -> NodeLayout:
        """Return a node by name."""
        return next(node for node in self.nodes if node.name == name)

    def _connect(self, node: NodeLayout) -> None:
        machine.connect(node)
        machine.make_cgroups(node)
        machine.route(node, [other for other in self.nodes if other != node])

    def _await_containerd(self, name: str) -> None:
        def answers() -> bool:
            try:
                self.run(name, "ctr", "-a", CONTAINERD_SOCKET, "version")
            except NodesError:
                return False
            return True

        if not wait_until(answers, _CONTAINERD_S):
            log = self.plane.log_path(f"{name}-containerd")
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise NodesError(f"{name}: containerd does not answer after {_CONTAINERD_S} s\n{tail}")
