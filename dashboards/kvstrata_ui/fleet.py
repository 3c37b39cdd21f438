"""The map of the fleet: what is asked of Prometheus, and what is made of the answers. Pure.

Nodes with their tiers (fill, blocks), what is wrong with them, and bytes that move between tiers and nodes. A move
between nodes is known to its reader alone: metrics name the node that fetched, not the one that lent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError

Labels = Mapping[str, str]
Samples = Sequence[tuple[Labels, float]]
"""What an instant query returned."""
Json = dict[str, Any]

NODES_MAX: Final = 400
"""Shown of a fleet: those in trouble first, then the fullest. The totals are of all."""
WINDOW_S: Final = 300
"""Over which flows are averaged, unless scrapes are rarer."""

_FLOW: Final = "sum by (pool, node, source, target) (rate(kvstrata_moved_bytes_total[$__rate_interval])) > 0"
QUERIES: Final = {
    "agents": "kvstrata_agent_info",
    "capacity_bytes": "sum by (pool, node, tier) (kvstrata_tier_capacity_bytes)",
    "used_bytes": "sum by (pool, node, tier) (kvstrata_tier_used_bytes)",
    "blocks": "sum by (pool, node, tier) (kvstrata_tier_blocks)",
    "emulated": "max by (pool, node, tier) (kvstrata_tier_emulated) > 0",
    "speed": 'max by (tier) (kvstrata_tier_probe_bytes_per_second{direction="read"})',
    "flows": _FLOW,
    "engines": "sum by (pool, node) (kvstrata_connections)",
    "directory_up": "min by (pool, node) (kvstrata_directory_up)",
    "directory_full": "max by (pool, node) (kvstrata_directory_full) > 0",
    "devices_down": "count by (pool, node, tier) (kvstrata_device_up == 0)",
    "pathology": "max by (pool, node, kind) (kvstrata_pathology) > 0",
    "corrupt": "sum by (pool, node, tier) (increase(kvstrata_corrupt_blocks_total[1h])) > 0",
    "alerts": 'ALERTS{alertname=~"Kvstrata.+",alertstate="firing"}',
    "pools": "max by (pool) (kvstrata_pool_ready)",
}
"""Instant queries by what they are for."""

MEDIA: Final = ("hbm", "dram", "cxl", "nvme", "flash", "cold", "object")
"""Names that tiers of examples and documents have, the fastest first. Metrics have the name of a tier, not its rank."""
_ENGINE: Final = "engine"


def fleet_map(answers: Mapping[str, Samples], agents: Sequence[Json] | None) -> Json:
    """Pools with their nodes, from the answers to `QUERIES` and the metadata service's agents, where it was asked.

    Raises `InvalidInputError` for answers without `agents`.
    """
    if "agents" not in answers:
        raise InvalidInputError("no answer to the query of agents")
    nodes: dict[tuple[str, str], Json] = {}
    for labels, _ in answers["agents"]:
        _node(nodes, labels)["version"] = labels.get("version", "")
    for name in ("capacity_bytes", "used_bytes", "blocks"):
        for labels, value in answers.get(name, ()):
            _tier(_node(nodes, labels), labels["tier"])[name] = value
    for labels, _ in answers.get("emulated", ()):
        _tier(_node(nodes, labels), labels["tier"])["is_emulated"] = True
    for labels, value in answers.get("flows", ()):
        flow = {"source": labels["source"], "target": labels["target"], "bytes_per_second": value}
        _node(nodes, labels)["flows"].append(flow)
    for labels, value in answers.get("engines", ()):
        _node(nodes, labels)["engines"] = value
    _add_troubles(nodes, answers)
    for agent in agents or ():
        _add_agent(nodes, agent)
    ranks = _ranks(nodes.values(), answers.get("speed", ()))
    for node in nodes.values():
        node["tiers"] = [node["tiers"][name] for name in sorted(node["tiers"], key=ranks.__getitem__)]
    ready = {labels["pool"]: value > 0 for labels, value in answers.get("pools", ())}
    pools = sorted({pool for pool, _ in nodes} | set(ready))
    return {
        "tiers": sorted(ranks, key=ranks.__getitem__),
        "pools": [_pool(pool, [n for n in nodes.values() if n["pool"] == pool], ready.get(pool)) for pool in pools],
        "alerts": [_alert(labels) for labels, _ in answers.get("alerts", ())],
    }


def _node(nodes: dict[tuple[str, str], Json], labels: Labels) -> Json:
    pool, node = labels.get("pool", ""), labels.get("node", "")
    empty = {
        "pool": pool,
        "node": node,
        "version": "",
        "state": "",
        "engines": 0,
        "tiers": {},
        "flows": [],
        "troubles": [],
    }
    return nodes.setdefault((pool, node), empty)


def _tier(node: Json, name: str) -> Json:
    empty = {"tier": name, "capacity_bytes": 0.0, "used_bytes": 0.0, "blocks": 0.0, "is_emulated": False}
    tier: Json = node["tiers"].setdefault(name, empty)
    return tier


def _add_troubles(nodes: dict[tuple[str, str], Json], answers: Mapping[str, Samples]) -> None:
    """What is wrong with each node, in words, with how bad it is: `bad` or `warn`."""
    for labels, value in answers.get("directory_up", ()):
        if not value:
            _trouble(nodes, labels, "bad", "directory away: other nodes' blocks are misses")
    for labels, _ in answers.get("directory_full", ()):
        _trouble(nodes, labels, "warn", "Redis has no memory for announcements")
    for labels, value in answers.get("devices_down", ()):
        _trouble(nodes, labels, "bad", f"{value:.0f} devices of {labels['tier']} take no blocks")
    for labels, value in answers.get("corrupt", ()):
        _trouble(nodes, labels, "bad", f"{value:.0f} corrupt blocks in {labels['tier']} in an hour; each was a miss")
    for labels, _ in answers.get("pathology", ()):
        _trouble(nodes, labels, "warn", f"the cache works and brings nothing: {labels['kind']}")
    for labels, _ in answers.get("alerts", ()):
        if (labels.get("pool", ""), labels.get("node", "")) in nodes:
            is_bad = labels.get("severity") == "critical"
            _trouble(nodes, labels, "bad" if is_bad else "warn", f"alert {labels['alertname']}")


def _trouble(nodes: dict[tuple[str, str], Json], labels: Labels, degree: str, words: str) -> None:
    _node(nodes, labels)["troubles"].append({"degree": degree, "words": words})


def _add_agent(nodes: dict[tuple[str, str], Json], agent: Json) -> None:
    """What the directory knows of an agent; one that no longer reports has nothing but this."""
    node = _node(nodes, agent)
    node["state"] = agent["state"]
    if agent["state"] != "live":
        silence = "" if agent["silence_s"] is None else f" for {agent['silence_s']:.0f} s"
        node["troubles"].append({"degree": "bad", "words": f"agent {agent['state']}{silence}"})


def _ranks(nodes: Any, speeds: Samples) -> dict[str, tuple[int, float, str]]:
    """Order of the tiers' names: known media, then others by measured speed, then by name."""
    measured = {labels["tier"]: value for labels, value in speeds}
    names = {name for node in nodes for name in node["tiers"]}
    known = {name: MEDIA.index(name) if name in MEDIA else len(MEDIA) for name in names}
    return {name: (known[name], -measured.get(name, 0.0), name) for name in names}


def _pool(pool: str, nodes: Sequence[Json], is_ready: bool | None) -> Json:  # noqa: FBT001  A value, not a switch.
    """One pool: the nodes that are shown, and totals of all."""
    tiers: dict[str, Json] = {}
    flows: dict[tuple[str, str], float] = {}
    for node in nodes:
        for tier in node["tiers"]:
            total = _tier({"tiers": tiers}, tier["tier"])
            for name in ("capacity_bytes", "used_bytes", "blocks"):
                total[name] += tier[name]
        for flow in node["flows"]:
            path = (flow["source"], flow["target"])
            flows[path] = flows.get(path, 0.0) + flow["bytes_per_second"]
    ordered = sorted(nodes, key=lambda n: (-_badness(n), -_fill(n), n["node"]))
    return {
        "pool": pool,
        "is_ready": is_ready,
        "node_count": len(nodes),
        "troubled_count": sum(bool(n["troubles"]) for n in nodes),
        "tiers": list(tiers.values()),
        "flows": [{"source": s, "target": t, "bytes_per_second": v} for (s, t), v in sorted(flows.items())],
        "nodes": sorted(ordered[:NODES_MAX], key=lambda n: n["node"]),
    }


def _badness(node: Json) -> int:
    return max(({"bad": 2, "warn": 1}[t["degree"]] for t in node["troubles"]), default=0)


def _fill(node: Json) -> float:
    return max((t["used_bytes"] / t["capacity_bytes"] for t in node["tiers"] if t["capacity_bytes"]), default=0.0)


def _alert(labels: Labels) -> Json:
    return {name: value for name, value in labels.items() if name not in {"__name__", "alertstate", "instance", "job"}}
