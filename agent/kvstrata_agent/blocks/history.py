"""The last decisions on blocks that are not here, or not as near as they were. No clock, no I/O.

Kept apart for each scope, so that what one reads never tells of another. Nothing is noted of blocks that stay where
they are: what is read and written every day costs nothing here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstrata_api.blocks import ScopeId

EVENTS_MAX: Final = 65_536
"""Of all scopes together: 20 MB. A scope that has more than its equal share gives way first."""
PER_BLOCK_MAX: Final = 4
"""Latest decisions on one block."""
_GIVEN_UP: Final = 64
"""Events that the largest scope forgets at a time, so that it is not searched for at each one."""


class What(StrEnum):
    """What was decided of a block."""

    EVICTED = "evicted"
    """Its last copy left to make room."""
    DEMOTED = "demoted"
    """Its fastest copy left; a slower one stays."""
    DROPPED = "dropped"
    """All copies left, whatever room there was: `reason` says on whose word."""
    LOST = "lost"
    """Its last copy could not be read, or its medium went away."""
    REFUSED = "refused"
    """A writer brought it and there was no room."""
    UNPUBLISHED = "unpublished"
    """A writer had room for it and has not filled it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, of one block or of many at once."""

    what: What
    at_s: float
    """Monotonic second."""
    reason: str
    tier: str = ""
    """That the copy left."""
    target: str = ""
    """Where the block is instead, when that was decided."""
    policy: str = ""
    """`policy.eviction.type` that chose."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What it was decided by."""
    kept: Choice | None = None
    """What would have left next, and stayed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A block that a policy weighed."""

    scope: ScopeId
    tenant: str
    uses_per_s: float
    """What it was worth; 0.0 under LeafLRU."""
    idle_s: float


class Event(msgspec.Struct, eq=False, gc=False):
    """One block's part in a decision."""

    digest: bytes
    decision: Decision
    idle_s: float = 0.0
    """Since its last use, when it was decided."""
    uses_per_s: float | None = None
    """What it was worth, negative where its session will not need it again; None where nobody asked."""
    is_kept_told: bool = False
    """True where what was kept instead is of the same tenant, in the same scope."""
    before: Event | None = None


class _Scope:
    """Events of one scope, oldest first, and the latest of each block."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.last: dict[bytes, Event] = {}

    def add(self, event: Event) -> None:
        event.before = link = self.last.get(event.digest)
        for _ in range(PER_BLOCK_MAX - 2):
            if link is None:
                break
            link = link.before
        if link is not None:
            link.before = None
        self.last[event.digest] = event
        self.events.append(event)

    def forget_oldest(self) -> None:
        oldest = self.events.popleft()
        link = self.last.get(oldest.digest)
        if link is oldest:
            del self.last[oldest.digest]
            return
        while link is not None and link.before is not oldest:
            link = link.before
        if link is not None:
            link.before = None


class History:
    """A bounded memory of decisions."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events_max = events_max
        self._scopes: dict[ScopeId, _Scope] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def note(self, scope: ScopeId, event: Event) -> None:
        """Add the part of one block in a decision."""
        table = self._scopes.get(scope)
        if table is None:
            table = self._scopes[scope] = _Scope()
        table.add(event)
        self._count += 1
        if self._count > self._events_max:
            self._make_room(table)

    def of(self, scope: ScopeId, digest: bytes) -> list[Event]:
        """Latest decisions on a block, the last one first; empty where none is remembered."""
        found: list[Event] = []
        table = self._scopes.get(scope)
        event = table.last.get(digest) if table is not None else None
        while event is not None:
            found.append(event)
            event = event.before
        return found

    def last(self, scope: ScopeId, digest: bytes) -> Event | None:
        """The latest of them."""
        table = self._scopes.get(scope)
        return table.last.get(digest) if table is not None else None

    def scopes(self) -> list[ScopeId]:
        """Scopes of which anything is remembered."""
        return list(self._scopes)

    def forget(self, scope: ScopeId) -> None:
        """Remember nothing of a scope: it was erased."""
        table = self._scopes.pop(scope, None)
        self._count -= len(table.events) if table is not None else 0

    def forget_block(self, scope: ScopeId, digest: bytes) -> None:
        """Remember nothing of a block: its writer was erased. Its events still count until they are the oldest."""
        table = self._scopes.get(scope)
        event = table.last.pop(digest, None) if table is not None else None
        while event is not None:
            event.digest, event.before, event = b"", None, event.before

    def _make_room(self, latest: _Scope) -> None:
        """Forget the oldest event of the scope that has just grown, or some of the largest if that has less."""
        table, count = latest, 1
        if len(latest.events) * len(self._scopes) < self._events_max:
            table, count = max(self._scopes.values(), key=lambda t: len(t.events)), _GIVEN_UP
        for _ in range(min(count, len(table.events))):
            table.forget_oldest()
            self._count -= 1
        if not table.events:
            self._scopes = {s: t for s, t in self._scopes.items() if t.events}
