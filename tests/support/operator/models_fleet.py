"""KVModelCaches over a simulated cluster: a pool whose agents are ready, and what people and agents do."""

from typing import Any

from kvstrata_api import names
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import Fleet, Json, pool_node, pool_spec, tier

DIGEST = "sha256:" + "ab" * 32
OTHER_DIGEST = "sha256:" + "cd" * 32
SIZE_BYTES = 1000


def running(nodes: int = 3, fleet: Fleet | None = None, name: str = "p") -> Fleet:
    """A pool with an NVMe tier whose agents are all ready, its nodes in two zones."""
    fleet = fleet or Fleet()
    fleet.pool(name, pool_spec([tier(), tier("nvme", "NVMe", "100Gi")]))
    for i in range(nodes):
        put_node(fleet, i)
    fleet.settle()
    for key in fleet.of(kinds.POOL_NODE):
        fleet.report(key)
    fleet.settle()
    return fleet


def put_node(fleet: Fleet, number: int, **labels: str) -> None:
    zone = {"topology.kubernetes.io/zone": f"z{number % 2}"}
    fleet.node(f"n{number}", pool="yes", **labels, **zone)


def declare(fleet: Fleet, name: str = "m", **spec: Any) -> Ref:
    """Put a KVModelCache."""
    fleet.put(kinds.MODEL_CACHE, name, spec={"poolRef": "p", "source": {"url": "s3://m"}, "revision": "v1"} | spec)
    return Ref(kinds.MODEL_CACHE, name)


def ordered(fleet: Fleet, node: str, pool: str = "p") -> list[Json]:
    """What the KVPoolNode of a node wants of weights."""
    found: list[Json] = fleet.objects[pool_node(pool, node)]["spec"].get("models", [])
    return found


def chosen(fleet: Fleet, name: str = "m", pool: str = "p") -> set[str]:
    """Nodes that have an order for the weights."""
    nodes = {b["spec"]["nodeName"] for b in fleet.of(kinds.POOL_NODE).values() if b["spec"]["poolRef"] == pool}
    return {node for node in nodes if any(order["name"] == name for order in ordered(fleet, node, pool))}


def answer(fleet: Fleet, node: str, name: str = "m", state: str = "Staged", pool: str = "p", **more: Any) -> None:
    """Let the agent of a node report how far it is with its order."""
    order = next(o for o in ordered(fleet, node, pool) if o["name"] == name)
    had = fleet.objects[pool_node(pool, node)].setdefault("status", {}).get("models", [])
    others = [m for m in had if (m["uid"], m["revision"]) != (order["uid"], order["revision"])]
    report = {key: order[key] for key in ("name", "uid", "generation", "revision")} | {"state": state}
    if state == "Staged":
        report |= {"digest": order.get("digest", DIGEST), "sizeBytes": SIZE_BYTES, "stagedBytes": SIZE_BYTES}
    told(fleet, node, [*others, report | more], pool)


def told(fleet: Fleet, node: str, models: list[Json], pool: str = "p") -> None:
    """Let the agent of a node report this of weights, and nothing else of them."""
    body = fleet.objects[pool_node(pool, node)]
    fleet.put(kinds.POOL_NODE, body["metadata"]["name"], status=body.get("status", {}) | {"models": models})


def labels(fleet: Fleet, node: str) -> dict[str, str]:
    """Labels of a Node about weights, by the name of the KVModelCache."""
    prefix, found = names.LABEL_MODEL_PREFIX, fleet.objects[Ref(kinds.NODE, node)]["metadata"]["labels"]
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
