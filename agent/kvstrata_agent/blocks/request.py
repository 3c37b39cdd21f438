"""What a verb on blocks needs to know about its caller, put together once for each request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret

NOBODY: Final = -1
"""Owner of what is done for nobody's connection: it takes neither leases nor reservations."""


@dataclass(frozen=True, slots=True)
class Place:
    """Whose blocks, in which scope and layout. The caller's right to the scope was checked before."""

    owner: int
    """Connection, for leases and reservations."""
    tenant: str
    secret: ScopeSecret
    layout_id: LayoutId
    raw_bytes: int
    """Bytes of one block of this layout."""
    session: Session | None = None

    @property
    def scope(self) -> ScopeId:
        """The scope of all keys of the request."""
        return self.secret.scope
