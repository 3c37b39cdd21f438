"""What one changed node or pod costs the planner, by the number of nodes: processor time, without any cluster."""

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from bench.operator.agents import node_names
from bench.operator.writes import LABEL, POOL, node_body, pool_body, status_body
from kvstrata_api import names
from kvstrata_operator.decide.incremental import FleetFacts, Seen
from kvstrata_operator.decide.plan.actions import Action, Apply, Create
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds, parse, parse_workloads
from kvstrata_operator.observe.records import KeksSeen
from kvstrata_operator.observe.world import ChangeBus, Setting, World

SETTING: Final = Setting(names.SYSTEM_NAMESPACE, "/run/kvstrata/{pool}/agent.sock")
WITH_PODS: Final = Setting(names.SYSTEM_NAMESPACE, "/run/kvstrata/{pool}/agent.sock", names.AGENT_TEMPLATE)
"""Of an operator that runs the agents' DaemonSets."""
CHANGES: Final = 15
NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)


READERS: Final = {
    kinds.NODE: parse.parse_labelled,
    kinds.POOL_NODE: parse.parse_pool_node,
    kinds.CONFIG_MAP: parse.parse_config_map,
    kinds.POD: parse_workloads.parse_agent_pod,
}


class Fleet:
    """A settled pool in memory."""

    def __init__(self, nodes: int) -> None:
        self._versions = 0
        self._alive: frozenset[str] = frozenset()
        self._world = World(ChangeBus())
        self._facts = FleetFacts.following(self._world)
        pool = pool_body()
        pool["metadata"] |= {"uid": "pool", "generation": 1, "finalizers": [names.FINALIZER], "resourceVersion": "1"}
        pool["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
        self._world.stores[kinds.POOL].put(parse.parse_declared(kinds.POOL, pool))
        for node in node_names(nodes):
            self.label(node)
        self.carry_out(plan_orders(*self.seen(), SETTING, NOW).actions)

    def seen(self) -> Seen:
        """The present."""
        self._facts.refresh(self._alive, frozenset())
        return self._world.view(self._alive, frozenset(), KeksSeen(), {}), self._facts

    def label(self, node: str) -> None:
        """Let a node join."""
        self._put(kinds.NODE, node_body(node, {LABEL: POOL}))

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Make the KVPoolNodes that were ordered, and let their agents be ready."""
        for action in actions:
            if isinstance(action, Create) and action.ref.kind == kinds.POOL_NODE:
                body = dict(action.body)
                self._put(kinds.POOL_NODE, {**body, "status": status_body(action.ref.name, body["spec"])["status"]})

    def run_pods(self, nodes: Iterable[str]) -> None:
        """Run the agents of these nodes in pods of the wanted revision, alive and ready."""
        agent = {"name": names.AGENT_CONTAINER, "image": "agent", "volumeMounts": []}
        text = json.dumps({"spec": {"containers": [agent], "volumes": []}})
        self._put(
            kinds.CONFIG_MAP, {"metadata": {"name": names.AGENT_TEMPLATE}, "data": {names.AGENT_TEMPLATE_ENTRY: text}}
        )
        daemon_set = next(
            action.body
            for action in plan_orders(*self.seen(), WITH_PODS, NOW).actions
            if isinstance(action, Apply) and action.ref.kind == kinds.DAEMON_SET
        )
        self._pod = daemon_set["spec"]["template"]
        self._alive = frozenset(names.pool_node_name(POOL, node) for node in nodes)
        for node in nodes:
            self.pod(node, is_ready=True)

    def pod(self, node: str, *, is_ready: bool) -> None:
        """Let the kubelet of a node tell of its agent's pod."""
        conditions = [{"type": "Ready", "status": str(is_ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        meta = {"name": f"agent-{node}", "labels": self._pod["metadata"]["labels"]}
        spec = {**self._pod["spec"], "nodeName": node}
        self._put(kinds.POD, {"metadata": meta, "spec": spec, "status": {"conditions": conditions}})

    def _put(self, kind: kinds.Kind, body: dict[str, Any]) -> None:
        self._versions += 1
        name = body["metadata"]["name"]
        meta = {**body["metadata"], "uid": f"{kind.name}-{name}", "resourceVersion": str(self._versions)}
        self._world.stores[kind].put(READERS[kind](json.dumps({**body, "metadata": meta}).encode()))


def planner_cost(sizes: Iterable[int]) -> dict[str, float]:
    """Seconds of processor time by size: orders and statuses for one node that joins, and both for one pod."""
    found = {}
    for nodes in sizes:
        found[f"plan_cpu_s_{nodes}"], found[f"status_cpu_s_{nodes}"] = _costs(nodes)
        found[f"pod_cpu_s_{nodes}"] = _pod_cost(nodes)
    return found


def _pod_cost(nodes: int) -> float:
    """Orders and statuses for one pod that turns unready."""
    fleet, every = Fleet(nodes), node_names(nodes)
    fleet.run_pods(every)
    fleet.seen()
    spent = []
    for node in every[:CHANGES]:
        began_s = time.process_time()
        fleet.pod(node, is_ready=False)
        plan_orders(*fleet.seen(), WITH_PODS, NOW)
        plan_statuses(*fleet.seen(), WITH_PODS, NOW)
        spent.append(time.process_time() - began_s)
        fleet.pod(node, is_ready=True)
    return median(spent)


def _costs(nodes: int) -> tuple[float, float]:
    fleet = Fleet(nodes)
    orders, statuses = [], []
    for node in node_names(nodes + CHANGES)[nodes:]:
        began_s = time.process_time()
        fleet.label(node)
        plan = plan_orders(*fleet.seen(), SETTING, NOW)
        orders.append(time.process_time() - began_s)
        fleet.carry_out(plan.actions)
        began_s = time.process_time()
        plan_statuses(*fleet.seen(), SETTING, NOW)
        statuses.append(time.process_time() - began_s)
    return median(orders), median(statuses)
