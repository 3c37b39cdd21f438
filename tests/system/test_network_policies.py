"""The chart's NetworkPolicies, as Helm renders them, let exactly the declared flows through."""

from typing import Any

import pytest
import yaml

from checks import rights
from support.kube.chart_agents import daemon_set, redis_set, template_of
from support.kube.network_flows import Pod, is_allowed

pytestmark = pytest.mark.system

Json = dict[str, Any]
SYSTEM_LABELS = {"kubernetes.io/metadata.name": rights.SYSTEM}
SETTINGS = {
    "processes.enabled": "true",
    "networkPolicy.enabled": "true",
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name": "monitoring",
    "agent.image.digest": "sha256:" + "1" * 64,
    **rights.NODE_PREPARATION,
}
DNS = Pod("kube-system", {"k8s-app": "kube-dns"}, namespace_labels={"kubernetes.io/metadata.name": "kube-system"})
PROMETHEUS = Pod("monitoring", {"app": "prometheus"}, namespace_labels={"name": "monitoring"})
ENGINE = Pod("team-a", {"kvstrata.io/pool": "llama"}, namespace_labels={"kvstrata.io/tenant": "team-a"})
IMPOSTOR = Pod(
    "team-a", {"app.kubernetes.io/part-of": "kvstrata", "app.kubernetes.io/component": "agent"},
    namespace_labels={"kvstrata.io/tenant": "team-a"},
)  # fmt: skip
NEIGHBOUR = Pod(rights.SYSTEM, {"app": "something"}, namespace_labels=SYSTEM_LABELS)
API_SERVER = Pod(address="172.16.0.1")
INTERNET = Pod(address="198.51.100.9")


class Fleet:
    """What was rendered."""

    def __init__(self, **settings: str) -> None:
        objects = [o for o in yaml.safe_load_all(rights.render(**SETTINGS, **settings)) if o]
        self.policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
        workloads = [o for o in objects if o["kind"] in ("DaemonSet", "Deployment", "StatefulSet")]
        workloads += redis_set(objects)
        workloads += [daemon_set(template_of(objects), pool) for pool in ("llama", "qwen")]
        self.pods = {o["metadata"]["name"].removeprefix("kvstrata-"): _pod(o) for o in workloads}
        outside = {"dns": DNS, "prometheus": PROMETHEUS, "engine": ENGINE, "impostor": IMPOSTOR}
        self.pods |= outside | {"neighbour": NEIGHBOUR, "api server": API_SERVER, "internet": INTERNET}

    def lets(self, source: str, target: str, port: int, protocol: str = "TCP") -> bool:
        return is_allowed(self.policies, self.pods[source], self.pods[target], port, protocol)


def _pod(workload: Json) -> Pod:
    template = workload["spec"]["template"]
    ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", ())}
    return Pod(rights.SYSTEM, template["metadata"]["labels"], ports, namespace_labels=SYSTEM_LABELS)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet()


AGENTS = ("agent-llama", "agent-qwen")
CLIENTS = ("operator", "metadata", "node", *AGENTS)
"""Of the API server."""
OURS = ("redis", *CLIENTS)
METRICS = {"operator": 9101, "metadata": 9102, "agent-llama": 9100, "agent-qwen": 9100}
PEER = 9104
REDIS = 6379
DECLARED = {
    *(("prometheus", target, port, "TCP") for target, port in METRICS.items()),
    *((source, "redis", REDIS, "TCP") for source in (*AGENTS, "metadata")),
    *((source, target, PEER, "TCP") for source in AGENTS for target in AGENTS),
    *((source, "api server", 6443, "TCP") for source in CLIENTS),
    *((source, "internet", 6443, "TCP") for source in CLIENTS),
    *((source, "dns", 53, protocol) for source in CLIENTS for protocol in ("TCP", "UDP")),
}
"""The API server's address is not known to the chart, so its port is open wherever `apiServer.cidrs` is not set."""


def test_exactly_the_declared_flows_pass(fleet: Fleet) -> None:
    """Every pair, one of which is ours, at every port that anybody listens on, and at one that nobody does."""
    tried = [
        (source, target, port, protocol)
        for source in fleet.pods
        for target in fleet.pods
        if source != target or source in AGENTS
        for port in (*sorted(set(METRICS.values())), PEER, REDIS, 53, 443, 6443, 8080)
        for protocol in ("TCP", "UDP")
        if source in OURS or target in OURS
    ]
    allowed = {flow for flow in tried if fleet.lets(*flow)}

    # At port 443 and 6443 nothing listens but the API server; pods of ours are closed to it by their ingress.
    assert {f for f in allowed if f[2] != 443} - DECLARED - _api_port_elsewhere(allowed) == set()
    assert DECLARED - allowed == set()
    assert len(tried) > 500


def _api_port_elsewhere(allowed: set[tuple[str, str, int, str]]) -> set[tuple[str, str, int, str]]:
    """Egress by port alone reaches pods of other namespaces at the API server's port: closed by `apiServer.cidrs`."""
    return {f for f in allowed if f[2] == 6443 and f[1] not in OURS}


def test_with_the_api_server_s_addresses_nothing_else_is_reached_at_its_port() -> None:
    closed = Fleet(**{"networkPolicy.apiServer.cidrs[0]": "172.16.0.1/32"})

    assert closed.lets("operator", "api server", 6443)
    for target in ("internet", "engine", "neighbour", "prometheus"):
        assert not closed.lets("operator", target, 6443)
        assert not closed.lets("agent-llama", target, 443)


def test_a_tenant_that_labels_its_pod_like_an_agent_gets_nowhere(fleet: Fleet) -> None:
    for target, port in (("redis", REDIS), ("agent-llama", PEER), ("metadata", 9102), ("agent-llama", 9100)):
        assert not fleet.lets("impostor", target, port)
        assert not fleet.lets("engine", target, port)


def test_redis_as_a_child_of_the_metadata_service_is_reached_by_agents_alone() -> None:
    fleet = Fleet(**{"redis.mode": "Process"})

    assert [s for s in fleet.pods if s != "metadata" and fleet.lets(s, "metadata", REDIS)] == list(AGENTS)


def test_ports_of_transfers_are_closed_until_they_are_named(fleet: Fleet) -> None:
    opened = Fleet(
        **{"networkPolicy.transferPorts[0].port": "20000", "networkPolicy.transferPorts[0].endPort": "20100"}
    )

    assert not fleet.lets("agent-llama", "agent-qwen", 20050)
    assert opened.lets("agent-llama", "agent-qwen", 20050)
    assert not opened.lets("engine", "agent-qwen", 20050)


def test_without_policies_everything_would_pass() -> None:
    """Positive control."""
    bare = Fleet()
    bare.policies = []

    assert bare.lets("engine", "redis", REDIS)
