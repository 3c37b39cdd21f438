"""What should run the agents of one pool, and how far that is, from the whole view. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import KVPool
from kvstrata_operator.decide.agents import rollout, workloads
from kvstrata_operator.decide.agents.rollout import NO_ROLLOUT, Rollout, Standing, Wish
from kvstrata_operator.decide.agents.workloads import Workload
from kvstrata_operator.decide.incremental import Members
from kvstrata_operator.decide.plan.actions import Action, Delete, Note
from kvstrata_operator.decide.pools.placement import Placement
from kvstrata_operator.decide.pools.reconcile import DrainOrder, drain_order, is_told, order_drains
from kvstrata_operator.decide.trust.identity_conflicts import Fault
from kvstrata_operator.observe.kinds import BUDGET, DAEMON_SET, POD, Ref
from kvstrata_operator.observe.records import AgentPodSeen, Declared, MadeSeen
from kvstrata_operator.observe.setting import Setting
from kvstrata_operator.observe.world import View


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of one pool. Empty where others run them."""

    workload: Workload | None = None
    fault: Fault | None = None
    """Why there is no workload that should be."""
    rollout: Rollout = NO_ROLLOUT

    @property
    def revision(self) -> str:
        """Name what the pods should be; empty where others run them."""
        return self.workload.pods.revision if self.workload else ""


def agents_of(view: View, pool: Declared[KVPool], members: Members, setting: Setting, now: datetime) -> Agents:
    """Look at an accepted pool: at those of its nodes alone that do not serve from the pod that they should have."""
    placement = members.placement
    if not setting.agent_template or pool.model is None or placement is None:
        return Agents()
    leaving = members.difference.surplus & view.nodes.keys()
    found = _workload(view, pool, placement, leaving, setting)
    if isinstance(found, Fault):
        return Agents(fault=found)
    doubtful = members.idle | (members.pods.not_of(found.pods.revision) & placement.nodes)
    standings = {node: _standing(view, placement, members, node) for node in doubtful}
    wish = Wish(found.pods.revision, found.pods.room, pool.model.spec.update_strategy, _order(pool, found))
    return Agents(found, None, rollout.roll(wish, standings, now))


def plan_agents(
    view: View, pool: Declared[KVPool], agents: Agents, members: Members, setting: Setting, now: datetime
) -> tuple[Action, ...]:
    """Plan the workload, then what its roll does to nodes now."""
    if agents.workload is None:
        return ()
    refs = workloads.refs(pool.key, setting.namespace)
    made = workloads.plan_workload(pool, agents.workload, _made(view, refs))
    nodes = [members.seen[node] for node in agents.rollout.drain]
    drains = order_drains(nodes, drain_order(pool), {n.key for n in nodes}, since=now, now=now)
    replaced = (_replace(pool, members.pods.by_node[node], setting.namespace) for node in agents.rollout.replace)
    return (*made, *drains, *replaced)


def forget_agents(view: View, pool: Declared[KVPool], setting: Setting) -> tuple[Action, ...]:
    """Stop the agents of a pool that has no nodes any more; the garbage collector would need up to half a minute."""
    made = _made(view, workloads.refs(pool.key, setting.namespace))
    return tuple(Delete(ref, pool.key, uid=record.uid) for ref, record in made.items())


def _workload(
    view: View, pool: Declared[KVPool], placement: Placement, leaving: Collection[str], setting: Setting
) -> Workload | Fault:
    held = view.config_maps.get(setting.agent_template)
    if held is None or not held.template:
        where = f"ConfigMap {setting.namespace}/{setting.agent_template}"
        return Fault("AgentTemplateMissing", f"{where} with entry {names.AGENT_TEMPLATE_ENTRY} is not there")
    try:
        return workloads.workload(pool, placement, leaving, held.template, setting.namespace)
    except InvalidInputError as e:
        return Fault("AgentTemplateInvalid", str(e))


def _standing(view: View, placement: Placement, members: Members, node: str) -> Standing:
    seen, pod = members.seen.get(node), members.pods.by_node.get(node)
    if seen is None:
        return Standing(pod)
    alive, silent = seen.key in view.alive, seen.key in view.silent
    return Standing(pod, seen, is_alive=alive, is_silent=silent, is_told=is_told(placement, seen))


def _order(pool: Declared[KVPool], found: Workload) -> DrainOrder | None:
    """How agents are emptied before they are replaced; None where what they hold lasts, or may be lost."""
    order = drain_order(pool)
    return None if found.pods.keeps_memory or order.mode == "Drop" else order


def _made(view: View, refs: Iterable[Ref]) -> dict[Ref, MadeSeen]:
    stores = {DAEMON_SET: view.daemon_sets, BUDGET: view.budgets}
    return {ref: stores[ref.kind][ref.name] for ref in refs if ref.name in stores[ref.kind]}


def _replace(pool: Declared[KVPool], pod: AgentPodSeen, namespace: str) -> Delete:
    note = Note(pool.ref, pool.uid, "ReplacingAgent", f"node {pod.node}: pod {pod.key} is of another revision")
    return Delete(Ref(POD, pod.key, namespace), pool.key, (note,), uid=pod.uid)
