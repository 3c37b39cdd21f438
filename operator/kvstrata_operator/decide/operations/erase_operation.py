"""KVOperations of type Erase: they ask for a tenant's erasure by its own field, and report how that goes. Pure.

`erasure` does the erasing, whoever asked for it. Laws: an erasure that is under way is never overwritten by another;
each operation asks for a value of its own, so it is complete only when an erasure that began after it is over.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final

from kvstrata_api.models.conditions import find
from kvstrata_api.models.trust import KVTenant
from kvstrata_operator.decide.operations import operations
from kvstrata_operator.decide.operations.operations import Open, Operation, Progress
from kvstrata_operator.decide.plan.actions import Action, Merge
from kvstrata_operator.decide.plan.conditions import Fault
from kvstrata_operator.observe.records import Declared, PoolNodeSeen

Tenant = Declared[KVTenant]

_MESSAGE_CHARS_MAX: Final = 512
"""`maxLength` of a failure's message."""


def requested_value(operation: Operation) -> str:
    """Value of the tenant's `spec.eraseRequested` that stands for this operation."""
    return f"kvoperation-{operation.uid}"


def plan_requests(seen: Iterable[Operation], tenants: Mapping[str, Tenant]) -> Iterator[Action]:
    """Ask for the erasures whose turn it is: the oldest operation of each tenant that has no erasure under way."""
    taken: set[str] = set()
    for operation in operations.in_order(seen):
        name = _tenant_of(operation)
        if name is None or name in taken or not _is_asking(operation):
            continue
        taken.add(name)
        tenant, value = tenants.get(name), requested_value(operation)
        if tenant is None or tenant.model is None or tenant.is_deleting:
            continue
        requested, last = tenant.model.spec.erase_requested or "", _text(tenant, "lastErase")
        if value not in (requested, last) and requested in ("", last):
            yield Merge(tenant.ref, body={"spec": {"eraseRequested": value}})


def progress_of(operation: Operation, tenant: Tenant | None, nodes: Iterable[PoolNodeSeen], now: datetime) -> Progress:
    """Return how far an Erase is that is not over by its stored status. Nodes are the witnesses."""
    fault = _fault(operation, tenant)
    here = [node for node in nodes if not node.is_deleting]
    if fault is not None or tenant is None:
        return operations.ended(operation, Progress(fault), now)
    total = max(1, len(here))
    if _text(tenant, "lastErase") == requested_value(operation):
        return operations.ended(operation, Progress(nodes=total, done=total), now)
    condition = find(tenant.conditions, "EraseCompleted")
    is_ours = tenant.model is not None and tenant.model.spec.erase_requested == requested_value(operation)
    reason, message = (
        ("Unconfirmed", condition.message) if is_ours and condition is not None else ("Waiting", "asked for soon")
    )
    version = int(str(tenant.status.get("keyVersion") or 0))
    done = sum(is_ours and node.erased.get(tenant.uid, 0) >= version > 0 for node in here)
    waits = Open("", reason, message[:_MESSAGE_CHARS_MAX])
    return operations.ended(operation, Progress(nodes=total, done=min(done, total - 1), open=(waits,)), now)


def _fault(operation: Operation, tenant: Tenant | None) -> Fault | None:
    if tenant is None or tenant.model is None or tenant.error:
        return Fault("TenantNotFound", f"tenant {_tenant_of(operation)} does not exist, or is not accepted")
    return Fault("TenantDeleting", f"tenant {tenant.key} is being deleted") if tenant.is_deleting else None


def _is_asking(operation: Operation) -> bool:
    """True between start and end."""
    assert operation.model is not None, "only what can be read names a tenant"
    has_begun = operations.started_at(operation) is not None and not operation.model.spec.cancel
    return has_begun and operations.stored_end(operation) is None and not operation.is_deleting


def _tenant_of(operation: Operation) -> str | None:
    model = operation.model
    return model.spec.erase.tenant if model is not None and model.spec.erase is not None else None


def _text(tenant: Tenant, name: str) -> str:
    value = tenant.status.get(name, "")
    return value if isinstance(value, str) else ""
