"""Who is at the other end of a connection and what it may do.

From a token to rights by `attach`, and from changed grants to revoked leases before each verb.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.serve.audit import Audit
from kvstrata_agent.serve.load_counts import LoadBook
from kvstrata_api import wire
from kvstrata_api.errors import (
    ForbiddenError,
    InvalidInputError,
    KvStrataError,
    PermanentError,
    RetryableError,
    UnauthenticatedError,
)
from kvstrata_api.models.pool import ANY
from kvstrata_api.trust import ScopeKind
from kvstrata_api.units import GIB, KIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import Caller
    from kvstrata_api.blocks import Layout, LayoutId, ScopeId, ScopeSecret
    from kvstrata_api.models.pool import Compatibility
    from kvstrata_api.trust import Access, Identity
    from kvstrata_api.wire import DeviceGrant, ExtentGrant


BLOCK_BYTES_MAX: Final = GIB
"""Largest block: 64 times what 16 tokens of a 400-billion-parameter model take."""
_MAY_BE_ANY: Final = ("model", "revision")
SLOT_STEP_BYTES: Final = 4 * KIB
"""Slots lie on pages, so that they can be the source and target of O_DIRECT transfers."""


class Authenticator(Protocol):
    """Turns tokens into callers (the Kubernetes side: `kvstrata_agent.kube`)."""

    @property
    def grants_version(self) -> int:
        """Moves on whenever tenants, domains, namespaces or scope Secrets changed."""

    async def authenticate(self, token: str) -> Caller:
        """Check a token by TokenReview and map it to a tenant.

        Raises `UnauthenticatedError` when the token is refused, `ForbiddenError` when no tenant claims the
        identity, `ApiServerAwayError` when that is unknown now, and `RetryableError` while the Secret of one of
        its scopes is missing. Present the token again before `Caller.expires_s` have passed.
        """

    def authorize(self, identity: Identity) -> Caller:
        """Return the current grants of an identity that was authenticated before, without a new TokenReview.

        Raises `ForbiddenError` when no tenant claims it any more, `RetryableError` while the Secret of one of its
        scopes is missing, as it is for a moment after a key version moved on.
        """

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key material of a scope; None when the scope does not exist (any more) or is not known yet.

        The core needs it to announce blocks that it found again before their tenant attached.
        """


class Users(Protocol):
    """Turns unix users into callers, where a connection is proof enough of who is at its other end."""

    def authenticate_user(self, uid: int) -> Caller:
        """Return the caller for the user of a connection.

        Raises `UnauthenticatedError` for a user that this machine cannot tell apart, `ForbiddenError` when no tenant
        claims the user, and `RetryableError` while the Secret of one of its scopes is missing.
        """


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
    uid: int = -1
    """User that connected, as the kernel has it; -1 where that is not known."""
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
    devices: frozenset[str] = frozenset()
    """Devices whose memory the client can open."""
    loads: LoadBook = field(default_factory=LoadBook)
    """Of loads under way."""

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

        The context of every scope is made again with them, so that no request goes on with a key of before.
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

    def forget_extents(self, extents: Iterable[ExtentGrant | DeviceGrant]) -> None:
        """Note that extents did not get through after all."""
        for grant in extents:
            self.extents -= {(grant.extent, True), (grant.extent, False)}


class Attaching:
    """Knows callers; carries out `attach` and `scopes`, and keeps rights current for all other verbs."""

    def __init__(self, node: Node, authenticator: Authenticator, users: Users | None = None) -> None:
        """Without `users`, whoever presents no token is refused."""
        self._node = node
        self._authenticator = authenticator
        self._users = users
        self.audit = Audit(node.counters, node.clock)
        """Log of decisions; for all verbs."""

    @property
    def grants_version(self) -> int:
        """Version of all grants, for replies."""
        return self._authenticator.grants_version

    async def attach(self, at: Attachment, request: wire.Attach) -> wire.Granted:
        """Authenticate and fix the layout; again on the same connection, renew the token.

        Raises `InvalidInputError` for another pool or layout, and what `Authenticator.authenticate` raises; a
        refused token takes the connection's rights away.
        """
        counters = self._node.counters
        try:
            granted = await self._attach(at, request)
        except KvStrataError as e:
            result = "refused" if isinstance(e, PermanentError) else "unknown"
            counters.add("kvstrata_attach_total", result=result)
            raise
        counters.add("kvstrata_attach_total", result="ok")
        return granted

    async def _attach(self, at: Attachment, request: wire.Attach) -> wire.Granted:
        if request.pool != self._node.pool:
            raise InvalidInputError(f"pool {request.pool!r}: this agent serves {self._node.pool!r}")
        check_layout(request.layout, self._node.spec.compatibility, self._node.element_bytes)
        _check_same(at, request.layout)
        try:
            caller = await self._authenticate(at, request.token)
        except KvStrataError as e:
            self.audit.refused_caller(e, "attach")
            if isinstance(e, PermanentError):  # Otherwise it is unknown now, and the old rights run out by time.
                self._refuse(at)
            raise
        if at.caller is not None and at.caller.identity != caller.identity:
            self.audit.other_identity(caller.identity)
            self._refuse(at)
            raise ForbiddenError("another identity on the same connection; open another connection")
        _check_same(at, request.layout)  # Another attach may have been quicker.
        at.layout, at.layout_id = request.layout, request.layout.layout_id()
        at.block_bytes = request.layout.block_bytes
        at.devices = frozenset(request.devices)
        self._node.block_bytes = self._node.block_bytes or at.block_bytes
        self._node.remember_layout(at.layout_id, at.layout)
        at.expires_at_s = self._node.clock() + caller.expires_s
        self._revoke(at, at.admit(caller, self.grants_version))
        self.audit.attached(caller)
        return self._granted(at, request.id)

    async def _authenticate(self, at: Attachment, token: str) -> Caller:
        """Go by the token; without one by the user of the connection, where users are known."""
        if not token and self._users is not None:
            return self._users.authenticate_user(at.uid)
        return await self._authenticator.authenticate(token)

    def scopes(self, at: Attachment, request: wire.Scopes) -> wire.Granted:
        """Return the current scopes."""
        self.refresh(at)
        return self._granted(at, request.id)

    def refresh(self, at: Attachment) -> None:
        """Check the token's time, and derive rights again when grants may have changed.

        Raises `UnauthenticatedError`, and what `Authenticator.authorize` raises.
        """
        caller = at.check(self._node.clock())
        version = self._authenticator.grants_version
        if version == at.grants_version:
            return
        try:
            caller = self._authenticator.authorize(caller.identity)
        except ForbiddenError as e:
            self.audit.refused_caller(e, "refresh", caller.identity)
            self._refuse(at)
            raise
        self._revoke(at, at.admit(caller, version))

    def readable(self, identity: Identity) -> frozenset[str] | None:
        """Scopes that an identity may read now; None while that is unknown."""
        try:
            return frozenset(a.scope for a in self._authenticator.authorize(identity).grants.access)
        except RetryableError:
            return None
        except PermanentError:
            return frozenset()

    def _refuse(self, at: Attachment) -> None:
        self._revoke(at, at.expel())

    def _revoke(self, at: Attachment, lost: set[str]) -> None:
        """Take back what the connection holds in scopes that it may no longer read, and slots that it may not fill."""
        node, owner = self._node, at.owner
        for table in (node.leases, node.pins) if lost else ():
            ids = [lease.id for lease in table.owned(owner) if lease.entry.scope in lost]
            node.end_leases(table.end(owner, ids))
        writable = {scope for scope, right in at.rights.items() if right.access.can_write}
        ids = [r.id for r in node.reservations.owned(owner) if r.entry.scope not in writable]
        node.abandon(r for r in node.reservations.take(owner, ids) if r is not None)

    def _granted(self, at: Attachment, request_id: int) -> wire.Granted:
        assert at.caller is not None
        scopes = tuple(
            wire.ScopeGrant(a.scope, a.kind, a.name, right.context.secret.secret, a.can_write, a.prefixes)
            for right in at.rights.values()
            for a in (right.access,)
        )
        return wire.Granted(
            id=request_id,
            grants_version=self.grants_version,
            tenant=at.tenant,
            scopes=scopes,
            write_scope=at.caller.grants.write_scope,
            block_bytes=at.block_bytes,
            slot_bytes=-(-at.block_bytes // SLOT_STEP_BYTES) * SLOT_STEP_BYTES,
            token_expires_s=max(0.0, at.expires_at_s - self._node.clock()),
            verbs=wire.LATER_VERBS,
        )


def _check_same(at: Attachment, layout: Layout) -> None:
    """Raise `InvalidInputError` when the connection has another layout already: it stays."""
    if at.layout is not None and at.layout != layout:
        raise InvalidInputError("layout: differs from the one of this connection; open another connection")


def check_layout(layout: Layout, wanted: Compatibility, element_bytes: int) -> None:
    """Compare a client's layout with the pool. Raises `InvalidInputError` with field, value and what is wanted."""
    pairs: dict[str, tuple[object, object]] = {
        "model": (layout.model, wanted.model),
        "revision": (layout.revision, wanted.revision),
        "dtype": (layout.dtype, wanted.dtype),
        "block_tokens": (layout.block_tokens, wanted.block_tokens),
        "element_bytes": (layout.element_bytes, element_bytes),
    }
    for name, (value, want) in pairs.items():
        if value != want and not (want == ANY and name in _MAY_BE_ANY):
            raise InvalidInputError(f"layout.{name}: {value!r}, the pool wants {want!r}")
    for name in ("layers", "kv_heads", "head_dim", "tp_size"):
        if getattr(layout, name) < 1:
            raise InvalidInputError(f"layout.{name}: {getattr(layout, name)}, at least 1 wanted")
    if layout.kv_parts not in {1, 2}:
        raise InvalidInputError(f"layout.kv_parts: {layout.kv_parts}, 1 or 2 wanted")
    if not 0 <= layout.tp_rank < layout.tp_size:
        raise InvalidInputError(f"layout.tp_rank: {layout.tp_rank}, 0 to {layout.tp_size - 1} wanted")
    if layout.block_bytes > BLOCK_BYTES_MAX:
        raise InvalidInputError(f"layout: blocks of {layout.block_bytes} B, limit {BLOCK_BYTES_MAX} B")
