"""Writes KVPoolNode.status: compares before it writes, keeps only the newest, outlives an absent API server."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from kvstrata_agent.kube import report
from kvstrata_agent.kube.report import Urgency
from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_api.models.poolnode import KVPoolNodeStatus
from kvstrata_kube import backoff
from kvstrata_kube.api import APPLY_PATCH, Call, KubeApi
from kvstrata_kube.signal import Signal

FIRST_JITTER_S: Final = 0.05
"""Facts are written within this time: it spreads a fleet that reacts to one change, and nobody notices it."""

GRAIN_S: Final = 0.001
"""What is due this soon is due now: clocks and timers round differently."""

_log: Final = logging.getLogger(__name__)

Stored = Callable[[], Mapping[str, Any] | None]
"""The status that the API server holds as far as the watch knows; None while the object does not exist."""


class KubeStatusSink:
    """Where the agent's own observations go; compares before it writes. Run `run` as a supervised task."""

    def __init__(
        self, api: KubeApi, name: str, stored: Stored, signal: Signal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to the KVPoolNode `name`; `signal` fires whenever `stored` may have changed."""
        self._api = api
        self._name = name
        self._clock = clock
        self._stored = stored
        self._signal = signal
        self._wanted: KVPoolNodeStatus | None = None
        self._answered: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        """What the watch returned before our last write, and what the API server answered to it."""
        self._written_at_s: float | None = None
        self.writes = 0
        """Writes that the API server took."""

    def report(self, status: KVPoolNodeStatus) -> None:
        """Queue a status for writing. Returns at once; only the newest is written."""
        self._wanted = status
        self._signal.fire()

    async def run(self) -> None:
        """Keep the stored status equal to the reported one until cancelled."""
        failures = 0
        while True:
            try:
                await self._step()
                failures = 0
            except KvStrataError as e:
                failures += 1
                _log.warning("status not written", extra={"failures": failures, "cause": str(e)})
                await asyncio.sleep(backoff.delay_s(failures, random.random()))

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the newest status is stored; False when that took longer."""
        deadline_s = self._clock() + timeout_s
        while self._need() is not Urgency.NONE:
            left_s = deadline_s - self._clock()
            if left_s <= 0 or not await self._signal.wait(left_s):
                return self._need() is Urgency.NONE
        return True

    def _known(self) -> Mapping[str, Any] | None:
        """Newest knowledge of the stored status: our own write, until the watch returns something else."""
        seen = self._stored()
        if seen is not None and self._answered is not None and seen == self._answered[0]:
            return self._answered[1]
        return seen

    def _need(self) -> Urgency:
        """How urgently the newest status should be written."""
        known = self._known()
        if self._wanted is None or known is None:
            return Urgency.NONE
        return report.urgency(self._wanted, known)

    async def _step(self) -> None:
        """Wait for the next event or due time, and write when it is time."""
        need = self._need()
        if need is Urgency.NONE:
            await self._signal.wait()
            return
        wait_s = report.due_s(need, self._written_at_s, random.random()) - self._clock()
        if wait_s > GRAIN_S:
            await self._signal.wait(wait_s)
            return
        await asyncio.sleep(random.uniform(0, FIRST_JITTER_S))
        await self._write()

    async def _write(self) -> None:
        """Apply the newest status. Raises what the API server's refusal means."""
        seen, wanted, known = self._stored(), self._wanted, self._known()
        if seen is None or wanted is None or known is None:
            return
        body = report.document(self._name, wanted, known, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        path = f"/apis/{names.API_VERSION}/kvpoolnodes/{self._name}/status"
        # Forced: the operator writes AgentConnected and Ready of agents that are away, and we are back.
        query = {"fieldManager": names.FIELD_MANAGER_AGENT, "force": "true"}
        answer = await self._api.call(Call("PATCH", path, query, body, APPLY_PATCH))
        self._written_at_s = self._clock()
        self._answered = (seen, answer.content().get("status") or {})
        self.writes += 1
        self._signal.fire()
