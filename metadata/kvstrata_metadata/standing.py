"""What one replica knows: of itself, of Redis, and through its duties of the fleet. Read by metrics and fleet view.

The parts of the service that work on one store, put together once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstrata_metadata.authority import Authority
from kvstrata_metadata.cluster import Cluster
from kvstrata_metadata.eraser import Erased, Eraser
from kvstrata_metadata.nominator import Departures, Nominated, Nominator
from kvstrata_metadata.records import Incarnation
from kvstrata_metadata.registry import SILENCE_S, Fleet, Member
from kvstrata_metadata.server_facts import RedisFacts
from kvstrata_metadata.store import Store
from kvstrata_metadata.survey import Amount, Survey
from kvstrata_metadata.sweeper import Sweeper, Swept


class Duties:
    """What one replica does, or stands ready to do."""

    def __init__(self, store: Store, cluster: Cluster | None, authority: Authority) -> None:
        self.sweeper = Sweeper(store, cluster.agent_leases if cluster else None, authority)
        self.eraser = Eraser(store, cluster.scope_owners if cluster else None, authority)
        self.nominator = Nominator(store, authority)
        self.survey = Survey(store)
        self.departures = Departures()


STATES = ("live", "silent", "fenced")


def state_of(member: Member) -> str:
    """`live`, `silent` (no heartbeat in time) or `fenced` (its locations are being removed)."""
    known = member.registration
    if known is None or known.is_fenced:
        return "fenced"
    return "live" if known.silence_s is not None and known.silence_s < SILENCE_S else "silent"


@dataclass(slots=True)
class Standing:
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
        """True while this replica may decide; never what was true a moment ago, before it was frozen, say."""
        return self.authority.mandate() is not None

    def look(self) -> None:
        """Take in who holds the Lease."""
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
        """The last look at all shards."""
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
