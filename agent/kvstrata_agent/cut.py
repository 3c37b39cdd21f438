"""What is to leave a tier, and what becomes of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvstrata_agent.movement.fair_queue import Priority

if TYPE_CHECKING:
    from kvstrata_api.blocks import ScopeId


class Fate(Enum):
    """What becomes of a victim's last copy."""

    SINK = auto()
    """It goes to a slower tier, or away when none takes it."""
    DROP = auto()
    """It goes away."""
    STAY = auto()
    """It goes to a slower tier, or stays when none takes it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What is to leave a tier, and how."""

    need_bytes: int
    reason: str
    urgency: Priority = Priority.ROOM
    tenant: str | None = None
    """Whose blocks; None for anybody's."""
    scope: ScopeId | None = None
    extents: frozenset[int] | None = None
    most_bytes: int | None = None
    """Never more than this; None for no bound."""
    fate: Fate = Fate.SINK
