"""Who asks for blocks, and what a verb needs to know of that, made once for each connection and scope. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret
    from kvstrata_api.trust import Grants, Identity

NOBODY: Final = -1
"""Owner of what is done for nobody's connection: it takes neither leases nor reservations."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated engine process: identity, tenant, scopes and their secrets."""

    identity: Identity
    grants: Grants
    secrets: tuple[ScopeSecret, ...]
    """One for each of `grants.access`, in the same order."""
    expires_s: float
    """Seconds from now until the token must be presented again."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Whose blocks, in which scope and layout. The caller's right to the scope was checked before."""

    owner: int
    """Connection, for leases and reservations."""
    tenant: str
    secret: ScopeSecret
    layout_id: LayoutId
    raw_bytes: int
    """Bytes of one block of this layout."""
    session: Session | None = None
    """The one that the request names."""

    @property
    def scope(self) -> ScopeId:
        """The scope of all keys of the request."""
        return self.secret.scope

    def within(self, session: Session | None) -> RequestContext:
        """Return the same context for a request of a session."""
        if session is None:
            return self
        return RequestContext(self.owner, self.tenant, self.secret, self.layout_id, self.raw_bytes, session)
