"""Which agents are alive, told from their Leases. Pure: the caller gives a monotonic clock.

How a Lease is judged stands in `kvstrata_kube.sightings`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_api import names
from kvstrata_kube.leases import Lease
from kvstrata_kube.sightings import Sighting, sight_all
from kvstrata_operator.decide.plan.actions import MarkSilent
from kvstrata_operator.observe.kinds import POOL_NODE, Ref
from kvstrata_operator.observe.records import PoolNodeSeen

ABSENT_S: Final = 15.0
"""How long an agent that has reported may be without a Lease: it writes its status first and its Lease next."""

REASON: Final = "LeaseExpired"

Beats = dict[str, Sighting]
"""Leases of agents by their name."""


@dataclass(frozen=True, slots=True)
class Roll:
    """Names of KVPoolNodes by what their agents' Leases say. Agents in neither set are not known yet."""

    alive: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


def observe(
    before: Mapping[str, Sighting], leases: Iterable[Lease], nodes: Iterable[PoolNodeSeen], now_s: float
) -> Beats:
    """Take in a complete list of Leases, by Lease name; those that nobody expects any more are forgotten.

    Agents that have reported and hold no Lease are followed too, and given `ABSENT_S` to take one.
    """
    seen = {lease.name: lease for lease in leases}
    for node in nodes:
        key = names.agent_lease_name(node.pool, node.node)
        if key not in seen and node.has_reported:
            seen[key] = Lease(key, "", "", ABSENT_S)
    return sight_all(before, seen.values(), now_s)


def call_roll(beats: Mapping[str, Sighting], nodes: Iterable[PoolNodeSeen], now_s: float) -> Roll:
    """Tell the living from the silent."""
    alive, silent = set(), set()
    for node in nodes:
        beat = beats.get(names.agent_lease_name(node.pool, node.node))
        if beat is None:
            continue
        if not beat.is_current(now_s):
            silent.add(node.key)
        elif beat.lease.renewed:
            alive.add(node.key)
    return Roll(frozenset(alive), frozenset(silent))


def answering(nodes: Iterable[PoolNodeSeen], alive: Collection[str], silent: Collection[str]) -> frozenset[str]:
    """Names of the KVPoolNodes whose agents may still do what they are asked.

    Besides the living these are agents that said that they are connected and whose Leases nobody has looked at yet, as
    after a start of this process: taken for gone they would be deleted undrained, and what they hold called erased.
    """
    return frozenset(n.key for n in nodes if n.key in alive or (n.key not in silent and n.is_true("AgentConnected")))


def mark_silent(nodes: Mapping[str, PoolNodeSeen], silent: Iterable[str]) -> tuple[MarkSilent, ...]:
    """Say on each silent agent's KVPoolNode that it is gone, once; agents that never reported are left alone."""
    return tuple(
        MarkSilent(
            Ref(POOL_NODE, key),
            nodes[key].pool,
            message=f"Lease {names.agent_lease_name(nodes[key].pool, nodes[key].node)} is not renewed",
        )
        for key in sorted(silent)
        if key in nodes and nodes[key].has_reported and not _is_marked(nodes[key])
    )


def _is_marked(node: PoolNodeSeen) -> bool:
    return node.is_false("AgentConnected") and node.is_false("Ready")
