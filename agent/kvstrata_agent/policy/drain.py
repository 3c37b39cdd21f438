"""How the drain of one tier stands, from look to look. Pure.

Laws: an empty tier is done at once; nothing is given up while somebody holds a block, or while a tier that could take
blocks is only away for a moment; what has no place is told after `IDLE_LOOKS` looks in a row, and stays.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

IDLE_LOOKS: Final = 3
"""Looks in a row that find nothing to move: what is only being copied is free soon."""


class Standing(Enum):
    """Where it stands; the value is the reason that is told."""

    MOVING = ""
    HELD = "BlocksHeld"
    WAITING = "TiersAway"
    EMPTY = "Drained"
    NO_PLACE = "NoPlace"

    @property
    def is_over(self) -> bool:
        """True when nothing more will happen by itself."""
        return self in (Standing.EMPTY, Standing.NO_PLACE)


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a tier that takes no blocks."""

    blocks: int
    is_stuck: bool
    """True when the last try to empty it moved nothing."""
    is_held: bool
    """True while somebody leases, pins, decodes from, writes or moves a block in it."""
    are_others_away: bool
    """True while another tier takes no writes for the moment."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What the looks so far have come to."""

    standing: Standing = Standing.MOVING
    idle_looks: int = 0
    blocks: int | None = None
    """At the last look; None before the first one."""

    def after(self, look: Look) -> "Watch":
        """Add one more look."""
        if look.blocks == 0 and not look.is_held:
            return Watch(Standing.EMPTY, 0, 0)
        if self.blocks is None or look.blocks < self.blocks:
            return Watch(Standing.MOVING, 0, look.blocks)
        if look.is_held:
            return Watch(Standing.HELD, 0, look.blocks)
        if not look.is_stuck:
            return Watch(Standing.MOVING, 0, look.blocks)
        if look.are_others_away:
            return Watch(Standing.WAITING, 0, look.blocks)
        idle_looks = self.idle_looks + 1
        return Watch(Standing.NO_PLACE if idle_looks >= IDLE_LOOKS else Standing.MOVING, idle_looks, look.blocks)
