"""The DaemonSet controller, kubelets and agents of a simulated cluster, as far as the operator sees them."""

import json
from dataclasses import dataclass, field
from typing import Any

from kvstrata_api import names
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.world import Setting
from support.operator.fleet import START, Fleet, pool_node

NAMESPACE = "kvstrata-system"
SETTING = Setting(NAMESPACE, "/run/kvstrata/{pool}/agent.sock", names.AGENT_TEMPLATE)
Json = dict[str, Any]


def template(image: str = "agent@sha256:1", *, memory: bool = False) -> Json:
    """A pod template as the chart writes it, as far as the operator reads it."""
    mounts = [{"name": "storage", "mountPath": "/var/lib/kvstrata/{pool}"}]
    volumes = [{"name": "storage", "hostPath": {"path": "/var/lib/kvstrata/{pool}", "type": "Directory"}}]
    if memory:
        mounts.append({"name": "memory", "mountPath": "/run/kvstrata-memory"})
        volumes.append({"name": "memory", "hostPath": {"path": "/run/km/{pool}", "type": "Directory"}})
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    agent = {"name": "agent", "image": image, "args": ["--pool={pool}"], "resources": resources, "volumeMounts": mounts}
    return {"metadata": {"labels": {"team": "x"}}, "spec": {"containers": [agent], "volumes": volumes}}


@dataclass
class Cluster:
    """A fleet whose agents run as pods."""

    fleet: Fleet = field(default_factory=lambda: Fleet(setting=SETTING))
    broken: set[str] = field(default_factory=set)
    """Revisions whose pods never become ready."""
    down: set[str] = field(default_factory=set)
    """Nodes whose kubelet is away: pods there neither start nor end."""
    ended: list[str] = field(default_factory=list)
    """Nodes whose pod a DaemonSet ended, for it is not the DaemonSet's node any more, while engines had its agent."""
    _serial: int = 0

    def install(self, text: Json | str) -> None:
        """Install the chart, or upgrade it."""
        data = {names.AGENT_TEMPLATE_ENTRY: text if isinstance(text, str) else json.dumps(text)}
        labels = {kinds.LABEL_COMPONENT: kinds.AGENT_TEMPLATE}
        self.fleet.put(kinds.CONFIG_MAP, names.AGENT_TEMPLATE, namespace=NAMESPACE, labels=labels, data=data)

    def pods(self, pool: str = "p") -> dict[str, Json]:
        """Pods of a pool by node."""
        found = self.fleet.of(kinds.POD).values()
        return {b["spec"]["nodeName"]: b for b in found if b["metadata"]["labels"][names.LABEL_POOL] == pool}

    def pods_by(self, daemon_set: str) -> dict[str, Json]:
        """Pods that a DaemonSet has made, by node."""
        found = self.fleet.of(kinds.POD).items()
        return {b["spec"]["nodeName"]: b for key, b in found if key.rpartition("-")[0] == daemon_set}

    def revisions(self, pool: str = "p") -> dict[str, str]:
        """Revision of each node's pod."""
        return {node: pod["metadata"]["labels"][names.LABEL_REVISION] for node, pod in self.pods(pool).items()}

    def wanted(self, pool: str = "p") -> str:
        """Revision that new pods get, on nodes with huge pages where there are some."""
        sets = self.fleet.of(kinds.DAEMON_SET)
        made = sets.get(names.agents_name(pool)) or sets[names.small_agents_name(pool)]
        return str(made["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION])

    def act(self) -> None:
        """Let the DaemonSet controller, kubelets and agents do what there is to do now."""
        self._end_pods()
        self._make_pods()
        self._start_pods()
        self._drain()

    def turn(self, rounds: int = 1) -> None:
        """Let operator and cluster act in turns."""
        for _ in range(rounds):
            self.fleet.step()
            self.act()
            self.fleet.pass_time(5)

    def _end_pods(self) -> None:
        for ref, body in list(self.fleet.objects.items()):
            if ref.kind == kinds.POD and "deletionTimestamp" in body["metadata"]:
                node = body["spec"]["nodeName"]
                if node not in self.down:
                    del self.fleet.objects[ref]
                    self.fleet.fall_silent(names.pool_node_name("p", node))

    def _make_pods(self) -> None:
        for name, made in self.fleet.of(kinds.DAEMON_SET).items():
            spec, here = made["spec"]["template"], self.pods_by(name)
            matching = {n for n, node in self.fleet.of(kinds.NODE).items() if _selects(spec["spec"], n, node)}
            for node in sorted(matching - here.keys()):
                self._serial += 1
                labels = spec["metadata"]["labels"]
                pod = {**spec["spec"], "nodeName": node}
                ref = Ref(kinds.POD, f"{name}-{self._serial}", NAMESPACE)
                self.fleet.put(kinds.POD, ref.name, namespace=NAMESPACE, labels=labels, spec=pod)
                self.fleet.objects[ref]["metadata"]["finalizers"] = ["grace"]  # A pod ends when its kubelet says so.
            for node in here.keys() - matching:
                if self._serves(node, here[node]):
                    self.ended.append(node)
                self.fleet.delete(Ref(kinds.POD, here[node]["metadata"]["name"], NAMESPACE))

    def _serves(self, node: str, pod: Json) -> bool:
        told = self.fleet.objects.get(pool_node("p", node))
        is_ready = pod.get("status", {}).get("conditions", [{}])[0].get("status") == "True"
        if told is None or told["spec"]["drain"]["requested"] or "deletionTimestamp" in pod["metadata"]:
            return False
        return is_ready and names.pool_node_name("p", node) in self.fleet.alive

    def _start_pods(self) -> None:
        for node, pod in self.pods().items():
            if node in self.down or "deletionTimestamp" in pod["metadata"]:
                continue
            is_well = pod["metadata"]["labels"][names.LABEL_REVISION] not in self.broken
            self._set_ready(pod, is_ready=is_well)
            if is_well and pool_node("p", node) in self.fleet.objects:
                self.fleet.report(names.pool_node_name("p", node))

    def _set_ready(self, pod: Json, *, is_ready: bool) -> None:
        status = "True" if is_ready else "False"
        before = pod.get("status", {}).get("conditions", [{}])[0]
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        now = since or self.fleet.now.isoformat()
        conditions = [{"type": "Ready", "status": status, "lastTransitionTime": now}]
        pod["status"] = {"conditions": conditions}

    def _drain(self) -> None:
        for key in sorted(self.fleet.alive):
            body = self.fleet.objects.get(Ref(kinds.POOL_NODE, key))
            if body and body["spec"]["drain"]["requested"]:
                pool = self.fleet.of(kinds.POOL).get(body["spec"]["poolRef"], {"metadata": {"deletionTimestamp": ""}})
                self.fleet.drained(key, "Released" if "deletionTimestamp" in pool["metadata"] else "Drained")

    def go_down(self, node: str) -> None:
        """Lose a node's kubelet and agent."""
        self.down.add(node)
        self.fleet.fall_silent(names.pool_node_name("p", node))
        if node in self.pods():
            self._set_ready(self.pods()[node], is_ready=False)

    def come_back(self, node: str) -> None:
        """Get it back."""
        self.down.discard(node)


def running(nodes: int = 3, spec: Json | None = None, text: Json | None = None) -> Cluster:
    """A pool `p` whose agents run as pods and are all ready."""
    cluster = Cluster()
    cluster.install(text or template())
    cluster.fleet.pool(spec=spec)
    for i in range(nodes):
        cluster.fleet.node(f"n{i}")
    cluster.turn(4)
    assert cluster.fleet.now > START
    return cluster


def _selects(spec: Json, name: str, node: Json) -> bool:
    """What the scheduler's node affinity says."""
    required = spec["affinity"].get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    labels = node["metadata"].get("labels", {})
    return any(_term(term, name, labels) for term in required["nodeSelectorTerms"])


def _term(term: Json, name: str, labels: dict[str, str]) -> bool:
    wanted = term.get("matchExpressions", ())
    by_label = all(
        e["key"] in labels if e["operator"] == "Exists" else labels.get(e["key"]) in e["values"] for e in wanted
    )
    by_name = all((name in e["values"]) == (e["operator"] == "In") for e in term.get("matchFields", ()))
    return by_label and by_name
