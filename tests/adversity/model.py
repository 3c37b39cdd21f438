"""Operators over a cluster in memory whose events and lists come late, twice, merged or not at all.

Real are the stores, the planners and the actions; simulated are the API server, its watches and the clock. Each
operator sees each kind as far as its own cursor in that kind's history, or as the last list showed it.
"""

import json
import random
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from adversity.calls import Json
from kvstrata_api import names
from kvstrata_api.shares import is_open
from kvstrata_operator.decide.incremental import FleetFacts, Seen
from kvstrata_operator.decide.plan.actions import Action, Delete, DeleteMany
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds, parse
from kvstrata_operator.observe.kinds import Kind, Ref, parse_time
from kvstrata_operator.observe.records import PoolNodeSeen
from kvstrata_operator.observe.world import PARSERS, ChangeBus, View, World
from support.operator.fleet import SETTING, START, ConflictError, Fleet

KINDS: Final = (*kinds.ADMINISTRATOR_KINDS, *PARSERS)
OWNERS: Final = {"tenant": kinds.TENANT, "domain": kinds.DOMAIN, "share": kinds.SHARE}


@dataclass(frozen=True, slots=True)
class Event:
    """One write of the history: the object as it was stored, or as it was when it went."""

    version: int
    body: Json
    is_deleted: bool


class Cluster(Fleet):
    """A fleet that writes its history down and knows what must never happen."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[Kind, list[Event]] = {kind: [] for kind in KINDS}
        self._parsed: dict[str, Any] = {}
        self._known: dict[Ref, tuple[str, Json]] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self.violations: list[str] = []

    def record(self, kind: Kind, body: Json) -> Any:
        """Parse an object as the operator does, each version once: that costs the most of all here."""
        version = body["metadata"]["resourceVersion"]
        if version not in self._parsed:
            self._parsed[version] = record(kind, body)
        return self._parsed[version]

    def note(self) -> None:
        """Write down what changed since the last time."""
        for ref, body in self.objects.items():
            version = body["metadata"]["resourceVersion"]
            if ref.kind in self.history and self._known.get(ref, ("", {}))[0] != version:
                stored = deepcopy(body)
                self.history[ref.kind].append(Event(int(version), stored, is_deleted=False))
                self._known[ref] = (version, stored)
        for ref in self._known.keys() - self.objects.keys():
            _, body = self._known.pop(ref)
            version = next(self._numbers)
            gone = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version)}}
            self.history[ref.kind].append(Event(version, gone, is_deleted=True))
        self._check_keys()

    def _check_keys(self) -> None:
        """Key material of one object and version is made once, as long as the object is there."""
        living = self._uids()
        for body in self.of(kinds.SECRET).values():
            owner = body["metadata"].get("annotations", {}).get(names.ANNOTATION_OWNER_UID, "")
            if owner not in living:
                continue
            for entry, value in body["data"].items():
                if "." not in entry and self._keys.setdefault((owner, entry), value) != value:
                    self.violations.append(f"key {entry} of {owner} was made anew")
                    self._keys[owner, entry] = value

    def _uids(self) -> set[str]:
        return {body["metadata"]["uid"] for body in self.objects.values()}

    def collect_garbage(self) -> None:
        """Delete what has owners that are all gone, as the garbage collector does sooner or later."""
        living = self._uids()
        for ref, body in list(self.objects.items()):
            owners = body["metadata"].get("ownerReferences", ())
            if owners and not any(owner["uid"] in living for owner in owners):
                self.delete(ref)
        self.note()

    def check(self, action: Action, view: View) -> None:
        """Look at an action before it is carried out."""
        if isinstance(action, Delete | DeleteMany):
            for key, body in self.of(kinds.POOL_NODE).items():
                if action.ref in (Ref(kinds.POOL_NODE, key), Ref(kinds.POOL, body["spec"]["poolRef"])):
                    self._check_removal(key, body, view)

    def check_shredding(self, secret: Json) -> None:
        """Look at a scope's Secret that was just deleted: whoever it was made for must not need it."""
        owner = secret["metadata"].get("annotations", {}).get(names.ANNOTATION_OWNER_UID, "")
        living = {b["metadata"]["uid"]: (r, b) for r, b in self.objects.items() if r.kind in OWNERS.values()}
        if owner in living and not self._is_over(*living[owner]):
            self.violations.append(f"the key of a living scope is shredded: {secret['metadata']['name']}")

    def _is_over(self, ref: Ref, body: Json) -> bool:
        """Whether it is a share that has ended."""
        share = self.record(ref.kind, body).model
        return ref.kind == kinds.SHARE and (share is None or not is_open(share, self.now))

    def _check_removal(self, key: str, body: Json, view: View) -> None:
        """An agent that answers is drained before its KVPoolNode goes."""
        seen = view.pools.pool_nodes.get(key)
        is_connected = key in self.alive and seen is not None and seen.is_true("AgentConnected")
        pool = view.pools.declared.get(seen.pool) if seen is not None else None
        is_final = pool is not None and pool.is_deleting
        if (
            seen is None
            or not is_connected
            or seen.node not in view.pools.nodes
            or _is_drained(seen, is_final=is_final)
        ):
            return
        deadline = parse_time(body["spec"]["drain"]["deadline"]) if body["spec"]["drain"]["requested"] else None
        timeout_s = pool.model.spec.update_strategy.drain.timeout_seconds if pool and pool.model else 0
        if timeout_s and (deadline is None or self.now < deadline) and key not in view.pools.silent:
            since = parse_time((pool.meta.deletion_timestamp if pool else None) or "")
            if since is None or (self.now - since).total_seconds() < timeout_s:
                self.violations.append(f"{key} is removed undrained")


@dataclass
class Operator:
    """One replica. Everything that it knows is here, and a crash forgets it."""

    cluster: Cluster
    world: World = field(default_factory=lambda: World(ChangeBus()))
    cursors: dict[Kind, int] = field(default_factory=dict)
    alive: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.facts = FleetFacts.following(self.world)

    def crash(self) -> None:
        """Forget everything, as a new process has."""
        self.world = World(ChangeBus())
        self.facts = FleetFacts.following(self.world)
        self.cursors, self.alive, self.silent = {}, frozenset(), frozenset()

    def list(self, kind: Kind) -> None:
        """Take in a complete list as of now; whoever listed goes on from there."""
        self.relist(kind)
        self.cursors[kind] = len(self.cluster.history[kind])

    def relist(self, kind: Kind) -> None:
        """Take in a complete list beside the events, which may tell the same later."""
        self.cluster.note()
        records = [self.cluster.record(kind, body) for ref, body in self.cluster.objects.items() if ref.kind == kind]
        self.world.stores[kind].take(records, str(next(self.cluster._numbers)))

    def hear(self, kind: Kind, count: int) -> None:
        """Take in the next events of a kind."""
        at = self.cursors.get(kind)
        if at is None:
            return
        self.cluster.note()
        events = self.cluster.history[kind][at : at + count]
        self.cursors[kind] = at + len(events)
        for event in events:
            told, store = self.cluster.record(kind, event.body), self.world.stores[kind]
            store.remove(told.key, told.uid, told.version) if event.is_deleted else store.put(told)

    def look_at_leases(self) -> None:
        """Learn which of the agents that it knows are alive."""
        known = self.world.stores[kinds.POOL_NODE].items.keys()
        self.alive = frozenset(self.cluster.alive & known)
        self.silent = frozenset(self.cluster.silent & known)

    def catch_up(self) -> None:
        """List whatever was not listed yet and hear everything."""
        for kind in KINDS:
            self.list(kind) if kind not in self.cursors else self.hear(kind, 1 << 30)
        for kind in kinds.ADMINISTRATOR_KINDS:
            self.relist(kind)
        self.look_at_leases()

    def seen(self) -> Seen | None:
        """What it would decide by; None before all kinds were listed."""
        if self.world.unsynced:
            return None
        self.facts.refresh(self.alive, self.silent)
        return self.world.view(self.alive, self.silent, self.cluster.keks, {}), self.facts

    def orders(self) -> tuple[Action, ...]:
        """Plan."""
        seen = self.seen()
        return plan_orders(*seen, SETTING, self.cluster.now).actions if seen else ()

    def statuses(self) -> tuple[Action, ...]:
        """Compare statuses."""
        seen = self.seen()
        return tuple(w.action for w in plan_statuses(*seen, SETTING, self.cluster.now)) if seen else ()

    def carry_out(self, action: Action, *, is_told: bool = True) -> None:
        """Let the API server do it; `is_told` says whether its answer came."""
        seen = self.seen()
        assert seen is not None
        self.cluster.check(action, seen[0])
        before = self.cluster.objects.get(action.ref) if action.ref.kind == kinds.SECRET else None
        try:
            self.cluster.apply(action)
        except ConflictError:
            is_told = False
        if before is not None and isinstance(action, Delete) and action.ref not in self.cluster.objects:
            self.cluster.check_shredding(before)
        self.cluster.note()
        body = self.cluster.objects.get(action.ref)
        if is_told and body is not None and action.ref.kind in self.world.stores:
            self.world.stores[action.ref.kind].put(self.cluster.record(action.ref.kind, body))

    def settle(self, rounds_max: int = 40) -> int:
        """Go on undisturbed until nothing is left to do; return how many actions that took."""
        count = 0
        for _ in range(rounds_max):
            self.catch_up()
            actions = self.orders() or self.statuses()
            if not actions:
                return count
            count += len(actions)
            for action in actions:
                self.carry_out(action)
        self.cluster.violations.append(f"no rest: {actions[:2]}")
        return count


def _is_drained(node: PoolNodeSeen, *, is_final: bool) -> bool:
    """Whether the agent has said that nothing is left to move, and where its pool goes that its memory is back."""
    said = node.conditions.get("Draining")
    enough = ("Released", "Destroyed") if is_final else ("Drained", "Released", "Destroyed")
    return said is not None and said.status == "False" and said.reason in enough


def record(kind: Kind, body: Json) -> Any:
    """Parse an object as the operator does."""
    if kind in PARSERS:
        return PARSERS[kind](json.dumps(body).encode())
    return parse.parse_declared(kind, deepcopy(body))


def act_as_agents(cluster: Cluster, chance: random.Random | None = None) -> None:
    """Let agents do what they are told: all of them, or some by chance. The garbage collector comes around, too."""
    cluster.collect_garbage()
    for key, body in list(cluster.of(kinds.POOL_NODE).items()):
        if chance is not None and chance.random() < 0.4:
            continue
        if body["spec"]["drain"]["requested"]:
            pool = cluster.of(kinds.POOL).get(body["spec"]["poolRef"], {"metadata": {"deletionTimestamp": ""}})
            cluster.drained(key, "Released" if "deletionTimestamp" in pool["metadata"] else "Drained")
        else:
            cluster.report(key)
        erased = [
            {"uid": t["metadata"]["uid"], "keyVersion": t.get("status", {}).get("keyVersion", 0)}
            for t in cluster.of(kinds.TENANT).values()
            if t["spec"].get("eraseRequested")
        ]
        orders = [{"uid": order["uid"], "phase": "Done"} for order in body["spec"].get("orders", ())]
        status = cluster.objects[Ref(kinds.POOL_NODE, key)]["status"]
        status |= {"erased": erased, "orders": orders, "observedGeneration": body["metadata"]["generation"]}
        if chance is not None and chance.random() < 0.5:
            demand = {"gainPermille": chance.choice([0, 100]), "lossPermille": 0}
            status["tiers"] = [t | {"usedBytes": t["capacityBytes"], "demand": demand} for t in status["tiers"]]
        cluster._touch(Ref(kinds.POOL_NODE, key))
    cluster.note()


def started(bodies: Iterable[tuple[Ref, Json]] = ()) -> Cluster:
    """A cluster with a few nodes and a namespace, and these objects in their order."""
    cluster = Cluster()
    cluster.now = START
    for name, value in (("n1", "yes"), ("n2", "yes"), ("n3", "no")):
        cluster.node(name, m=value)
    cluster.put(kinds.NAMESPACE, "team-1", labels={"kubernetes.io/metadata.name": "team-1"})
    for ref, spec in bodies:
        cluster.pass_time(1)
        cluster.put(ref.kind, ref.name, namespace=ref.namespace, spec=spec)
    cluster.note()
    return cluster
