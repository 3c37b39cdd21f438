"""The erasure of a tenant's blocks: which key version it takes, and when it is over. Pure.

A new value of `spec.eraseRequested` moves the key version on by one, and `status.eraseStarted` remembers for which
value that was done. First the new key is minted, then one write stores version and value, then
`scope_keys.plan_retirement` removes the old keys, which is what makes the bytes unreadable. Laws: a version never
goes down; it moves once for each value; `status.lastErase` names a value only after the old keys are gone and every
agent that is connected has reported that it holds nothing from before.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvstrata_api.models.conditions import Condition, Status, find
from kvstrata_api.models.trust import KVTenant
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.trust import ScopeKind
from kvstrata_operator.decide.plan.conditions import ConditionMaker
from kvstrata_operator.decide.trust.scope_keys import has_key, highest_version, plan_retirement, status_version
from kvstrata_operator.decide.trust.tenant_usage import named
from kvstrata_operator.observe.records import Declared, PoolNodeSeen, ScopeSecretSeen


@dataclass(frozen=True, slots=True)
class ErasureProgress:
    """How far a tenant's erasure is."""

    key_version: int
    """Version that the status is to have; 0 before there was any key."""
    has_key: bool
    """True when the key of that version is there."""
    started: str
    """Value of `spec.eraseRequested` that this version serves."""
    last: str
    """Value whose erasure is over."""
    missing: tuple[str, ...] = ()
    """KVPoolNodes whose agents have not confirmed."""
    away: tuple[str, ...] = ()
    """KVPoolNodes without an agent to ask."""


def key_version(tenant: Declared[KVTenant], secret: ScopeSecretSeen | None) -> int:
    """Key version that a tenant should have."""
    current = status_version(tenant)
    if not current:
        return max(KEY_VERSION, highest_version(tenant, secret))
    return current + is_due(tenant)


def is_due(tenant: Declared[KVTenant]) -> bool:
    """True while the key has not been moved on for what is asked for."""
    wanted = _requested(tenant)
    return bool(wanted) and wanted != _text(tenant, "eraseStarted")


def progress_of(
    tenant: Declared[KVTenant], secret: ScopeSecretSeen | None, nodes: Iterable[PoolNodeSeen], alive: Collection[str]
) -> ErasureProgress:
    """Return how far the erasure is."""
    wanted, current = key_version(tenant, secret), status_version(tenant)
    started, last, requested = _text(tenant, "eraseStarted"), _text(tenant, "lastErase"), _requested(tenant)
    if not has_key(tenant, wanted, secret):
        return ErasureProgress(current, current > 0 and has_key(tenant, current, secret), started, last)
    if requested and requested != started:
        return ErasureProgress(wanted, has_key=True, started=requested, last=last)
    if not requested or requested == last:
        return ErasureProgress(wanted, has_key=True, started=started, last=last)
    open_nodes = [n for n in nodes if not n.is_deleting and n.erased.get(tenant.uid, 0) < wanted]
    missing = tuple(sorted(n.key for n in open_nodes if n.key in alive))
    away = tuple(sorted(n.key for n in open_nodes if n.key not in alive))
    is_shredded = not plan_retirement(tenant, ScopeKind.TENANT, secret, "")
    last = requested if is_shredded and not missing else last
    return ErasureProgress(wanted, has_key=True, started=started, last=last, missing=missing, away=away)


def erase_condition(
    make: ConditionMaker, tenant: Declared[KVTenant], progress: ErasureProgress, now: str
) -> tuple[Condition, ...]:
    """State how far an erasure has come; nothing for a tenant that never asked for one."""
    requested = _requested(tenant)
    if not requested:
        return ()
    before = find(tenant.conditions, "EraseCompleted")
    if progress.last != requested:
        message = f"{requested!r}: agents that have not confirmed: {named(progress.missing) or 'not asked yet'}"
        return (make.false("EraseCompleted", "InProgress", message),)
    is_stated = before is not None and before.status is Status.TRUE and _text(tenant, "lastErase") == requested
    if before is not None and is_stated:
        return (make.true("EraseCompleted", before.reason, before.message),)
    message = f"{requested!r} erased at {now}, key version {progress.key_version}"
    if progress.away:
        left = "what lies at rest there cannot be read, and is dropped when they come back"
        return (
            make.true("EraseCompleted", "NodesAway", f"{message}; without an agent: {named(progress.away)}: {left}"),
        )
    return (make.true("EraseCompleted", "Erased", message),)


def _requested(tenant: Declared[KVTenant]) -> str:
    return (tenant.model.spec.erase_requested or "") if tenant.model is not None else ""


def _text(tenant: Declared[KVTenant], name: str) -> str:
    value = tenant.status.get(name, "")
    return value if isinstance(value, str) else ""
