"""Puts nominations into the mailboxes of agents, and knows what a nomination is judged by."""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvstrata_metadata.directory.messages import nominate
from kvstrata_metadata.directory.registry import SILENCE_S, Fleet, Member
from kvstrata_metadata.duties.authority import Authority
from kvstrata_metadata.duties.nominations import ERASED, AgentFacts, OverReplicated, plan_nominations
from kvstrata_metadata.duties.survey import Amount, Holding
from kvstrata_metadata.store.records import Incarnation, Mandate, Nomination
from kvstrata_metadata.store.store import Store, partly

GONE_GRACE_S: Final = 3_600.0
"""An agent that was away for longer comes back to a fleet that has made again what it needed."""

GONE_MAX: Final = 16_384
"""Agents whose departure is remembered; with the oldest one only a better choice is lost."""


AGAIN_S: Final = 600.0
"""An owner that kept a copy is not asked about it again for so long."""

ASKED_MAX: Final = 100_000
"""Copies that are remembered for that; beyond, owners are asked again too early."""


@dataclass(slots=True)
class Nominated:
    """What was nominated since start."""

    blocks: Counter[str] = field(default_factory=Counter)
    """By reason; a whole scope counts as one."""
    refused: int = 0
    """Nominations that no mailbox took: it was full or away."""


class Departures:
    """Remembers who was gone for how long."""

    def __init__(self) -> None:
        self._living: set[str] = set()
        self._gone_s: dict[str, float] = {}
        self._returned: dict[str, Incarnation] = {}

    def observe(self, fleet: Fleet, now_s: float) -> None:
        """Take in who lives now."""
        living = {name: member.incarnation for member in fleet.members if (name := _living(member))}
        for agent in self._living - living.keys():
            self._gone_s[agent] = now_s
            self._returned.pop(agent, None)
        while len(self._gone_s) > GONE_MAX:
            del self._gone_s[next(iter(self._gone_s))]
        for agent in living.keys() & self._gone_s.keys():
            if now_s - self._gone_s.pop(agent) > GONE_GRACE_S:
                self._returned[agent] = living[agent]
        self._living = set(living)

    def has_returned(self, agent: str, incarnation: Incarnation) -> bool:
        """True for an incarnation that began after a long absence."""
        return self._returned.get(agent) == incarnation


class Nominator:
    """One round after the other on one store."""

    def __init__(self, store: Store, authority: Authority) -> None:
        self._store = store
        self._authority = authority
        self._asked_s: dict[tuple[Incarnation, bytes], float] = {}
        self.nominated = Nominated()

    async def nominate(
        self,
        over_replicated: Sequence[OverReplicated],
        facts: Mapping[Incarnation, AgentFacts],
        wanted: Mapping[str, int],
        own: Mandate,
    ) -> None:
        """Nominate what `over_replicated` has too much of, while `own` is our mandate. Raises `DirectoryAwayError`."""
        for incarnation, nominations in plan_nominations(over_replicated, facts, wanted).items():
            for nomination in nominations:
                digests = tuple(d for d in nomination.digests if self._may_ask(incarnation, d))
                if self._authority.mandate() != own:
                    return
                if digests and await self._post(incarnation, replace(nomination, digests=digests)):
                    self._asked_s.update(dict.fromkeys(((incarnation, d) for d in digests), _now_s()))

    def _may_ask(self, incarnation: Incarnation, digest: bytes) -> bool:
        """True unless the owner was asked about this copy lately."""
        if len(self._asked_s) > ASKED_MAX:
            self._asked_s.clear()
        asked_s = self._asked_s.get((incarnation, digest))
        return asked_s is None or _now_s() - asked_s >= AGAIN_S

    async def nominate_erased(self, tags: Collection[str], fleet: Fleet, own: Mandate) -> None:
        """Nominate all blocks of erased scopes to those who may have some. Raises `DirectoryAwayError`."""
        for member in fleet.members:
            for tag in sorted({shard.tag for shard in member.shards} & set(tags)):
                if self._authority.mandate() != own:
                    return
                await self._post(member.incarnation, Nomination(tag, ERASED, ()))

    async def _post(self, incarnation: Incarnation, nomination: Nomination) -> bool:
        """Put one nomination into a mailbox; false when that is full, or away with a part of the directory."""
        is_taken = False
        with partly():
            is_taken = await nominate(self._store, incarnation, nomination)
        if is_taken:
            self.nominated.blocks[nomination.reason] += max(1, len(nomination.digests))
        else:
            self.nominated.refused += 1
        return is_taken


def agent_facts(
    fleet: Fleet, held: Mapping[Holding, Amount], capacity_bytes: Mapping[str, int], departures: Departures
) -> dict[Incarnation, AgentFacts]:
    """Put together what is known of those who live. `capacity_bytes` by agent, of all its tiers."""
    used: Counter[Incarnation] = Counter()
    for (incarnation, _), amount in held.items():
        used[incarnation] += amount.stored_bytes
    facts = {}
    for member in fleet.members:
        if agent := _living(member):
            fill_ratio = used[member.incarnation] / max(1, capacity_bytes.get(agent, 0))
            is_returned = departures.has_returned(agent, member.incarnation)
            facts[member.incarnation] = AgentFacts(agent, fill_ratio, is_returned)
    return facts


def _living(member: Member) -> str:
    """Name of the agent when it lives; empty otherwise."""
    known = member.registration
    is_living = known and not known.is_fenced and known.silence_s is not None and known.silence_s < SILENCE_S
    return known.record.agent if known and is_living else ""


def _now_s() -> float:
    """Seconds on the clock of the loop, which a simulator may turn."""
    return asyncio.get_running_loop().time()
