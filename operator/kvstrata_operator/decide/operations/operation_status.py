"""The status of a KVOperation, and the Events of its start and end. Pure."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.operation import OperationFailure, OperationProgress
from kvstrata_operator.decide.operations import operations
from kvstrata_operator.decide.operations.operations import End, Operation, Progress
from kvstrata_operator.decide.plan.actions import Note, Severity
from kvstrata_operator.decide.plan.conditions import ConditionMaker, conditions_only
from kvstrata_operator.observe.kinds import format_time

_ENDED: Final = {End.COMPLETE: "every node is done", End.CANCELLED: "cancelled on request"}


def operation_status(operation: Operation, progress: Progress, now: datetime) -> dict[str, Any]:
    """Status of an operation that is not over by its stored status."""
    conditions = _conditions(ConditionMaker(operation.meta.generation), progress, _message(operation, progress))
    start = operations.started_at(operation)
    return {
        **conditions_only(operation, conditions, format_time(now)),
        "state": str(progress.end or ("Pending" if progress.fault or start is None else "Progressing")),
        "startedAt": format_time(start or now),
        "finishedAt": format_time(now) if progress.end else "",
        "progress": _progress(progress).to_json(),
        "summary": _summary(operation, progress),
        "failures": [_failure(count, o).to_json() for count, o in operations.by_reason(progress.open)],
    }


def operation_notes(operation: Operation, progress: Progress) -> tuple[Note, ...]:
    """Make the Events of the start and of the end, each once: both go with the write that stores them."""
    events: list[tuple[str, str, Severity]] = []
    if operations.started_at(operation) is None:
        events.append(("Started", "the operation has been taken up", Severity.NORMAL))
    if progress.end is not None:
        severity = Severity.WARNING if progress.end is End.FAILED else Severity.NORMAL
        events.append((str(progress.end), _message(operation, progress), severity))
    return tuple(Note(operation.ref, operation.uid, *it) for it in events)


def _conditions(make: ConditionMaker, progress: Progress, message: str) -> tuple[Condition, ...]:
    fault = progress.fault
    accepted = (
        make.false("Accepted", fault.reason, fault.message) if fault else make.true("Accepted", "Accepted", "taken up")
    )
    if progress.end is not None:
        return (
            accepted,
            make.false("Progressing", progress.end, message),
            make.true(progress.end, progress.reason, message),
        )
    if fault is not None:
        return (accepted, make.false("Progressing", fault.reason, fault.message))
    return (accepted, make.true("Progressing", "InProgress", "agents work on it"))


def _message(operation: Operation, progress: Progress) -> str:
    """What people read at the end."""
    if progress.end is not End.FAILED:
        return f"{_ENDED[progress.end]}: {_summary(operation, progress)}" if progress.end is not None else ""
    if progress.fault is not None:
        return progress.fault.message
    reasons = "; ".join(
        f"{count} x {o.reason}{o.node and f', {o.node}'}: {o.message}"
        for count, o in operations.by_reason(progress.open)
    )
    return f"{progress.done} of {progress.nodes} nodes are done; {reasons or 'the others are still at it'}"


def _progress(progress: Progress) -> OperationProgress:
    def total(counts: Iterable[int]) -> int:
        return units.coarse(sum(counts))

    return OperationProgress(
        nodes_done=progress.done,
        nodes_total=progress.nodes,
        blocks_done=total(a.blocks_done for a in progress.answers),
        blocks_total=total(a.blocks_total for a in progress.answers),
        bytes_done=total(a.bytes_done for a in progress.answers),
        bytes_total=total(a.bytes_total for a in progress.answers),
        blocks_missing=total(a.blocks_missing for a in progress.answers),
    )


def _summary(operation: Operation, progress: Progress) -> str:
    missing, left = sum(a.blocks_missing for a in progress.answers), 0
    if operation.model is not None and operation.model.spec.drain is not None:
        left = sum(a.blocks_total - a.blocks_done for a in progress.answers)
    rest = (
        f", {units.coarse(missing)} blocks missing" if missing else f", {units.coarse(left)} blocks left" * bool(left)
    )
    return f"{progress.done}/{progress.nodes} nodes{rest}"


def _failure(count: int, first: operations.Open) -> OperationFailure:
    return OperationFailure(reason=first.reason, nodes=count, node=first.node, message=first.message[:512])
