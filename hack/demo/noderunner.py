"""Plays the kubelet: one agent process for each KVPoolNode, started when it appears and again when it dies."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from demo.cluster import Cluster
from demo.errors import DemoError
from demo.supervised import Supervised

_LOOK_S: Final = 0.3
_RESTART_S: Final = 1.0
"""A kubelet waits before it starts a dead container again; it begins with less than it ends with, as this does."""


class NodeRunner:
    """Runs the agents of one pool on nodes that have no kubelet."""

    def __init__(
        self,
        cluster: Cluster,
        processes: Supervised,
        pool: str,
        nodes: Sequence[str],
        kubeconfig: Path,
        peer_hosts: Mapping[str, str],
    ) -> None:
        """Prepare to run agents on `nodes` under the identity of `kubeconfig`; `start` begins.

        Others reach the agent of a node at 127.0.0.1, or at the address of `peer_hosts`.
        """
        self._cluster = cluster
        self._processes = processes
        self._pool = pool
        self._nodes = frozenset(nodes)
        self._kubeconfig = kubeconfig
        self._peer_hosts = peer_hosts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-runner", daemon=True)
        self._failure: DemoError | None = None
        """Why the last look did not succeed, if it did not: an API server that starts answers 429 for a moment."""

    def start(self) -> None:
        """Begin to follow the pool's nodes."""
        self._thread.start()

    def stop(self) -> None:
        """Leave the agents as they are. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def socket(self, node: str) -> Path:
        """Unix socket of a node's agent."""
        return self._processes.root / f"{self._pool}.{node}.sock"

    def name(self, node: str) -> str:
        """Name of a node's agent process."""
        return f"agent.{self._pool}.{node}"

    def wait_agents(self, timeout_s: float) -> None:
        """Wait until the agents of all nodes serve engines. Raises `DemoError`."""
        end_s = time.monotonic() + timeout_s
        for node in sorted(self._nodes):
            while not self._processes.was_started(self.name(node)):
                if time.monotonic() > end_s:
                    why = f": {self._failure}" if self._failure is not None else ""
                    raise DemoError(f"no KVPoolNode {self._pool}.{node} after {timeout_s:.0f} s{why}")
                time.sleep(_LOOK_S / 3)
            self.wait_ready(node, max(1.0, end_s - time.monotonic()))

    def wait_ready(self, node: str, timeout_s: float) -> dict[str, Any]:
        """Wait until the agent of a node serves engines, now or when it is started again. Raises `DemoError`."""
        return self._processes.wait_ready(self.name(node), timeout_s, is_restarted=True)

    def _run(self) -> None:
        placed: frozenset[str] = frozenset()
        while not self._stopping.wait(_LOOK_S):
            try:
                if placed != self._nodes:
                    placed = self._placed() & self._nodes
                self._look_after(placed)
                self._failure = None
            except DemoError as e:
                self._failure = e

    def _look_after(self, nodes: frozenset[str]) -> None:
        for node in sorted(nodes):
            if not self._processes.was_started(self.name(node)):
                self._start_agent(node)
            elif not self._processes.is_running(self.name(node)) and not self._stopping.wait(_RESTART_S):
                self._processes.restart(self.name(node))

    def _placed(self) -> frozenset[str]:
        """Nodes for which the operator has made a KVPoolNode."""
        told = json.loads(self._cluster.kubectl("get", "kvpoolnodes", "-o", "json"))
        specs = [item["spec"] for item in told["items"]]
        return frozenset(s["nodeName"] for s in specs if s["poolRef"] == self._pool)

    def _start_agent(self, node: str) -> None:
        root = self._processes.root
        arguments = ["--pool", self._pool, "--node", node, "--socket", str(self.socket(node))]
        arguments += [
            "--state-dir",
            str(root / "state" / f"{self._pool}.{node}"),
            "--kubeconfig",
            str(self._kubeconfig),
        ]
        arguments += ["--metrics-port", "0", "--peer-address", f"{self._peer_hosts.get(node, '127.0.0.1')}:0"]
        self._processes.start(self.name(node), "kvstrata-agent", arguments)
