"""Demotes blocks before the watermark asks for it: archived sessions, and blocks not admitted to memory.

A session counts as archived once every block of its chains has a copy on a medium below memory that survives a
restart. Until then it is tried again, however often tiers are full or fail, but less and less often while nothing
gets through: each attempt reads and encodes blocks, which is bandwidth that engines want.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import GONE, TIERS_MAX
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.movement.path import Priority
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_agent.cache.demotion import Demoter, Rooms

WAITING_MAX: Final = 65_536
"""Blocks that may wait; more are left to the watermark."""
AT_ONCE: Final = 16
"""Copies under way, half of the mover's width, so that a big archive never fills it."""
UNPACKED_AT_ONCE: Final = 256
"""Rows of a session's chains that become entries in one step of the loop, at most 10 ms."""
RETRY_S: Final = 5.0
"""Until the next attempt for a session that is not all copied: half of what a failed tier is left alone."""
RETRY_MAX_S: Final = 60.0
"""The same, once several attempts in a row got no block through. Twice as long each time until then."""


@dataclass(slots=True)
class _Try:
    """When a session is tried next."""

    due_s: float = 0.0
    """A time of the running loop; what is new is due at once."""
    pause_s: float = RETRY_S
    """How long it is left alone when that gets no block through."""


class Archiver:
    """A bounded queue of blocks that want a copy further down, and the sessions to archive; worked off by `run`."""

    def __init__(self, node: Node, demoter: Demoter) -> None:
        self._node = node
        self._demoter = demoter
        self._waiting: deque[tuple[Entry, Priority]] = deque()
        self._sessions: dict[Session, _Try] = {}
        self._wake = asyncio.Event()
        self._round = asyncio.Event()
        """Set, and replaced, after each round over the sessions."""

    @property
    def waiting(self) -> int:
        """Blocks that wait for their copy."""
        return len(self._waiting)

    def demote_soon(self, entries: Iterable[Entry], priority: Priority) -> None:
        """Copy blocks to a slower tier soon, and let them leave memory first. Returns at once.

        Slower tiers keep them for as long as they keep any: who pressed new blocks into memory has filled those as
        well, and would find none of them again.
        """
        for entry in entries:
            if entry.residences:
                memory = entry.residences[0].tier
                entry.passed = memory, entry.used_at_s
                self._node.contents(memory).age(entry)
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((entry, priority))
        self._wake.set()

    def archive(self, session: Session) -> None:
        """Copy the chains of a session in state `archiving` to a tier that survives; returns at once.

        The state becomes `archived` when `run` has seen that all of it is there: chains may be long, and many sessions
        end together. A session that comes back meanwhile is let go.
        """
        self._sessions[session] = _Try()
        if not session.heads:
            self.settle(session)  # There is nothing to look at.
        self._wake.set()

    def follow(self, session: Session, chain: Sequence[Entry]) -> None:
        """Note that a session runs through these blocks, in order, and archive them where it is archived."""
        if session.is_forgotten or not chain:
            return
        self.attend(session, chain)
        if session.state is SessionState.ARCHIVED:  # There is more of it now than was archived.
            session.enter(SessionState.ARCHIVING)
            self.archive(session)
        if session.attention.window_tokens:
            self._slide(session)

    def attend(self, session: Session, chain: Sequence[Entry]) -> None:
        """Note that a session has read or written these blocks, in order, and attends to them.

        A block without the one before it here begins a chain of its own, which has a head of its own. What the session
        reads with what comes before it stays with that, whatever the windows of others have left behind.
        """
        if session.is_forgotten:
            return
        starts = [0, *(i for i in range(1, len(chain)) if chain[i].parent != chain[i - 1].digest), len(chain)]
        window_blocks = session.attention.window_blocks(self._node.spec.compatibility.block_tokens)
        for start, stop in itertools.pairwise(starts):
            session.follow(chain[start:stop])
            first = max(start, stop - window_blocks + 1) if window_blocks else start
            for entry in chain[first:stop]:
                if entry.is_cut and entry not in session.kept:
                    self._node.index.join(entry)
        self._node.sessions.refresh(session, self._node.clock())

    def _slide(self, session: Session) -> None:
        """Let go of what a session has behind its sinks and before its window: that leaves first, but for anchors.

        What another session or chain continues is none of it. Sinks and anchors are used whenever the session is.
        """
        index, attention = self._node.index, session.attention
        block_tokens = self._node.spec.compatibility.block_tokens
        for head in [h for h in session.heads if h not in session.kept]:
            own = self.exclusive(head, session)
            if not attention.passed(len(own), None, block_tokens):
                continue
            lineage = [*own, *index.ancestors(own[-1])]
            is_whole = not lineage[-1].parent
            if is_whole:
                session.heads[head] = len(lineage)
            self._pass(session, own, session.heads[head])
            sinks = attention.sink_blocks(block_tokens)
            if is_whole and 0 < sinks < len(lineage):
                session.keep(lineage[-sinks], sinks)
        if session.kept:
            kept = [entry for head in session.kept for entry in ((head,) if head.is_cut else self.chain(head))]
            self._node.returns.read_along(next(reversed(session.heads)), kept)

    def _pass(self, session: Session, own: Sequence[Entry], blocks: int) -> None:
        """Cut a window off at the end of a chain of so many blocks (0: not known), and each anchor that it has left."""
        index, attention = self._node.index, session.attention
        block_tokens = self._node.spec.compatibility.block_tokens
        passed = attention.passed(len(own), blocks - len(own) if blocks else None, block_tokens)
        if not passed:
            return
        index.cut(own[passed.start - 1])
        anchors = [n for n in passed if blocks and attention.is_anchor(blocks - 1 - n, blocks, block_tokens)]
        for number in anchors:
            index.cut(own[number])
            session.keep(own[number], blocks - number)
        if own[-1] not in session.kept:
            index.join(own[-1])
        self.age(own[n] for n in passed if own[n] not in session.kept)
        if anchors:
            self._thin(session, blocks)

    def _thin(self, session: Session, blocks: int) -> None:
        """Let go of anchors that a chain of so many blocks has no more."""
        block_tokens = self._node.spec.compatibility.block_tokens
        for entry in tuple(session.kept):
            if not session.attention.stays(session.heads[entry] - 1, blocks, block_tokens):
                session.drop_head(entry)
                if not entry.followers:
                    self._node.index.join(entry)
                    self.age((entry,))

    async def archived(self, session: Session, within_s: float) -> bool:
        """Wait until a session is archived, `within_s` at most; returns whether it is."""
        try:
            async with asyncio.timeout(within_s):
                while session.state is SessionState.ARCHIVING:
                    await self._round.wait()
        except TimeoutError:
            return False
        return session.state is SessionState.ARCHIVED

    def left(self, session: Session) -> list[Entry]:
        """Blocks of a session's chains that a restart would lose, root first."""
        return [entry for chain in self.chains(session) for entry in chain if not is_safe(entry)]

    def age(self, entries: Iterable[Entry]) -> None:
        """Make blocks the first to leave their tiers, as if nobody had ever used them."""
        for entry in entries:
            entry.used_at_s = 0.0
            for residence in entry.residences:
                self._node.contents(residence.tier).age(entry)

    def chains(self, session: Session) -> list[list[Entry]]:
        """The heads of a session with everything before them, each block once.

        Root first: the root is what most others continue. What two chains share stands in the first of them.
        """
        seen: set[Entry] = set()
        chains = []
        for head in session.heads:
            chains.append(self.chain(head, seen))
            seen.update(chains[-1])
        return chains

    def chain(self, head: Entry, seen: Collection[Entry] = ()) -> list[Entry]:
        """Return a head and everything before it up to what was `seen`, root first."""
        lineage = itertools.chain((head,), self._node.index.ancestors(head))
        return list(itertools.takewhile(lambda e: e.residences and e not in seen, lineage))[::-1]

    def exclusive(self, head: Entry, session: Session) -> list[Entry]:
        """A head and what stands before it, up to the first block that another chain or session continues.

        Nothing of a prefix share: what its readers need next is not for one of them to decide.
        """
        own: list[Entry] = []
        if head.scope.startswith(f"{ScopeKind.SHARE}/"):
            return own
        for entry in itertools.chain((head,), self._node.index.ancestors(head)):
            others = (entry.followers or set()) - {session.key}
            is_continued = bool(own) or head in session.kept  # By what its window has passed.
            if not entry.residences or others or self._node.index.blockers(entry, TIERS_MAX - 1) > is_continued:
                break
            own.append(entry)
        return own

    def demotable(self, chain: Sequence[Entry]) -> list[Entry]:
        """Blocks at the end of a chain that nobody holds and nothing else continues, the last one first."""
        own: list[Entry] = []
        for entry in reversed(chain):
            is_continued = self._node.index.blockers(entry, TIERS_MAX - 1) > bool(own)
            if not entry.residences or entry.is_held or is_continued or (own and entry.digest != own[-1].parent):
                break
            own.append(entry)
        return own

    async def run(self) -> None:
        """Work the queues off until cancelled."""
        while True:
            if not self._waiting:
                await self._wait()
            self._wake.clear()
            batch = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            rooms = self._demoter.rooms()
            await asyncio.gather(*(self._demote(entry, priority, rooms) for entry, priority in batch))
            # After each batch: blocks may come as fast as they leave, and no session would ever have its turn.
            now_s = asyncio.get_running_loop().time()
            for session, attempt in tuple(self._sessions.items()):
                if attempt.due_s <= now_s:
                    await self._demote_chains(session, attempt)
                    await asyncio.sleep(0)  # Thousands may be due that can get nothing through.

    async def _wait(self) -> None:
        """Wait until a block is sent down, a session is to be archived, or one is due again."""
        due_s = min((attempt.due_s for attempt in self._sessions.values()), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await self._wake.wait()

    async def _demote_chains(self, session: Session, attempt: _Try) -> None:
        """Make the copies that a session still lacks."""
        async with self._unpacked(session):
            left = self.left(session) if session.state is SessionState.ARCHIVING else []
            rooms = self._demoter.rooms()
            for i in range(0, len(left), AT_ONCE):
                await asyncio.gather(*(self._secure(entry, rooms) for entry in left[i : i + AT_ONCE]))
            self.settle(session)
        if any(is_safe(entry) for entry in left):
            attempt.pause_s = RETRY_S
        attempt.due_s = asyncio.get_running_loop().time() + attempt.pause_s
        attempt.pause_s = min(2 * attempt.pause_s, RETRY_MAX_S)

    @asynccontextmanager
    async def _unpacked(self, session: Session) -> AsyncIterator[None]:
        """Make entries of a session's chains, some in each step, and keep them: walking rows takes far longer."""
        kept: dict[Entry, None] = {}
        for head in tuple(session.heads) if session.state is SessionState.ARCHIVING else ():
            entry: Entry | None = head
            while entry is not None and entry.level != GONE and entry not in kept:
                kept[entry] = None
                if len(kept) % UNPACKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                entry = self._node.index.parent(entry) if entry.level != GONE else None
        yield

    def settle(self, session: Session) -> None:
        """Note whether a session is archived now, or has come back."""
        if session.state is SessionState.ARCHIVING and not self.left(session):
            session.enter(SessionState.ARCHIVED)
            self._retire(entry for head in session.heads for entry in self.exclusive(head, session))
        if session.state is not SessionState.ARCHIVING:
            self._sessions.pop(session, None)
        self._round.set()
        self._round = asyncio.Event()

    def _retire(self, entries: Iterable[Entry]) -> None:
        """Make blocks as old as those of a session that just counts as finished: not the first to leave slow tiers."""
        old_s = self._node.clock() - self._node.spec.policy.retention.idle_seconds
        for entry in entries:
            if entry.used_at_s > old_s:
                entry.used_at_s = max(0.0, old_s)
                for residence in entry.residences:
                    self._node.contents(residence.tier).age(entry)

    async def _secure(self, entry: Entry, rooms: Rooms) -> None:
        if entry.move is not None:
            await asyncio.wait([entry.move])
        if not is_safe(entry):
            await self._demote(entry, Priority.ARCHIVE, rooms)

    async def _demote(self, entry: Entry, priority: Priority, rooms: Rooms) -> None:
        """Make one copy below; an archived block goes to a tier that a restart finds again."""
        if not entry.residences or entry.move is not None:
            return
        source = entry.residences[0].tier
        target = self._node.tier_below(source.level, must_survive=priority is Priority.ARCHIVE)
        if target is not None and entry.residence(target) is None:
            await self._demoter.demote_to(entry, source, target, priority, rooms)


def is_safe(entry: Entry) -> bool:
    """True when a copy lies on a medium below memory that survives a restart."""
    media = (r.tier.backend.capabilities for r in entry.residences)
    return any(can.survives_restart and not can.is_memory for can in media)
