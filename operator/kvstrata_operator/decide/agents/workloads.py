"""What runs the agents of a pool: a DaemonSet and its PodDisruptionBudget, and the actions towards them. Pure.

The DaemonSet replaces no pod by itself (OnDelete): `rollout` says when.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.pool import KVPool
from kvstrata_operator.decide.agents.agent_pods import AgentPods, Whereabouts, agent_pods
from kvstrata_operator.decide.plan.actions import Action, Apply, Note
from kvstrata_operator.decide.plan.objects import WORKLOAD_LABELS, owner_reference, sealed
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.observe.kinds import BUDGET, DAEMON_SET, POOL, Ref
from kvstrata_operator.observe.records import Declared, MadeSeen

HISTORY: Final = 10
"""ControllerRevisions that Kubernetes keeps of a DaemonSet; its own default, said so that it stays."""

Body = Mapping[str, Any]
Made = Mapping[Ref, MadeSeen]


@dataclass(frozen=True, slots=True)
class Workload:
    """What should run the agents of one pool."""

    pods: AgentPods
    bodies: Mapping[Ref, Body]


def workload(
    pool: Declared[KVPool], placement: Placement, leaving: Collection[str], template: str, namespace: str
) -> Workload:
    """Say what should run the agents of an accepted pool; `leaving` names nodes that match no more and still drain.

    Raises `InvalidInputError` for a template that cannot be used.
    """
    assert pool.model is not None
    where = Whereabouts(tuple(sorted(placement.excluded)), tuple(sorted(leaving)))
    pods = agent_pods(pool.model, placement.tiers, template, where)
    daemon_set, budget = refs(pool.key, namespace)
    bodies = {
        daemon_set: _daemon_set(daemon_set, pool.meta, pods),
        budget: _budget(budget, pool.meta, pool.model, len(placement.nodes)),
    }
    return Workload(pods, bodies)


def refs(pool: str, namespace: str) -> tuple[Ref, Ref]:
    """Addresses of a pool's DaemonSet and PodDisruptionBudget."""
    name = names.agents_name(pool)
    return Ref(DAEMON_SET, name, namespace), Ref(BUDGET, name, namespace)


def plan_workload(pool: Declared[KVPool], wanted: Workload, made: Made) -> tuple[Action, ...]:
    """Make what is absent and change what was made from something else.

    Both by server-side apply: what a `POST` had made would keep fields, such as a volume, that are wanted no more.
    """
    return tuple(
        Apply(ref, pool.key, (_note(pool, ref, made),), body=body)
        for ref, body in wanted.bodies.items()
        if ref not in made or made[ref].content_digest != body["metadata"]["annotations"][names.ANNOTATION_DIGEST]
    )


def _note(pool: Declared[KVPool], ref: Ref, made: Made) -> Note:
    doing = "Changing" if ref in made else "Creating"
    return Note(pool.ref, pool.uid, f"{doing}{ref.kind.name}", f"{doing.lower()} {ref}")


def _selector(pool: ObjectMeta) -> dict[str, str]:
    return {**WORKLOAD_LABELS, names.LABEL_POOL: pool.name}


def _metadata(pool: ObjectMeta) -> dict[str, Any]:
    return {"labels": _selector(pool), "ownerReferences": [owner_reference(POOL, pool)]}


def _daemon_set(ref: Ref, pool: ObjectMeta, pods: AgentPods) -> Body:
    spec = {
        "selector": {"matchLabels": _selector(pool)},
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": HISTORY,
        "template": pods.template,
    }
    return sealed(ref, _metadata(pool), spec=spec)


def _budget(ref: Ref, pool: ObjectMeta, model: KVPool, nodes: int) -> Body:
    """Hold evictions to the pool's `maxUnavailable`.

    Written as `minAvailable`: the disruption controller takes `maxUnavailable` only where the owner of the pods has a
    scale, which a DaemonSet has not. Pods that are not ready may always go.
    """
    spec = {
        "minAvailable": max(0, nodes - model.spec.update_strategy.max_unavailable),
        "selector": {"matchLabels": _selector(pool)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return sealed(ref, _metadata(pool), spec=spec)
