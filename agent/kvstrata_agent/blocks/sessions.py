"""Sessions: conversations and agent runs, with their life and the heads of their chains. No clock, no I/O.

A session is known by its tenant and its name, so that no tenant can touch another's. The head of a chain is its last
block; while the session decodes, its heads are guarded, and with them everything that they continue, because a
parent never leaves before its children. A fork starts with the heads of its parent and holds them by itself, so it
does not matter to it what becomes of the parent.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata_agent.blocks.session_log import SessionLog
from kvstrata_agent.policy.attention import EVERYTHING, Attention
from kvstrata_agent.policy.prefetch import doubt_s
from kvstrata_agent.policy.quota import FairOrder
from kvstrata_api.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.index import Index
    from kvstrata_api.blocks import ScopeSecret

SESSIONS_MAX: Final = 65_536
"""Sessions that a node remembers. Over it the tenant that has most forgets a quiet one, the least recently touched,
and for another tenant an open one. A session that decodes is never forgotten: the new one is refused instead."""
HEADS_MAX: Final = 64
"""Chains of one session: parallel samples of one prompt; older heads lose their guard. Kept ones come besides."""
GUARD_S: Final = 600.0
"""A decoding session that nobody touches for so long becomes idle."""
URGENCY_S: Final = 60.0
"""How long an urgency holds after the touch, or after the return that was expected: urgency always expires."""


class SessionState(StrEnum):
    """Life of a session."""

    OPEN = "open"
    DECODING = "decoding"
    IDLE = "idle"
    ARCHIVING = "archiving"
    """Finished; its chain is being copied to a tier that survives."""
    ARCHIVED = "archived"
    """Every block of its chain has a copy that survives a restart."""


QUIET: Final = frozenset({SessionState.IDLE, SessionState.ARCHIVING, SessionState.ARCHIVED})
"""States in which nobody works on the session."""


class AbsentHead(NamedTuple):
    """A head whose block is not here, or not yet."""

    scope: str
    digest: bytes
    blocks: int = 0
    """Of its chain, itself included; 0: not known."""
    is_kept: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """What is known about one session."""

    tenant: str
    name: str
    owners: set[int] = field(default_factory=set)
    """Connections that opened or touched it; when the last of them has died the session becomes idle."""
    parent: str = ""
    priority: str = ""
    attention: Attention = EVERYTHING
    """What its next token attends to."""
    kept: set[Entry] = field(default_factory=set)
    """Heads that its window has left behind, and that stay: the last of its attention sinks, and anchors."""
    state: SessionState = SessionState.OPEN
    turns: int = 0
    """Times that it came back after it was idle, or was opened again."""
    urgency: int = 0
    urgent_until_s: float = 0.0
    """Monotonic second at which the urgency is over."""
    returns_at_s: float = 0.0
    """Monotonic second of the expected return; 0 when unknown."""
    doubt_s: float = 0.0
    """How much sooner or later it may be back than that."""
    retained_until_s: float = 0.0
    """Monotonic second until which it is not finished, however idle; 0 where nobody asked for that."""
    touched_at_s: float = 0.0
    heads: OrderedDict[Entry, int] = field(default_factory=OrderedDict)
    """Each with the blocks of its chain, itself included; 0: not known."""
    secret: ScopeSecret | None = None
    """Of the tenant's own scope: names the session in the directory and in the journal."""
    parent_digest: bytes = b""
    """Of the parent session, where its name is not known: the session was revived."""
    absent: tuple[AbsentHead, ...] = ()
    """Heads of an earlier run."""
    is_changed: bool = False
    """True until the directory and the journal were notified."""
    is_forgotten: bool = False
    """True once nobody will let go of its heads any more, so that it takes no new ones: a slow request may hold it."""

    @property
    def key(self) -> tuple[str, str]:
        """Key in the table of sessions."""
        return self.tenant, self.name

    @property
    def guard(self) -> str:
        """Name under which the session guards its heads."""
        return f"{self.tenant}/{self.name}"

    def follow(self, chain: Sequence[Entry]) -> None:
        """Note that the session's chain runs through these blocks, in chain order; the last one is a head now."""
        if not chain:
            return
        blocks = 0 if chain[0].parent else len(chain)
        if self.heads:
            left = {(e.scope, e.digest): len(chain) - at for at, e in enumerate(chain, 1)}
            left[chain[0].scope, chain[0].parent] = len(chain)
            for head, before in tuple(self.heads.items()):
                behind = left.get((head.scope, head.digest))
                if behind is not None:
                    blocks = before + behind if before else blocks
                    if head not in self.kept:
                        self.drop_head(head)
        self.add_head(chain[-1], blocks)

    def add_head(self, head: Entry, blocks: int = 0) -> None:
        """Make a block a head of a chain of so many blocks, and guard it while the session decodes."""
        if self.is_forgotten:
            return
        self.heads[head] = blocks or self.heads.get(head, 0)
        self.is_changed = True
        if head.followers is None:
            head.followers = {self.key}
        else:
            head.followers.add(self.key)
        if self.state is SessionState.DECODING:
            _add_guard(head, self.guard)
        while len(self.heads) - len(self.kept) > HEADS_MAX:
            self.drop_head(next(h for h in self.heads if h not in self.kept))

    def keep(self, entry: Entry, blocks: int) -> None:
        """Make a block a head that stays, before all others: the end of the chain stays the last one."""
        if entry.residences and not self.is_forgotten:
            self.kept.add(entry)
            self.add_head(entry, blocks)
            self.heads.move_to_end(entry, last=False)

    def drop_head(self, entry: Entry) -> None:
        """Let go of a head and its guard."""
        if entry in self.heads:
            del self.heads[entry]
            self.kept.discard(entry)
            _drop_guard(entry, self.guard)
            if entry.followers is not None:
                entry.followers.discard(self.key)
                entry.followers = entry.followers or None

    def enter(self, state: SessionState) -> None:
        """Change the state; guards follow it."""
        self.is_changed = self.is_changed or state is not self.state
        self.state = state
        for head in self.heads:
            if state is SessionState.DECODING:
                _add_guard(head, self.guard)
            else:
                _drop_guard(head, self.guard)

    def urgency_at(self, now_s: float) -> int:
        """Urgency that still holds."""
        return self.urgency if now_s < self.urgent_until_s else 0


class SessionTable:
    """All sessions of this node."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions: dict[tuple[str, str], Session] = {}
        self._order: FairOrder[tuple[str, str]] = FairOrder()
        self._owned: dict[int, set[Session]] = {}
        self._max = sessions_max
        self.log = SessionLog()
        """What became of them."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def find(self, tenant: str, name: str) -> Session | None:
        """Return a session of this tenant, or None."""
        return self._sessions.get((tenant, name))

    def open(self, tenant: str, name: str, owner: int, now_s: float, parent: str = "", priority: str = "") -> Session:
        """Start a session, or revive the one of that name.

        A fork has its parent's heads, what that attends to and, by default, its priority. Raises `InvalidInputError`
        when there are too many and none may be forgotten.
        """
        session = self.find(tenant, name)
        if session is None:
            origin = self.find(tenant, parent) if parent else None
            priority = priority or (origin.priority if origin is not None else "")
            session = Session(tenant, name, parent=parent, priority=priority, is_changed=True)
            if origin is not None:
                session.attention, session.kept = origin.attention, set(origin.kept)
                for head, blocks in origin.heads.items():
                    session.add_head(head, blocks)
            if not self._add(session):
                why = f"{self._order.count(tenant)} of this tenant are open, and none of them may be forgotten"
                raise InvalidInputError(f"session {name!r}: {why}; a node remembers {self._max}")
        else:
            session.turns += 1
            session.priority = priority or session.priority
            if session.state is not SessionState.DECODING or not session.owners - {owner}:
                session.enter(SessionState.OPEN)  # Another rank of the same engine may decode already.
        self._own(session, owner)
        self.refresh(session, now_s)
        return session

    def revive(self, tenant: str, name: str, now_s: float, priority: str) -> Session:
        """Take up a session of an earlier run, idle and owned by nobody; there must be none of that name.

        One for which there is no place is forgotten at once.
        """
        assert self.find(tenant, name) is None, "a session is revived once"
        session = Session(tenant, name, priority=priority, state=SessionState.IDLE)
        self._add(session)
        self.refresh(session, now_s)
        return session

    def touch(
        self,
        session: Session,
        state: SessionState,
        urgency: int,
        return_s: float,
        now_s: float,
        owner: int | None = None,
    ) -> None:
        """Take a hint: what the session does now and when it is expected back."""
        if owner is not None:
            self._own(session, owner)
        if session.state in QUIET and state is SessionState.DECODING:
            session.turns += 1
        session.urgency = urgency
        session.returns_at_s = now_s + return_s if return_s > 0 else 0.0
        session.doubt_s = doubt_s(return_s) if return_s > 0 else 0.0
        session.urgent_until_s = max(now_s, session.returns_at_s) + URGENCY_S
        session.is_changed = True
        session.enter(state)
        self.refresh(session, now_s)

    def refresh(self, session: Session, now_s: float) -> None:
        """Note that the session was heard of: what it reads and writes shows as well as a touch that it lives."""
        session.touched_at_s = now_s
        if self.find(session.tenant, session.name) is session:
            self._order.use(session.tenant, (session.tenant, session.name))

    def forget(self, session: Session) -> None:
        """Let go of a session and of all that it holds. Idempotent."""
        session.is_forgotten = True
        self.log.forget(session.key)
        for head in tuple(session.heads):
            session.drop_head(head)
        if self.find(session.tenant, session.name) is session:
            del self._sessions[session.tenant, session.name]
            self._order.drop((session.tenant, session.name))
        for owner in session.owners:
            self._owned[owner].discard(session)
            if not self._owned[owner]:
                del self._owned[owner]
        session.owners = set()

    def close(self, session: Session, *, archive: bool) -> list[Entry]:
        """End a session and return its heads; one to be archived is remembered, another one is forgotten."""
        heads = list(session.heads)
        session.enter(SessionState.ARCHIVING)
        if not archive:
            self.forget(session)
        return heads

    def end_owner(self, owner: int) -> None:
        """Turn sessions idle whose last connection has died."""
        for session in self._owned.pop(owner, set()):
            session.owners.discard(owner)
            if not session.owners and session.state not in QUIET:
                session.enter(SessionState.IDLE)

    def sweep(self, now_s: float, idle_s: float = float("inf")) -> list[Session]:
        """Turn decoding sessions idle that nobody touched for `GUARD_S`; returns idle ones that are finished.

        Finished is a session that is idle for `idle_s` after its last touch and its expected return, and not retained.
        """
        finished: list[Session] = []
        for session in self._sessions.values():
            quiet_s = now_s - max(session.touched_at_s, session.returns_at_s)
            if session.state is SessionState.DECODING and now_s - session.touched_at_s >= GUARD_S:
                session.enter(SessionState.IDLE)
            elif session.state is SessionState.IDLE and quiet_s >= idle_s and now_s >= session.retained_until_s:
                finished.append(session)
        return finished

    def lost(self, entry: Entry, parent: Entry | None) -> None:
        """A head has no copy any more: its sessions fall back to the block before it."""
        for session in [self._sessions[key] for key in entry.followers or ()]:
            blocks = session.heads.get(entry, 0)
            session.drop_head(entry)
            if parent is not None:
                session.add_head(parent, max(0, blocks - 1) if parent.digest == entry.parent else 0)

    def broke(self, entry: Entry, parent: Entry, index: Index) -> None:
        """A block amid a chain has failed: decoding sessions that ran through it hold on to what stands before it."""
        for session in self._sessions.values():
            if session.state is SessionState.DECODING and _runs_through(session.heads, entry, index):
                session.add_head(parent)

    def counts(self) -> dict[SessionState, int]:
        """Sessions by state."""
        counts = dict.fromkeys(SessionState, 0)
        for session in self._sessions.values():
            counts[session.state] += 1
        return counts

    def _own(self, session: Session, owner: int) -> None:
        session.owners.add(owner)
        self._owned.setdefault(owner, set()).add(session)

    def _add(self, session: Session) -> bool:
        """Remember a new session; false when it is too many."""
        key = (session.tenant, session.name)
        self._sessions[key] = session
        self._order.use(session.tenant, key)
        if len(self._sessions) > self._max:
            self.forget(self._superfluous(session))
        return key in self._sessions

    def _superfluous(self, newest: Session) -> Session:
        """Which session makes way for the newest; itself when nobody has to."""
        largest = self._order.largest_account()
        may_go = [QUIET] if newest.tenant == largest else [QUIET, frozenset({SessionState.OPEN})]
        found = (s for states in may_go for s in self._of(largest) if s.state in states)
        return next(found, newest)

    def _of(self, tenant: str) -> Iterator[Session]:
        return (self._sessions[key] for key in self._order.of(tenant))


def _runs_through(heads: Iterable[Entry], gone: Entry, index: Index) -> bool:
    """True when a chain that ends at one of the heads continues a block that is not here any more."""
    return any(
        entry.scope == gone.scope and entry.parent == gone.digest
        for head in heads
        if head.residences
        for entry in chain((head,), index.ancestors(head))
    )


def _add_guard(entry: Entry, guard: str) -> None:
    if entry.guards is None:
        entry.guards = {guard}
    else:
        entry.guards.add(guard)


def _drop_guard(entry: Entry, guard: str) -> None:
    if entry.guards is not None:
        entry.guards.discard(guard)
        if not entry.guards:
            entry.guards = None
