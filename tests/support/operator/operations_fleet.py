"""KVOperations over a simulated cluster: a pool whose agents are ready, and what people and agents do."""

from typing import Any

from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import Fleet, Json, pool_node

TIMEOUT_S = 600
ENDS = ("Complete", "Failed", "Cancelled")


def running(nodes: int = 3) -> Fleet:
    """A pool `p` whose agents are all ready."""
    fleet = Fleet()
    fleet.pool()
    for i in range(nodes):
        fleet.node(f"n{i}", pool="yes", rack=f"r{i % 2}")
    fleet.settle()
    for key in fleet.of(kinds.POOL_NODE):
        fleet.report(key)
    fleet.settle()
    return fleet


def operate(fleet: Fleet, name: str = "op", type_: str = "Flush", **block: Any) -> Ref:
    more: Json = {k: block.pop(k) for k in ("ttlSecondsAfterFinished", "timeoutSeconds") if k in block}
    spec: Json = {"type": type_, "poolRef": "p", type_.lower(): block, "timeoutSeconds": TIMEOUT_S, **more}
    fleet.put(kinds.OPERATION, name, spec=spec)
    return Ref(kinds.OPERATION, name)


def drain(fleet: Fleet, name: str = "op", **nodes: Any) -> Ref:
    return operate(fleet, name, "Drain", nodes=nodes or {"names": ["n0"]})


def drain_tier(fleet: Fleet, name: str = "op", tier: str = "dram") -> Ref:
    return operate(fleet, name, "Drain", nodes={"names": ["n0"]}, tier=tier)


def cancel(fleet: Fleet, ref: Ref) -> None:
    body = fleet.objects[ref]
    fleet.put(kinds.OPERATION, ref.name, spec={**body["spec"], "cancel": True})


def is_cancelled(fleet: Fleet, ref: Ref) -> bool:
    return bool(fleet.objects[ref]["spec"].get("cancel"))


def state(fleet: Fleet, ref: Ref) -> str:
    told: str = fleet.objects[ref].get("status", {}).get("state", "")
    return told


def orders(fleet: Fleet, node: str) -> list[str]:
    return [order["uid"] for order in fleet.objects[pool_node("p", node)]["spec"].get("orders", [])]


def warm(fleet: Fleet, name: str = "op", **block: Any) -> Ref:
    return operate(fleet, name, "Warm", **({"tenant": "a", "prefixes": ["ab" * 20]} | block))


def is_drained(fleet: Fleet, node: str) -> bool:
    drain: Json = fleet.objects[pool_node("p", node)]["spec"]["drain"]
    return bool(drain["requested"])


def answer(fleet: Fleet, node: str, uid: str, phase: str = "Done", **more: Any) -> None:
    body = fleet.objects[pool_node("p", node)]
    others = [a for a in body["status"].get("orders", []) if a["uid"] != uid]
    body["status"]["orders"] = [*others, {"uid": uid, "phase": phase, **more}]


def listen(fleet: Fleet, node: str, *, drains: bool = True) -> None:
    """Let an agent take in its spec: it drains when it is asked to, and forgets what it is asked no more."""
    ref = pool_node("p", node)
    body = fleet.objects[ref]
    kept = [a for a in body["status"].get("orders", []) if a["uid"] in orders(fleet, node)]
    said = ("False", "Drained") if drains else ("True", "MovingBlocks")
    fleet.report(ref.name, Draining=said if is_drained(fleet, node) else ("False", "NotRequested"))
    body["status"] |= {"orders": kept, "observedGeneration": body["metadata"]["generation"]}
