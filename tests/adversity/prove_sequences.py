"""Claim `sequences`: drawn changes and KVOperations of many clusters' worth of objects at once, on the real API server.

Each sequence has names, nodes and namespaces of its own, so a batch of them shares the control plane and the operator.
"""

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from adversity.calls import Json
from adversity.drawn import OPERATION, Change, Names, sequence, settled
from adversity.portrait import Portrait
from adversity.runs import at_rest
from adversity.scenario import Admin
from adversity.shared import stage
from adversity.simulated import ENDS, forget_history
from adversity.stage import Keeper, Stage
from controlplane import ApiError
from controlplane.waiting import wait_until
from kvstrata_api.schema_kinds import BY_NAME
from kvstrata_operator.observe.kinds import ADMINISTRATOR_KINDS
from support.runner.outcome import Outcome, Scale

FULL: Final = (5, 100)
"""Batches, and sequences of each."""
SHORT: Final = (1, 6)
COUNTED: Final = ("changes", "refused", "operations", "complete", "stepped")
"""Figures of a batch."""
CHANGES: Final = 5
WAVE_S: Final = 1.1
"""At least between two changes of a sequence: creation times, by which the older of two pools is told, have seconds."""
OPERATION_S: Final = ((1, 30), (1, 5))
"""Times that KVOperations have, at full counts and shortened: their ends are waited for."""
OPERATIONS_END_S: Final = 180.0
"""Bound of waiting for the ends of all KVOperations of a batch on a busy machine."""
WORTHLESS: Final = {"gainPermille": 0, "lossPermille": 0, "heldBytes": 0}
"""What agents say of every tier while changes are made: those that scale shrink."""
_CREATED: Final = {BY_NAME[kind.name].name for kind in ADMINISTRATOR_KINDS}


@dataclass(slots=True)
class Batch:
    """Sequences that run side by side."""

    stage: Stage
    admin: Admin
    named: tuple[Names, ...]
    made: dict[tuple[str, str, str], Json] = field(default_factory=dict)
    """Specs of what there should be, in the order of creation."""
    violations: list[str] = field(default_factory=list)
    changes: int = 0
    refused: int = 0
    operations: int = 0
    """KVOperations that have ended."""
    complete: int = 0
    """Of these, with all done that was asked for."""
    stepped: int = 0
    """Pools with a tier that has scaled."""

    def take(self, change: Change, named: Names) -> None:
        """Let the API server take or refuse one change."""
        namespace = named.namespace if BY_NAME[change.kind].is_namespaced else ""
        key = (change.kind, change.name, namespace)
        self.changes += 1
        try:
            if change.verb == "delete":
                self.admin.delete(*key)
                self.made.pop(key)
            elif key in self.made:
                self.admin.replace(*key[:2], change.spec, namespace)
                self.made[key] = change.spec
            else:
                self.admin.make(*key[:2], change.spec, namespace)
                self.made[key] = change.spec
        except ApiError as e:
            self._judge(change, key, e)
            return
        if change.verb == "bad":
            self.violations.append(f"accepted though {change.blamed} is bad: {change.kind} {change.spec}")

    def _judge(self, change: Change, key: tuple[str, str, str], refusal: ApiError) -> None:
        """Tell a refusal that people can use from others; 404 and 409 are of objects that are leaving."""
        if change.verb == "bad" and refusal.status in (400, 422):
            self.refused += 1
            if change.blamed not in str(refusal):
                self.violations.append(f"{change.blamed} is bad and not named: {refusal}")
        elif refusal.status not in (404, 409, 422):
            self.violations.append(f"{change.verb} {key}: {refusal}")
        if refusal.status == 404:
            self.made.pop(key, None)

    def settle(self) -> None:
        """Let KVOperations end and tiers rest; then write down what they leave behind in specs, as if it were declared.

        Once a KVOperation is deleted, all is as if there had been none.
        """
        if not wait_until(lambda: all(_state(o) in ENDS for o in self.admin.get(OPERATION)), OPERATIONS_END_S):
            left = [f"{o['metadata']['name']} {_state(o)}" for o in self.admin.get(OPERATION)]
            self.violations.append(f"KVOperations have not ended: {left}")
        self.complete += sum(_state(o) == "Complete" for o in self.admin.get(OPERATION))
        self.stage.agents.manners.demand = None
        for key in [key for key in self.made if key[0] == OPERATION]:
            self.operations += 1
            self.admin.delete(*key)
            del self.made[key]
        at_rest(self.stage)
        for tenant in self.admin.get("KVTenant"):
            key = ("KVTenant", tenant["metadata"]["name"], "")
            if (asked := tenant["spec"].get("eraseRequested")) is not None:
                self.made[key] = {**self.made[key], "eraseRequested": asked}
        for pool in self.admin.get("KVPool"):
            self._write_sizes_down(("KVPool", pool["metadata"]["name"], ""), pool.get("status", {}))

    def _write_sizes_down(self, key: tuple[str, str, str], status: Json) -> None:
        self.stepped += any(scale.get("steppedAt") for scale in status.get("autoscaling", ()))
        spec = settled(self.made[key], status)
        if spec != self.made[key]:
            self.made[key] = spec
            self.admin.replace(*key[:2], spec)


def run(scale: Scale) -> Outcome:
    """Run batches: the changes, then the same objects from scratch."""
    batches, size = scale.of(FULL, SHORT)
    there, admin = stage(), Admin(stage().plane)
    operation_s = scale.of(*OPERATION_S)
    named = tuple(Names(f"m{n}", f"m{n}-0", (f"m{n}-n",), operation_s) for n in range(size))
    admin.make_homes([one.mark for one in named])
    violations, counts, started_s = list[str](), Counter[str](), time.monotonic()
    is_caught = False
    with there.operator() as keeper:
        for number in range(batches):
            batch = Batch(there, admin, named)
            found, wanted = _run(batch, keeper, f"sequences {scale.first_seed + number}")
            broken = (*batch.violations, *found.differences(wanted))
            violations += [f"batch {scale.first_seed + number}: {line}" for line in broken]
            sys.stderr.writelines(f"    {line}\n" for line in broken)
            counts.update({name: getattr(batch, name) for name in COUNTED})
            is_caught = is_caught or _is_seen(found, wanted)
            told = ", ".join(f"{count} {name}" for name, count in counts.items())
            told = f"{number + 1}/{batches} batches, {told}, {len(violations)} broken"
            sys.stderr.write(f"    {told}, {time.monotonic() - started_s:.0f} s\n")
    return Outcome(batches * size, "sequences", tuple(violations), is_caught, counts)


def _run(batch: Batch, keeper: Keeper, seed: str) -> tuple[Portrait, Portrait]:
    """How the sequences end, and how the same objects look when nobody ever changed them."""
    keeper.stop()
    batch.admin.clear()
    keeper.run()
    starts = keeper.starts
    batch.stage.agents.manners.demand = WORTHLESS
    drawn = [(n, sequence(random.Random(f"{seed} {n.mark}"), n, CHANGES)) for n in batch.named]
    for _ in range(CHANGES):
        began_s = time.monotonic()
        for named, changes in drawn:
            for change in (c for c in [next(changes, None)] if c is not None):
                batch.take(change, named)
        time.sleep(max(0.0, WAVE_S - (time.monotonic() - began_s)))
    batch.settle()
    found = _forgetful(at_rest(batch.stage))
    if keeper.starts > starts + 1:
        batch.violations.append(f"the operator ended {keeper.starts - starts} times")
    keeper.stop()
    batch.admin.clear()
    keeper.run()
    left = dict(batch.made)
    while left:
        began_s = time.monotonic()
        for named in batch.named:
            mine = next((key for key in left if key[1].startswith(f"{named.mark}-")), None)
            if mine is not None:
                batch.admin.make(mine[0], mine[1], left.pop(mine), mine[2])
        time.sleep(max(0.0, WAVE_S - (time.monotonic() - began_s)))
    return found, _forgetful(at_rest(batch.stage))


def _state(body: Json) -> str:
    return str((body.get("status") or {}).get("state"))


def _forgetful(seen: Portrait) -> Portrait:
    """Leave out what is meant to tell of the past, and the keys of shares that nobody grants now."""
    lapsed = {key for key, body in seen.objects.items() if key.startswith("KVPrefixShare") and not _is_accepted(body)}
    hidden = {f"Secret kvstrata-scope.share.{key.split(' ')[1].replace('/', '.')}" for key in lapsed}
    kept = {key: body for key, body in seen.objects.items() if key not in hidden}
    return Portrait({key: _without_past(key, body) for key, body in kept.items()}, seen.behind)


def _without_past(key: str, body: Json) -> Any:
    if key.startswith("Secret "):
        return {**body, "data": len([e for e in body["data"] if "." not in e])}
    return forget_history(body) if key.split(" ", maxsplit=1)[0] in _CREATED else body


def _is_accepted(body: Json) -> bool:
    told = (body.get("status") or {}).get("conditions", ())
    return any(c["type"] == "Accepted" and c["status"] == "True" for c in told)


def _is_seen(found: Portrait, wanted: Portrait) -> bool:
    """Whether one field of one object's status that is not as it should be would be seen."""
    key = next((k for k, body in wanted.objects.items() if (body.get("status") or {}).get("conditions")), None)
    if key is None:
        return False
    body = wanted.objects[key]
    first, *rest = body["status"]["conditions"]
    bent = {**body, "status": {**body["status"], "conditions": [{**first, "reason": "Bent"}, *rest]}}
    return len(found.differences(Portrait({**wanted.objects, key: bent}))) > len(found.differences(wanted))
