"""Keeps the directory clean: observes members and Leases, decides, fences and removes.

Any number may observe at once; who has no mandate stops there. What is removed was fenced before, so that a removal is
right whoever does it and however late; only the decision to fence needs the mandate, and Redis checks it.

`LeaseWatch` follows the Leases of agents over successive lists; how one is judged is in `kvstrata_kube.sightings`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_kube.leases import Lease
from kvstrata_kube.sightings import Sighting, sight
from kvstrata_metadata.directory import registry, shards
from kvstrata_metadata.directory.registry import Fleet
from kvstrata_metadata.duties.authority import Alone, Authority
from kvstrata_metadata.duties.cluster import ask
from kvstrata_metadata.duties.collect import Fence, LeaseState, Plan, Removal, orphans, plan
from kvstrata_metadata.store.keys import TOMBSTONE_S, Shard, incarnation_text
from kvstrata_metadata.store.records import Mandate, Verdict
from kvstrata_metadata.store.store import Store, partly
from kvstrata_telemetry.tracing import span

SWEEP_S: Final = 5.0
"""Seconds between sweeps; an agent is removed within this and the silence that means death."""

STREAMS_EVERY: Final = 6
"""Sweeps between two scans of the streams of all shards."""

SHARDS_PER_CALL: Final = 64

REMOVING_S_MAX: Final = 15.0
"""Of one sweep: others may die meanwhile, and probes ask whether the loop turns. An idle Redis removes 4,000,000."""

FENCES_AT_ONCE: Final = 100
"""Of one round trip: a switch that fails may take hundreds of agents along."""

SHARDS_MAX: Final = 262_144
"""Shards that are remembered after their last member; beyond it only members' own are scanned."""

ReadLeases = Callable[[], Awaitable[Mapping[str, Lease]]]
"""Reads all agents' Leases, by agent; raises `RetryableError`, `UnauthenticatedError` or `ForbiddenError`."""

_log = logging.getLogger(__name__)


class LeaseWatch:
    """Remembers when each Lease last moved."""

    def __init__(self) -> None:
        self._seen: dict[str, Sighting] = {}

    def judge(self, seen: Mapping[str, Lease], now_s: float) -> dict[str, LeaseState]:
        """State of each agent's Lease, `now_s` on a monotonic clock; those that `seen` lacks are forgotten."""
        self._seen = {agent: sight(self._seen.get(agent), lease, now_s) for agent, lease in seen.items()}
        return {a: LeaseState.HELD if s.is_held(now_s) else LeaseState.EXPIRED for a, s in self._seen.items()}

    def ages(self, now_s: float) -> dict[str, float]:
        """Seconds for which each agent's Lease has stood still."""
        return {agent: now_s - sighting.since_s for agent, sighting in self._seen.items()}

    def forget(self) -> None:
        """Start over: while nobody can be asked nobody can renew either, so the time meanwhile counts for nobody."""
        self._seen.clear()


@dataclass(slots=True)
class Swept:
    """What sweeps have done since start."""

    fenced: int = 0
    removed_locations: int = 0
    removed_orphans: int = 0
    sweeps: int = 0
    last_s: float = 0.0
    """How long the last one took."""
    backlog: int = 0
    """Fenced incarnations that still had locations when the last one began."""
    are_leases_known: bool = False
    lease_ages_s: dict[str, float] = field(default_factory=dict)
    """For how long each agent's Lease has stood still."""
    fleet: Fleet = field(default_factory=lambda: Fleet("", ()))
    """As the last sweep saw it, before it acted."""


class Sweeper:
    """One sweep after the other on one store."""

    def __init__(self, store: Store, read_leases: ReadLeases | None, authority: Authority | None = None) -> None:
        """`read_leases` is None where there is no Kubernetes: heartbeats alone decide then, later."""
        self._store = store
        self._read_leases = read_leases
        self._authority = authority or Alone()
        self._watch = LeaseWatch()
        self._heard_since_s: float | None = None
        self._shards: dict[Shard, float] = {}
        """When each shard was last a member's."""
        self.swept = Swept()

    async def sweep(self) -> Mandate | None:
        """Observe, decide and, with a mandate, apply once; the mandate, None while another replica leads.

        Raises `DirectoryAwayError`; what was begun is taken up by the next sweep.
        """
        try:
            with span("kvstrata.sweep") as active:
                mandate = await self._sweep()
                active.set(members=len(self.swept.fleet.members), is_leader=mandate is not None)
        except DirectoryAwayError:
            self._heard_since_s = None
            raise
        return mandate

    async def _sweep(self) -> Mandate | None:
        started_s = _now_s()
        if not await self._store.is_installed():
            await self._store.install()
            _log.info("transitions loaded")
        fleet = self.swept.fleet = await registry.fleet(self._store)
        self._note_shards(fleet)
        self._heard_since_s = started_s if self._heard_since_s is None else self._heard_since_s
        leases = await self._leases()
        mandate = await self._mandate()
        if mandate is not None:
            await self._apply(plan(fleet.members, leases, started_s - self._heard_since_s), mandate)
            if self.swept.sweeps % STREAMS_EVERY == 0:
                await self._sweep_streams(fleet)
        else:
            self.swept.backlog = 0  # Whoever leads now has it.
        self.swept.sweeps += 1
        self.swept.last_s = _now_s() - started_s
        return mandate

    async def _mandate(self) -> Mandate | None:
        """Return our mandate when we have one and the registry obeys it."""
        mandate = self._authority.mandate()
        if mandate is None:
            return None
        obeyed = await registry.lead(self._store, mandate)
        if obeyed is None:
            return mandate
        _log.warning("mandate refused", extra={"term": mandate.term, "obeyed": obeyed})
        self._authority.rise(obeyed)
        return None

    async def _leases(self) -> dict[str, LeaseState] | None:
        """State of each agent's Lease; None when nobody can be asked."""
        self.swept.are_leases_known = False
        if self._read_leases is None:
            return None
        seen = await ask(self._read_leases, "leases")
        if seen is None:
            self._watch.forget()
            return None
        self.swept.are_leases_known = True
        states = self._watch.judge(seen, _now_s())
        self.swept.lease_ages_s = self._watch.ages(_now_s())
        return states

    async def _apply(self, decided: Plan, mandate: Mandate) -> None:
        """Fence first, so that nobody is sent to the dead while the locations of others are being removed."""
        self.swept.backlog = len(decided.removals)
        for i in range(0, len(decided.fences), FENCES_AT_ONCE):
            await self._fence(decided.fences[i : i + FENCES_AT_ONCE], mandate)
        try:
            async with asyncio.timeout(REMOVING_S_MAX):
                await self._remove_all(decided.removals, mandate)
        except TimeoutError:
            _log.warning("many dead agents; the next sweep goes on with their locations")

    async def _remove_all(self, removals: Sequence[Removal], mandate: Mandate) -> None:
        for removal in removals:
            if self._authority.mandate() != mandate:
                return
            with partly():
                await self._remove(removal, mandate)

    async def _fence(self, fences: Sequence[Fence], mandate: Mandate) -> None:
        silences_s = {fence.incarnation: fence.silence_s for fence in fences}
        verdicts = await registry.fence_all(self._store, silences_s, mandate)
        for fence, verdict in zip(fences, verdicts, strict=True):
            if verdict is not Verdict.OK:
                continue
            self.swept.fenced += 1
            about = {"incarnation": incarnation_text(fence.incarnation), "silence_s": fence.silence_s}
            _log.warning("agent fenced", extra={"agent": fence.agent, "lease": fence.lease, **about})

    async def _remove(self, removal: Removal, mandate: Mandate) -> None:
        """In parts; other clients of Redis get their turn between two of them."""
        removed = await shards.drop_everywhere(self._store, removal.shards, removal.incarnation)
        await registry.forget(self._store, removal.incarnation, mandate)
        self.swept.removed_locations += removed
        _log.info(
            "agent removed",
            extra={"incarnation": incarnation_text(removal.incarnation), "locations": removed},
        )

    async def _sweep_streams(self, fleet: Fleet) -> None:
        every = sorted(self._shards)
        streams: dict[Shard, list[shards.Stream]] = {}
        for i in range(0, len(every), SHARDS_PER_CALL):
            part = every[i : i + SHARDS_PER_CALL]
            with partly():
                streams |= dict(zip(part, await shards.sweep(self._store, part, TOMBSTONE_S), strict=True))
        for shard, incarnation in orphans(streams, (member.incarnation for member in fleet.members)):
            with partly():
                self.swept.removed_locations += await shards.drop_agent(self._store, shard, incarnation)
                self.swept.removed_orphans += 1

    def _note_shards(self, fleet: Fleet) -> None:
        """Remember the shards of members: a registry that lost everything no longer knows where streams went on."""
        now_s = _now_s()
        self._shards |= dict.fromkeys((shard for member in fleet.members for shard in member.shards), now_s)
        oldest_s = now_s - TOMBSTONE_S if len(self._shards) <= SHARDS_MAX else now_s
        self._shards = {shard: seen_s for shard, seen_s in self._shards.items() if seen_s >= oldest_s}


def _now_s() -> float:
    """Seconds on the clock of the loop, which a simulator may turn."""
    return asyncio.get_running_loop().time()
