"""Fake nodes: Node objects that kwok keeps Ready and whose pods it runs in name only."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from controlplane.client import ApiClient
from controlplane.components import FAKE_NODE_ANNOTATION

DEFAULT_CAPACITY = {"cpu": "32", "memory": "256Gi", "pods": "110"}
"""Capacity of a fake node unless told otherwise: a middling GPU server; 110 pods is the kubelet's default."""

_WRITERS = 8  # The API server of two cores is busy with these; more only queue.


def fake_node(name: str, labels: Mapping[str, str], capacity: Mapping[str, str]) -> dict[str, Any]:
    """Return the Node object of one fake node; all of its capacity is allocatable."""
    usual = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**usual, **labels}, "annotations": dict(FAKE_NODE_ANNOTATION)},
        "status": {"capacity": dict(capacity), "allocatable": dict(capacity)},
    }


def create_nodes(api: ApiClient, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Create nodes, several at a time. Raises `ApiError` for the first that is refused."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        for _ in pool.map(lambda node: api.post("/api/v1/nodes", node), nodes):
            pass


def ready_names(nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of those nodes whose condition Ready is True and that carry no not-ready taint."""
    return {node["metadata"]["name"] for node in nodes if _is_ready(node)}


def _is_ready(node: Mapping[str, Any]) -> bool:
    """Whether pods can be scheduled to a node now."""
    conditions = {c["type"]: c["status"] for c in node["status"].get("conditions", ())}
    taints = {taint["key"] for taint in node["spec"].get("taints", ())}
    return conditions.get("Ready") == "True" and "node.kubernetes.io/not-ready" not in taints
