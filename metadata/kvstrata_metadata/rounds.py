"""The loop of the service: look at the fleet, and where this replica leads sweep, erase and nominate."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry

from kvstrata_api import __version__
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata import fleet_view
from kvstrata_metadata.asking import ASK_TIMEOUT_S, ask
from kvstrata_metadata.authority import Authority
from kvstrata_metadata.cluster import Cluster
from kvstrata_metadata.declared import DEFAULT_COPIES
from kvstrata_metadata.duties import Duties
from kvstrata_metadata.fleet_metrics import FleetMetrics
from kvstrata_metadata.keeper import RedisKeeper
from kvstrata_metadata.nominator import agent_facts
from kvstrata_metadata.server_facts import parse_servers
from kvstrata_metadata.standing import Standing
from kvstrata_metadata.store import Store
from kvstrata_telemetry.catalog_metadata import METADATA
from kvstrata_telemetry.http import View
from kvstrata_telemetry.metrics import Instruments

READY_SWEEPS: Final = 3
"""Sweeps that may fail before the service is no longer ready, and before a leader lets another one try."""

DECLARED_EVERY_S: Final = 120.0
"""Between looks at what pools want and agents were given: it changes when somebody changes a KVPool."""

_log = logging.getLogger(__name__)


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
        self._standing = Standing(authority)
        instruments = Instruments(METADATA, registry)
        instruments.gauge("kvstrata_metadata_info", version=__version__).set(1)
        instruments.gauge("kvstrata_metadata_leader").set_function(lambda: float(self._standing.is_leader))
        self._certificate_expiry = instruments.gauge("kvstrata_metadata_certificate_expiry_timestamp_seconds")
        self._metrics = FleetMetrics(instruments)
        self._wanted: dict[str, int] = {}
        self._capacity_bytes: dict[str, int] = {}
        self._looked_s = time.monotonic()
        self._swept_s: float | None = None

    def watch_certificate(self, expires_at_s: Callable[[], float]) -> None:
        """Show when the certificate ends, which is asked for at each scrape."""
        self._certificate_expiry.set_function(expires_at_s)

    def is_healthy(self) -> bool:
        """Tell whether the loop turns, whether or not Redis answers."""
        return time.monotonic() - self._looked_s < 60.0 + self._sweep_s

    def is_ready(self) -> bool:
        """Tell whether Redis answered lately and agents have been told where it is. Standing by is ready, too."""
        swept_s = self._swept_s
        is_fresh = swept_s is not None and time.monotonic() - swept_s < READY_SWEEPS * self._sweep_s + 5.0
        return is_fresh and (self._keeper is None or (self._keeper.is_running and self._keeper.is_published))

    def views(self) -> dict[str, View]:
        """Pages of the fleet view by path."""
        return fleet_view.pages(lambda: self._standing)

    def look(self) -> None:
        """Note that the loop turns, and who leads."""
        self._looked_s = time.monotonic()
        self._standing.look()
        self._metrics.looked(self._standing)

    async def run(self, store: Store) -> None:
        """Go on until cancelled; while Redis is away, try again each time."""
        duties = Duties(store, self._cluster, self._authority)
        self._standing.duties = duties
        async with asyncio.TaskGroup() as tasks:
            if self._cluster:
                tasks.create_task(self._follow_declared(self._cluster))
            tasks.create_task(self._go_round(store, duties))

    async def _go_round(self, store: Store, duties: Duties) -> None:
        failures = 0
        while True:
            self._standing.is_redis_up = await self._round(store, duties)
            failures = 0 if self._standing.is_redis_up else failures + 1
            if failures >= READY_SWEEPS and self._standing.is_leader:
                await self._authority.step_aside()
            self.look()
            restarts_total = self._keeper.restarts_total if self._keeper else 0
            self._metrics.redis(self._standing, restarts_total=restarts_total)
            await asyncio.sleep(self._sweep_s)

    async def _round(self, store: Store, duties: Duties) -> bool:
        try:
            mandate = await duties.sweeper.sweep()
            fleet = duties.sweeper.swept.fleet
            duties.departures.see(fleet, time.monotonic())
            crowded = await duties.survey.look(fleet, min(self._wanted.values(), default=DEFAULT_COPIES))
            self._standing.redis = parse_servers(await store.describe())
            if mandate is not None:
                await duties.nominator.tell_erased(await duties.eraser.erase(mandate), fleet, mandate)
                facts = agent_facts(fleet, duties.survey.held, self._capacity_bytes, duties.departures)
                await duties.nominator.nominate(crowded, facts, self._wanted, mandate)
        except DirectoryAwayError as e:
            _log.warning("directory away", extra={"error": str(e)})
            return False
        except Exception:  # noqa: BLE001  A task root: one bad round must not end the sweeps for good.
            _log.exception("round failed")
            return False
        self._swept_s = time.monotonic()
        self._metrics.swept(self._standing)
        return True

    async def _follow_declared(self, cluster: Cluster) -> None:
        """Read what is declared, now and then; the last known stays where nobody can be asked."""
        while True:
            wanted = await ask(cluster.wanted_copies, "pools")
            capacity_bytes = await ask(cluster.capacities, "capacities")
            self._wanted = self._wanted if wanted is None else wanted
            self._capacity_bytes = self._capacity_bytes if capacity_bytes is None else capacity_bytes
            await asyncio.sleep(DECLARED_EVERY_S if wanted is not None else ASK_TIMEOUT_S)
