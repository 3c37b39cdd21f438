"""Everything that the demo starts, from the control plane to the agents, and what the story does to it."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml

from demo.cluster import Cluster, CurrentCluster, EmbeddedCluster
from demo.errors import DemoError
from demo.installing import EXAMPLES, HOST_PATH, ROOT, apply_example, install, remove_examples, render_chart, uninstall
from demo.noderunner import NodeRunner
from demo.supervised import Supervised, stop_at
from kvstrata import Client, Target
from kvstrata_api.blocks import Layout
from kvstrata_api.names import API_VERSION, AUDIENCE

POOL: Final = "demo"
STAGED: Final = "llama"
"""Weights that are staged on a node."""
NODES: Final = ("demo-node-1", "demo-node-2")
NODE_LABELS: Final = {"kvstrata.io/pool": POOL}

START_S: Final = 120.0
"""Bound of every wait for a process or condition; each takes a few seconds on two idle cores, more on busy ones."""
_SOCKET_PATH_BYTES_MAX: Final = 107
"""sun_path of sockaddr_un, man 7 unix."""

Say = Callable[[str], None]


class World:
    """One demo's cluster, processes and files. Leaving it as a context manager removes all of them."""

    def __init__(
        self,
        say: Say,
        *,
        is_current_cluster: bool,
        options: Sequence[str] = (),
        name: str = "kvstrata",
        peer_hosts: Mapping[str, str] | None = None,
    ) -> None:
        """Start the cluster; `say` is told of each step. Raises `DemoError`; nothing is left behind then.

        All of our processes are given `options`. Its folder is called after `name`. Agents reach each other at
        127.0.0.1 but for the nodes that `peer_hosts` has another loopback address for.
        """
        self._say = say
        self._is_current_cluster = is_current_cluster
        self._is_kept = False
        self._peer_hosts = peer_hosts or {}
        self.root = _state_dir(name)
        self.processes = Supervised(self.root, options)
        self.cluster: Cluster
        try:
            with ThreadPoolExecutor(1) as helm:
                chart = helm.submit(render_chart, self.root / "host")
                self.cluster = CurrentCluster() if is_current_cluster else EmbeddedCluster(self.root / "plane")
                say("control plane is up" if not is_current_cluster else "using the current cluster")
                self._chart = chart.result()
        except BaseException:
            self.processes.stop()
            raise
        self._runners: dict[str, NodeRunner] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runner(self) -> NodeRunner:
        """What runs the agents of the demo's pool."""
        return self.runner_of(POOL)

    def runner_of(self, pool: str) -> NodeRunner:
        """What runs the agents of a pool that was brought up."""
        return self._runners[pool]

    @property
    def stop_options(self) -> str:
        """What `--stop` must be told besides the folder."""
        return " --cluster current" if self._is_current_cluster else ""

    def bring_up(self) -> None:
        """Install, start the processes, declare the pool and wait until it is ready. Raises `DemoError`."""
        install(self.cluster, self._chart)
        self._say("custom resources, identities and rights are applied (helm template | kubectl apply)")
        self._start_services()
        self.cluster.add_nodes(NODES, dict(NODE_LABELS))
        apply_example(self.cluster, "01-quickstart", self.root / "host")
        self._say("kubectl apply -f examples/01-quickstart/ (with /var/lib/kvstrata in a temporary directory)")
        self.run_agents(POOL, NODES)

    def add_pool(self, pool: str, node: str, compatibility: dict[str, Any]) -> None:
        """Declare a pool like the demo's for another model, on one of its nodes, and wait until it is ready."""
        text = (EXAMPLES / "01-quickstart/10-pool.yaml").read_text().replace(HOST_PATH, str(self.root / "host"))
        declared = yaml.safe_load(text.replace(f"/{POOL}/", f"/{pool}/"))
        declared["metadata"]["name"] = pool
        declared["spec"] |= {"nodeSelector": {"kubernetes.io/hostname": node}, "compatibility": compatibility}
        self.cluster.kubectl("label", "node", node, f"kubernetes.io/hostname={node}")
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(declared))
        self.run_agents(pool, (node,))

    def run_agents(self, pool: str, nodes: Sequence[str]) -> None:
        """Run the agents of a declared pool and wait until it is ready. Raises `DemoError`."""
        agent = self.cluster.process_kubeconfig("kvstrata-agent", self.root / f"agent.{pool}.kubeconfig")
        runner = self._runners[pool] = NodeRunner(self.cluster, self.processes, pool, nodes, agent, self._peer_hosts)
        runner.start()
        runner.wait_agents(START_S)
        self._say(f"{len(nodes)} agents of pool {pool} serve, one for each KVPoolNode")
        self.cluster.kubectl("wait", "--for=condition=Ready", f"kvpool/{pool}", f"--timeout={START_S:.0f}s")
        self._say(f"kubectl wait --for=condition=Ready kvpool/{pool}: condition met")

    def client(self, tenant: str, node: str, layout: Layout) -> Client:
        """Attach an engine of a tenant, with a token as its kubelet would project it. Raises `DemoError`."""
        target = Target(self.runner.socket(node), POOL, self.token(tenant), layout)
        client = Client.attach(target, wait_s=START_S)
        if not client.is_attached:
            reason = client.reason
            client.close()
            raise DemoError(f"the engine of {tenant} is not let in on {node}: {reason}")
        return client

    def token(self, tenant: str) -> Path:
        """A file with a token of a tenant's engines, as their kubelet would project it."""
        path = self.root / f"token.{tenant}"
        path.write_text(self.cluster.token(f"team-{tenant}", "engine", AUDIENCE))
        return path

    def resize(self, **capacities: str) -> None:
        """Change the capacity of tiers, as an administrator would: `kubectl patch kvpool`."""
        pool = json.loads(self.cluster.kubectl("get", "kvpool", POOL, "-o", "json"))
        names = [tier["name"] for tier in pool["spec"]["tiers"]]
        patch = [
            {"op": "replace", "path": f"/spec/tiers/{names.index(name)}/capacityPerNode", "value": capacity}
            for name, capacity in capacities.items()
        ]
        self.cluster.kubectl("patch", "kvpool", POOL, "--type=json", "-p", json.dumps(patch))

    def kill_agent(self, node: str, pool: str = POOL) -> None:
        """`kill -9` the agent of a node; the node runner starts it again."""
        self.processes.kill(self.runner_of(pool).name(node))

    def stage(self, revision: str, source: Path, node: str) -> Path:
        """Declare the KVModelCache `STAGED`; returns its folder once a node has the files. Raises `DemoError`."""
        spec = {
            "poolRef": POOL,
            "source": {"url": f"file://{source}"},
            "revision": revision,
            "nodes": {"names": [node]},
        }
        cache = {"apiVersion": API_VERSION, "kind": "KVModelCache", "metadata": {"name": STAGED}, "spec": spec}
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(cache))
        self.cluster.kubectl("wait", "--for=condition=Staged", f"kvmc/{STAGED}", f"--timeout={START_S:.0f}s")
        nodes = json.loads(self.cluster.kubectl("get", "kvpoolnodes", "-o", "json"))["items"]
        of_node = next(n for n in nodes if n["spec"]["nodeName"] == node and n["spec"]["poolRef"] == POOL)
        return Path(next(m["path"] for m in of_node["status"]["models"] if m["name"] == STAGED))

    def join_domain(self) -> None:
        """Declare the trust domain of both tenants."""
        apply_example(self.cluster, "02-trust-domain", self.root / "host")

    def metrics(self) -> dict[str, str]:
        """`host:port` at which each process serves its metrics."""
        told = {name: self.processes.wait_ready(name, START_S) for name in ("operator", "metadata")}
        told |= {self.runner.name(node): self.runner.wait_ready(node, START_S) for node in NODES}
        return {name: str(ready["metrics"]) for name, ready in told.items()}

    def absences(self) -> list[str]:
        """Return what these nodes lack, in the words of their conditions, with what to do about it."""
        told = json.loads(self.cluster.kubectl("get", "kvpoolnodes", "-o", "json"))
        return [
            f"{node['spec']['nodeName']}: {condition['type']} is False: {condition['message']}"
            for node in told["items"]
            for condition in node["status"]["conditions"]
            if condition["status"] == "False" and condition["type"] != "Draining"
        ]

    def complaints(self) -> list[str]:
        """Return what the processes have logged as warning or error, the last of each first."""
        return [line for name in self.processes.names for line in self.processes.complaints(name)]

    def detach(self) -> None:
        """Leave everything running when this process ends; `close` does nothing from here on."""
        self._is_kept = True
        self._stop_runners()
        self.cluster.detach()
        self.processes.detach()

    def close(self) -> None:
        """End everything and remove all files. Idempotent."""
        if self._is_kept:
            return
        self._stop_runners()
        try:
            if self._is_current_cluster:  # An embedded one disappears with all that it holds.
                added = [pool for pool in self._runners if pool != POOL]
                if added:
                    self.cluster.kubectl("delete", "kvpool", "--ignore-not-found", *added)
                self.cluster.kubectl("delete", "kvmodelcache", "--ignore-not-found", STAGED)
                remove_examples(self.cluster)
                self.processes.terminate_all()
                uninstall(self.cluster)
            self.cluster.close()
        finally:
            self.processes.stop()

    def _stop_runners(self) -> None:
        for runner in self._runners.values():
            runner.stop()

    def _start_services(self) -> None:
        """Start operator and metadata service under their own identities and wait for both."""
        common = ["--metrics-port", "0"]
        for name, extra in {"operator": [], "metadata": ["--redis", "embedded", "--redis-port", "0"]}.items():
            kubeconfig = self.cluster.process_kubeconfig(f"kvstrata-{name}", self.root / f"{name}.kubeconfig")
            state = ["--state-dir", str(self.root / "state" / name)] if extra else []
            arguments = ["--kubeconfig", str(kubeconfig), *common, *extra, *state]
            self.processes.start(name, f"kvstrata-{name}", arguments)
        for name in ("operator", "metadata"):
            self.processes.wait_ready(name, START_S)
        self._say("operator and metadata service (with its Redis) run under their own ServiceAccounts")


def _state_dir(name: str) -> Path:
    """Make an empty folder: below the tree, on a real disk, unless its sockets' paths would be too long."""
    inside = ROOT / ".demo"
    longest = f"/{name}-xxxxxxxx/{POOL}.{NODES[0]}.sock"
    fits = len(os.fsencode(str(inside) + longest)) <= _SOCKET_PATH_BYTES_MAX
    if fits and os.access(ROOT, os.W_OK):
        inside.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=inside))
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def stop_world(root: Path, *, is_current_cluster: bool) -> None:
    """End what `detach` left running in a folder, remove the folder, and what was applied to a current cluster.

    Raises `DemoError` when that cluster cannot be cleaned; ends quietly for a folder that is gone.
    """
    if is_current_cluster:
        cluster = CurrentCluster()
        remove_examples(cluster)
        cluster.kubectl("delete", "node", "--ignore-not-found", "--wait=false", *NODES)
        uninstall(cluster)
    stop_at(root / "plane")
    stop_at(root)
    remove_empty_parent()


def remove_empty_parent() -> None:
    """Remove the folder of demo folders when no demo is left in it."""
    inside = ROOT / ".demo"
    if inside.exists() and not any(inside.iterdir()):
        shutil.rmtree(inside)
