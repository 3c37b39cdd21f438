"""Which agents are replaced now, so that every pod ends at the pool's template. Pure.

A node is drained where its memory would be lost, then its pod is deleted, and its DaemonSet makes a new one. Laws: of
nodes that serve, one is taken only while fewer than `maxUnavailable` are away for whatever reason; of those with an
agent that does not serve, no more than `maxUnavailable` are in our hands; an agent that is gone is replaced at once.
An agent that can do what is wanted in its old pod does that first: a tier that goes is emptied where its directory is.
When a new pod is not ready by the deadline nothing more is taken until it is, or until something else is wanted.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvstrata_api.models.pool import UpdateStrategy
from kvstrata_operator.decide.pools.reconcile import DrainOrder, Holds, must_drain
from kvstrata_operator.observe.moments import parse_time
from kvstrata_operator.observe.records import AgentPodSeen, PoolNodeSeen, Room


@dataclass(frozen=True, slots=True)
class Standing:
    """One node of a pool's placement."""

    pod: AgentPodSeen | None = None
    seen: PoolNodeSeen | None = None
    is_alive: bool = False
    is_silent: bool = False
    """Neither, while nobody has looked at its agent's Lease."""
    is_told: bool = True
    """True when its KVPoolNode says what the pool wants."""

    @property
    def is_serving(self) -> bool:
        """True when engines have its agent now, and it was not asked to empty itself."""
        is_up = self.pod is not None and self.pod.is_ready and not self.pod.is_deleting
        return is_up and self.is_alive and _is_ready(self.seen) and not self.is_draining

    @property
    def is_draining(self) -> bool:
        """True when its agent was asked to empty itself."""
        return self.seen is not None and self.seen.drain.requested

    @property
    def is_free(self) -> bool:
        """True when nothing is done to it already, and it is known whether its agent lives."""
        return not (self.is_draining or _is_deleting(self)) and (self.is_alive or self.is_silent)

    @property
    def is_settling(self) -> bool:
        """True while its agent has not done what it was told: blocks of a tier that goes are moved in the old pod."""
        is_behind = self.seen is not None and (
            not self.is_told or self.seen.observed_revision != self.seen.revision or self.seen.is_false("TiersSettled")
        )
        return self.is_alive and is_behind

    @property
    def is_gone(self) -> bool:
        """True when there is no agent that could lose anything."""
        is_unheard = self.is_silent or self.seen is None or not self.seen.has_reported
        return self.pod is not None and not self.pod.is_ready and is_unheard


@dataclass(frozen=True, slots=True)
class Wish:
    """What a roll is for."""

    revision: str
    room: Room
    strategy: UpdateStrategy
    order: DrainOrder | None
    """None where memory outlives a pod."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is done to which node now. Nodes are sorted."""

    outdated: frozenset[str] = frozenset()
    """Nodes whose pod is of another revision."""
    untold: frozenset[str] = frozenset()
    """Those of them whose pod has no room for what the pool wants: they are told when the new pod is there."""
    missing: frozenset[str] = frozenset()
    """Nodes without a pod."""
    away: frozenset[str] = frozenset()
    """Nodes that do not serve, those included that are taken now."""
    drained: frozenset[str] = frozenset()
    """Nodes whose order to drain stands."""
    drain: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    stuck: str = ""
    """A node whose new pod is not ready in time; empty when there is none."""

    @property
    def holds(self) -> Holds:
        """What the roll keeps from `reconcile`."""
        return Holds(self.untold, self.drained)


NO_ROLLOUT = Rollout()
"""Of a pool whose agents others run."""


def roll(wish: Wish, standings: Mapping[str, Standing], now: datetime) -> Rollout:
    """Decide by node name.

    `standings` has the nodes of the placement; those that serve from a pod of `wish.revision` may be left out, because
    nothing is done to them and nothing depends on them.
    """
    outdated = {n for n, s in standings.items() if s.pod is not None and s.pod.revision != wish.revision}
    untold = frozenset(n for n in outdated if not _has_room(standings[n], wish))
    away = {n for n, s in standings.items() if not s.is_serving}
    missing = frozenset(n for n, s in standings.items() if s.pod is None)
    stuck = _first_late(standings, away - outdated, wish.strategy, now)
    if stuck or wish.strategy.type == "OnDelete":
        return Rollout(frozenset(outdated), untold, missing, frozenset(away), stuck=stuck)
    hands = {n for n in away - missing if n not in outdated or _is_taken(standings[n])}
    drain: list[str] = []
    replace: list[str] = []
    for node in sorted(outdated, key=lambda n: (n not in away, n)):
        standing = standings[node]
        if standing.is_gone or (standing.is_draining and not _waits(standing, wish, now)):
            replace.append(node)
        elif not standing.is_free or (standing.is_settling and node not in untold):
            continue
        elif (len(hands) if node in away else len(away)) < wish.strategy.max_unavailable:
            hands.add(node)
            away.add(node)
            (drain if _waits(standing, wish, now) else replace).append(node)
    ordered = frozenset(n for n in outdated if standings[n].is_draining) | frozenset(drain)
    replaced = tuple(n for n in replace if not _is_deleting(standings[n]))
    return Rollout(frozenset(outdated), untold, missing, frozenset(away), ordered, tuple(drain), replaced)


def _waits(standing: Standing, wish: Wish, now: datetime) -> bool:
    """True while an agent has to bring blocks to safety before its pod goes."""
    if standing.seen is None or wish.order is None:
        return False
    alive: Collection[str] = (standing.seen.key,) if standing.is_alive else ()
    return must_drain(standing.seen, wish.order, alive, since=now, now=now)


def _has_room(standing: Standing, wish: Wish) -> bool:
    return standing.pod is not None and standing.pod.room.covers(wish.room)


def _is_taken(standing: Standing) -> bool:
    return standing.is_draining or _is_deleting(standing)


def _is_deleting(standing: Standing) -> bool:
    return standing.pod is not None and standing.pod.is_deleting


def _is_ready(seen: PoolNodeSeen | None) -> bool:
    return seen is not None and seen.is_true("Ready")


def _first_late(
    standings: Mapping[str, Standing], updated: Collection[str], strategy: UpdateStrategy, now: datetime
) -> str:
    """Return the first node by name whose new pod has had its time and is not ready."""
    latest = now - timedelta(seconds=strategy.progress_deadline_seconds)
    late = (n for n in sorted(updated) if _is_late(standings[n].pod, latest))
    return next(late, "")


def _is_late(pod: AgentPodSeen | None, latest: datetime) -> bool:
    if pod is None or pod.is_ready or pod.is_deleting:
        return False
    since = parse_time(pod.ready_since or pod.created)
    return since is not None and since <= latest
