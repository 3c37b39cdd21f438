"""What each block of this node is worth, learned from the requests that name it. No I/O.

Blocks have a mark each, which tells of their last use; `policy.expected_reuse` makes and reads it.
"""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvstrata_agent.blocks.block import TIERS_MAX
from kvstrata_agent.blocks.signs import LOAD_S, is_tried, is_unread
from kvstrata_agent.policy.admission import WriteAdmission
from kvstrata_agent.policy.expected_reuse import UNMARKED, ExpectedReuse, RequestFacts, Return
from kvstrata_agent.policy.placement import Replica
from kvstrata_agent.policy.prefetch import LEAD_S
from kvstrata_agent.policy.priority import PriorityClass, class_of, felt_use_s
from kvstrata_agent.policy.reuse_curve import SAME_USE_S
from kvstrata_api.blocks import ScopeId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.sessions import Session

AWAITED_MAX: Final = 16_384
"""Chains that requests have named and that may be stored yet: 2 MB."""
SOON_S: Final = 60.0
"""A return within it is soon."""
RECENT_MAX: Final = 4096
"""Ends of chains that were asked for of late."""
HOT_MAX: Final = 256
"""Chains of late that may be raised to a tier faster than the memory which engines map: a millisecond to judge."""
SET_BACK: Final = -1.0
"""Worth of what its session will not need again, or whose uses an earlier run took along."""
REPLICAS_MAX: Final = 65_536
"""Blocks that came from other agents, of which that is remembered: 15 MB."""
REPLICA_S: Final = 300.0
"""For so long the copy that a block was fetched from is believed to be there: what counts for less may leave."""
TRUST: Final = 0.5
"""Chance that an engine's word on a return comes true. What it means for whole classes of requests is learned."""

Worth = tuple[float, float, float]
"""Uses for each second held, times the factor of the priority class; then last use, as that factor has it felt, and
birth, by which equals leave in the order of age."""


class _Marks:
    """Marks of the blocks of one scope after the other: in their entries, and of what is still to come in a table.

    There the first block of each chain that is not here is enough: those behind it take its mark as they come.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._blocks = index.blocks(ScopeId(""))
        self.awaited: dict[bytes, int] = {}

    def within(self, scope: ScopeId) -> None:
        """Go to a scope."""
        self._blocks = self._index.blocks(scope)

    def read(self, chain: Sequence[bytes]) -> list[int]:
        """Mark of each up to the first that is not here, and `UNMARKED` behind it."""
        marks = [entry.mark for entry in self.here(chain)]
        if len(marks) < len(chain):
            marks.append(self.awaited.get(chain[len(marks)], UNMARKED))
        return marks + [UNMARKED] * (len(chain) - len(marks))

    def write(self, chain: Sequence[bytes], marks: Sequence[int]) -> None:
        """Set the mark of each up to the first that is not here."""
        here = self.here(chain)
        for entry, mark in zip(here, marks, strict=False):
            entry.mark = mark
        if len(here) < len(chain):
            self.awaited[chain[len(here)]] = marks[len(here)]
            if len(self.awaited) > AWAITED_MAX:
                del self.awaited[next(iter(self.awaited))]

    def here(self, chain: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading blocks that are here."""
        found = self._blocks.get_all(chain)
        stop = found.index(None) if None in found else len(found)
        return [entry for entry in found[:stop] if entry is not None]


class Returns:
    """Follows the requests of this node, and knows what each of its blocks is worth."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._marks = _Marks(node.index)
        self._reuse: ExpectedReuse[bytes] = ExpectedReuse(self._marks)
        self._admission: WriteAdmission[bytes] = WriteAdmission()
        self._replicas: dict[bytes, Replica] = {}
        self._recent: dict[bytes, float] = {}
        """When the chains that end so were asked for last, the latest one last."""
        self._ends: dict[bytes, ScopeId] = {}
        """Deepest blocks that are here of the chains that were used last, the latest one last."""
        self.random = Random(1)
        """Draws samples of victims: what it draws is no secret, but a run can be repeated."""

    @property
    def are_followed(self) -> bool:
        """True where the pool wants what is worth least to leave first."""
        return self._node.spec.policy.eviction.type == "ReuseAware"

    def asked(self, scope: ScopeId, session: Session | None, digests: Sequence[bytes]) -> None:
        """A request names its chain: all of it that is here is used now, and the rest will come.

        Asking again for the same chain before long is the same use: an engine polls. Once something of it was read or
        computed it is another one.
        """
        if not digests:
            return
        now_s, recent, last = self._node.clock(), self._recent, digests[-1]
        self._marks.within(scope)
        for entry in self._marks.here(digests):
            self._node.signs.used(entry, now_s)
        if not self.are_followed:
            return
        before_s = recent.pop(last, -math.inf)
        recent[last] = now_s
        if len(recent) > RECENT_MAX:
            del recent[next(iter(recent))]
        if now_s - before_s < SAME_USE_S:
            return
        self._note_end(scope, digests)
        self._admission.asked(digests, len(digests))
        facts = RequestFacts() if session is None else RequestFacts(kind=session.priority, session=session.key)
        self._reuse.begin(digests, None, facts, now_s)

    def loaded(self, scope: ScopeId, session: Session | None, digests: Sequence[bytes]) -> None:
        """Blocks are asked for to be read: part of a use that a lookup has begun, or else a use of their own."""
        if not digests or not self.are_followed:
            return
        marks, now_s = self._marks, self._node.clock()
        marks.within(scope)
        first = self._node.index.blocks(scope).in_use.get(digests[0])
        before = self._node.index.find(scope, first.parent) if first is not None and first.parent else None
        ends = marks.read(digests[-1:])
        if before is not None:
            ends.append(before.mark)  # A chain is read batch by batch.
        if not any(self._reuse.is_fresh(mark, LOAD_S, now_s) for mark in ends):
            self.asked(scope, session, digests)
        self._answered(digests[-1], ends[0])

    def stored(self, session: Session | None, entries: Sequence[Entry]) -> None:
        """Blocks have come, in chain order: what their request is, or what they continue, they are."""
        if not self.are_followed:
            return
        index, awaited = self._node.index, self._marks.awaited
        for at, entry in enumerate(entries):
            entry.mark = awaited.pop(entry.digest, entry.mark)
            if entry.mark:
                continue
            before = index.blocks(entry.scope).in_use.get(entry.parent)
            if before is None or not before.mark:
                self.asked(entry.scope, session, [e.digest for e in entries[at:] if e.scope == entry.scope])
                break
            entry.mark = before.mark
            self._reuse.cut(before.digest)
        if entries:
            self._note_end(entries[-1].scope, [entries[-1].digest])
            self._answered(entries[-1].digest, entries[-1].mark)

    def refused(self, digest: bytes) -> None:
        """No room was found for a block that was computed."""
        self._answered(digest, self._marks.awaited.get(digest, UNMARKED))

    def _answered(self, digest: bytes, mark: int) -> None:
        """Something was read or computed of the chain that used a block last: whoever polled for it has stopped."""
        self._recent.pop(self._reuse.end_of(digest, mark), None)

    def read_along(self, head: Entry, entries: Iterable[Entry]) -> None:
        """Blocks are read whenever the end of a chain is: its last use is theirs, unless other chains share them."""
        for entry in entries:
            entry.used_at_s = max(entry.used_at_s, head.used_at_s)
            if head.mark and not self._reuse.is_shared(entry.mark):
                entry.mark = head.mark

    def hot(self) -> list[Entry]:
        """Ends of the chains that were used last, those that are worth most first."""
        found = [self._node.index.find(scope, digest) for digest, scope in self._ends.items()]
        return sorted((e for e in found if e is not None and e.residences), key=self.worth, reverse=True)

    def _note_end(self, scope: ScopeId, digests: Sequence[bytes]) -> None:
        here = self._node.index.blocks(scope).in_use
        end = next((digest for digest in reversed(digests) if digest in here), None)
        if end is not None:
            self._ends.pop(end, None)
            self._ends[end] = scope
            if len(self._ends) > HOT_MAX:
                del self._ends[next(iter(self._ends))]

    def expect(self, session: Session, return_s: float | None) -> None:
        """An engine reports when a session comes back; None for never."""
        reported = Return.COMPLETE if return_s is None else Return.SOON if return_s <= SOON_S else Return.LATER
        for head in session.heads:
            self._reuse.expect(head.digest, head.mark, reported)

    def worth(self, entry: Entry) -> Worth:
        """What a block is worth; the least goes first."""
        used_at_s = entry.used_at_s
        if used_at_s <= 0.0:
            return SET_BACK, used_at_s, entry.born_s
        now_s = self._node.clock()
        idle_s = now_s - used_at_s
        if entry.mark:
            worth = self._reuse.worth(entry.digest, entry.mark, now_s, idle_s)
        else:
            worth = self._reuse.times.overall(idle_s)
        if entry.followers:
            worth = max(worth, self._reported(entry.followers, now_s))
        if self._replicas and (replica := self.replica_of(entry)) is not None:
            worth *= replica.part
        priority = entry.priority
        if priority is PriorityClass.STANDARD:
            return worth, used_at_s, entry.born_s
        return worth * priority.factor, felt_use_s(used_at_s, now_s, priority), entry.born_s

    def worth_of_next(
        self, scope: ScopeId, before: Sequence[bytes], digest: bytes, session: Session | None
    ) -> Worth | None:
        """What a block that comes now is worth, behind the chain `before`; None where the pool does not go by that."""
        if not self.are_followed:
            return None
        now_s, mark, index = self._node.clock(), UNMARKED, self._node.index
        for known in (digest, *reversed(before)):  # What is reserved and not there yet has no mark.
            entry = index.find(scope, known)
            mark = self._marks.awaited.get(known, entry.mark if entry is not None else UNMARKED)
            if mark:
                break
        worth = self._reuse.worth(digest, mark, now_s) if mark else self._reuse.times.overall(0.0)
        priority = PriorityClass.STANDARD
        if session is not None:
            worth, priority = max(worth, self._word(session, now_s)), class_of(session.priority)
        return worth * priority.factor, now_s, now_s

    def replicated(self, entries: Sequence[Entry], fetch_s: float, compute_s: float) -> None:
        """Blocks have come from another agent that keeps them; fetching and computing one of them takes so long."""
        replica = Replica(fetch_s, compute_s, self._node.clock() + REPLICA_S)
        for entry in entries:
            self._replicas.pop(entry.digest, None)
            self._replicas[entry.digest] = replica
        while len(self._replicas) > REPLICAS_MAX:
            del self._replicas[next(iter(self._replicas))]

    def replica_of(self, entry: Entry) -> Replica | None:
        """What is known of another agent's copy of a block; None where there is none, or none is believed in."""
        replica = self._replicas.get(entry.digest)
        return replica if replica is not None and self._node.clock() < replica.until_s else None

    def write_chance(self, entry: Entry) -> float | None:
        """Chance of a return by which a block that leaves memory is written; None where nothing tells."""
        if not self.are_followed or not entry.mark:
            return None
        now_s = self._node.clock()
        chance = self._reuse.return_chance(entry.digest, entry.mark, now_s, now_s - max(entry.used_at_s, entry.born_s))
        if chance is None:
            return None
        if entry.followers and self._reported(entry.followers, now_s) > 0.0:
            chance = max(chance, TRUST)
        replica = self.replica_of(entry)
        return min(1.0, chance * entry.priority.factor) * (replica.part if replica is not None else 1.0)

    def declined(self, entry: Entry) -> str:
        """Why a block is not worth a write to a medium that wears or bills; empty for one that is.

        What blocks in slower tiers continue always is: without it they are lost.
        """
        index = self._node.index
        if index.blockers(entry, TIERS_MAX - 1) > index.blockers(entry, entry.level):
            return ""
        chance = self.write_chance(entry)
        if chance is not None and not self._admission.takes(chance):
            return "it is unlikely to return"
        is_expected = self._reported(entry.followers or (), self._node.clock()) > 0.0
        is_suspect = entry.tenant in self._node.signs.polluters and is_unread(entry) and not is_expected
        if is_suspect and not is_tried(entry):
            return "hardly any of its tenant's blocks is ever read"
        return ""

    def offered(self, entry: Entry) -> None:
        """A block leaves memory for such a medium, or is declined."""
        chance = self.write_chance(entry)
        if chance is not None:
            self._admission.offered(entry.digest, 1, chance)

    def explain(self, entry: Entry) -> dict[str, Any]:
        """Why a block leaves before others or after them."""
        policy = self._node.spec.policy.eviction.type
        known = {"policy": policy, "priority_class": entry.priority.name.lower(), "factor": entry.priority.factor}
        tier = entry.residences[0].tier if entry.residences else None
        if tier is not None and entry.is_passing(tier):
            why = "new blocks are not admitted there now, or a hint sent it down; and nobody has used it since"
            return known | {"reason": f"first to leave {tier.name}: {why}"}
        if not self.are_followed:
            return known | {"reason": "the least recently used leaf leaves first, its idle time divided by the factor"}
        worth, *_ = self.worth(entry)
        if worth == SET_BACK:
            why = "its session is over, or its window has passed it; or it is of an earlier run"
            return known | {"reason": f"first to leave: {why}"}
        uses_per_s = worth / entry.priority.factor
        if (replica := self.replica_of(entry)) is not None:
            uses_per_s /= max(replica.part, 1e-9)
            known |= {"replica": self._explained(entry, replica, worth)}
        return known | {"worth": worth, "uses_per_s": uses_per_s} | self._reuse.explain(entry.digest, entry.mark)

    def _explained(self, entry: Entry, replica: Replica, worth: float) -> dict[str, Any]:
        """Whether a copy of what another agent has pays for its place."""
        tier = entry.residences[0].tier if entry.residences else None
        price_per_s = self._node.facts_of(tier).price_per_s if tier is not None else 0.0
        choice = "locality: it stays" if worth >= price_per_s else "dedup: the other agent's copy is enough"
        costs = {"fetch_s": replica.fetch_s, "compute_s": replica.compute_s, "part_of_worth": replica.part}
        return costs | {"price_per_s": price_per_s, "choice": choice}

    def _reported(self, followers: Iterable[tuple[str, str]], now_s: float) -> float:
        """What engines' words on the return of sessions make a head worth; words expire with the return."""
        worth = 0.0
        for tenant, name in followers:
            session = self._node.sessions.find(tenant, name)
            if session is not None:
                worth = max(worth, self._word(session, now_s))
        return worth

    @staticmethod
    def _word(session: Session, now_s: float) -> float:
        if session.returns_at_s + session.doubt_s > now_s:
            return TRUST / max(LEAD_S, session.returns_at_s - now_s)
        if session.retained_until_s > now_s:
            return TRUST / max(LEAD_S, session.retained_until_s - now_s)
        if session.urgency_at(now_s) > 0:
            return TRUST / max(LEAD_S, session.urgent_until_s - now_s)
        return 0.0
