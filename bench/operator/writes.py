"""Objects of the operator's benchmark, and the physical limit: the same writes with nothing around them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from kvstrata_api import names
from kvstrata_kube.api import APPLY_PATCH, Call, KubeApi

WRITES_AT_ONCE: Final = 16
"""More only adds latency on a two-core API server (design)."""

APPLY_QUERY: Final = {"fieldManager": names.FIELD_MANAGER_AGENT, "force": "true"}
KVPOOLS: Final = f"/apis/{names.API_VERSION}/kvpools"
KVPOOLNODES: Final = f"/apis/{names.API_VERSION}/kvpoolnodes"
LABEL: Final = "bench"
"""Nodes of the pool have it; its value is `POOL`."""
POOL: Final = "fleet"
GIB: Final = 1 << 30
_STAMP: Final = "2026-01-01T00:00:00Z"

Job = Callable[[], Awaitable[None]]


async def bounded(jobs: Iterable[Job], at_once: int = WRITES_AT_ONCE) -> None:
    """Run all jobs, at most so many at a time; the first error ends it."""
    left = iter(jobs)

    async def work() -> None:
        for job in left:
            await job()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())


def pool_body() -> dict[str, Any]:
    """A KVPool with a tier in memory and one on disk."""
    tiers = [
        {"name": "dram", "type": "HostDRAM", "capacityPerNode": "64Gi", "hostDRAM": {}},
        {"name": "nvme", "type": "NVMe", "capacityPerNode": "2Ti", "nvme": {"path": "/var/lib/kvstrata/nvme"}},
    ]
    spec = {
        "nodeSelector": {LABEL: POOL},
        "compatibility": {"model": "m", "revision": "r", "dtype": "bf16"},
        "tiers": tiers,
    }
    return {"apiVersion": names.API_VERSION, "kind": "KVPool", "metadata": {"name": POOL}, "spec": spec}


def node_body(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A Node that nothing runs on."""
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": dict(labels)}}


def pool_node_body(pool: str, node: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """A KVPoolNode of another pool, with the spec of one that the operator made."""
    labels = {names.LABEL_POOL: pool, names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_NODE: node}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPoolNode",
        "metadata": {"name": names.pool_node_name(pool, node), "labels": labels},
        "spec": {**like, "poolRef": pool, "nodeName": node},
    }


def status_body(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent applies that has set up everything it was told."""
    said = {"AgentConnected": "Connected", "MetadataAvailable": "Available", "TierReady": "AllTiersReady",
            "HugepagesReserved": "NotNeeded", "Ready": "Serving"}  # fmt: skip
    conditions = [
        {"type": type_, "status": "True", "reason": reason, "message": "", "lastTransitionTime": _STAMP}
        for type_, reason in said.items()
    ]
    tiers = [
        {"name": t["name"], "type": t["type"], "phase": "Ready", "capacityBytes": t["capacityBytes"]}
        for t in spec["tiers"]
    ]
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPoolNode",
        "metadata": {"name": name},
        "status": {
            "observedRevision": spec["revision"],
            "memoryBytes": 256 * GIB,
            "tiers": tiers,
            "conditions": conditions,
        },
    }


async def make_nodes(api: KubeApi, nodes: Mapping[str, Mapping[str, str]]) -> None:
    """Create Nodes, by name, with their labels."""

    def creating(name: str) -> Job:
        async def create() -> None:
            (await api.call(Call("POST", "/api/v1/nodes", body=node_body(name, nodes[name])))).content()

        return create

    await bounded(creating(name) for name in nodes)


async def raw_writes(
    api: KubeApi, nodes: Iterable[str], like: Mapping[str, Any], pool: str, *, statuses: bool = True
) -> float:
    """Create a KVPoolNode for each node and apply its status, nothing else; return the seconds."""

    def writing(node: str) -> Job:
        async def write() -> None:
            body = pool_node_body(pool, node, like)
            (await api.call(Call("POST", KVPOOLNODES, body=body), timeout_s=60.0)).content()
            if not statuses:
                return
            name = body["metadata"]["name"]
            status = status_body(name, body["spec"])
            call = Call("PATCH", f"{KVPOOLNODES}/{name}/status", APPLY_QUERY, status, APPLY_PATCH)
            (await api.call(call, timeout_s=60.0)).content()

        return write

    began_s = time.monotonic()
    await bounded(writing(node) for node in nodes)
    return time.monotonic() - began_s
