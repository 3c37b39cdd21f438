"""The life of sessions with its consequences: revival, forks, prefetch, archive, and reports to the others.

A session that is not in memory is looked for in the node's own journal and then in the directory; what is found there
makes it the same session again: priority, parent, turns, and the heads whose chains are brought up before the engine
asks for them. The index is the truth about blocks: a head that has no block here is only a name.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.session_log import Happened, SessionEvent
from kvstrata_agent.blocks.sessions import QUIET, AbsentHead, Session, SessionState
from kvstrata_agent.cache.session_journal import Remembered, SessionJournal
from kvstrata_agent.policy.attention import Attention
from kvstrata_agent.policy.prefetch import AGAIN_S, HORIZON_S, LOOK_S, FairSessions, Wanted
from kvstrata_agent.policy.priority import class_of
from kvstrata_api.blocks import ScopeId
from kvstrata_kube.tasks import TaskSet
from kvstrata_metadata.store.keys import session_digest
from kvstrata_metadata.store.records import SessionRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.cache.archive import Archiver
    from kvstrata_agent.cache.load import PrefetchedChains, Reader
    from kvstrata_agent.cache.ports import Directory
    from kvstrata_agent.cache.remote_fetch import RemoteFetcher
    from kvstrata_api.blocks import ScopeSecret

REVIVALS_MAX: Final = 8
"""Sessions that are revived from the directory at a time; others wait, and their engines fetch by key meanwhile."""
SCAN_BLOCKS: Final = 8192
"""Blocks of due sessions scanned in one step, and then the rest of one session: about 10 ms of the loop, but up to
0.3 s where all of them are rows, as one long session takes alone."""
FINISH_BLOCKS: Final = 512
"""Blocks of sessions that are finished in one sweep and not archived, and then the rest of one: 20 ms if all are rows.
"""
CHAIN_MAX: Final = 4096
"""Blocks of one chain that are fetched from other nodes ahead of the engine: 65,536 tokens of 16 to a block."""


class SessionLife:
    """Carries out what happens to sessions. One for each agent; verbs and the sweep call it."""

    def __init__(
        self,
        node: Node,
        archiver: Archiver,
        reader: Reader,
        remote: RemoteFetcher,
        directory: Directory | None,
        journal: SessionJournal,
    ) -> None:
        """Remember sessions in `journal`."""
        self._node = node
        self._archiver = archiver
        self._reader = reader
        self._remote = remote
        self._directory = directory
        self._journal = journal
        self._expected: dict[Session, _Plan] = {}
        """Sessions whose blocks are to be brought up when it is time."""
        self._fair: FairSessions[Session] = FairSessions()
        self._reviving: set[Session] = set()
        """Sessions whose record is being read: it must not be overwritten before."""
        self._gate = asyncio.Semaphore(REVIVALS_MAX)
        self._tasks: TaskSet[None] = TaskSet()

    async def close(self) -> None:
        """End revivals and write what is to be remembered."""
        await self._tasks.close()
        self._tell_changed()
        await self._journal.flush()

    def find(self, tenant: str, secret: ScopeSecret | None, name: str) -> Session | None:
        """Return a session of this tenant, from memory or from the journal; None when neither knows it."""
        session = self._node.sessions.find(tenant, name)
        if session is not None and _is_of_another(session, secret):
            self._node.sessions.forget(session)
            session = None
        if session is None and secret is not None:
            past = self._journal.find(session_digest(secret, name))
            session = self._remember(tenant, secret, name, past) if past is not None else None
        if session is not None and session.absent:
            self._resolve(session)
        return session

    def open(
        self, owner: int, tenant: str, secret: ScopeSecret | None, name: str, *, parent: str, priority: str
    ) -> Session:
        """Start, revive or fork a session. Raises `InvalidInputError` when too many are open."""
        known = self.find(tenant, secret, name)
        if parent:
            self.find(tenant, secret, parent)  # A fork shares the chain of a parent that is only remembered as well.
        session = self._node.sessions.open(tenant, name, owner, self._node.clock(), parent, priority)
        session.secret = secret or session.secret
        if known is not None:
            self.expect(session)
        return session

    def revive_from_directory(self, session: Session, places: Sequence[RequestContext]) -> None:
        """Ask the directory about a session that is new here; `places` are the caller's scopes. Returns at once."""
        directory = self._directory
        if directory is None or not directory.is_up or session.secret is None:
            self.publish(session)
            return
        self._reviving.add(session)
        self._tasks.spawn(self._revive(session, places))

    def touch(
        self, session: Session, state: SessionState, urgency: int, return_s: float, owner: int | None = None
    ) -> None:
        """Take a hint, and make ready for the return that it announces."""
        self._node.sessions.touch(session, state, urgency, return_s, self._node.clock(), owner)
        self._node.changed.fire()
        if return_s > 0:
            self._node.returns.expect(session, return_s)
        if urgency or return_s > 0:
            self.expect(session)
        self.publish(session)

    def finish(self, session: Session, *, archive: bool) -> int:
        """End a session: its chain goes to a tier that survives, or what nobody else continues is the first to go.

        Returns how many blocks those are; none that is to be archived, which the archiver looks at later.
        """
        self._expected.pop(session, None)
        self._node.returns.expect(session, None)
        self._node.changed.fire()
        archiver = self._archiver
        if archive:
            session.enter(SessionState.ARCHIVING)
            archiver.archive(session)
            self.publish(session)
            return 0
        pruned = [entry for head in session.heads for entry in archiver.exclusive(head, session)]
        self._node.sessions.close(session, archive=False)
        archiver.age(pruned)
        self._tell(session, None)
        return len(pruned)

    @property
    def is_erasing(self) -> bool:
        """True while the journal's file may hold sessions that were erased."""
        return self._journal.has_erased

    def scopes(self) -> set[ScopeId]:
        """Tenants' own scopes of all sessions, those of earlier runs included."""
        known = {s.secret.scope for s in self._node.sessions if s.secret is not None}
        return known | self._journal.scopes()

    def erase(self, scope: ScopeId) -> None:
        """Let go of the sessions of a tenant's own scope, and of what journal and directory know of them."""
        self._journal.erase(scope)
        for session in tuple(self._node.sessions):
            if session.secret is not None and session.secret.scope == scope:
                self._expected.pop(session, None)
                self._node.sessions.forget(session)
                self._tell(session, None)

    def archived_heads(self) -> Iterator[tuple[str, bytes]]:
        """Scope and digest of each chain's end of the sessions that are archived, the last archived first."""
        for remembered in self._journal.latest():
            if remembered.state in (SessionState.ARCHIVING, SessionState.ARCHIVED):
                yield from reversed(remembered.heads)

    def expect(self, session: Session) -> None:
        """Bring a session's blocks up when it is time."""
        self._expected[session] = _Plan(session.doubt_s)

    def sweep(self, now_s: float) -> None:
        """Finish sessions that were idle for longer than the pool's retention; if too many, the rest next time."""
        retention, pruned = self._node.spec.policy.retention, 0
        for session in self._node.sessions.sweep(now_s, retention.idle_seconds):
            pruned += self.finish(session, archive=retention.archive)
            if pruned >= FINISH_BLOCKS:
                return

    async def tend(self) -> None:
        """Bring up what is expected, publish what changed, and write the journal."""
        self.bring_up(self._node.clock())
        self._tell_changed()
        await self._journal.flush()

    def bring_up(self, now_s: float) -> None:
        """Start to bring up the chains of sessions that are due, each tenant's in turn, within the pool's bound.

        A session's blocks are kept up until it is back or not expected any more; those that came up before come last.
        """
        self._expected = {s: plan for s, plan in self._expected.items() if not _is_over(s, plan, now_s)}
        fresh: list[Wanted[Session]] = []
        again: list[Wanted[Session]] = []
        for session, plan in self._expected.items():
            if _is_due(session, plan, now_s):
                (again if plan.has_begun else fresh).append(_wanted(session, now_s))
        scanned = 0
        for wanted in itertools.chain(self._fair.order(fresh), again):
            session, plan = wanted.session, self._expected[wanted.session]
            chains = self._archiver.chains(session)
            begun = self._reader.prefetch_chains(chains)
            self._fair.served(session.tenant, begun.size_bytes, self._node.tenants.of(session.tenant).weight)
            self._note_prefetch(session, begun, now_s)
            if not begun.is_whole:
                return  # The bound is reached; the rest comes next time.
            plan.begun_at_s = now_s
            if _is_over(session, plan, now_s):
                del self._expected[session]
            scanned += sum(map(len, chains))
            if scanned >= SCAN_BLOCKS:
                return  # As above.
        self._look(now_s, scanned)

    def _note_prefetch(self, session: Session, begun: PrefetchedChains, now_s: float) -> None:
        tier = self._node.entry_tier
        if begun.blocks and tier is not None:
            blocks = Counter({tier.name: begun.blocks})
            self._node.sessions.log.note(session.key, SessionEvent(Happened.PREFETCH, now_s, now_s, blocks=blocks))

    def _look(self, now_s: float, scanned: int) -> None:
        """See where the blocks of sessions are that come back soon, and so when they begin to come up."""
        for session, plan in self._expected.items():
            if scanned >= SCAN_BLOCKS:
                return
            if now_s < session.returns_at_s <= now_s + HORIZON_S and now_s >= plan.looked_at_s + LOOK_S:
                chains = self._archiver.chains(session)
                plan.lead_s, plan.looked_at_s = max(plan.lead_s, self._reader.coming_up_s(chains)), now_s
                scanned += sum(map(len, chains))

    def publish(self, session: Session) -> None:
        """Let the directory and the journal know where a session stands."""
        if session not in self._reviving:
            self._tell(session, session.state)

    def _tell_changed(self) -> None:
        for session in self._node.sessions:
            if session.is_changed:
                self.publish(session)

    def _tell(self, session: Session, state: SessionState | None) -> None:
        secret, directory = session.secret, self._directory
        session.is_changed = False
        if state is not None:
            now_s = self._node.clock()
            self._node.sessions.log.note(session.key, SessionEvent(Happened.STATE, now_s, now_s, state))
        if secret is None:
            return
        remembered = self._remembered(session) if state else None
        self._journal.note(session_digest(secret, session.name), remembered, session.tenant)
        if directory is not None:
            return_s = max(0.0, session.returns_at_s - self._node.clock()) if session.returns_at_s else 0.0
            directory.note_session(secret, session.name, _record(session, state, return_s) if state else None)

    def _remembered(self, session: Session) -> Remembered:
        returns_s = session.returns_at_s - self._node.clock() + self._journal.wall() if session.returns_at_s else 0.0
        here = (AbsentHead(h.scope, h.digest, n, h in session.kept) for h, n in session.heads.items())
        heads = sorted((*session.absent, *here), key=lambda h: not h.is_kept)
        attention = session.attention
        return Remembered(
            session.state, session.priority, _parent(session), session.turns, session.urgency, returns_s,
            tuple((str(h.scope), h.digest) for h in heads), attention.sink_tokens, attention.window_tokens,
            attention.anchor_tokens, sum(h.is_kept for h in heads), tuple(h.blocks for h in heads),
            str(session.secret.scope) if session.secret is not None else "",
        )  # fmt: skip

    def _remember(self, tenant: str, secret: ScopeSecret, name: str, past: Remembered) -> Session:
        """Make a session of an earlier run one of this run."""
        now_s = self._node.clock()
        session = self._node.sessions.revive(tenant, name, now_s, past.priority)
        session.secret, session.parent_digest = secret, past.parent
        session.turns, session.absent = past.turns, _heads(past)
        session.attention = Attention(past.sink_tokens, past.window_tokens, past.anchor_tokens)
        if past.returns_at_s:
            session.returns_at_s = now_s + past.returns_at_s - self._journal.wall()
        self._resolve(session)
        if past.state in (SessionState.ARCHIVING, SessionState.ARCHIVED):
            session.enter(SessionState.ARCHIVING)
            self._archiver.archive(session)  # Brings down what is not there.
            self._archiver.settle(session)  # Whoever asks for it is told how it stands.
        return session

    def _resolve(self, session: Session) -> None:
        """Turn heads that were names only into heads, as far as their blocks are here now."""
        heads, session.absent = session.absent, ()
        for head in heads:
            entry = self._node.index.find(ScopeId(head.scope), head.digest)
            if entry is None or not entry.residences:
                session.absent += (head,)
            elif head.is_kept:
                session.keep(entry, head.blocks)
            else:
                session.add_head(entry, head.blocks)

    async def _revive(self, session: Session, places: Sequence[RequestContext]) -> None:
        try:
            async with self._gate:
                await self._read_record(session, places)
        finally:
            self._reviving.discard(session)
            session.is_changed = True

    async def _read_record(self, session: Session, places: Sequence[RequestContext]) -> None:
        directory, secret = self._directory, session.secret
        assert directory is not None
        assert secret is not None
        record = await directory.find_session(secret, session.name)
        if record is not None:
            session.turns += 1
            session.priority = session.priority or record.priority
            session.parent_digest = session.parent_digest or record.parent
        elif session.parent and not session.heads:
            record = await directory.find_session(secret, session.parent)  # A fork of a session on another node.
        if record is None or not record.head or self._node.spec.policy.prefetch.type == "None":
            return
        for place in places:
            if await self._fetch_chain(session, place, record.head):
                return

    async def _fetch_chain(self, session: Session, place: RequestContext, head: bytes) -> bool:
        """Fetch a chain from wherever it is, from its head to its root; false when the head cannot be had."""
        directory, blocks, digest = self._directory, self._node.index, head
        assert directory is not None
        for count in range(min(CHAIN_MAX, self._node.spec.policy.prefetch.max_inflight_bytes // place.raw_bytes)):
            entry = blocks.find(place.scope, digest)
            if entry is None:
                copies = (await directory.locate(place.secret, [digest]))[0]
                if copies and blocks.find(place.scope, digest) is None:
                    self._remote.start(place, [(digest, b"")], copies[:1])
                entry = blocks.find(place.scope, digest)
            if entry is not None and entry.move is not None:
                await asyncio.wait([entry.move])
            if entry is None or not entry.residences:
                return count > 0
            if count == 0 and not session.heads:
                session.add_head(entry)
            if not entry.parent:
                return True
            digest = entry.parent
        return True


@dataclass(slots=True)
class _Plan:
    """When a session's blocks begin to come up."""

    lead_s: float
    """Before its return."""
    looked_at_s: float = -math.inf
    begun_at_s: float = -math.inf
    """When they did last."""

    @property
    def has_begun(self) -> bool:
        """True once they were brought up."""
        return self.begun_at_s > -math.inf


def _is_due(session: Session, plan: _Plan, now_s: float) -> bool:
    if not plan.has_begun and (session.state not in QUIET or session.urgency_at(now_s) > 0):
        return True
    return 0.0 < session.returns_at_s <= now_s + plan.lead_s and now_s >= plan.begun_at_s + AGAIN_S


def _is_over(session: Session, plan: _Plan, now_s: float) -> bool:
    """True when nothing more is to be brought up for a session: it works, or is not expected any more."""
    if session.is_forgotten:
        return True
    return plan.has_begun and (session.state not in QUIET or now_s >= session.returns_at_s + session.doubt_s)


def _wanted(session: Session, now_s: float) -> Wanted[Session]:
    urgency, priority = session.urgency_at(now_s), class_of(session.priority)
    return Wanted(session, session.tenant, urgency, priority, session.returns_at_s, session.guard)


def _parent(session: Session) -> bytes:
    if session.parent and session.secret is not None:
        return session_digest(session.secret, session.parent)
    return session.parent_digest


def _heads(past: Remembered) -> tuple[AbsentHead, ...]:
    blocks = past.blocks or (0,) * len(past.heads)
    named = enumerate(zip(past.heads, blocks, strict=True))
    return tuple(AbsentHead(*name, of_it, number < past.kept) for number, (name, of_it) in named)


def _is_of_another(session: Session, secret: ScopeSecret | None) -> bool:
    """True for the session of an earlier tenant of this name, or of blocks that were erased with an earlier key."""
    return secret is not None and session.secret is not None and session.secret.scope != secret.scope


def _record(session: Session, state: SessionState, return_s: float) -> SessionRecord:
    """What the directory keeps of a session; which agent it is, the directory fills in."""
    head = next(reversed(session.heads)).digest if session.heads else b""
    if not head and session.absent:
        head = session.absent[-1].digest
    # No tenant: the key of the record belongs to its scope, and names have no place in Redis.
    return SessionRecord("", session.priority, state, _parent(session), head, "", session.urgency, return_s)
