"""DaemonSets of agents and the StatefulSet of Redis as the operator makes them from the chart's templates."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from kvstrata_api import names
from kvstrata_operator.decide.agents.workloads import NodeClasses, bodies, daemon_sets, pods_of
from kvstrata_operator.decide.directory import redis_workload
from kvstrata_operator.decide.directory.redis_workload import Need
from kvstrata_operator.decide.pools.placement import place
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.parse import parse_config_map, parse_declared
from kvstrata_operator.observe.records import NodeSeen
from support.operator.fleet import pool_spec

Json = dict[str, Any]


def template_of(objects: Iterable[Json]) -> str:
    """Pod template in what the chart renders."""
    (found,) = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == names.AGENT_TEMPLATE)
    return str(found["data"][names.AGENT_TEMPLATE_ENTRY])


def redis_set(objects: Iterable[Json]) -> list[Json]:
    """Return the StatefulSet of Redis in a fleet without pools; nothing where the chart runs none."""
    found = [o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == names.REDIS_TEMPLATE]
    made = []
    for config_map in found:
        owner = parse_config_map(
            json.dumps({**config_map, "metadata": {"uid": "u", **config_map["metadata"]}}).encode()
        )
        wanted = redis_workload.redis_set(
            owner, redis_workload.parse_template(owner.template), Need(), None, names.SYSTEM_NAMESPACE
        )
        made.append(json.loads(json.dumps(wanted.body)))
    return made


def daemon_set(template: str, pool: str, **spec: Any) -> Json:
    """Return the DaemonSet of a pool on one node."""
    metadata = {"name": pool, "uid": f"uid-{pool}", "creationTimestamp": datetime.now(UTC).isoformat()}
    declared = parse_declared(kinds.POOL, {"metadata": metadata, "spec": pool_spec(**spec)})
    assert not declared.error, declared.error
    nodes = {"n0": NodeSeen("n0", "uid-n0", 1, declared.model.spec.node_selector if declared.model else {})}
    assert declared.model is not None
    placement = place([declared], nodes)[pool]
    pods = pods_of(declared.model, placement, template)
    made = bodies(declared, placement, pods, NodeClasses(), names.SYSTEM_NAMESPACE, {})
    return dict(json.loads(json.dumps(made[next(iter(daemon_sets(pool, names.SYSTEM_NAMESPACE)))])))
