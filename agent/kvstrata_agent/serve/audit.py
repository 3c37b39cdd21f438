"""The audit log: every decision on a read across tenants, as a line and in counters.

The first decision of its kind in a window is logged at once, those after it in one line at the window's end: a hot path
does not log each block, a flood of refusals cannot fill a disk, and the sum over all lines is what was decided.
docs/audit.md describes the fields.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata_api.errors import ForbiddenError, KvStrataError, UnauthenticatedError
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.request import Caller
    from kvstrata_api.trust import Access, Identity
    from kvstrata_telemetry.agent_metrics import Counters

WINDOW_S: Final = 10.0
KINDS_MAX: Final = 32
"""Decisions of one identity that differ within a window; a caller that invents scopes gets one line for the rest."""
IDENTITIES_MAX: Final = 256
"""Identities kept apart within a window: pods of one node. Those beyond them share lines."""
SCOPE_CHARS_MAX: Final = 160
"""Of a scope that a caller names; ours are shorter."""
OTHERS: Final = "(others)"

_log: Final = logging.getLogger("kvstrata.audit")
_log.setLevel(logging.INFO)  # Whatever --log-level is for everything else.

_ALLOW: Final = "allow"
_DENY: Final = "deny"


class Reason(StrEnum):
    """Why it was decided so. Names are part of the log's contract."""

    ATTACHED = "Attached"
    DOMAIN_MEMBER = "DomainMember"
    SHARE_READER = "ShareReader"
    SCOPE_NOT_GRANTED = "ScopeNotGranted"
    WRITE_NOT_GRANTED = "WriteNotGranted"
    TOKEN_REFUSED = "TokenRefused"  # noqa: S105  A word of the log.
    NO_TENANT = "NoTenant"
    OTHER_IDENTITY = "OtherIdentity"
    CANNOT_BE_TOLD = "CannotBeTold"


_GRANTED_BY: Final = {"domain": Reason.DOMAIN_MEMBER, "share": Reason.SHARE_READER}
"""By the kind of the scope that was read."""


class Decided(NamedTuple):
    """One kind of decision; a tuple, because they are made on the hot path."""

    decision: str
    reason: str
    verb: str
    tenant: str = ""
    namespace: str = ""
    service_account: str = ""
    pod_uid: str = ""
    scope: str = ""
    kind: str = ""
    """`tenant`, `domain` or `share`; empty for what is no scope of ours."""
    grant: str = ""
    """Name of the domain or share that allows it."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Who it was decided for."""
        return (self.namespace, self.service_account, self.pod_uid)


class Sum(NamedTuple):
    """Decisions of one kind since its last line."""

    requests: int
    blocks: int


class Window:
    """Sums of decisions by kind. No clock, no I/O; as large as its two bounds at most."""

    def __init__(self) -> None:
        self._sums: dict[Decided, Sum] = {}
        self._kinds: dict[tuple[str, str, str], int] = {}

    def add(self, decided: Decided, blocks: int) -> Decided | None:
        """Note a decision; return its kind when it is the first of the window, to be logged at once."""
        kind = decided if decided in self._sums else self._bounded(decided)
        known = self._sums.get(kind)
        if known is None:
            self._sums[kind] = Sum(0, 0)
            self._kinds[kind.identity] = self._kinds.get(kind.identity, 0) + 1
            return kind
        self._sums[kind] = Sum(known.requests + 1, known.blocks + blocks)
        return None

    def drain(self) -> list[tuple[Decided, Sum]]:
        """Return what was not logged yet and begin again."""
        rest = [(kind, total) for kind, total in self._sums.items() if total.requests]
        self._sums.clear()
        self._kinds.clear()
        return rest

    def _bounded(self, decided: Decided) -> Decided:
        """Fold what goes beyond a bound: of one identity by scope, of all of them by identity."""
        count = self._kinds.get(decided.identity)
        if count is None and len(self._kinds) >= IDENTITIES_MAX:
            return Decided(decided.decision, decided.reason, decided.verb, OTHERS, OTHERS, OTHERS, OTHERS, OTHERS)
        if count is not None and count >= KINDS_MAX:
            return decided._replace(scope=OTHERS, kind="", grant="")
        return decided


class Audit:
    """The audit log of one agent."""

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self._window = Window()
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def read(self, caller: Caller | None, access: Access, verb: str, entries: Iterable[Entry | None]) -> None:
        """Note the blocks that a caller found, or was given, by this right; None for one that another node holds.

        What the caller's tenant has written itself crosses nothing, and neither does anything of its own scope.
        """
        if access.kind is ScopeKind.TENANT or caller is None:
            return
        tenant = caller.grants.tenant
        blocks = sum(entry is None or entry.tenant != tenant for entry in entries)
        if not blocks:
            return
        reason = _GRANTED_BY[access.kind]
        self._note(_of(caller, _ALLOW, reason, verb, (access.scope, access.kind, access.name)), blocks)

    def refused_scope(self, caller: Caller | None, scope: str, verb: str, blocks: int) -> None:
        """Note that a caller asked for a scope that it may not read."""
        self._note(_of(caller, _DENY, Reason.SCOPE_NOT_GRANTED, verb, _named(scope)), blocks)

    def refused_write(self, caller: Caller | None, scope: str, verb: str, blocks: int) -> None:
        """Note that a caller asked for slots of a scope that it may not write."""
        self._note(_of(caller, _DENY, Reason.WRITE_NOT_GRANTED, verb, _named(scope)), blocks)

    def attached(self, caller: Caller | None) -> None:
        """Note that a caller got its grants."""
        self._note(_of(caller, _ALLOW, Reason.ATTACHED, "attach", ("", "", "")), 0)

    def refused_caller(self, why: KvStrataError, verb: str, identity: Identity | None = None) -> None:
        """Note that a caller got no grants, or lost them. Nobody vouches for an identity whose token was refused."""
        known = (identity.namespace, identity.service_account, identity.pod_uid) if identity else ("", "", "")
        self._note(Decided(_DENY, _reason_of(why), verb, "", *known), 0)

    def other_identity(self, identity: Identity) -> None:
        """Note that an identity was shown on the connection of another one."""
        known = (identity.namespace, identity.service_account, identity.pod_uid)
        self._note(Decided(_DENY, Reason.OTHER_IDENTITY, "attach", "", *known), 0)

    def close(self) -> None:
        """Log what was not logged yet. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._log_rest()

    def _note(self, decided: Decided, blocks: int) -> None:
        labels = {"decision": decided.decision, "reason": str(decided.reason), "verb": decided.verb}
        self._counters.add("kvstrata_audit_total", 1, **labels)
        if blocks:
            self._counters.add("kvstrata_audit_blocks_total", blocks, **labels)
        first = self._window.add(decided, blocks)
        if self._timer is None:
            self._began_s = self._clock()
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._log_rest)
        if first is not None:
            _log_decision(first, Sum(1, blocks), 0.0)

    def _log_rest(self) -> None:
        self._timer = None
        covered_s = self._clock() - self._began_s
        for decided, total in self._window.drain():
            _log_decision(decided, total, covered_s)


def _log_decision(decided: Decided, total: Sum, window_s: float) -> None:
    level = logging.INFO if decided.decision == _ALLOW else logging.WARNING
    fields = {**decided._asdict(), **total._asdict(), "window_s": round(window_s, 3)}
    _log.log(level, "audit", extra=fields)


def _of(caller: Caller | None, decision: str, reason: str, verb: str, scope: tuple[str, str, str]) -> Decided:
    if caller is None:  # It lost its grants while the request was under way.
        return Decided(decision, reason, verb, "", "", "", "", *scope)
    who, tenant = caller.identity, caller.grants.tenant
    return Decided(decision, reason, verb, tenant, who.namespace, who.service_account, who.pod_uid, *scope)


def _named(scope: str) -> tuple[str, str, str]:
    """Scope, kind and grant as a caller named them; they need not exist."""
    kind, _, rest = scope.partition("/")
    is_known = kind in {"tenant", *_GRANTED_BY}
    return (
        scope[:SCOPE_CHARS_MAX],
        kind if is_known else "",
        rest.partition("/")[0][:SCOPE_CHARS_MAX] if is_known else "",
    )


def _reason_of(why: KvStrataError) -> Reason:
    if isinstance(why, UnauthenticatedError):
        return Reason.TOKEN_REFUSED
    return Reason.NO_TENANT if isinstance(why, ForbiddenError) else Reason.CANNOT_BE_TOLD
