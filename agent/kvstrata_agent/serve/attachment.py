"""Who is at the other end of a connection and what it may do. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstrata_agent.blocks.request import RequestContext
from kvstrata_api.errors import ForbiddenError, UnauthenticatedError
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata_agent.blocks.request import Caller
    from kvstrata_api.blocks import Layout, LayoutId, ScopeSecret
    from kvstrata_api.trust import Access
    from kvstrata_api.wire import ExtentGrant


@dataclass(frozen=True, slots=True)
class ScopeRight:
    """One scope that the caller may read, and perhaps write."""

    access: Access
    context: RequestContext
    """Of each request on keys of this scope that names no session; made with the right, and gone with it."""


@dataclass(slots=True, eq=False)
class Attachment:
    """State of one connection. Empty until its first attach."""

    owner: int
    """Number of the connection; owns leases, pins, reservations and sessions."""
    client: str = ""
    caller: Caller | None = None
    rights: dict[str, ScopeRight] = field(default_factory=dict)
    grants_version: int = -1
    """Version that `rights` were derived from."""
    expires_at_s: float = 0.0
    """Monotonic second at which the token must be presented again."""
    layout: Layout | None = None
    layout_id: LayoutId | None = None
    block_bytes: int = 0
    extents: set[tuple[int, bool]] = field(default_factory=set)
    """Extents that were sent, with whether they were writable."""

    @property
    def tenant(self) -> str:
        """Tenant of the caller; attached connections only."""
        assert self.caller is not None
        return self.caller.grants.tenant

    @property
    def own_secret(self) -> ScopeSecret | None:
        """Key material of the tenant's own scope; None once its grants were taken away."""
        own = (r.context.secret for r in self.rights.values() if r.access.kind is ScopeKind.TENANT)
        return next(own, None)

    def admit(self, caller: Caller, grants_version: int) -> set[str]:
        """Take new grants; returns the scopes that are lost. The layout is fixed before.

        The context of every scope is made anew with them, so that no request goes on with a key of before.
        """
        before, layout_id = set(self.rights), self.layout_id
        assert layout_id is not None, "an attach brings its layout along"
        self.caller = caller
        self.grants_version = grants_version
        access, tenant = caller.grants.access, caller.grants.tenant
        self.rights = {
            a.scope: ScopeRight(a, RequestContext(self.owner, tenant, secret, layout_id, self.block_bytes))
            for a, secret in zip(access, caller.secrets, strict=True)
        }
        return before - set(self.rights)

    def expel(self) -> set[str]:
        """Take all grants away; returns the scopes that are lost."""
        lost = set(self.rights)
        self.rights = {}
        self.caller = None
        return lost

    def check(self, now_s: float) -> Caller:
        """Return the caller. Raises `UnauthenticatedError` when there is none or its token ran out."""
        if self.caller is None:
            raise UnauthenticatedError("no attach on this connection; present a token first")
        if now_s >= self.expires_at_s:
            raise UnauthenticatedError("the token's time is up; attach again")
        return self.caller

    def readable(self, scope: str) -> ScopeRight | None:
        """Return the right to a scope; None when there is none, whether or not such a scope exists."""
        return self.rights.get(scope)

    def writable(self, scope: str) -> ScopeRight:
        """Return the right to write a scope. Raises `ForbiddenError`, in equal words for unknown and forbidden ones."""
        right = self.rights.get(scope)
        if right is None or not right.access.can_write:
            raise ForbiddenError("this caller may not write that scope")
        return right

    def is_new(self, number: int, *, is_writable: bool) -> bool:
        """Note that an extent is sent; False when it was sent before."""
        if (number, is_writable) in self.extents or (number, True) in self.extents:
            return False
        self.extents.add((number, is_writable))
        return True

    def forget_extents(self, extents: Iterable[ExtentGrant]) -> None:
        """Note that extents did not get through after all."""
        for grant in extents:
            self.extents.discard((grant.extent, grant.is_writable))
