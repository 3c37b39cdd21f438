"""One replica of the metadata service: the real duties on a simulated Redis, told by a simulated API server."""

import asyncio
from typing import Any, Final

from kvstrata_api.errors import ApiServerAwayError, DirectoryAwayError
from kvstrata_kube.leases import Lease
from kvstrata_metadata.duties.authority import Alone
from kvstrata_metadata.duties.nominator import agent_facts
from kvstrata_metadata.service.fleet_view import Duties
from sim.store import SimStore

POOL: Final = "pool"
SWEEP_S: Final = 5.0
SURVEY_EVERY: Final = 5
"""Sweeps between looks at all blocks."""
SURVEYS: Final = 0.01
"""Share of the seeds that look at all blocks at all: it costs more than everything else."""
COPIES: Final = 2


class SimCluster:
    """What the service reads of Kubernetes."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def _ask(self) -> None:
        if self._world.is_api_away:
            raise ApiServerAwayError("the API server is away")

    async def agent_leases(self) -> dict[str, Lease]:
        """All agents' Leases. Raises `ApiServerAwayError`."""
        self._ask()
        return {f"{POOL}.{host.name}": host.lease() for host in self._world.hosts if host.renewed}

    async def scope_owners(self) -> dict[str, int]:
        """Key version in use by uid of owner. Raises `ApiServerAwayError`."""
        self._ask()
        return {f"uid-{name}": version for name, version in self._world.tenancy.versions.items()}


class Service:
    """Sweeps, erases and nominates until it dies."""

    def __init__(self, world: Any, name: str) -> None:
        self._world = world
        self.name = name
        cluster: Any = SimCluster(world)
        self.duties = Duties(SimStore(world.redis_link), cluster, Alone())

    async def run(self) -> None:
        """One round after the other."""
        rounds = 0
        has_survey = self._world.rng.random() < SURVEYS
        while True:
            try:
                await self._round(is_survey_due=has_survey and rounds % SURVEY_EVERY == 0)
            except DirectoryAwayError:
                self._world.note(self.name, "finds no directory")
            rounds += 1
            await asyncio.sleep(SWEEP_S)

    async def _round(self, *, is_survey_due: bool) -> None:
        duties = self.duties
        mandate = await duties.sweeper.sweep()
        fleet = duties.sweeper.swept.fleet
        duties.departures.observe(fleet, self._world.loop.now_s)
        if mandate is None:
            return
        await duties.eraser.erase(mandate)
        if is_survey_due:
            over_replicated = await duties.survey.scan(fleet, COPIES)
            facts = agent_facts(fleet, duties.survey.held, {}, duties.departures)
            await duties.nominator.nominate(over_replicated, facts, {POOL: COPIES}, mandate)
