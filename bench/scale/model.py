"""A fleet as stations with queues: who is asked how often, what an answer costs, how long one waits. Pure.

Arrivals of many independent nodes at one server are Poisson, whatever each of them does (Palm and Khinchin); what all
do at once, as after a failover, is put on top. Service times are measured ones and constant. A station of one server is
Lindley's recursion, so that one of constant service has the mean wait of M/D/1 (`mean_wait_md1_s`): the check.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstrata_agent.kube.heartbeat import RENEW_S
from kvstrata_metadata.client.announcer import REPORT_JITTER_S, Pace
from kvstrata_metadata.directory.registry import BEAT_S
from kvstrata_metadata.duties.sweeper import SWEEP_S
from kvstrata_metadata.store.keys import REGISTRY_KEY, SHARDS, Shard
from kvstrata_metadata.store.servers import SLOTS, slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Times = NDArray[np.float64]

LIMIT: Final = 0.7
"""Of a server's time: above it the wait of M/D/1 is more than a service, and a failover is not caught up with."""
LISTS_PER_S: Final = 2 / SWEEP_S
"""Of the agents' Leases: the metadata service's, and as often the operator's (its `--heartbeat-s`)."""
PROMPT_BLOCKS: Final = 128
"""What is announced, and looked up, at a time: 8,192 tokens in blocks of 64. A message goes to each shard."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds and bytes of one of each, measured (`measure.py`)."""

    announce_s: float
    """Of Redis, for one location in messages of 1,000, as agents report all that they have."""
    flush_s: float
    """Of Redis, for the locations of one prompt of `PROMPT_BLOCKS`, in a message for each shard."""
    lookup_s: float
    """Of Redis, for one prompt that is looked up, in a message for each shard."""
    remove_s: float
    """Of Redis, for one location of an agent that is gone."""
    beat_s: float
    """Of Redis, for one heartbeat of an agent."""
    location_bytes: float
    """Of Redis, for one location in a large scope."""
    renew_s: float
    """Of API server and etcd, for one renewal of a Lease."""
    status_s: float
    """Of API server and etcd, for one status of a KVPoolNode."""
    list_s: float
    """Of the API server, for one Lease in a list."""
    parse_s: float
    """Of the operator, for one Lease in a list."""
    plan_s: float
    """Of the operator, for one node that has changed: orders and status."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a fleet asks of its control plane and of its directory."""

    nodes: int
    blocks: float
    """Locations in the directory."""
    stored_per_s: float
    """Blocks that a node announces in a second, as new or as gone."""
    asked_per_s: float
    """Blocks that a node looks up in the directory in a second: those that it does not have itself."""
    changed_per_s: float
    """Statuses that a node writes in a second."""
    tenants: int
    skew: float
    """Of tenants' sizes: the n-th has a share in proportion to n to the power of minus this."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What it is served by."""

    cells: int
    """Kubernetes clusters, each with its own API server and operator; nodes are divided among them."""
    api_cores: int
    """Of each cell."""
    primaries: int
    """Of all directories together."""
    redis_bytes: float
    """Of each primary."""
    directories: int = 1
    """One for all cells, or one for each: a node finds blocks of its own directory alone."""


@dataclass(frozen=True, slots=True)
class Station:
    """One kind of server under steady load."""

    name: str
    rate_per_s: float
    service_s: float
    """Of one, on average."""
    servers: int = 1

    @property
    def utilisation(self) -> float:
        """Part of the servers' time."""
        return self.rate_per_s * self.service_s / self.servers

    def coarse(self, factor: int) -> Station:
        """The same load in fewer and larger pieces, for runs of hours."""
        return replace(self, rate_per_s=self.rate_per_s / factor, service_s=self.service_s * factor)


def of_directory(fleet: Fleet, layout: Layout) -> tuple[Fleet, Layout]:
    """What one directory has of a fleet and of its primaries."""
    part = grown(fleet, max(1, round(fleet.nodes / layout.directories)))
    return part, replace(layout, primaries=max(1, layout.primaries // layout.directories), directories=1)


def shares(fleet: Fleet, primaries: int) -> Times:
    """Part of all locations that each primary has: scopes are cut into shards, and shards lie by their slot."""
    weights = np.arange(1, fleet.tenants + 1, dtype=float) ** -fleet.skew
    weights /= weights.sum()
    held = np.zeros(primaries)
    for tenant, weight in enumerate(weights):
        for index in range(SHARDS):
            held[slot_of(Shard(f"{tenant:016x}", index).key) * primaries // SLOTS] += weight / SHARDS
    return held


def stations(costs: Costs, fleet: Fleet, layout: Layout) -> list[Station]:
    """Every server whose load grows with the fleet, the busiest of its kind."""
    of_cell = math.ceil(fleet.nodes / layout.cells)
    api = [(of_cell / RENEW_S, costs.renew_s), (of_cell * fleet.changed_per_s, costs.status_s)]
    api.append((LISTS_PER_S, of_cell * costs.list_s))
    operator = [(LISTS_PER_S / 2, of_cell * costs.parse_s), (of_cell * fleet.changed_per_s, costs.plan_s)]
    part, own = of_directory(fleet, layout)
    messages_per_block = SHARDS / PROMPT_BLOCKS
    data = [
        (part.nodes * part.stored_per_s * messages_per_block, costs.flush_s / SHARDS),
        (part.nodes * part.asked_per_s * messages_per_block, costs.lookup_s / SHARDS),
    ]
    share = shares(part, own.primaries)
    registry = slot_of(REGISTRY_KEY) * own.primaries // SLOTS
    beats = [(part.nodes / BEAT_S, costs.beat_s)]
    return [
        _station("API server", api, layout.api_cores),
        _station("operator", operator),
        _station("Redis, busiest primary", [(rate * float(share.max()), cost) for rate, cost in data]),
        _station("Redis, registry", [*beats, *((rate * float(share[registry]), cost) for rate, cost in data)]),
    ]


def _station(name: str, parts: Sequence[tuple[float, float]], servers: int = 1) -> Station:
    rate = sum(r for r, _ in parts)
    busy = sum(r * cost for r, cost in parts)
    return Station(name, rate, busy / rate if rate else 0.0, servers)


def memory_fill(costs: Costs, fleet: Fleet, layout: Layout) -> float:
    """Part of the fullest primary's memory that locations take."""
    part, own = of_directory(fleet, layout)
    return float(shares(part, own.primaries).max()) * part.blocks * costs.location_bytes / layout.redis_bytes


def nodes_at_limit(costs: Costs, fleet: Fleet, layout: Layout) -> dict[str, float]:
    """By station: nodes at which it has no more than `LIMIT` of its time, all else in proportion; memory at 1."""
    found = {}
    for one in stations(costs, fleet, layout):
        found[one.name] = fleet.nodes * LIMIT / one.utilisation if one.utilisation else math.inf
    found["Redis, memory of the fullest primary"] = fleet.nodes / memory_fill(costs, fleet, layout)
    return found


def grown(fleet: Fleet, nodes: int) -> Fleet:
    """The same fleet with more nodes, and blocks and tenants in proportion."""
    factor = nodes / fleet.nodes
    return replace(fleet, nodes=nodes, blocks=fleet.blocks * factor, tenants=max(1, round(fleet.tenants * factor)))


@dataclass(frozen=True, slots=True)
class Burst:
    """What comes on top at one time, evenly within `within_s`."""

    at_s: float
    work_s: float
    """Seconds of a server, in pieces of `piece_s`."""
    piece_s: float
    within_s: float


@dataclass(frozen=True, slots=True)
class Waits:
    """What a run of one station came to."""

    p50_s: float
    p99_s: float
    worst_s: float
    caught_up_s: float
    """From the burst, or the pause, until one waits no longer than before; infinite where it does not end."""


def waits(
    station: Station,
    seconds: float,
    seed: int,
    *,
    burst: Burst | None = None,
    paused: tuple[float, float] | None = None,
) -> Waits:
    """Run a station for so long; `paused` is when it stands still, from and for how long."""
    arrivals, services = _arrivals(station, seconds, np.random.default_rng(seed), burst)
    if not len(arrivals):
        return Waits(0.0, 0.0, 0.0, 0.0)
    if paused is not None:
        at_s, for_s = paused
        first = int(np.searchsorted(arrivals, at_s))
        arrivals, services = np.insert(arrivals, first, at_s), np.insert(services, first, for_s * station.servers)
    waited = _lindley(arrivals, services / station.servers)
    event = (burst.at_s, burst.at_s + burst.within_s) if burst is not None else None
    if paused is not None:
        event = (paused[0], sum(paused))
    p50, p99 = np.percentile(waited, (50, 99))
    return Waits(float(p50), float(p99), float(waited.max()), _caught_up(arrivals, waited, event))


def _arrivals(station: Station, seconds: float, rng: np.random.Generator, burst: Burst | None) -> tuple[Times, Times]:
    count = rng.poisson(station.rate_per_s * seconds)
    at_s = np.sort(rng.uniform(0.0, seconds, count))
    services = np.full(count, station.service_s)
    if burst is None or not burst.work_s:
        return at_s, services
    more = burst.at_s + np.sort(rng.uniform(0.0, burst.within_s, max(1, round(burst.work_s / burst.piece_s))))
    at_s, services = np.concatenate((at_s, more)), np.concatenate((services, np.full(len(more), burst.piece_s)))
    order = np.argsort(at_s, kind="stable")
    return at_s[order], services[order]


def _lindley(arrivals: Times, services: Times) -> Times:
    """Wait of each: max(0, wait + service - gap) one after the other, as sums and their least so far.

    Several servers are taken for one that is as much faster: right for backlogs, too short for single waits.
    """
    steps = np.concatenate(([0.0], services[:-1] - np.diff(arrivals)))
    walk = np.cumsum(steps)
    waited: Times = walk - np.minimum.accumulate(np.minimum(walk, 0.0))
    return waited


def _caught_up(arrivals: Times, waited: Times, event: tuple[float, float] | None) -> float:
    """Seconds from the event until, once it is over, somebody waits no longer than nearly all did before."""
    if event is None:
        return 0.0
    first, over = (int(np.searchsorted(arrivals, at_s)) for at_s in event)
    usual_s = float(np.percentile(waited[:first], 99)) if first else 0.0
    if not len(waited[first:over]) or np.percentile(waited[first:over], 50) <= usual_s:
        return 0.0
    again = np.flatnonzero(waited[over:] <= usual_s)
    return float(arrivals[over + again[0]] - event[0]) if len(again) else math.inf


@dataclass(frozen=True, slots=True)
class Reporting:
    """What others met while agents reported all that they have."""

    p99_s: float
    """Wait of whatever else is asked of the server."""
    turn_s: float
    """Longest round of an agent, in which it does not beat."""
    finished_s: float


def reports(
    station: Station,
    agents: int,
    changes: int,
    change_s: float,
    *,
    seed: int,
    round_changes: int | None,
) -> Reporting:
    """All agents report at one server: each sends a round when the one before is answered.

    `changes` of each agent take `change_s` each of the server; a round has `round_changes`, and None is the product's
    pace. First come first served, event by event.
    """
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    starts = [(draw.uniform(0.0, REPORT_JITTER_S), agent) for agent in range(agents)]
    heapq.heapify(starts)
    left, paces = [changes] * agents, [Pace() for _ in range(agents)]
    next_s, free_s, waited, turn_s = rng.exponential(1 / station.rate_per_s), 0.0, list[float](), 0.0
    while starts:
        if next_s < starts[0][0]:
            waited.append(max(0.0, free_s - next_s))
            free_s = max(free_s, next_s) + station.service_s
            next_s += rng.exponential(1 / station.rate_per_s)
            continue
        at_s, agent = heapq.heappop(starts)
        size = min(left[agent], paces[agent].changes if round_changes is None else round_changes)
        free_s = max(free_s, at_s) + size * change_s
        left[agent] -= size
        turn_s = max(turn_s, free_s - at_s)
        if left[agent]:
            rest_s = paces[agent].after(free_s - at_s, draw.random()) if round_changes is None else 0.0
            heapq.heappush(starts, (free_s + rest_s, agent))
    return Reporting(float(np.percentile(waited, 99)) if waited else 0.0, turn_s, free_s)


def mean_wait_md1_s(station: Station) -> float:
    """Mean wait at one server of constant service (Pollaczek and Khinchin): rho x s / (2 (1 - rho))."""
    rho = station.utilisation
    return rho * station.service_s / (2 * (1 - rho))


def queueing_error(seed: int) -> float:
    """Largest relative error of simulated mean waits against M/D/1, at 20 to 90 percent of a server."""
    errors = []
    for rho in (0.2, 0.5, 0.7, 0.9):
        station = Station("check", rho / 1e-3, 1e-3)
        arrivals, services = _arrivals(station, 2_000.0, np.random.default_rng(seed), None)
        mean_s = float(_lindley(arrivals, services).mean())
        errors.append(abs(mean_s / mean_wait_md1_s(station) - 1))
    return max(errors)
