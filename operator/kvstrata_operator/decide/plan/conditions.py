"""Building blocks of statuses: conditions of one generation, their Events, and whether a write is worth it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api.models.conditions import Condition, Status, find, merge
from kvstrata_api.reasons import TRUE_IS_BAD
from kvstrata_operator.decide.plan.actions import Note, Severity
from kvstrata_operator.observe.records import Declared

_QUIET_TYPES: Final = frozenset({"Progressing", "Provisioned"})
"""Types whose flips people see in Ready already."""

_EVENT_REASONS: Final = frozenset({"ProgressDeadlineExceeded"})
"""Reasons of those types that nothing else reports."""

PASSING: Final = frozenset(
    {"NodesNotReady", "NodesNotUpdated", "Deleting", "Expired", "RedisStarting", "RedisRolling", "Staging"}
)
"""Reasons of bad news that healthy objects pass through."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an object is not accepted, or not ready: a condition's reason and message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ConditionMaker:
    """Makes conditions of one object's generation."""

    generation: int

    def true(self, type_: str, reason: str, message: str = "") -> Condition:
        """Condition that holds."""
        return self._make(type_, Status.TRUE, reason, message)

    def false(self, type_: str, reason: str, message: str) -> Condition:
        """Condition that does not hold."""
        return self._make(type_, Status.FALSE, reason, message)

    def unknown(self, type_: str, reason: str, message: str) -> Condition:
        """Condition that cannot be judged yet."""
        return self._make(type_, Status.UNKNOWN, reason, message)

    def _make(self, type_: str, status: Status, reason: str, message: str) -> Condition:
        return Condition(type=type_, status=status, reason=reason, message=message, observed_generation=self.generation)


def settle(declared: Declared[Any], new: Iterable[Condition], now: str) -> tuple[Condition, ...]:
    """Put new conditions over the stored ones; times move only where a status flips."""
    return merge(declared.conditions, new, now)


def conditions_only(declared: Declared[Any], new: Iterable[Condition], now: str) -> dict[str, Any]:
    """Return the status fields that every kind has; all others stay as they are stored."""
    settled = settle(declared, new, now)
    return {"observedGeneration": declared.meta.generation, "conditions": [c.to_json() for c in settled]}


def refused(make: ConditionMaker, reason: str, message: str) -> tuple[Condition, ...]:
    """Conditions of an object whose spec cannot be acted upon; what was observed before stays as it was."""
    return (
        make.false("Accepted", reason, message),
        make.false("Ready", "NotAccepted", f"the spec is not accepted: {message}"),
    )


def notes_of(declared: Declared[Any], new: Iterable[Condition]) -> tuple[Note, ...]:
    """Make one Event for each condition that flips; of first appearances only bad news and what is ready at once.

    What became ready is reported whether or not a status in between was not ready yet: that is a matter of pace.
    """
    return tuple(_note(declared, c) for c in new if _deserves_event(find(declared.conditions, c.type), c))


def differs(stored: Mapping[str, Any], wanted: Mapping[str, Any], ignored: Iterable[str] = ()) -> bool:
    """True when a wanted field is not stored as it should be; fields of other writers do not count."""
    return any(stored.get(k) != wanted[k] for k in wanted.keys() - set(ignored))


def _deserves_event(before: Condition | None, after: Condition) -> bool:
    is_quiet = after.type in _QUIET_TYPES and after.reason not in _EVENT_REASONS
    if is_quiet or after.status is Status.UNKNOWN:
        return False
    if before is None:
        return after.reason not in PASSING if _is_bad(after) else after.type == "Ready"
    return before.status is not after.status


def _is_bad(condition: Condition) -> bool:
    return condition.status is (Status.TRUE if condition.type in TRUE_IS_BAD else Status.FALSE)


def _note(declared: Declared[Any], condition: Condition) -> Note:
    is_warning = _is_bad(condition) and condition.reason not in PASSING
    severity = Severity.WARNING if is_warning else Severity.NORMAL
    message = f"{condition.type} is {condition.status}: {condition.message}"
    return Note(declared.ref, declared.uid, condition.reason, message, severity)
