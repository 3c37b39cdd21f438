"""Whether NetworkPolicies let a connection through: a small evaluator of `networking.k8s.io/v1`. Pure.

A pod that a policy of a direction selects gets only what some such policy admits, one that none selects everything.
A connection needs both its sender's egress and its receiver's ingress. Ports by name are the receiver's.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """One end of a connection: a pod, or an address outside of the cluster when it has no namespace."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its ports by name."""
    address: str = "10.1.1.1"
    namespace_labels: Mapping[str, str] = field(default_factory=dict)


def is_allowed(policies: Sequence[Json], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Whether `source` may connect to a port of `target`."""
    leaves = _admits(policies, source, target, ("Egress", "to"), (target, port, protocol))
    return leaves and _admits(policies, target, source, ("Ingress", "from"), (target, port, protocol))


def _admits(policies: Sequence[Json], pod: Pod, other: Pod, way: tuple[str, str], at: tuple[Pod, int, str]) -> bool:
    direction, peers = way
    mine = [p for p in policies if direction in p["spec"]["policyTypes"] and _selects(p, pod)]
    rules = [(policy, rule) for policy in mine for rule in policy["spec"].get(direction.lower()) or ()]
    return not mine or any(
        _has_port(rule.get("ports"), *at) and _has_peer(rule.get(peers), other, policy["metadata"]["namespace"])
        for policy, rule in rules
    )


def _selects(policy: Json, pod: Pod) -> bool:
    return policy["metadata"]["namespace"] == pod.namespace and matches(policy["spec"]["podSelector"], pod.labels)


def _has_port(ports: Sequence[Json] | None, target: Pod, port: int, protocol: str) -> bool:
    """Absent ports are all ports."""
    if not ports:
        return True
    for one in ports:
        wanted = one.get("port")
        first = target.ports.get(wanted) if isinstance(wanted, str) else wanted
        is_within = wanted is None or (first is not None and first <= port <= (one.get("endPort") or first))
        if is_within and one.get("protocol", "TCP") == protocol:
            return True
    return False


def _has_peer(peers: Sequence[Json] | None, other: Pod, namespace: str) -> bool:
    """Absent peers are all peers."""
    return not peers or any(_is_peer(peer, other, namespace) for peer in peers)


def _is_peer(peer: Json, other: Pod, namespace: str) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(other.address)
        excepted = [ipaddress.ip_network(block) for block in peer["ipBlock"].get("except", ())]
        return address in ipaddress.ip_network(peer["ipBlock"]["cidr"]) and not any(address in e for e in excepted)
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        is_there = matches(peer["namespaceSelector"], other.namespace_labels)
    else:
        is_there = other.namespace == namespace
    return is_there and matches(peer.get("podSelector", {}), other.labels)


def matches(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects; an empty one selects everything."""
    equal = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
    return equal and all(_holds(rule, labels) for rule in selector.get("matchExpressions", ()))


def _holds(rule: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(rule["key"])
    match rule["operator"]:
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "In":
            return value in rule["values"]
        case _:
            return value not in rule["values"]
