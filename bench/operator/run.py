"""One size of the operator's benchmark, from an empty API server to its last figure."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from bench.operator import naive as operator_naive
from bench.operator.agents import node_names
from bench.operator.cluster import SYSTEM, Child, Replica, cpu_seconds, server_metrics, started, until, writes_of
from bench.operator.writes import KVPOOLNODES, KVPOOLS, LABEL, POOL, make_nodes, pool_body, raw_writes
from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_kube.api import MERGE_PATCH, Call, KubeApi
from kvstrata_kube.store import Store
from kvstrata_kube.watch import Source, Watch
from kvstrata_operator.observe.parse import parse_pool_node
from kvstrata_operator.observe.records import PoolNodeSeen

CHANGES_PER_S: Final = 50.0
SETTLE_S: Final = 3.0
"""Between phases, for what is held back by a second."""
NAIVE_S: Final = 60.0
"""The naive operator gets no more time than this; what it has done by then counts."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one run does."""

    nodes: int
    changes: int
    """Nodes that join one by one, beyond `nodes`."""
    naive: int
    """Nodes that the naive operator is given."""
    idle_s: float
    crowd: int = 0
    """KVPoolNodes in all at the last restart; 0 for no such restart."""


@dataclass(slots=True)
class Run:
    """Figures of one size."""

    nodes: int
    values: dict[str, float] = field(default_factory=dict)


class Arrivals:
    """When each KVPoolNode was first seen, and which ones are ready."""

    def __init__(self) -> None:
        self.seen_s: dict[str, float] = {}
        self._ready: dict[str, set[str]] = {}
        """By pool."""
        self.store: Store[PoolNodeSeen] = Store(self._changed)

    def _changed(self, old: PoolNodeSeen | None, new: PoolNodeSeen | None) -> None:
        if new is None:
            return
        if old is None:
            self.seen_s[new.key] = time.monotonic()
        if new.is_true("Ready"):
            self._ready.setdefault(new.pool, set()).add(new.key)

    def count_ready(self, pool: str) -> int:
        """KVPoolNodes of a pool whose agents have been ready."""
        return len(self._ready.get(pool, ()))


@dataclass(frozen=True, slots=True)
class Scene:
    """What the phases share."""

    sizes: Sizes
    plane: ControlPlane
    api: KubeApi
    folder: Path
    kubeconfig: Path
    """Of the operator."""
    arrivals: Arrivals
    run: Run

    @property
    def spares(self) -> list[str]:
        """Nodes that join later."""
        return node_names(self.sizes.nodes + self.sizes.changes + 1)[self.sizes.nodes :]

    def replica(self, name: str) -> Replica:
        """Start one process of the operator."""
        return Replica(name, self.kubeconfig, self.folder)

    @property
    def server_cpu_s(self) -> float:
        """Processor time that the API server and its store have used."""
        return sum(cpu_seconds(part.pid) for part in self.plane.status().values())

    def tell(self, **figures: float) -> None:
        """Keep figures, and show them to whoever waits."""
        self.run.values.update(figures)
        told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        load = os.getloadavg()[0]
        print(f"  {self.sizes.nodes} nodes: {told} (load {load:.1f})", file=sys.stderr, flush=True)


async def measured(sizes: Sizes, folder: Path) -> Run:
    """Measure one size."""
    with started(folder) as plane:
        api = await KubeApi.connect("bench", plane.kubeconfig)
        who = {n: plane.service_account_kubeconfig(SYSTEM, n, folder / n)
               for n in (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)}  # fmt: skip
        arrivals = Arrivals()
        kubeconfig = who[names.FIELD_MANAGER_OPERATOR]
        scene = Scene(sizes, plane, api, folder, kubeconfig, arrivals, Run(sizes.nodes))
        source = Source(KVPOOLNODES, parse_pool_node)
        watching = asyncio.create_task(Watch(api, source, arrivals.store).run())
        try:
            await _populate(scene)
            with _agents(scene, who[names.FIELD_MANAGER_AGENT]) as agents:
                await until(lambda: "leases" in agents.log.read_text(), agents)
                await _operate(scene)
                like = await _spec_of(scene)
                await _naive(scene, like)
            await _limit(scene, like)
            await _crowd(scene, like)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await api.close()
    return scene.run


@contextmanager
def _agents(scene: Scene, kubeconfig: Path) -> Iterator[Child]:
    nodes = scene.sizes.nodes + len(scene.spares)
    arguments = ["--kubeconfig", str(kubeconfig), "--namespace", SYSTEM, "--pool", POOL, "--nodes", str(nodes)]
    with Child("bench.operator.agents", arguments, scene.folder / "agents.log") as child:
        yield child


async def _populate(scene: Scene) -> None:
    """Create all Nodes."""
    joined = set(node_names(scene.sizes.nodes))
    naive = set(node_names(scene.sizes.naive))
    every = node_names(scene.sizes.nodes + len(scene.spares))
    labels = {
        name: ({LABEL: POOL} if name in joined else {}) | ({operator_naive.LABEL: "yes"} if name in naive else {})
        for name in every
    }
    await make_nodes(scene.api, labels)


async def _operate(scene: Scene) -> None:
    """Let the operator do everything that it is measured by."""
    with scene.replica("first") as first:
        await first.wait_synced()
        await until(first.leads, first)
        await _all_ready(scene, first)
        await _rest(scene, first)
        await _changes(scene, first)
        scene.tell(rss_bytes=first.rss_bytes)
        first.kill()
        with scene.replica("again") as again:
            scene.tell(restart_s=await again.wait_synced(), restart_cpu_s=again.cpu_s)
            await until(again.leads, again)
            await _failover(scene, again)


async def _all_ready(scene: Scene, replica: Replica) -> None:
    """From the pool's creation until it is Ready with all its nodes."""
    before, cpu_s, server_cpu_s = (await replica.metrics()).requests(), replica.cpu_s, scene.server_cpu_s
    began_s = time.monotonic()
    (await scene.api.call(Call("POST", KVPOOLS, body=pool_body()))).content()
    await until(lambda: scene.arrivals.count_ready(POOL) == scene.sizes.nodes, replica)
    agents_s = time.monotonic() - began_s

    async def is_ready() -> bool:
        status = (await scene.api.call(Call("GET", f"{KVPOOLS}/{POOL}"))).content().get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
        return conditions.get("Ready") == "True" and status["nodes"]["ready"] == scene.sizes.nodes

    await until(is_ready, replica)
    took_s = time.monotonic() - began_s
    requests = (await replica.metrics()).requests() - before
    scene.tell(
        all_ready_s=took_s,
        agents_ready_s=agents_s,
        nodes_per_s=scene.sizes.nodes / took_s,
        writes_per_node=writes_of(requests) / scene.sizes.nodes,
        all_ready_cpu_s=replica.cpu_s - cpu_s,
        all_ready_server_cpu_s=scene.server_cpu_s - server_cpu_s,
    )


async def _rest(scene: Scene, replica: Replica) -> None:
    """Count writes while nothing changes."""
    await asyncio.sleep(SETTLE_S)
    before, cpu_s = (await server_metrics(scene.api)).writes(), replica.cpu_s
    await asyncio.sleep(scene.sizes.idle_s)
    writes = (await server_metrics(scene.api)).writes() - before
    scene.tell(
        idle_writes_per_s=writes.total() / scene.sizes.idle_s,
        idle_cpu_share=(replica.cpu_s - cpu_s) / scene.sizes.idle_s,
    )


async def _join(scene: Scene, node: str) -> float:
    """Label a node; return when that was asked for."""
    asked_s = time.monotonic()
    patch = {"metadata": {"labels": {LABEL: POOL}}}
    (await scene.api.call(Call("PATCH", f"/api/v1/nodes/{node}", body=patch, content_type=MERGE_PATCH))).content()
    return asked_s


async def _changes(scene: Scene, replica: Replica) -> None:
    """Nodes join, 50 a second; how long each waits for its KVPoolNode."""
    nodes = scene.spares[:-1]
    before, cpu_s, server_cpu_s = (await replica.metrics()).requests(), replica.cpu_s, scene.server_cpu_s
    began_s = time.monotonic()
    asked = []
    for number, node in enumerate(nodes):
        await asyncio.sleep(max(0.0, began_s + number / CHANGES_PER_S - time.monotonic()))
        asked.append(asyncio.create_task(_join(scene, node)))
    asked_s = dict(zip(nodes, await asyncio.gather(*asked), strict=True))
    seen_s = scene.arrivals.seen_s
    await until(lambda: all(names.pool_node_name(POOL, node) in seen_s for node in nodes), replica)
    spent_s, requests = replica.cpu_s - cpu_s, (await replica.metrics()).requests() - before
    waits_s = [seen_s[names.pool_node_name(POOL, node)] - at_s for node, at_s in asked_s.items()]
    scene.tell(
        change_p50_s=median(waits_s),
        change_p99_s=quantiles(waits_s, n=100, method="inclusive")[-1],
        cpu_per_change_s=spent_s / len(nodes),
        server_cpu_per_change_s=(scene.server_cpu_s - server_cpu_s) / len(nodes),
        requests_per_change=writes_of(requests) / len(nodes),
    )


async def _failover(scene: Scene, leader: Replica) -> None:
    """Kill the leader while another stands by: how long a node that joins right then waits."""
    node = scene.spares[-1]
    with scene.replica("standby") as standby:
        await standby.wait_synced()
        leader.kill()
        asked_s = await _join(scene, node)
        key = names.pool_node_name(POOL, node)
        await until(lambda: key in scene.arrivals.seen_s, standby)
        scene.tell(failover_s=scene.arrivals.seen_s[key] - asked_s)


async def _spec_of(scene: Scene) -> dict[str, Any]:
    """Spec of a KVPoolNode as the operator made it."""
    name = names.pool_node_name(POOL, node_names(1)[0])
    spec: dict[str, Any] = (await scene.api.call(Call("GET", f"{KVPOOLNODES}/{name}"))).content()["spec"]
    return spec


async def _naive(scene: Scene, like: dict[str, Any]) -> None:
    """From the first KVPoolNode of the naive operator until all its nodes are ready, or its time is up."""
    arguments = ["--kubeconfig", str(scene.plane.kubeconfig), "--like", json.dumps(like)]
    pool, wanted, seen_s = operator_naive.POOL, scene.sizes.naive, scene.arrivals.seen_s
    with Child("bench.operator.naive", arguments, scene.folder / "naive.log") as child:
        began = names.pool_node_name(pool, "")
        await until(lambda: any(key.startswith(began) for key in seen_s), child)
        first_s = min(at_s for key, at_s in seen_s.items() if key.startswith(began))
        while scene.arrivals.count_ready(pool) < wanted and time.monotonic() < first_s + NAIVE_S:
            child.check()
            await asyncio.sleep(0.02)
        took_s, ready = time.monotonic() - first_s, scene.arrivals.count_ready(pool)
        scene.tell(naive_nodes_per_s=ready / took_s, naive_nodes=ready, naive_s=took_s)


async def _limit(scene: Scene, like: dict[str, Any]) -> None:
    """The same creates and statuses, nothing else."""
    server_cpu_s = scene.server_cpu_s
    took_s = await raw_writes(scene.api, node_names(scene.sizes.nodes), like, "raw")
    scene.tell(raw_s=took_s, raw_server_cpu_s=scene.server_cpu_s - server_cpu_s)


async def _crowd(scene: Scene, like: dict[str, Any]) -> None:
    """Restart once more with many more KVPoolNodes."""
    if not scene.sizes.crowd:
        return
    nodes = node_names(scene.sizes.nodes)
    count = 0
    while (left := scene.sizes.crowd - len(scene.arrivals.store.items)) > 0:
        count += 1
        await raw_writes(scene.api, nodes[:left], like, f"crowd-{count}", statuses=False)
        await asyncio.sleep(SETTLE_S)
    with scene.replica("crowded") as replica:
        scene.tell(crowd_restart_s=await replica.wait_synced(), crowd_restart_cpu_s=replica.cpu_s)
        await until(replica.leads, replica)
        await asyncio.sleep(SETTLE_S)
        scene.tell(crowd_rss_bytes=replica.rss_bytes)
