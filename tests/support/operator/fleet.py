"""A cluster in memory that carries out the operator's actions as the API server would, and builders of its objects.

It stands in for the API server in tests of pure decisions only; tests/system runs the operator against a real one.
"""

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from kvstrata_api import names
from kvstrata_operator.decide.incremental import FleetFacts, Seen
from kvstrata_operator.decide.plan.actions import (
    Action,
    Apply,
    Create,
    Delete,
    DeleteMany,
    MarkSilent,
    Merge,
    MintDataKey,
    MintKek,
    MintKey,
    Rewrap,
    SetFinalizers,
    Shred,
)
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.decide.trust import scope_keys
from kvstrata_operator.observe import kinds, parse, parse_workloads
from kvstrata_operator.observe.kinds import LABEL_COMPONENT, Kind, Ref
from kvstrata_operator.observe.records import KeksSeen
from kvstrata_operator.observe.world import ClusterSeen, PoolsSeen, Setting, TrustSeen, View

SETTING = Setting("kvstrata-system", "/run/kvstrata/{pool}/agent.sock")
START = datetime(2026, 1, 1, tzinfo=UTC)
GIB = 1 << 30

Json = dict[str, Any]

LABELS = {kinds.POOL_NODE: names.LABEL_POOL, kinds.CONFIG_MAP: LABEL_COMPONENT}
"""Labels by which the operator knows what it made."""

Said = tuple[str, str]
"""Status and reason of a condition."""


def tier(name: str = "dram", type_: str = "HostDRAM", size: str = "1Gi", **settings: Any) -> Json:
    """One tier of a pool; `size` is its capacity on each node, or in all for shared media."""
    blocks: dict[str, Json] = {
        "HostDRAM": {"hostDRAM": {}},
        "CXL": {"cxl": {"mode": "NumaNode"}},
        "NVMe": {"nvme": {"path": "/var/lib/kvstrata/nvme"}},
        "Object": {"object": {"url": "s3://kv"}},
        "RemoteFlash": {"remoteFlash": {"path": "/mnt/flash"}},
    }
    capacity = "capacity" if type_ in ("Object", "RemoteFlash") else "capacityPerNode"
    return {"name": name, "type": type_, capacity: size, **blocks[type_], **settings}


def pool_spec(tiers: Iterable[Json] = (), selector: dict[str, str] | None = None, **more: Any) -> Json:
    """Spec of a pool on nodes labelled `pool=yes` unless told otherwise."""
    return {
        "nodeSelector": {"pool": "yes"} if selector is None else selector,
        "compatibility": {"model": "m", "revision": "r", "dtype": "bf16"},
        "tiers": list(tiers) or [tier()],
        **more,
    }


class ConflictError(Exception):
    """The object has changed since it was read."""


@dataclass
class Fleet:
    """Objects by address. Time stands still until it is told to pass."""

    now: datetime = START
    alive: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    keks: KeksSeen = field(default_factory=KeksSeen)
    setting: Setting = SETTING
    objects: dict[Ref, Json] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def put(self, kind: Kind, name: str, *, namespace: str = "", **parts: Any) -> Json:
        """Create or replace an object as an administrator would."""
        ref = Ref(kind, name, namespace)
        before = self.objects.get(ref)
        meta = {"name": name, "uid": f"uid-{next(self._numbers)}", "generation": 1}
        meta["creationTimestamp"] = self.now.isoformat()
        if namespace:
            meta["namespace"] = namespace
        if before:
            meta = {**before["metadata"], "generation": before["metadata"]["generation"] + 1}
        labels = parts.pop("labels", None)
        if labels is not None:
            meta["labels"] = labels
        self.objects[ref] = {"metadata": meta, **(before or {}), **parts} | {"metadata": meta}
        return self._touch(ref)

    def node(self, name: str, pages: str | None = None, **labels: str) -> None:
        """Put a Node; `pages` is what its kubelet offers of hugepages-2Mi, None for one that has not reported."""
        offered: Json = {} if pages is None else {"status": {"allocatable": {"cpu": "4", "hugepages-2Mi": pages}}}
        self.put(kinds.NODE, name, labels=labels or {"pool": "yes"}, **offered)

    def pool(self, name: str = "p", spec: Json | None = None) -> None:
        """Put a KVPool."""
        self.put(kinds.POOL, name, spec=spec or pool_spec())

    def tenant(self, name: str, **spec: Any) -> None:
        """Put a KVTenant that claims a ServiceAccount of its own name."""
        spec.setdefault("serviceAccounts", [{"namespace": name, "name": "engine"}])
        self.put(kinds.TENANT, name, spec=spec)

    def delete(self, ref: Ref) -> None:
        """Delete as the API server does: at once, or a mark for the finalizers."""
        body = self.objects.get(ref)
        if body is None:
            return
        if body["metadata"].get("finalizers"):
            body["metadata"].setdefault("deletionTimestamp", self.now.isoformat())
            self._touch(ref)
            return
        del self.objects[ref]
        self._collect(body["metadata"]["uid"])

    def report(
        self, key: str, *, ready: bool = True, memory_bytes: int = 64 * GIB, **conditions: tuple[str, str]
    ) -> None:
        """Let the agent of a KVPoolNode set up what it was told and write its status. It is alive from then on."""
        body = self.objects[Ref(kinds.POOL_NODE, key)]
        said = {"AgentConnected": ("True", "Connected"), "Ready": ("True" if ready else "False", "Said"), **conditions}
        tiers = [{"name": t["name"], "type": t["type"], "phase": "Ready"} for t in body["spec"]["tiers"]]
        for told, wanted in zip(tiers, body["spec"]["tiers"], strict=True):
            told["capacityBytes"] = wanted["capacityBytes"]
        body["status"] = {
            "observedRevision": body["spec"]["revision"],
            "memoryBytes": memory_bytes,
            "tiers": tiers,
            "conditions": [{"type": t, "status": s, "reason": r} for t, (s, r) in said.items()],
        }
        self._touch(Ref(kinds.POOL_NODE, key))
        self.alive.add(key)
        self.silent.discard(key)

    def fall_silent(self, key: str) -> None:
        """Let the Lease of an agent run out."""
        self.alive.discard(key)
        self.silent.add(key)

    def drained(self, key: str, reason: str = "Drained") -> None:
        """Let an agent say that it has drained, given its memory back, or destroyed everything."""
        self.report(key, Draining=("False", reason))

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    def of(self, kind: Kind) -> dict[str, Json]:
        """Objects of one kind by name."""
        return {ref.name: body for ref, body in self.objects.items() if ref.kind == kind}

    def view(self) -> View:
        """Give what the operator would see."""
        here = set(self.of(kinds.POOL_NODE))
        return View(
            PoolsSeen(
                declared=self._declared(kinds.POOL),
                operations=self._declared(kinds.OPERATION),
                model_caches=self._declared(kinds.MODEL_CACHE),
                nodes=self._records(kinds.NODE, parse.parse_node),
                pool_nodes=self._records(kinds.POOL_NODE, parse.parse_pool_node),
                alive=frozenset(self.alive & here),
                silent=frozenset(self.silent & here),
                failures=self.failures,
            ),
            TrustSeen(
                tenants=self._declared(kinds.TENANT),
                domains=self._declared(kinds.DOMAIN),
                shares=self._declared(kinds.SHARE),
                namespaces=self._records(kinds.NAMESPACE, parse.parse_labelled),
                secrets=self._records(kinds.SECRET, parse.parse_scope_secret),
                keks=self.keks,
            ),
            ClusterSeen(
                config_maps=self._records(kinds.CONFIG_MAP, parse.parse_config_map),
                daemon_sets=self._records(kinds.DAEMON_SET, parse_workloads.parse_daemon_set),
                stateful_sets=self._records(kinds.STATEFUL_SET, parse_workloads.parse_stateful_set),
                budgets=self._records(kinds.BUDGET, parse_workloads.parse_made),
                pods=self._records(kinds.POD, parse_workloads.parse_agent_pod),
            ),
        )

    def seen(self) -> Seen:
        """Give what a plan is made from; what follows from the view is gathered anew."""
        view = self.view()
        return view, facts_of(view)

    def orders(self) -> tuple[Action, ...]:
        """Plan without carrying it out."""
        return plan_orders(*self.seen(), self.setting, self.now).actions

    def step(self) -> int:
        """Plan once, orders then statuses, and carry everything out; return how many actions that took."""
        orders = self.orders()
        for action in orders:
            self.apply(action)
        statuses = [write.action for write in plan_statuses(*self.seen(), self.setting, self.now)]
        for action in statuses:
            self.apply(action)
        return len(orders) + len(statuses)

    def settle(self, rounds_max: int = 8) -> int:
        """Plan until there is nothing to do; return the rounds. Fails when it does not come to rest."""
        for rounds in range(rounds_max):
            if not self.step():
                return rounds
        raise AssertionError(f"not at rest after {rounds_max} rounds: {self.orders()}")

    def apply(self, action: Action) -> None:  # noqa: C901, PLR0912  One case for each verb.
        """Carry out one action. Raises `ConflictError` where the API server would answer 409; 404 is no news."""
        makes = isinstance(action, Create | Apply | DeleteMany | MintKek) or (
            isinstance(action, MintKey) and not action.resource_version
        )
        if not makes and action.ref not in self.objects:
            return
        match action:
            case Create(ref=ref, body=body):
                if ref not in self.objects:
                    self._make(ref, body)
                elif action.adopts:
                    self._adopt(ref, body)
            case Apply(ref=ref, body=body):
                if ref not in self.objects:
                    self._make(ref, body)
                kept = ("labels", "annotations", "ownerReferences")
                ours = {k: v for k, v in body["metadata"].items() if k in kept}
                self._change(ref, {**body, "metadata": ours}, replaces_spec=True)
            case Merge(ref=ref, body=body):
                self._expect(ref, action.resource_version)
                self._change(ref, body)
            case Shred() if self._is_in_use(action):
                raise ConflictError(str(action.ref))
            case Delete(ref=ref, uid=uid):
                if ref in self.objects and self.objects[ref]["metadata"]["uid"] == uid:
                    self.delete(ref)
            case DeleteMany(kind=kind, selector=selector):
                for ref, body in list(self.objects.items()):
                    if ref.kind == kind and selector.items() <= body["metadata"].get("labels", {}).items():
                        self.delete(ref)
            case SetFinalizers():
                self._set_finalizers(action)
            case MintKey():
                self._mint(action)
            case MintKek():
                self._mint_kek(action)
            case MintDataKey(entry=entry):
                self._wrap(action.ref, {entry: f"data-{next(self._numbers)}"}, action.resource_version)
            case Rewrap(wrapped=wrapped):
                inside = {entry: text.partition(":")[2] for entry, text in wrapped.items()}
                self._wrap(action.ref, inside, action.resource_version)
            case MarkSilent(ref=ref):
                self._mark_silent(ref)

    def _make(self, ref: Ref, body: Any) -> None:
        made = json.loads(json.dumps(body))
        made["metadata"] |= {"uid": f"uid-{next(self._numbers)}", "generation": 1}
        made["metadata"]["creationTimestamp"] = self.now.isoformat()
        self.objects[ref] = made
        self._touch(ref)

    def _adopt(self, ref: Ref, body: Any) -> None:
        self._change(ref, {k: v for k, v in body.items() if k != "metadata"}, replaces_spec=True)
        self.objects[ref]["metadata"]["labels"] = dict(body["metadata"]["labels"])

    def _change(self, ref: Ref, patch: Any, *, replaces_spec: bool = False) -> None:
        if ref not in self.objects:
            return
        body = self.objects[ref]
        if replaces_spec:
            body.pop("spec", None)
        merge_patch(body, json.loads(json.dumps(patch)))
        self._touch(ref)

    def _expect(self, ref: Ref, version: str) -> None:
        if version and ref in self.objects and self.objects[ref]["metadata"]["resourceVersion"] != version:
            raise ConflictError(str(ref))

    def _set_finalizers(self, action: SetFinalizers) -> None:
        self._expect(action.ref, action.resource_version)
        meta = self.objects[action.ref]["metadata"]
        meta["finalizers"] = list(action.finalizers)
        self._touch(action.ref)
        if not action.finalizers and "deletionTimestamp" in meta:
            self.delete(action.ref)

    def _is_in_use(self, action: Shred) -> bool:
        """Whether the owner, as it is now, needs its keys."""
        body = self.objects.get(action.owner)
        live = parse.parse_declared(action.owner.kind, deepcopy(body)) if body else None
        return scope_keys.is_in_use(live, action.owner_uid, self.now)

    def _mint(self, action: MintKey) -> None:
        key = {action.entry: f"key-{next(self._numbers)}"}
        if not action.resource_version:
            if action.ref not in self.objects:
                self._make(action.ref, {**action.body, "data": key})
            return
        self._expect(action.ref, action.resource_version)
        self.objects[action.ref]["data"] |= key
        self._touch(action.ref)

    def _mint_kek(self, action: MintKek) -> None:
        if self.keks.is_absent:
            self.keks = KeksSeen(frozenset({int(action.entry[1:])}))

    def _wrap(self, ref: Ref, inside: Mapping[str, str], resource_version: str) -> None:
        """What stands behind the KEK's name is the key itself here."""
        self._expect(ref, resource_version)
        texts = {entry: f"k{self.keks.newest}:{key}" for entry, key in inside.items()}
        self.objects[ref]["data"] |= {e: base64.b64encode(text.encode()).decode() for e, text in texts.items()}
        self._touch(ref)

    def _mark_silent(self, ref: Ref) -> None:
        conditions = {c["type"]: c for c in self.objects[ref]["status"]["conditions"]}
        for type_ in ("AgentConnected", "Ready"):
            conditions[type_] = {"type": type_, "status": "False", "reason": "LeaseExpired"}
        self.objects[ref]["status"]["conditions"] = list(conditions.values())
        self._touch(ref)

    def _collect(self, owner_uid: str) -> None:
        """Delete what the object owned, as the garbage collector does."""
        for ref, body in list(self.objects.items()):
            if any(o["uid"] == owner_uid for o in body["metadata"].get("ownerReferences", ())):
                self.delete(ref)

    def _touch(self, ref: Ref) -> Json:
        self.objects[ref]["metadata"]["resourceVersion"] = str(next(self._numbers))
        return self.objects[ref]

    def _declared(self, kind: Kind) -> dict[str, Any]:
        found = [
            parse.parse_declared(kind, {**body, "status": deepcopy(body.get("status"))})
            for body in self.of(kind).values()
        ]
        return {record.key: record for record in found}

    def _records(self, kind: Kind, parse_one: Callable[[bytes], Any]) -> dict[str, Any]:
        """What a watch with the operator's selector would tell."""
        label = LABELS.get(kind)
        bodies = {n: b for n, b in self.of(kind).items() if label is None or label in b["metadata"].get("labels", {})}
        return {name: parse_one(json.dumps(body).encode()) for name, body in bodies.items()}


def facts_of(view: View) -> FleetFacts:
    """Gather what follows from a view."""
    pools = view.pools
    facts = FleetFacts(pools.declared, pools.nodes, pools.pool_nodes, view.cluster.pods, pools.model_caches)
    facts.refresh(pools.alive, pools.silent)
    return facts


def merge_patch(target: Json, patch: Json) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge_patch(target.setdefault(key, {}), value)
        else:
            target[key] = value


def condition(body: Json, type_: str) -> tuple[str, str]:
    """Status and reason of a condition; `("", "")` when there is none."""
    for found in body.get("status", {}).get("conditions", ()):
        if found["type"] == type_:
            return found["status"], found.get("reason", "")
    return "", ""


def pool_node(pool: str, node: str) -> Ref:
    """Address of a KVPoolNode."""
    return Ref(kinds.POOL_NODE, names.pool_node_name(pool, node))
