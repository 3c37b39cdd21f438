"""Sessions, restarts and messages that come twice, as rules of the agent's state machine."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.sessions import Session, SessionState
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.session_journal import SessionJournal
from kvstrata_agent.cache.store import REFUSED
from support.agent.doubles import (
    BLOCK_BYTES,
    SCOPE,
    Clock,
    DictBackend,
    FakeAuthenticator,
    TestCodecs,
    dict_tier,
    dram_tier,
    make_node,
    secret,
)

T = TypeVar("T")
SLOTS = 16
LOW_SLOTS = 24
TENANT = "t"
SECRET = secret(SCOPE)
SENT_MAX = 16

names = st.sampled_from(["s1", "s1", "s2", "s3", "f1", "f2"])
owners = st.sampled_from([1, 1, 2, 3])
seldom = st.sampled_from([False, False, False, True])


class WatchedNode(Node):
    """Holds every eviction against the definitions, without the index's own counts."""

    def evict(self, entries: Iterable[Entry], tier: Tier, reason: str) -> int:
        return Node.evict(self, (e for e in entries if self._may_go(e, tier)), tier, reason)

    def _may_go(self, entry: Entry, tier: Tier) -> bool:
        assert not entry.leases
        assert not entry.pins
        assert not entry.guards
        level = min((r.tier.level for r in entry.residences if r.tier is not tier), default=9)
        children = [e for e in self.index if e.scope == entry.scope and e.parent == entry.digest]
        is_last, is_decoded = len(entry.residences) == 1, entry in decoded_from(self)
        assert not (is_last and is_decoded), "a decoding session runs through it"
        if level > tier.level and (is_last or is_decoded):  # Any other copy may go while a slower one stays.
            assert all(min((r.tier.level for r in c.residences), default=0) >= level for c in children)
        return True


def decoded_from(node: Node) -> set[Entry]:
    """Blocks that decoding sessions can reach from their heads."""
    reached: set[Entry] = set()
    for session in node.sessions:
        for head in session.heads if session.state is SessionState.DECODING else ():
            entry: Entry | None = head
            while entry is not None and entry.residences:
                reached.add(entry)
                entry = node.index.parent(entry)
    return reached


class SessionRules:
    """What the machine does with sessions; mixed into it."""

    core: Any
    """`AgentParts`; rules look into parts of it that are nobody's business otherwise."""
    clock: Clock
    sweeper: Sweeper
    swept_s: float
    run: Callable[[Coroutine[Any, Any, T]], T]
    do: Callable[[Callable[[], T]], T]

    def __init__(self) -> None:
        super().__init__()
        self.journal = SessionJournal(wall=lambda: self.clock())  # noqa: PLW0108  Set by each run.
        self.mode = "None"
        self.sent: list[tuple[str, int, list[int], list[bytes], bytes]] = []
        """Messages that were carried out: verb, owner, numbers, checksums, result."""

    async def make(self, low: Tier, epoch: int) -> None:
        """Start an agent over a slow tier and an empty fast one."""
        policy = {"compression": {"mode": self.mode}, "admission": {"type": "Always"}}
        tiers = [dram_tier(SLOTS * BLOCK_BYTES), low]
        node = make_node(tiers, self.clock, kind=WatchedNode, policy=policy)
        node.epoch = epoch
        self.core = AgentParts(node, TestCodecs(), journal=self.journal)
        self.sweeper = Sweeper(self.core.cache, FakeAuthenticator())

    def note(self, verb: str, owner: int, ids: list[int], sums: list[bytes], result: bytes) -> None:
        """Keep a message, to be sent once more."""
        self.sent = [*self.sent[-SENT_MAX:], (verb, owner, ids, sums, result)]

    def session(self, name: str) -> Session | None:
        """Find a session as verbs do."""
        found: Session | None = self.core.cache.life.find(TENANT, SECRET, name)
        return found

    @rule(owner=owners, name=names, parent=st.sampled_from(["", "", "s1", "s2", "f1"]))
    def open(self, owner: int, name: str, parent: str) -> None:
        before = list(origin.heads) if parent and (origin := self.session(parent)) else []
        is_new = self.session(name) is None
        opened = self.do(lambda: self.core.cache.life.open(owner, TENANT, SECRET, name, parent=parent, priority=""))
        if is_new and parent != name:
            assert set(before) <= set(opened.heads), "a fork starts where its parent is"

    @rule(name=names, state=st.sampled_from([SessionState.DECODING, SessionState.DECODING, SessionState.IDLE]))
    def touch(self, name: str, state: SessionState) -> None:
        session = self.session(name)
        if session is not None:
            self.do(lambda: self.core.cache.life.touch(session, state, 0, 0.0))

    @rule(name=names, archive=st.booleans())
    def close(self, name: str, *, archive: bool) -> None:
        session = self.session(name)
        if session is not None:
            self.do(lambda: self.core.cache.life.finish(session, archive=archive))
            assert archive or self.session(name) is None

    @rule()
    def bring_down(self) -> None:
        """One round over the sessions to archive."""
        for session, attempt in tuple(self.core.cache.archiver._sessions.items()):
            self.run(self.core.cache.archiver._demote_chains(session, attempt))
            if session.state is SessionState.ARCHIVED:
                assert not self.core.cache.archiver.left(session)

    @rule(which=st.integers(0, SENT_MAX), by=owners)
    def send_again(self, which: int, by: int) -> None:
        """A message comes once more, later than others, and perhaps from somebody else."""
        if not self.sent:
            return
        verb, owner, ids, sums, result = self.sent[which % len(self.sent)]
        if verb == "publish":
            again = self.run(self.core.cache.writer.publish(by, ids, sums))
            assert again == (result if by == owner else bytes([REFUSED]) * len(ids))
        elif verb == "release":
            assert self.do(lambda: self.core.cache.release(by, ids)) == 0
        else:
            assert self.do(lambda: self.core.cache.abandon(by, ids)) == 0

    @rule(happens=seldom)
    def restart(self, *, happens: bool) -> None:
        """Kill the agent: memory, leases and connections are gone, the slow tier and the journal are not."""
        if happens:
            self.run(self._restart())

    async def _restart(self) -> None:
        old = self.core
        await old.cache.life.tend()
        archived = {s.name: {h.digest for h in s.heads} for s in old.node.sessions if self._is_safe(s)}
        low = old.node.tiers[1]
        await old.close()
        await old.node.tiers[0].backend.close()
        kept = [copy for e in old.node.index if (copy := e.residence(low)) is not None]
        await self.make(_again(low, kept), old.node.epoch + 1)
        self.core.node.restore([Residence(self.core.node.tiers[1], copy.slot, copy.record) for copy in kept])
        self.forget_connections()
        for name, heads in archived.items():
            session = self.session(name)
            assert session is not None
            assert {h.digest for h in session.heads} == heads, "an archived session is there again"

    def forget_connections(self) -> None:
        """Forget what engines held: they reconnect with nothing."""
        self.sent = []

    def _is_safe(self, session: Session) -> bool:
        return session.state is SessionState.ARCHIVED and not self.core.cache.archiver.left(session)

    @invariant()
    def sessions_hold_their_heads_and_only_decoding_ones_guard_them(self) -> None:
        if not hasattr(self, "core"):
            return
        heads: dict[Entry, set[Session]] = {}
        for session in self.core.node.sessions:
            for head in session.heads:
                heads.setdefault(head, set()).add(session)
        for entry in (*self.core.node.index, *heads):
            followers = heads.get(entry, set())
            assert (entry.followers or set()) == {s.key for s in followers}
            assert (entry.guards or set()) == {s.guard for s in followers if s.state is SessionState.DECODING}
        assert all(h.residences for h in heads), "a head that is gone gives way to the block before it"


def _again(low: Tier, copies: list[Residence]) -> Tier:
    """The slow medium as the next run opens it: with what the index of the last one had there."""
    made, old = dict_tier("nvme", LOW_SLOTS * BLOCK_BYTES, 1, 2), low.backend
    assert isinstance(old, DictBackend)
    assert isinstance(made.backend, DictBackend)
    made.backend._stamp = old._stamp
    for copy in copies:
        made.backend.live[copy.slot.stamp] = copy.slot
        made.backend.stored[copy.slot.stamp] = old.stored[copy.slot.stamp]
        made.backend.used_bytes += copy.slot.size_bytes
    return made
