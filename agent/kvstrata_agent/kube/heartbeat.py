"""The Lease by which an agent shows that it lives. Renewed on a monotonic beat, released on stop."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NoReturn

from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_kube import leases
from kvstrata_kube.answers import Answer, Json
from kvstrata_kube.api import MERGE_PATCH, Call, KubeApi

RENEW_S: Final = 5.0
DURATION_S: Final = 15
"""Two renewals may fail before the operator calls the agent away."""

CALL_TIMEOUT_S: Final = 4.0
"""Below `RENEW_S`, so that a silent API server costs one beat at most."""

RELEASE_TIMEOUT_S: Final = 2.0
_JITTER_S: Final = 0.5  # Spreads a fleet that was started at once.

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beat:
    """Whose heart beats."""

    namespace: str
    pool: str
    node: str
    holder: str
    """Names this incarnation, such as `<node>_<epoch>`."""
    owner_uid: str = ""
    """Uid of the KVPoolNode: the Lease goes when it goes."""

    @property
    def collection(self) -> str:
        """Path of the Leases."""
        return leases.lease_path(self.namespace)

    def lease(self, now: datetime) -> Json:
        """Build the whole Lease, renewed at `now`."""
        labels = {
            names.LABEL_POOL: self.pool,
            names.LABEL_NODE: names.label_value(self.node),
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
        }
        metadata: Json = {"labels": labels, **self._owned}
        spec = leases.renewal(self.holder, DURATION_S, now) | {"acquireTime": leases.micro_time(now)}
        return leases.lease_body(names.agent_lease_name(self.pool, self.node), metadata, spec)

    def renewal(self, now: datetime) -> Json:
        """Build the merge patch of one renewal. A KVPoolNode that was created again is another owner than before."""
        return {"metadata": self._owned, "spec": leases.renewal(self.holder, DURATION_S, now)}

    @property
    def _owned(self) -> Json:
        if not self.owner_uid:
            return {}
        owner = {"apiVersion": names.API_VERSION, "kind": "KVPoolNode", "uid": self.owner_uid}
        return {"ownerReferences": [owner | {"name": names.pool_node_name(self.pool, self.node)}]}

    def release(self, now: datetime) -> Json:
        """Build the merge patch that ends the Lease at once, as client-go releases its own."""
        return {"spec": leases.renewal("", 1, now)}


class Heartbeat:
    """Renews until cancelled. Never raises for the API server's sake."""

    def __init__(self, api: KubeApi, beat: Callable[[], Beat], clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._beat = beat
        self._renewed_at_s: float | None = None

    @property
    def _path(self) -> str:
        beat = self._beat()
        return leases.lease_path(beat.namespace, names.agent_lease_name(beat.pool, beat.node))

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last renewal that the API server confirmed; None before the first."""
        return None if self._renewed_at_s is None else self._clock() - self._renewed_at_s

    async def run(self) -> NoReturn:
        """Beat until cancelled."""
        while True:
            started_s = self._clock()
            await self._beat_once()
            # Counted from the start of this beat: a slow answer does not stretch the period, a late beat is
            # not made up for.
            spent_s = self._clock() - started_s
            await asyncio.sleep(max(0.0, RENEW_S - random.uniform(0, _JITTER_S) - spent_s))

    async def release(self) -> None:
        """End the Lease now, so that the operator need not wait for it to expire. Best effort, bounded."""
        call = Call("PATCH", self._path, body=self._beat().release(_now()), content_type=MERGE_PATCH)
        try:
            (await self._api.call(call, timeout_s=RELEASE_TIMEOUT_S)).content()
        except KvStrataError as e:
            _log.warning("lease not released", extra={"cause": str(e)})

    async def _beat_once(self) -> None:
        """Renew, or create when absent."""
        started_s = self._clock()
        try:
            answer = await self._renew()
            if answer.is_absent:
                answer = await self._create()
            answer.content()
        except KvStrataError as e:
            _log.warning("heartbeat failed", extra={"silent_s": self.silent_s, "cause": str(e)})
        else:
            self._renewed_at_s = started_s

    async def _renew(self) -> Answer:
        """Patch the times."""
        call = Call("PATCH", self._path, body=self._beat().renewal(_now()), content_type=MERGE_PATCH)
        return await self._api.call(call, timeout_s=CALL_TIMEOUT_S)

    async def _create(self) -> Answer:
        """Create the Lease; a conflict means that it exists by now, and the next beat renews it."""
        call = Call("POST", self._beat().collection, body=self._beat().lease(_now()))
        return await self._api.call(call, timeout_s=CALL_TIMEOUT_S)


def _now() -> datetime:
    """Wall-clock time of this beat; the operator compares it with its own observation, not with its clock."""
    return datetime.now(UTC)
