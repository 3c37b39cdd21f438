"""What the metadata service measures, written into the instruments."""

from collections.abc import Mapping

from kvstrata_metadata.nominations import REASONS
from kvstrata_metadata.records import Incarnation
from kvstrata_metadata.standing import STATES, Standing, state_of, total
from kvstrata_metadata.survey import Amount
from kvstrata_telemetry.metrics import Instruments

SESSION_STATES = ("open", "decoding", "idle", "tool", "archived")


class FleetMetrics:
    """Writes what a replica knows. Counters are those of this replica: the sum over replicas is the fleet's."""

    def __init__(self, instruments: Instruments) -> None:
        self._made = instruments
        self._counted: dict[tuple[str, str], float] = {}
        self._agents: set[str] = set()
        self._pools: set[tuple[str, str]] = set()
        self._members: frozenset[Incarnation] | None = None

    def looked(self, at: Standing) -> None:
        """Take in who leads."""
        self._count("kvstrata_metadata_failovers_total", at.failovers)

    def redis(self, at: Standing, *, restarts_total: int) -> None:
        """Take the state of Redis in."""
        self._made.gauge("kvstrata_metadata_redis_up").set(at.is_redis_up)
        self._count("kvstrata_metadata_redis_restarts_total", restarts_total)

    def swept(self, at: Standing) -> None:
        """Take a finished round in."""
        made, swept, erased = self._made, at.swept, at.erased
        made.histogram("kvstrata_metadata_sweep_duration_seconds").observe(swept.last_s)
        made.gauge("kvstrata_metadata_leases_known").set(swept.are_leases_known)
        made.gauge("kvstrata_metadata_backlog").set(swept.backlog)
        made.gauge("kvstrata_metadata_redis_fill_ratio").set(at.redis.fill_ratio)
        made.gauge("kvstrata_metadata_redis_full").set(at.redis.is_full)
        made.gauge("kvstrata_metadata_erase_claims").set(erased.waiting)
        self._count("kvstrata_metadata_fenced_total", swept.fenced)
        self._count("kvstrata_metadata_removed_locations_total", swept.removed_locations)
        self._count("kvstrata_metadata_orphans_total", swept.removed_orphans)
        self._count("kvstrata_metadata_erased_scopes_total", erased.scopes)
        self._count("kvstrata_metadata_erased_locations_total", erased.locations)
        self._count("kvstrata_metadata_erase_claims_refused_total", erased.refused)
        self._count("kvstrata_metadata_nominations_refused_total", at.nominated.refused)
        for reason in REASONS:
            self._count("kvstrata_metadata_nominated_total", at.nominated.blocks[reason], reason=reason)
        self._registrations(frozenset(member.incarnation for member in at.fleet.members))
        self._amounts(at)

    def _registrations(self, members: frozenset[Incarnation]) -> None:
        """Count incarnations that began; each means a full report. What was there at the first look does not count."""
        began = members - self._members if self._members is not None else frozenset()
        self._made.counter("kvstrata_metadata_registrations_total").inc(len(began))
        self._members = members

    def _amounts(self, at: Standing) -> None:
        made, amounts = self._made, at.amounts()
        everything = total(a for by_tier in amounts.values() for a in by_tier.values())
        made.gauge("kvstrata_metadata_used_bytes").set(at.redis.used_bytes)
        per_location = at.redis.used_bytes / everything.locations if everything.locations else 0.0
        made.gauge("kvstrata_metadata_location_bytes").set(per_location)
        states = [state_of(member) for member in at.fleet.members]
        for state in STATES:
            made.gauge("kvstrata_metadata_agents", state=state).set(states.count(state))
        for state in SESSION_STATES:
            made.gauge("kvstrata_metadata_sessions", state=state).set(at.survey.sessions[state] if at.survey else 0)
        self._by_agent(at, amounts)

    def _by_agent(self, at: Standing, amounts: Mapping[Incarnation, Mapping[str, Amount]]) -> None:
        """Set what each agent has, and each tier of each pool; one that is gone has no series any more."""
        locations: dict[str, int] = {}
        stored: dict[tuple[str, str], int] = {}
        for member in at.fleet.members:
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
