"""The loop of the service: observe the fleet and, where this replica leads, sweep, erase and nominate; its metrics."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from kvstrata_api import __version__
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.duties.authority import Authority
from kvstrata_metadata.duties.cluster import ASK_TIMEOUT_S, Cluster, ask
from kvstrata_metadata.duties.nominations import REASONS
from kvstrata_metadata.duties.nominator import agent_facts
from kvstrata_metadata.duties.survey import Amount
from kvstrata_metadata.server.keeper import RedisKeeper
from kvstrata_metadata.service import fleet_view
from kvstrata_metadata.service.fleet_view import STATES, Duties, ReplicaState, state_of, total
from kvstrata_metadata.store.records import DEFAULT_COPIES, Incarnation
from kvstrata_metadata.store.servers import parse_servers
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.catalog import METADATA
from kvstrata_telemetry.http import View
from kvstrata_telemetry.metrics import Instruments

SESSION_STATES = ("open", "decoding", "idle", "tool", "archived")

READY_SWEEPS: Final = 3
"""Sweeps that may fail before the service is no longer ready, and before a leader lets another one try."""

DECLARED_EVERY_S: Final = 120.0
"""Polling interval of what pools want and agents were given: it changes when somebody changes a KVPool."""

_log = logging.getLogger(__name__)


class FleetMetrics:
    """Writes what a replica knows. Counters are those of this replica: the sum over replicas is the fleet's."""

    def __init__(self, instruments: Instruments) -> None:
        self._made = instruments
        self._counted: dict[tuple[str, str], float] = {}
        self._agents: set[str] = set()
        self._pools: set[tuple[str, str]] = set()
        self._members: frozenset[Incarnation] | None = None

    def leader(self, replica: ReplicaState) -> None:
        """Record who leads."""
        self._count("kvstrata_metadata_failovers_total", replica.failovers)

    def redis(self, replica: ReplicaState, *, restarts_total: int) -> None:
        """Record the state of Redis."""
        self._made.gauge("kvstrata_metadata_redis_up").set(replica.is_redis_up)
        self._count("kvstrata_metadata_redis_restarts_total", restarts_total)

    def swept(self, replica: ReplicaState) -> None:
        """Record a finished round."""
        made, swept, erased = self._made, replica.swept, replica.erased
        made.histogram("kvstrata_metadata_sweep_duration_seconds").observe(swept.last_s)
        made.gauge("kvstrata_metadata_leases_known").set(swept.are_leases_known)
        made.gauge("kvstrata_metadata_backlog").set(swept.backlog)
        made.gauge("kvstrata_metadata_redis_fill_ratio").set(replica.redis.fill_ratio)
        made.gauge("kvstrata_metadata_redis_full").set(replica.redis.is_full)
        made.gauge("kvstrata_metadata_erase_claims").set(erased.waiting)
        self._count("kvstrata_metadata_fenced_total", swept.fenced)
        self._count("kvstrata_metadata_removed_locations_total", swept.removed_locations)
        self._count("kvstrata_metadata_orphans_total", swept.removed_orphans)
        self._count("kvstrata_metadata_erased_scopes_total", erased.scopes)
        self._count("kvstrata_metadata_erased_locations_total", erased.locations)
        self._count("kvstrata_metadata_erase_claims_refused_total", erased.refused)
        self._count("kvstrata_metadata_nominations_refused_total", replica.nominated.refused)
        for reason in REASONS:
            self._count("kvstrata_metadata_nominated_total", replica.nominated.blocks[reason], reason=reason)
        self._registrations(frozenset(member.incarnation for member in replica.fleet.members))
        self._amounts(replica)

    def _registrations(self, members: frozenset[Incarnation]) -> None:
        """Count incarnations that began; each means a full report. What was there at the first sweep does not count."""
        began = members - self._members if self._members is not None else frozenset()
        self._made.counter("kvstrata_metadata_registrations_total").inc(len(began))
        self._members = members

    def _amounts(self, replica: ReplicaState) -> None:
        made, amounts = self._made, replica.amounts()
        everything = total(a for by_tier in amounts.values() for a in by_tier.values())
        made.gauge("kvstrata_metadata_used_bytes").set(replica.redis.used_bytes)
        per_location = replica.redis.used_bytes / everything.locations if everything.locations else 0.0
        made.gauge("kvstrata_metadata_location_bytes").set(per_location)
        states = [state_of(member) for member in replica.fleet.members]
        for state in STATES:
            made.gauge("kvstrata_metadata_agents", state=state).set(states.count(state))
        for state in SESSION_STATES:
            made.gauge("kvstrata_metadata_sessions", state=state).set(
                replica.survey.sessions[state] if replica.survey else 0
            )
        self._by_agent(replica, amounts)

    def _by_agent(self, replica: ReplicaState, amounts: Mapping[Incarnation, Mapping[str, Amount]]) -> None:
        """Set what each agent has, and each tier of each pool; one that is gone has no series any more."""
        locations: dict[str, int] = {}
        stored: dict[tuple[str, str], int] = {}
        for member in replica.fleet.members:
            if member.registration is None:
                continue
            agent, by_tier = member.registration.record.agent, amounts.get(member.incarnation, {})
            locations[agent] = locations.get(agent, 0) + total(by_tier.values()).locations
            for tier, amount in by_tier.items():
                key = (agent.partition(".")[0], tier)
                stored[key] = stored.get(key, 0) + amount.stored_bytes
        for agent in self._agents - locations.keys():
            pool, _, node = agent.partition(".")
            self._made.forget("kvstrata_metadata_locations", pool=pool, node=node)
        for pool, tier in self._pools - stored.keys():
            self._made.forget("kvstrata_metadata_stored_bytes", pool=pool, tier=tier)
        for agent, count in locations.items():
            pool, _, node = agent.partition(".")
            self._made.gauge("kvstrata_metadata_locations", pool=pool, node=node).set(count)
        for (pool, tier), count in stored.items():
            self._made.gauge("kvstrata_metadata_stored_bytes", pool=pool, tier=tier).set(count)
        self._agents, self._pools = set(locations), set(stored)

    def _count(self, name: str, now: float, **labels: str) -> None:
        """Bring a counter up to a total that only grows."""
        key = (name, str(labels))
        self._made.counter(name, **labels).inc(now - self._counted.get(key, 0.0))
        self._counted[key] = now


class Rounds:
    """One round after the other, as soon as Redis is known."""

    def __init__(
        self,
        authority: Authority,
        cluster: Cluster | None,
        keeper: RedisKeeper | None,
        sweep_s: float,
        registry: CollectorRegistry,
    ) -> None:
        self._authority = authority
        self._cluster = cluster
        self._keeper = keeper
        self._sweep_s = sweep_s
        self._replica = ReplicaState(authority)
        instruments = Instruments(METADATA, registry)
        instruments.gauge("kvstrata_metadata_info", version=__version__).set(1)
        instruments.gauge("kvstrata_metadata_leader").set_function(lambda: float(self._replica.is_leader))
        self._certificate_expiry = instruments.gauge("kvstrata_metadata_certificate_expiry_timestamp_seconds")
        self._metrics = FleetMetrics(instruments)
        self._wanted: dict[str, int] = {}
        self._capacity_bytes: dict[str, int] = {}
        self._alive_s = time.monotonic()
        self._swept_s: float | None = None

    def watch_certificate(self, expires_at_s: Callable[[], float]) -> None:
        """Show when the certificate ends, which is asked for at each scrape."""
        self._certificate_expiry.set_function(expires_at_s)

    def is_healthy(self) -> bool:
        """True while the loop turns, whether or not Redis answers."""
        return time.monotonic() - self._alive_s < 60.0 + self._sweep_s

    def is_ready(self) -> bool:
        """True when Redis answered lately and its Secret is written. Standing by is ready, too."""
        swept_s = self._swept_s
        is_fresh = swept_s is not None and time.monotonic() - swept_s < READY_SWEEPS * self._sweep_s + 5.0
        return is_fresh and (self._keeper is None or (self._keeper.is_running and self._keeper.is_published))

    def views(self) -> dict[str, View]:
        """Pages of the fleet view by path."""
        return fleet_view.pages(lambda: self._replica)

    def note_alive(self) -> None:
        """Note that the loop turns, and who leads."""
        self._alive_s = time.monotonic()
        self._replica.note_leader()
        self._metrics.leader(self._replica)

    async def run(self, store: Store) -> None:
        """Go on until cancelled; while Redis is away, try again each time."""
        duties = Duties(store, self._cluster, self._authority)
        self._replica.duties = duties
        async with asyncio.TaskGroup() as tasks:
            if self._cluster:
                tasks.create_task(self._follow_declared(self._cluster))
            tasks.create_task(self._go_round(store, duties))

    async def _go_round(self, store: Store, duties: Duties) -> None:
        failures = 0
        while True:
            self._replica.is_redis_up = await self._round(store, duties)
            failures = 0 if self._replica.is_redis_up else failures + 1
            if failures >= READY_SWEEPS and self._replica.is_leader:
                await self._authority.step_aside()
            self.note_alive()
            restarts_total = self._keeper.restarts_total if self._keeper else 0
            self._metrics.redis(self._replica, restarts_total=restarts_total)
            await asyncio.sleep(self._sweep_s)

    async def _round(self, store: Store, duties: Duties) -> bool:
        try:
            mandate = await duties.sweeper.sweep()
            fleet = duties.sweeper.swept.fleet
            duties.departures.observe(fleet, time.monotonic())
            over_replicated = await duties.survey.scan(fleet, min(self._wanted.values(), default=DEFAULT_COPIES))
            self._replica.redis = parse_servers(await store.describe())
            if mandate is not None:
                await duties.nominator.nominate_erased(await duties.eraser.erase(mandate), fleet, mandate)
                facts = agent_facts(fleet, duties.survey.held, self._capacity_bytes, duties.departures)
                await duties.nominator.nominate(over_replicated, facts, self._wanted, mandate)
            else:
                duties.eraser.stand_by()
        except DirectoryAwayError as e:
            _log.warning("directory away", extra={"error": str(e)})
            return False
        except Exception:  # noqa: BLE001  A task root: one bad round must not end the sweeps for good.
            _log.exception("round failed")
            return False
        self._swept_s = time.monotonic()
        self._metrics.swept(self._replica)
        return True

    async def _follow_declared(self, cluster: Cluster) -> None:
        """Read what is declared, now and then; the last known stays where nobody can be asked."""
        while True:
            wanted = await ask(cluster.wanted_copies, "pools")
            capacity_bytes = await ask(cluster.capacities, "capacities")
            self._wanted = self._wanted if wanted is None else wanted
            self._capacity_bytes = self._capacity_bytes if capacity_bytes is None else capacity_bytes
            await asyncio.sleep(DECLARED_EVERY_S if wanted is not None else ASK_TIMEOUT_S)
