"""Request for one slot: tier, scope, account, size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_api.blocks import ScopeId

BATCH_SLOTS: Final = 16
"""Slots freed at a time, because the writer that needs one will need more."""


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """One slot that somebody needs in a tier."""

    tier: Tier
    scope: ScopeId
    tenant: str
    """Account that it is on."""
    size_bytes: int
    writer: str = ""
    """Tenant whose client is to fill it; empty when we do."""
    slots: int = 1
    """How many like it will be taken one after the other, this one included: room is made for them at once."""

    @property
    def is_new(self) -> bool:
        """True for bytes that an engine brings; all else is here or in the fleet already."""
        return bool(self.writer)

    @property
    def batch_bytes(self) -> int:
        """What is freed at a time for a writer that is known, or likely, to need more slots like this one."""
        return self.size_bytes * max(BATCH_SLOTS, self.slots)
