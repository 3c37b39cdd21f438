"""The fleet view: what one replica knows of itself, Redis and the fleet, and the JSON that shows it, read-only. No I/O.

docs/fleet-view.md describes every field. No tenant, scope tag or digest is in it: who may read it must not learn who
uses the fleet.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_metadata.directory.registry import SILENCE_S, Fleet, Member
from kvstrata_metadata.duties.authority import Authority
from kvstrata_metadata.duties.cluster import Cluster
from kvstrata_metadata.duties.eraser import Erased, Eraser
from kvstrata_metadata.duties.nominator import Departures, Nominated, Nominator
from kvstrata_metadata.duties.survey import Amount, Survey
from kvstrata_metadata.duties.sweeper import Sweeper, Swept
from kvstrata_metadata.store.keys import incarnation_text
from kvstrata_metadata.store.records import Incarnation
from kvstrata_metadata.store.servers import RedisFacts
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.http import View

STATES = ("live", "silent", "fenced")

Json = dict[str, Any]

PAGE_AGENTS: Final = 100
"""Agents of one page where the request sets no limit."""
PAGE_AGENTS_MAX: Final = 1_000
"""300 KB of JSON."""

_QUERY: Final = ("pool", "state", "limit", "after")


class Duties:
    """What one replica does, or stands ready to do."""

    def __init__(self, store: Store, cluster: Cluster | None, authority: Authority) -> None:
        self.sweeper = Sweeper(store, cluster.agent_leases if cluster else None, authority)
        self.eraser = Eraser(store, cluster.scope_owners if cluster else None, authority)
        self.nominator = Nominator(store, authority)
        self.survey = Survey(store)
        self.departures = Departures()


def state_of(member: Member) -> str:
    """`live`, `silent` (no heartbeat in time) or `fenced` (its locations are being removed)."""
    known = member.registration
    if known is None or known.is_fenced:
        return "fenced"
    return "live" if known.silence_s is not None and known.silence_s < SILENCE_S else "silent"


@dataclass(slots=True)
class ReplicaState:
    """State of one replica."""

    authority: Authority
    leader: str = ""
    """Last replica that was seen to lead; empty when none was."""
    failovers: int = 0
    """Times that another replica came to lead, as far as this one saw."""
    is_redis_up: bool = False
    redis: RedisFacts = field(default_factory=RedisFacts)
    """As Redis answered last."""
    duties: Duties | None = None
    """None while Redis is not known, as in a standby whose leader starts it."""

    @property
    def me(self) -> str:
        """Name of this replica."""
        return self.authority.me

    @property
    def is_leader(self) -> bool:
        """True while this replica may decide; never what was true a moment ago, before it was frozen, for instance."""
        return self.authority.mandate() is not None

    def note_leader(self) -> None:
        """Record who holds the Lease."""
        holder = self.authority.holder
        if holder and holder != self.leader:
            self.failovers += bool(self.leader)
            self.leader = holder

    @property
    def swept(self) -> Swept:
        """What this replica's sweeps did."""
        return self.duties.sweeper.swept if self.duties else Swept()

    @property
    def fleet(self) -> Fleet:
        """Members as the last sweep saw them."""
        return self.swept.fleet

    @property
    def erased(self) -> Erased:
        """What this replica erased."""
        return self.duties.eraser.erased if self.duties else Erased()

    @property
    def nominated(self) -> Nominated:
        """What this replica nominated."""
        return self.duties.nominator.nominated if self.duties else Nominated()

    @property
    def survey(self) -> Survey | None:
        """The last scan of all shards."""
        return self.duties.survey if self.duties else None

    def amounts(self) -> dict[Incarnation, dict[str, Amount]]:
        """How much each incarnation has, by tier."""
        found: dict[Incarnation, dict[str, Amount]] = {}
        for (incarnation, tier), amount in (self.survey.held if self.survey else {}).items():
            found.setdefault(incarnation, {})[tier] = amount
        return found


def total(amounts: Iterable[Amount]) -> Amount:
    """Sum of amounts."""
    listed = list(amounts)
    return Amount(sum(a.locations for a in listed), sum(a.stored_bytes for a in listed))


def pages(replica: Callable[[], ReplicaState]) -> dict[str, View]:
    """Views by path."""
    return {
        "/v1/fleet": lambda query: summary(replica(), query),
        "/v1/agents": lambda query: agents(replica(), query),
        "/fleet": lambda query: {**summary(replica(), {}), **agents(replica(), query)},
    }


def summary(replica: ReplicaState, query: Mapping[str, str]) -> Json:
    """Everything that does not grow with the fleet but for the pools. Raises `InvalidInputError` for any query."""
    _check(query, ())
    amounts = replica.amounts()
    everything = total(a for by_tier in amounts.values() for a in by_tier.values())
    used_bytes = replica.redis.used_bytes
    states = [state_of(member) for member in replica.fleet.members]
    return {
        "replica": replica.me,
        "leader": replica.leader,
        "is_leader": replica.is_leader,
        "failovers_total": replica.failovers,
        "directory": replica.fleet.directory_id,
        "leases_known": replica.swept.are_leases_known,
        "redis": _redis(replica),
        "agents_by_state": {state: states.count(state) for state in STATES},
        "pools": _pools(replica.fleet.members, amounts),
        "sessions": dict(replica.survey.sessions) if replica.survey else {},
        "locations": everything.locations,
        "stored_bytes": everything.stored_bytes,
        "used_bytes": used_bytes,
        "location_bytes": round(used_bytes / everything.locations, 1) if everything.locations else 0.0,
        "passes_total": replica.survey.passes_total if replica.survey else 0,
        **_done(replica),
    }


def agents(replica: ReplicaState, query: Mapping[str, str]) -> Json:
    """One page of agents by name: `pool` and `state` choose, `limit` bounds, `after` is `next` of the page before.

    Raises `InvalidInputError` for a limit out of range and for what is not in this list.
    """
    _check(query, _QUERY)
    limit = _limit(query.get("limit", str(PAGE_AGENTS)))
    amounts = replica.amounts()
    chosen = {_cursor(member): member for member in replica.fleet.members if _is_chosen(member, query)}
    rest = sorted(cursor for cursor in chosen if cursor > query.get("after", ""))
    page = [chosen[cursor] for cursor in rest[:limit]]
    more = rest[limit - 1] if len(rest) > limit else ""
    return {"agents": [_agent(replica, member, amounts.get(member.incarnation, {})) for member in page], "next": more}


def _agent(replica: ReplicaState, member: Member, by_tier: Mapping[str, Amount]) -> Json:
    known, name = member.registration, _name(member)
    pool, _, node = name.partition(".")
    lease_age_s = replica.swept.lease_ages_s.get(name)
    return {
        "agent": name,
        "pool": pool,
        "node": node,
        "state": state_of(member),
        "epoch": str(known.record.epoch) if known else "",
        "incarnation": incarnation_text(member.incarnation),
        "silence_s": known.silence_s if known else None,
        "lease_age_s": round(lease_age_s, 1) if lease_age_s is not None else None,
        "shards": len(member.shards),
        **_amount(total(by_tier.values())),
        "tiers": _tiers([by_tier]),
    }


def _pools(members: Iterable[Member], amounts: Mapping[Incarnation, Mapping[str, Amount]]) -> list[Json]:
    by_pool: dict[str, list[Mapping[str, Amount]]] = {}
    for member in members:
        if member.registration and not member.registration.is_fenced:
            pool = _name(member).partition(".")[0]
            by_pool.setdefault(pool, []).append(amounts.get(member.incarnation, {}))
    return [
        {
            "pool": pool,
            "agents": len(held),
            **_amount(total(a for by_tier in held for a in by_tier.values())),
            "tiers": _tiers(held),
        }
        for pool, held in sorted(by_pool.items())
    ]


def _tiers(held: Sequence[Mapping[str, Amount]]) -> list[Json]:
    names = sorted({tier for by_tier in held for tier in by_tier})
    return [{"tier": t, **_amount(total(by_tier.get(t, Amount()) for by_tier in held))} for t in names]


def _redis(replica: ReplicaState) -> Json:
    facts = replica.redis
    return {
        "is_up": replica.is_redis_up,
        "is_full": facts.is_full,
        "fill_ratio": round(facts.fill_ratio, 4),
        "servers": [
            {
                "run_id": s.run_id,
                "role": s.role,
                "version": s.version,
                "used_bytes": s.used_bytes,
                "max_bytes": s.max_bytes,
                "replicas": s.replicas,
            }
            for s in facts.servers
        ],
    }


def _done(replica: ReplicaState) -> Json:
    """What this replica did since it started; a standby has zeros."""
    swept, erased, nominated = replica.swept, replica.erased, replica.nominated
    return {
        "sweeps_total": swept.sweeps,
        "sweep_s": round(swept.last_s, 3),
        "backlog": swept.backlog,
        "fenced_total": swept.fenced,
        "removed_locations_total": swept.removed_locations,
        "orphans_total": swept.removed_orphans,
        "nominated_total": dict(nominated.blocks),
        "nominations_refused_total": nominated.refused,
        "erased_scopes_total": erased.scopes,
        "erased_locations_total": erased.locations,
        "erase_claims_refused_total": erased.refused,
        "erase_claims_waiting": erased.waiting,
    }


def _amount(amount: Amount) -> Json:
    return {"locations": amount.locations, "stored_bytes": amount.stored_bytes}


def _name(member: Member) -> str:
    return member.registration.record.agent if member.registration else ""


def _cursor(member: Member) -> str:
    return f"{_name(member)}/{incarnation_text(member.incarnation)}"


def _is_chosen(member: Member, query: Mapping[str, str]) -> bool:
    wants_pool, wants_state = query.get("pool"), query.get("state")
    return wants_pool in (None, _name(member).partition(".")[0]) and wants_state in (None, state_of(member))


def _check(query: Mapping[str, str], known: Sequence[str]) -> None:
    if unknown := sorted(query.keys() - set(known)):
        raise InvalidInputError(f"query {unknown[0]}: one of {', '.join(known) or 'none'} is known")
    if query.get("state") not in (None, *STATES):
        raise InvalidInputError(f"state {query['state']}: one of {', '.join(STATES)} is wanted")


def _limit(text: str) -> int:
    limit = int(text) if text.isdecimal() else 0
    if not 1 <= limit <= PAGE_AGENTS_MAX:
        raise InvalidInputError(f"limit {text}: 1 to {PAGE_AGENTS_MAX} is wanted")
    return limit
