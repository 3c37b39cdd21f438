"""What is to be copied, and how it can get there. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry, Residence


class Move(NamedTuple):
    """One block that is to be copied."""

    entry: Entry
    source: Residence
    slot: SlotRef | None = None
    """Where it goes; None lets the target give a slot of the stored size."""


class Way(StrEnum):
    """How a block gets from one tier to another."""

    STRAIGHT = "straight"
    """As it lies, together with others."""
    CODED = "coded"
    """Through a codec, together with others."""
    ALONE = "alone"
