"""The status of a KVOperation, and the Events that tell of its start and end. Pure."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from kvstrata_api import units
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.operation import OperationFailure, OperationProgress
from kvstrata_operator.decide.operations import operations
from kvstrata_operator.decide.operations.operations import Course, End, Operation
from kvstrata_operator.decide.plan.actions import Note, Severity
from kvstrata_operator.decide.plan.conditions import Says, conditions_only
from kvstrata_operator.observe.moments import format_time

_ENDED: Final = {End.COMPLETE: "every node is done", End.CANCELLED: "cancelled on request"}


def operation_status(operation: Operation, course: Course, now: datetime) -> dict[str, Any]:
    """Status of an operation that is not over by its stored status."""
    conditions = _conditions(Says(operation.meta.generation), course, _message(operation, course))
    start = operations.started_at(operation)
    return {
        **conditions_only(operation, conditions, format_time(now)),
        "state": str(course.end or ("Pending" if course.fault or start is None else "Progressing")),
        "startedAt": format_time(start or now),
        "finishedAt": format_time(now) if course.end else "",
        "progress": _progress(course).to_json(),
        "summary": _summary(operation, course),
        "failures": [_failure(count, o).to_json() for count, o in operations.by_reason(course.open)],
    }


def operation_notes(operation: Operation, course: Course) -> tuple[Note, ...]:
    """Tell of the start and of the end, each once: both are told by the write that stores them."""
    told: list[tuple[str, str, Severity]] = []
    if operations.started_at(operation) is None:
        told.append(("Started", "the operation has been taken up", Severity.NORMAL))
    if course.end is not None:
        severity = Severity.WARNING if course.end is End.FAILED else Severity.NORMAL
        told.append((str(course.end), _message(operation, course), severity))
    return tuple(Note(operation.ref, operation.uid, *it) for it in told)


def _conditions(says: Says, course: Course, message: str) -> tuple[Condition, ...]:
    fault = course.fault
    accepted = (
        says.false("Accepted", fault.reason, fault.message) if fault else says.true("Accepted", "Accepted", "taken up")
    )
    if course.end is not None:
        return (accepted, says.false("Progressing", course.end, message), says.true(course.end, course.reason, message))
    if fault is not None:
        return (accepted, says.false("Progressing", fault.reason, fault.message))
    return (accepted, says.true("Progressing", "InProgress", "agents work on it"))


def _message(operation: Operation, course: Course) -> str:
    """What people read at the end."""
    if course.end is not End.FAILED:
        return f"{_ENDED[course.end]}: {_summary(operation, course)}" if course.end is not None else ""
    if course.fault is not None:
        return course.fault.message
    told = "; ".join(
        f"{count} x {o.reason}{o.node and f', {o.node}'}: {o.message}" for count, o in operations.by_reason(course.open)
    )
    return f"{course.done} of {course.nodes} nodes are done; {told or 'the others are still at it'}"


def _progress(course: Course) -> OperationProgress:
    def total(counts: Iterable[int]) -> int:
        return units.coarse(sum(counts))

    return OperationProgress(
        nodes_done=course.done,
        nodes_total=course.nodes,
        blocks_done=total(a.blocks_done for a in course.answers),
        blocks_total=total(a.blocks_total for a in course.answers),
        bytes_done=total(a.bytes_done for a in course.answers),
        bytes_total=total(a.bytes_total for a in course.answers),
        blocks_missing=total(a.blocks_missing for a in course.answers),
    )


def _summary(operation: Operation, course: Course) -> str:
    missing, left = sum(a.blocks_missing for a in course.answers), 0
    if operation.model is not None and operation.model.spec.drain is not None:
        left = sum(a.blocks_total - a.blocks_done for a in course.answers)
    told = (
        f", {units.coarse(missing)} blocks missing" if missing else f", {units.coarse(left)} blocks left" * bool(left)
    )
    return f"{course.done}/{course.nodes} nodes{told}"


def _failure(count: int, first: operations.Open) -> OperationFailure:
    return OperationFailure(reason=first.reason, nodes=count, node=first.node, message=first.message[:512])
