"""The status of a KVModelCache. Pure."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.model_cache import KVModelCacheSpec
from kvstrata_api.models.operation import FAILURES_MAX, OperationFailure
from kvstrata_api.reasons import REASONS, Weight
from kvstrata_operator.decide.models.model_caches import (
    AT_WORK,
    EVICTED,
    CacheFacts,
    ModelCache,
    found_digest,
    staging_since,
)
from kvstrata_operator.decide.plan.actions import Note, Severity
from kvstrata_operator.decide.plan.conditions import ConditionMaker, Fault, conditions_only
from kvstrata_operator.observe.kinds import format_time

_EVENTS: Final = frozenset(
    reason.reason for reason in REASONS if "ModelsStaged" in reason.types and reason.weight is Weight.BROKEN
)
"""Failures of agents; what is away or waits is no news."""
_MESSAGE_CHARS_MAX: Final = 512
"""Of one failure, as the CRD bounds it."""


def model_status(facts: CacheFacts, cache: ModelCache, now: datetime) -> dict[str, Any]:
    """What people should read of a KVModelCache; `cache` is the one of the facts with its status as it is now."""
    make = ConditionMaker(cache.meta.generation)
    if facts.fault is not None or facts.want is None or cache.model is None:
        fault = facts.fault or Fault("Invalid", cache.error)
        return {**conditions_only(cache, _refused(make, fault), format_time(now)), **_NOBODY}
    since = (staging_since(cache) or now) if facts.open else None
    failures = _failures(facts)
    return {
        **conditions_only(cache, _conditions(make, facts, cache.model.spec, since, now), format_time(now)),
        "tier": facts.want.order.tier,
        "digest": found_digest(cache) or _most(facts.digests, ""),
        "sizeBytes": _most(facts.sizes, 0),
        "nodesWanted": len(facts.chosen),
        "nodesStaged": facts.staged,
        "nodesInUse": facts.in_use,
        "summary": _summary(facts),
        "stagingSince": format_time(since) if since is not None else "",
        "failures": [failure.to_json() for failure in failures],
    }


def failure_notes(cache: ModelCache, wanted: Mapping[str, Any]) -> tuple[Note, ...]:
    """Make one Event for each reason why nodes have not all files that the stored status does not have.

    `Staged` is False from the start, so that no condition flips when a disk is full.
    """
    stored: list[dict[str, Any]] = cache.status.get("failures") or []  # type: ignore[assignment]
    known = {failure.get("reason") for failure in stored}
    return tuple(
        Note(cache.ref, cache.uid, f["reason"], f"{f['nodes']} x, {f['node']}: {f['message']}", Severity.WARNING)
        for f in wanted["failures"]
        if f["reason"] in _EVENTS - known
    )


_NOBODY: Final[dict[str, Any]] = {
    "nodesWanted": 0, "nodesStaged": 0, "nodesInUse": 0, "summary": "", "stagingSince": "", "failures": [],
}  # fmt: skip
"""Counts of a KVModelCache that nobody is asked to stage."""


def _refused(make: ConditionMaker, fault: Fault) -> tuple[Condition, ...]:
    message = f"the spec is not accepted: {fault.message}"
    return (
        make.false("Accepted", fault.reason, fault.message),
        make.false("Staged", "NotAccepted", message),
        make.false("Progressing", "NotAccepted", message),
    )


def _conditions(
    make: ConditionMaker, facts: CacheFacts, spec: KVModelCacheSpec, since: datetime | None, now: datetime
) -> tuple[Condition, ...]:
    accepted = make.true("Accepted", "Accepted", "the pool and its tier are there")
    message = _message(facts, spec)
    if not facts.chosen:
        nobody = "no node of the pool is meant by spec.nodes" if spec.nodes is not None else "the pool has no nodes"
        return (accepted, make.false("Staged", "NoNodes", nobody), make.false("Progressing", "NoNodes", nobody))
    if not facts.open:
        return (accepted, make.true("Staged", "Staged", message), make.false("Progressing", "Complete", message))
    return (accepted, _unstaged(make, facts, spec, since or now, now, message), _progressing(make, facts, message))


def _unstaged(
    make: ConditionMaker, facts: CacheFacts, spec: KVModelCacheSpec, since: datetime, now: datetime, message: str
) -> Condition:
    """Why copies are missing: those that made room for KV are no fault, and those that are late are."""
    if all(standing.reason == EVICTED for standing in facts.open.values()):
        return make.false("Staged", "Evicted", message)
    if now >= since + timedelta(seconds=spec.deadline_seconds):
        late = f"{message}; later than spec.deadlineSeconds {spec.deadline_seconds}"
        return make.false("Staged", "DeadlineExceeded", late)
    return make.false("Staged", "Staging", message)


def _progressing(make: ConditionMaker, facts: CacheFacts, message: str) -> Condition:
    if facts.is_paused:
        return make.false("Progressing", "PoolPaused", f"spec.poolRef: pool {facts.pool} is paused")
    if any(standing.reason == AT_WORK for standing in facts.open.values()):
        return make.true("Progressing", "Staging", "agents copy files")
    return make.false("Progressing", "Waiting", message)


def _message(facts: CacheFacts, spec: KVModelCacheSpec) -> str:
    size = _most(facts.sizes, 0)
    each = f", {units.format_rounded(size)} each" if size else ""
    counted = f"{facts.staged} of {len(facts.chosen)} nodes have revision {spec.revision}{each}"
    reasons = "; ".join(f"{f.nodes} x {f.reason}, {f.node}: {f.message}" for f in _failures(facts))
    return f"{counted}; {reasons}" if reasons else counted


def _failures(facts: CacheFacts) -> list[OperationFailure]:
    """Count nodes by what keeps them from being done; the first by name speaks for each."""
    waiting = {node: standing for node, standing in facts.open.items() if standing.reason != AT_WORK}
    counts = Counter(standing.reason for standing in waiting.values())
    made = []
    for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:FAILURES_MAX]:
        node = min(n for n, standing in waiting.items() if standing.reason == reason)
        text = waiting[node].message[:_MESSAGE_CHARS_MAX]
        made.append(OperationFailure(reason=reason, nodes=count, node=node, message=text))
    return made


def _summary(facts: CacheFacts) -> str:
    """How many nodes have all files, and while some have not how much of all bytes is there."""
    wanted, size = len(facts.chosen), _most(facts.sizes, 0)
    share = units.percent(min(facts.staged_bytes, size * wanted), size * wanted) if facts.open and size else None
    return f"{facts.staged}/{wanted} nodes" + (f", {share}%" if share is not None else "")


def _most(counts: Counter[Any], default: Any) -> Any:
    """What most nodes have found, the least of equals; `default` when none has found anything."""
    return min(counts, key=lambda found: (-counts[found], found), default=default)
