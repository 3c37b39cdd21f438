"""A pool on two nodes under a real operator, each with an agent process, and what an administrator asks of it."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_metadata.store.access import Role, format_access
from support.kube.agent import GROUP, MIB, SYSTEM, Agent, custom, dram, nvme, until
from support.metadata.replicas import Redis
from support.operator.process import Replica

NODES = ("node-a", "node-b")
Json = dict[str, Any]


class Fleet:
    """A pool on two nodes: an operator that places it, and an agent process on each."""

    def __init__(self, plane: ControlPlane, agents: list[Agent], operator_config: Path, folder: Path) -> None:
        self.plane = plane
        self.agents = agents
        self.pool = agents[0].pool
        self._operator_config = operator_config
        self._folder = folder
        self.operator = Replica(operator_config, folder)

    def restart_operator(self) -> None:
        self.operator.end(signal.SIGKILL)
        self.operator = Replica(self._operator_config, self._folder)

    def operate(self, name: str, type_: str, **block: Any) -> str:
        spec = {"type": type_, "poolRef": self.pool, type_.lower(): block, "timeoutSeconds": 240}
        self.plane.kubectl("apply", "-f", "-", stdin=json.dumps(custom("KVOperation", f"{self.pool}-{name}", spec)))
        return f"{self.pool}-{name}"

    def wait(self, name: str, condition: str) -> Json:
        self.plane.kubectl("wait", f"--for=condition={condition}", f"kvop/{name}", "--timeout=90s")
        return self.status(name)

    def status(self, name: str) -> Json:
        found: Json = self.plane.api.get(f"{GROUP}/kvoperations/{name}").get("status") or {}
        return found

    def cancel(self, name: str) -> None:
        self.plane.kubectl("patch", f"kvop/{name}", "--type=merge", "-p", '{"spec":{"cancel":true}}')

    def orders(self, agent: Agent) -> Any:
        return self.plane.api.get(f"{GROUP}/kvpoolnodes/{agent.name}")["spec"].get("orders")

    def events(self, name: str) -> list[str]:
        found = self.plane.api.get(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={name}")
        return [event["reason"] for event in found["items"]]


def join_redis(plane: ControlPlane, redis: Redis) -> None:
    """Let agents find each other's blocks."""
    access = {"metadata": {"name": names.REDIS_SECRET_AGENT}, "stringData": format_access(redis.access(Role.AGENT))}
    plane.kubectl("delete", "secret", names.REDIS_SECRET_AGENT, "-n", SYSTEM, "--ignore-not-found")
    plane.api.post(f"/api/v1/namespaces/{SYSTEM}/secrets", access)


def make_node(agent: Agent) -> None:
    """A Node that the agent's pool selects."""
    meta = {"name": agent.node, "labels": {"for": agent.pool}}
    agent.plane.api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})


def declare(plane: ControlPlane, agent: Agent, tiers: list[Json]) -> None:
    """A pool on nodes of its own, as an administrator makes it."""
    wanted = [
        {k: v for k, v in t.items() if k != "capacityBytes"} | {"capacityPerNode": t["capacityBytes"]} for t in tiers
    ]
    compatibility = {"model": "m", "revision": "r", "dtype": "bf16", "blockTokens": 16}
    spec = {"nodeSelector": {"for": agent.pool}, "compatibility": compatibility, "tiers": wanted}
    spec |= {"policy": {"recompute": {"type": "AlwaysFetch", "prefillTokensPerSecond": 12_000}}}
    plane.api.post(f"{GROUP}/kvpools", custom("KVPool", agent.pool, spec))


@contextmanager
def serving(
    plane: ControlPlane,
    kubeconfig: Path,
    operator_config: Path,
    folder: Path,
    dram_bytes: int = 16 * MIB,
    memory: Path | None = None,
) -> Iterator[Fleet]:
    """A fleet whose agents are ready, with so much memory and 64 MiB of NVMe on each node.

    With `memory`, a folder on a tmpfs, blocks in memory outlive an agent, and weights can lie there.
    """
    agents = [Agent(plane, kubeconfig, folder / node) for node in NODES]
    for agent, node in zip(agents, NODES, strict=True):
        agent.pool, agent.home = agents[0].pool, folder / node
        agent.node = f"{agent.pool}-{node}"
        agent.home.mkdir()
        agent.memory_dir = memory / node if memory is not None else None
        make_node(agent)
    declare(
        plane,
        agents[0],
        [dram(dram_bytes, persistence="None" if memory is None else "AgentRestart"), nvme(folder / "nvme", 64 * MIB)],
    )
    made = Fleet(plane, agents, operator_config, folder)
    try:
        with agents[0], agents[1]:
            for agent in agents:
                agent.start()
                until(agent.says("Ready", "True"))
            yield made
    finally:
        made.operator.end(signal.SIGKILL)
        plane.api.delete(f"{GROUP}/kvpools/{agents[0].pool}")
