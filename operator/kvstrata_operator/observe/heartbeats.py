"""Lists the agents' Leases at an interval. Not watched: a fleet renews hundreds of them every second.

How a Lease is judged stands in `kvstrata_kube.sightings`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_kube.api import KubeApi
from kvstrata_kube.leases import Lease, lease_path, parse_lease
from kvstrata_kube.sightings import Sighting, sight_all
from kvstrata_kube.watch import Source, list_objects
from kvstrata_operator.observe.records import PoolNodeSeen

log = logging.getLogger(__name__)


ABSENT_S: Final = 15.0
"""How long an agent that has reported may be without a Lease: it writes its status first and its Lease next."""

Beats = dict[str, Sighting]
"""Leases of agents by their name."""


@dataclass(frozen=True, slots=True)
class Roll:
    """Names of KVPoolNodes by what their agents' Leases show. Agents in neither set are not known yet."""

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
    """Divide agents into alive and silent."""
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


class Heartbeats:
    """Knows which agents are alive."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        nodes: Mapping[str, PoolNodeSeen],
        interval_s: float,
        changed: Callable[[], None],
    ) -> None:
        """Call `changed` when an agent came to life or fell silent."""
        self._api = api
        self._source = Source(lease_path(namespace), parse_lease, {"labelSelector": names.LABEL_POOL})
        self._nodes = nodes
        self._interval_s = interval_s
        self._changed = changed
        self._beats: Beats = {}
        self.roll = Roll()
        """As of the last list."""

    async def run(self) -> None:
        """List for ever. While the API server is away nobody can renew, so nobody is called silent."""
        while True:
            try:
                leases, _ = await list_objects(self._api, self._source)
            except KvStrataError as e:
                log.warning("leases not listed", extra={"error": str(e)})
                self._beats.clear()
            else:
                self._take(leases)
            await asyncio.sleep(self._interval_s)

    def _take(self, leases: list[Lease]) -> None:
        now_s = time.monotonic()
        self._beats = observe(self._beats, leases, self._nodes.values(), now_s)
        roll = call_roll(self._beats, self._nodes.values(), now_s)
        if roll != self.roll:
            self.roll = roll
            self._changed()
