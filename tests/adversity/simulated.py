"""The wide net: drawn sequences over simulated clusters; operators are killed, replaced, deafened and told late.

No process and no API server: thousands of sequences, minutes. What is proven here of decisions is proven of the
process by the other rows.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from adversity import model
from adversity.calls import Json
from adversity.drawn import Change, Names, sequence, settled
from adversity.model import Cluster, Operator, act_as_agents
from adversity.portrait import Portrait, normal
from kvstrata_api import names
from kvstrata_api.schema_kinds import BY_NAME
from kvstrata_api.validate import validate
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import condition

CHANGES: Final = (4, 14)
"""Of one sequence."""
_BY_NAME: Final = {kind.name: kind for kind in kinds.ADMINISTRATOR_KINDS}
_NAMES: Final = Names(nodes=("n1", "n2", "n3"))
ENDS: Final = ("Complete", "Failed", "Cancelled")


@dataclass(frozen=True, slots=True)
class Ran:
    """One sequence."""

    seed: int
    violations: tuple[str, ...]
    changes: int
    crashes: int
    trace: tuple[str, ...]


def run(seed: int) -> Ran:
    """Run one sequence and compare its end with the same objects made from scratch."""
    world = _Sequence(seed)
    for change in sequence(world.chance, _NAMES, world.chance.randint(*CHANGES)):
        world.take(change)
        world.disturb(world.chance.randint(4, 24))
    return Ran(seed, world.end(), world.changes, world.crashes, tuple(world.trace))


class _Sequence:
    """One cluster, two replicas of which one leads, and chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"simulated {seed}")
        self.cluster = model.started()
        self.replicas = [Operator(self.cluster), Operator(self.cluster)]
        self.leader = self.replicas[0]
        self.changes = self.crashes = 0
        self.trace: list[str] = []
        for replica in self.replicas:
            replica.catch_up()
        self._deeds: list[Callable[[], None]] = [
            *[self._work] * 6,
            *[self._hear] * 6,
            *[self._agents] * 4,
            self._crash,
            self._fail_over,
            self._relist,
            self._merge_events,
            self._leases,
            self._silence,
            self._relabel,
            lambda: self.cluster.pass_time(self.chance.choice([1, 5, 100])),
        ]

    def take(self, change: Change) -> None:
        """Let the API server take or refuse a change."""
        ref = _ref(change)
        before = self.cluster.objects.get(ref)
        self.trace.append(f"{change.verb} {change.kind} {change.name} {change.spec}")
        if change.verb == "delete":
            self.cluster.delete(ref)
        elif not validate(change.manifest, {**change.manifest, "spec": before["spec"]} if before else None):
            if change.verb == "bad":
                self.cluster.violations.append(f"accepted though {change.blamed} is broken: {change.spec}")
                return
            if before is None or "deletionTimestamp" not in before["metadata"]:
                self.cluster.pass_time(1)  # Ages decide between pools, and have whole seconds.
                self.cluster.put(ref.kind, ref.name, namespace=ref.namespace, spec=change.spec)
        self.changes += 1
        self.cluster.note()

    def disturb(self, deeds: int) -> None:
        """Let a few things happen, in any order."""
        for _ in range(deeds):
            deed = self.chance.choice(self._deeds)
            self.trace.append(deed.__name__)
            deed()

    def _work(self) -> None:
        """Carry out a part of a plan; an answer may be lost, and the process may die with the rest undone."""
        actions = list(self.leader.orders() or self.leader.statuses())
        self.chance.shuffle(actions)
        for action in actions[: self.chance.randint(0, len(actions) + 3)]:
            self.trace.append(f"  {type(action).__name__} {action.ref}")
            self.leader.carry_out(action, is_told=self.chance.random() < 0.8)
            if self.chance.random() < 0.08:
                self._crash()
                return

    def _hear(self) -> None:
        for replica in self.replicas:
            for kind in self.chance.sample(model.KINDS, len(model.KINDS) - 2):
                if kind in replica.cursors:
                    replica.hear(kind, self.chance.randint(0, 4))
                else:
                    replica.list(kind)

    def _agents(self) -> None:
        act_as_agents(self.cluster, self.chance)

    def _crash(self) -> None:
        self.crashes += 1
        self.leader.crash()

    def _fail_over(self) -> None:
        self.leader = self.chance.choice(self.replicas)

    def _relist(self) -> None:
        for kind in self.chance.sample(kinds.ADMINISTRATOR_KINDS, 2):
            self.leader.relist(kind)

    def _merge_events(self) -> None:
        """A watch that broke with 410: what came and went meanwhile was never seen."""
        kind = self.chance.choice(model.KINDS)
        if kind in self.leader.cursors:
            self.leader.list(kind)

    def _leases(self) -> None:
        self.leader.look_at_leases()

    def _silence(self) -> None:
        alive = sorted(self.cluster.alive & self.cluster.of(kinds.POOL_NODE).keys())
        if alive:
            self.cluster.fall_silent(self.chance.choice(alive))

    def _relabel(self) -> None:
        self.cluster.node(self.chance.choice(["n1", "n2", "n3"]), m=self.chance.choice(["yes", "no"]))

    def end(self) -> tuple[str, ...]:
        """Let all come to rest, and compare. KVOperations end, and once they are gone all is as if none had been."""
        rest(self.cluster, self.leader)
        for name, body in self.cluster.of(kinds.POOL).items():
            self.cluster.put(kinds.POOL, name, spec=settled(body["spec"], body.get("status", {})))
        for name, body in self.cluster.of(kinds.OPERATION).items():
            if (state := body.get("status", {}).get("state")) not in ENDS:
                self.cluster.violations.append(f"KVOperation {name} has not ended: {state}")
            self.cluster.delete(Ref(kinds.OPERATION, name))
        rest(self.cluster, self.leader)
        fresh = model.started()
        for ref, body in self.cluster.objects.items():
            if ref.kind == kinds.NODE:
                fresh.put(ref.kind, ref.name, labels=body["metadata"]["labels"])
        made = [(r, b) for r, b in self.cluster.objects.items() if r.kind in kinds.ADMINISTRATOR_KINDS]
        for ref, body in sorted(made, key=lambda one: str(one[1]["metadata"]["creationTimestamp"])):
            fresh.pass_time(1)
            fresh.put(ref.kind, ref.name, namespace=ref.namespace, spec=body["spec"])
        rest(fresh, Operator(fresh))
        found = portrait(self.cluster).differences(portrait(fresh))
        return (*self.cluster.violations, *fresh.violations, *found)


def rest(cluster: Cluster, operator: Operator) -> None:
    """Let agents and operator go on undisturbed until nothing is left to do; then nothing may be written."""
    for _ in range(4):
        operator.settle()
        act_as_agents(cluster)
        cluster.pass_time(400)
    operator.settle()
    if writes := operator.settle():
        cluster.violations.append(f"{writes} writes at rest")


def portrait(cluster: Cluster) -> Portrait:
    """Everything that the operator has a say in, without what history is meant to leave behind."""
    shown = (*kinds.ADMINISTRATOR_KINDS, kinds.POOL_NODE, kinds.SECRET, kinds.CONFIG_MAP)
    lapsed = _lapsed_keys(cluster)
    seen = [(r, body) for r, body in cluster.objects.items() if r.kind in shown and r.name not in lapsed]
    objects = {
        str(r): normal(_bare(cluster, b)) if r.kind == kinds.SECRET else forget_history(normal(b)) for r, b in seen
    }
    leaving = tuple(str(r) for r, b in cluster.objects.items() if "deletionTimestamp" in b["metadata"])
    return Portrait(objects, leaving)


def _lapsed_keys(cluster: Cluster) -> set[str]:
    """Secrets of shares that nobody grants now: one that was granted before keeps its key until its end."""
    shares = [(r, b) for r, b in cluster.objects.items() if r.kind == kinds.SHARE]
    return {
        names.scope_secret_name("share", f"{ref.namespace}.{ref.name}")
        for ref, body in shares
        if condition(body, "Accepted")[0] != "True"
    }


def _shown(cluster: Cluster, ref: Ref, body: Json) -> Json:
    shown: Json = normal(_bare(cluster, body) if ref.kind == kinds.SECRET else body)
    return shown if ref.kind == kinds.SECRET else forget_history(shown)


def _bare(cluster: Cluster, secret: Json) -> Json:
    """A scope's Secret with the number of its keys: of a successor that was made, nobody needs to have been told yet.

    So it is where somebody left a domain, and came back before the status named the next version.
    """
    owner = secret["metadata"].get("annotations", {}).get(names.ANNOTATION_OWNER_UID)
    told = (b.get("status", {}).get("keyVersion") for b in cluster.objects.values() if b["metadata"]["uid"] == owner)
    newest = next(told, None)
    keys = [e for e in secret["data"] if "." not in e and (newest is None or int(e.removeprefix("v")) <= newest)]
    return {**secret, "data": len(keys)}


def forget_history(body: Json) -> Json:
    """Leave out what is meant to tell of the past: how often a key moved on, which erasure was done, tiers' steps."""
    status = dict(body.get("status") or {})
    for name in ("keyVersion", "eraseStarted", "lastErase", "currentRevision", "erased"):
        status.pop(name, None)
    told: list[Json] = [c for c in status.get("conditions", ()) if c["type"] != "EraseCompleted"]
    for one in told:
        one["message"] = one.get("message", "").split("key version")[0]
    if "autoscaling" in status:
        status["autoscaling"] = [{k: s[k] for k in ("tier", "capacityPerNode")} for s in status["autoscaling"]]
    return {**body, "status": {**status, "conditions": told}}


def _ref(change: Change) -> Ref:
    kind = _BY_NAME[change.kind]
    return Ref(kind, change.name, _NAMES.namespace if BY_NAME[change.kind].is_namespaced else "")


def sweep(seeds: range) -> Iterator[Ran]:
    """Run sequences."""
    for seed in seeds:
        yield run(seed)
