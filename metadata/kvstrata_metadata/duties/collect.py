"""Which agents are dead, and what has to be removed because of it. Pure: no clock, no I/O.

Two witnesses: heartbeats in Redis and the agent's Kubernetes Lease. One that cannot be heard never kills, and silence
counts only from when it could be heard again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstrata_metadata.directory.registry import SILENCE_S, Member
from kvstrata_metadata.directory.shards import Stream
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import Incarnation

ORPHAN_AFTER_S: Final = 60.0
"""Silence after which a stream of an incarnation that the registry does not know is removed: the registry lost it."""


class LeaseState(StrEnum):
    """State of an agent's Lease."""

    HELD = "held"
    EXPIRED = "expired"
    """Not renewed in time, released, or gone."""
    UNKNOWN = "unknown"
    """No cluster, or its API server does not answer."""


DEAD_AFTER_S: Final[Mapping[LeaseState, float]] = {
    LeaseState.EXPIRED: SILENCE_S,
    LeaseState.UNKNOWN: 4 * SILENCE_S,
    LeaseState.HELD: 40 * SILENCE_S,
}
"""Silence in Redis that means death, by the state of the Lease. An agent that holds its Lease is cut off from Redis:
its locations stay true, nobody is sent to it meanwhile, and after ten minutes reporting again costs less."""


@dataclass(frozen=True, slots=True)
class Fence:
    """End an incarnation unless it has beaten since."""

    incarnation: Incarnation
    agent: str
    silence_s: float
    lease: LeaseState


@dataclass(frozen=True, slots=True)
class Removal:
    """Remove all locations of a fenced incarnation, then forget it."""

    incarnation: Incarnation
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one sweep does."""

    fences: tuple[Fence, ...]
    removals: tuple[Removal, ...]


def plan(members: Iterable[Member], leases: Mapping[str, LeaseState] | None, heard_s: float = math.inf) -> Plan:
    """Decide over all members. `leases` by agent; an agent without one has none; None when nobody could be asked.

    `heard_s` is for how long Redis has answered without a break: agents cannot beat while it does not.
    An incarnation whose record is corrupt is ended too: nobody can be sent to it any more.
    """
    fences: list[Fence] = []
    removals: list[Removal] = []
    for member in members:
        known = member.registration
        if known is not None and known.is_fenced:
            removals.append(Removal(member.incarnation, member.shards))
            continue
        agent = known.record.agent if known else ""
        lease = LeaseState.UNKNOWN if leases is None else leases.get(agent, LeaseState.EXPIRED)
        silence_s = known.silence_s if known else None
        # No heartbeat at all: one that was cleaned away with the registry's other keys, long ago.
        witnessed_s = 0.0 if silence_s is None else min(silence_s, heard_s)
        if silence_s is None or witnessed_s >= DEAD_AFTER_S[lease]:
            fences.append(Fence(member.incarnation, agent, witnessed_s, lease))
    return Plan(tuple(fences), tuple(removals))


def orphans(
    streams: Mapping[Shard, Iterable[Stream]], known: Iterable[Incarnation]
) -> tuple[tuple[Shard, Incarnation], ...]:
    """Streams of incarnations that the registry does not know and that have been silent long enough."""
    living = frozenset(known)
    return tuple(
        (shard, stream.incarnation)
        for shard, found in streams.items()
        for stream in found
        if stream.incarnation not in living and stream.silence_s >= ORPHAN_AFTER_S
    )
