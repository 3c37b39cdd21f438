"""Priority classes of sessions: how long blocks of each stay, and how soon its moves go. Pure.

A class is a factor and no rank. Laws: whatever a block's class, another one that was idle for less than a `SPREAD`th of
its time outlives it, so nothing dead starves what is used; a move waits at most for what its account moves of all
classes in the time that the factors give its own. A class orders what one account has. What others hold and how fast
they are is decided by quotas and weights before, so no class that a tenant names takes anything from another tenant.
"""

from enum import IntEnum
from typing import Final


class PriorityClass(IntEnum):
    """Class of a session, and of the blocks that it used last; lower comes first."""

    URGENT = 0
    """Somebody waits for each token: a voice, an operator in an incident."""
    INTERACTIVE = 1
    """A person reads along."""
    STANDARD = 2
    """Whoever names no class, or a name that is none."""
    BATCH = 3
    """Results are wanted today."""
    BACKGROUND = 4
    """Whenever nothing else is to be done."""

    @property
    def factor(self) -> float:
        """How much longer blocks of the class stay than standard ones, used alike: 4, 2, 1, 1/2 and 1/4."""
        return _FACTORS[self]


_FACTORS: Final = (4.0, 2.0, 1.0, 0.5, 0.25)
SPREAD: Final = _FACTORS[0] / _FACTORS[-1]
"""Between the first class and the last: about what lies between a tool's answer (8 s) and a person's (86 to 218 s)."""
NAMES: Final = tuple(c.name.lower() for c in PriorityClass)
_BY_NAME: Final = dict(zip(NAMES, PriorityClass, strict=True))


def class_of(priority: str) -> PriorityClass:
    """Class of a session of this priority."""
    return _BY_NAME.get(priority, PriorityClass.STANDARD)


def felt_use_s(used_at_s: float, now_s: float, priority: PriorityClass) -> float:
    """When a block was used last, its idle time stretched by its class: the lower goes first.

    A use of 0 or before stays what it is: such blocks leave before all others.
    """
    return now_s - (now_s - used_at_s) / priority.factor if used_at_s > 0.0 else used_at_s
