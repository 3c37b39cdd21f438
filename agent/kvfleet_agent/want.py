"""A slot that is wanted: where, for whom and how big. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfleet_agent.tiers import Tier
    from kvfleet_api.blocks import ScopeId


@dataclass(frozen=True, slots=True)
class Want:
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
