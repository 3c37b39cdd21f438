"""Lists the agents' Leases now and then. Listed, not watched: a fleet renews hundreds of them every second."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_kube.api import KubeApi
from kvstrata_kube.leases import Lease, lease_path, parse_lease
from kvstrata_kube.watch import Source, list_objects
from kvstrata_operator.decide.pools.liveness import Beats, Roll, call_roll, observe
from kvstrata_operator.observe.records import PoolNodeSeen

log = logging.getLogger(__name__)


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
