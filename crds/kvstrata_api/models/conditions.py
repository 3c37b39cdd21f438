"""Kubernetes conditions that do not flap: typed values and a merge law. Pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from kvstrata_api.models.base import COUNT_MAX, ApiModel, unique_by


class Status(StrEnum):
    """Three-valued answer of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation about an object, in the shape of `metav1.Condition` (KEP-1623)."""

    type: str = Field(min_length=1, max_length=316, description="CamelCase name of the condition.")
    status: Status = Field(description="True: the condition holds. False: it does not. Unknown: nobody can tell now.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="CamelCase cause of the last change, for programs.",
    )
    message: str = Field("", max_length=32768, description="The same for people, with numbers.")
    last_transition_time: str = Field(
        "", max_length=64, json_schema_extra={"format": "date-time"}, description="When the status last changed."
    )
    observed_generation: int = Field(
        0, ge=0, le=COUNT_MAX, description="metadata.generation that the condition speaks of."
    )


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=unique_by("type"))]
"""At most one condition of each type; two writers may share the list."""


def merge(old: Iterable[Condition], new: Iterable[Condition], now: str) -> tuple[Condition, ...]:
    """Put each of `new` in place of the condition of its type; others stay, in order of first appearance.

    The transition time moves to `now` (RFC 3339) only where the status flips, so a steady object gives a
    steady status and no watch event.
    """
    merged = {c.type: c for c in old}
    for condition in new:
        before = merged.get(condition.type)
        flipped = before is None or before.status != condition.status or not before.last_transition_time
        when = now if flipped or before is None else before.last_transition_time
        merged[condition.type] = condition.model_copy(update={"last_transition_time": when})
    return tuple(merged.values())


def find(conditions: Iterable[Condition], type_: str) -> Condition | None:
    """Return the condition of one type, or None."""
    return next((c for c in conditions if c.type == type_), None)


def is_true(conditions: Iterable[Condition], type_: str) -> bool:
    """True when the condition exists and its status is True."""
    found = find(conditions, type_)
    return found is not None and found.status is Status.TRUE


def parse_conditions(status: Mapping[str, Any]) -> tuple[Condition, ...]:
    """Read the conditions of a status as it came from the API server."""
    return tuple(Condition.model_validate(c) for c in status.get("conditions") or ())
