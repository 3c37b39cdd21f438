"""What a run of one invariant says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to do: the counts of the invariant table, or a shortened run of seconds."""

    is_full: bool
    first_seed: int = 0

    def of(self, full: T, short: T) -> T:
        """Choose between two counts."""
        return full if self.is_full else short


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one invariant."""

    n: int
    """How many cases were tried, in the unit of the invariant table."""
    unit: str
    """What was counted: reads, steps, kills, restarts ..."""
    violations: tuple[str, ...]
    """What broke it, each with what replays it; empty when it held."""
    is_control_caught: bool
    """Whether the same check, run against a seeded defect, saw it: a check that cannot fail proves nothing."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Other figures worth keeping, by name with unit."""

    @property
    def is_held(self) -> bool:
        """True when nothing broke the invariant and the check can see a break."""
        return not self.violations and self.is_control_caught
