"""Holds, or waits for, the Lease that makes this replica the one that writes.

Which of several replicas may write: the rules over a coordination Lease. Pure: the caller gives a monotonic clock.

Laws: nobody takes a Lease that its holder renews; a holder stops writing before anybody else may begin; a released
Lease is free at once; every new holder has a higher term than all before it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from kvstrata_api.errors import ApiServerAwayError, KvStrataError, RetryableError
from kvstrata_kube import leases
from kvstrata_kube.answers import Answer, Json
from kvstrata_kube.api import Call, KubeApi
from kvstrata_kube.leases import Lease
from kvstrata_kube.sightings import Sighting, sight

MARGIN: Final = 3 / 4
"""A holder that could not renew stops writing after this part of the duration; the rest is for requests under way."""

RENEW: Final = 1 / 4
"""A holder renews after this part of the duration, so that two lost renewals do no harm."""

RELEASES: Final = 3
"""Tries to give a Lease back that is written meanwhile."""

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What a replica does next."""

    WAIT = "wait"
    TAKE = "take"
    RENEW = "renew"


def judge(seen: Sighting, me: str, now_s: float) -> Verdict:
    """Decide by the last reading."""
    if seen.lease.holder == me:
        return Verdict.RENEW
    return Verdict.WAIT if seen.is_held(now_s) else Verdict.TAKE


def next_term(seen: Sighting, me: str, floor: int) -> int:
    """Term that `me` writes when it takes or renews the Lease: moves on with every new holder.

    `floor` is a term that a server of ours has obeyed: a Lease that was deleted and made again counts from 0, and
    its holder has to rise above the terms of before.
    """
    return max(seen.lease.transitions + (seen.lease.holder != me), floor + 1)


def leads_until_s(renewed_s: float, duration_s: float) -> float:
    """Return until when a holder may write that sent its last successful renewal at `renewed_s`."""
    return renewed_s + duration_s * MARGIN


def pause_s(duration_s: float) -> float:
    """Return the polling interval of the Lease."""
    return duration_s * RENEW


@dataclass(frozen=True, slots=True)
class Candidacy:
    """What a replica stands for."""

    namespace: str
    lease: str
    """Name of the Lease, which all replicas share."""
    me: str
    """Unique among the replicas."""
    duration_s: float
    """After so long without a renewal another replica may take over."""


class Leadership:
    """One replica's part in the election. `is_leading` is the fence in front of every write."""

    def __init__(self, api: KubeApi, candidacy: Candidacy, changed: Callable[[], None]) -> None:
        """Call `changed` whenever leadership comes or goes."""
        self._api = api
        self._namespace = candidacy.namespace
        self._name = candidacy.lease
        self.me = candidacy.me
        self._duration_s = candidacy.duration_s
        self._changed = changed
        self._seen: Sighting | None = None
        self._floor = 0
        self._until_s = 0.0
        self._aside_until_s = 0.0
        self._was_leading = False

    @property
    def term(self) -> int:
        """Fencing token of our leadership: no later holder has one as low. Means nothing while not leading."""
        return self._seen.lease.transitions if self._seen else 0

    @property
    def holder(self) -> str:
        """Who held the Lease when it was read last; empty when nobody did or it was never read."""
        return self._seen.lease.holder if self._seen else ""

    @property
    def is_replaced(self) -> bool:
        """True when another replica was seen to hold the Lease, which not being able to read it does not mean."""
        return self.holder not in ("", self.me)

    def rise(self, floor: int) -> None:
        """Note that a server obeys term `floor` of somebody else; leading ends until a renewal has a higher one."""
        self._floor = max(self._floor, floor)
        self._until_s = 0.0
        self._report()

    async def step_aside(self) -> None:
        """Let others lead, who may have what this replica lacks; it stands by for two durations."""
        self._aside_until_s = time.monotonic() + 2 * self._duration_s
        await self.release()

    def is_leading(self) -> bool:
        """True while this replica may write."""
        return self._aside_until_s <= time.monotonic() < self._until_s

    async def run(self) -> None:
        """Take part in the election for ever. Cancelling does not release; `release` does."""
        while True:
            try:
                async with asyncio.timeout(pause_s(self._duration_s) * 2):
                    await self._step()
            except (KvStrataError, TimeoutError) as e:
                log.warning("election", extra={"error": f"{type(e).__name__} {e}"})
                if isinstance(e, ApiServerAwayError | TimeoutError):
                    self._see_anew()
            self._report()
            await asyncio.sleep(pause_s(self._duration_s))

    def _see_anew(self) -> None:
        """Give the holder its time once more: while we cannot read, it may have been unable to renew."""
        if self._seen is not None:
            self._seen = Sighting(self._seen.lease, time.monotonic())

    async def release(self) -> None:
        """Give leadership up, so that the next replica need not wait. Harmless for one that does not lead.

        A renewal that was cut off may have been carried out, or be on its way still: the Lease is read anew.
        """
        self._until_s = 0.0
        self._report()
        error: KvStrataError | None = None
        for _ in range(RELEASES):
            error = await self._release()
            if not isinstance(error, RetryableError):  # Else it was written meanwhile.
                break
        if error is not None:
            log.warning("lease not released", extra={"error": str(error)})

    async def _release(self) -> KvStrataError | None:
        """Read the Lease and give it back if it is ours; returns what was in the way."""
        try:
            lease = await self._read()
            if self._seen is not None and lease.holder == self.me:
                await self._write(lease, holder="")
        except KvStrataError as e:
            return e
        return None

    async def _step(self) -> None:
        """Look at the Lease; renew or take it where that is due."""
        lease = await self._read()
        if not lease.resource_version and self._is_led_by_another():
            return  # Somebody deleted the Lease; whoever held it does not know that yet.
        self._seen = sight(self._seen, lease, time.monotonic())
        is_aside = time.monotonic() < self._aside_until_s
        if is_aside or judge(self._seen, self.me, time.monotonic()) is Verdict.WAIT:
            self._until_s = 0.0
            return
        sent_s = time.monotonic()
        lease = await self._write(self._seen.lease, holder=self.me)
        self._seen = sight(self._seen, lease, time.monotonic())
        self._until_s = leads_until_s(sent_s, self._duration_s)

    def _is_led_by_another(self) -> bool:
        """True while another replica may believe that it leads, by what was read last."""
        return self._seen is not None and self.is_replaced and self._seen.is_held(time.monotonic())

    async def _read(self) -> Lease:
        path = leases.lease_path(self._namespace, self._name)
        answer = await self._api.call(Call("GET", path), timeout_s=self._duration_s)
        if answer.is_absent:
            return Lease(self._name, "", "", self._duration_s)
        return _parse(answer)

    async def _write(self, lease: Lease, holder: str) -> Lease:
        """Create or replace the Lease as it was read. Raises `RetryableError` when somebody else was first."""
        body = self._body(lease, holder)
        replace = Call("PUT", leases.lease_path(self._namespace, self._name), body=body)
        call = replace if lease.resource_version else Call("POST", leases.lease_path(self._namespace), body=body)
        answer = await self._api.call(call, timeout_s=self._duration_s)
        if answer.is_conflict:
            raise RetryableError("another replica was first")
        return _parse(answer)

    def _body(self, lease: Lease, holder: str) -> Json:
        spec = leases.renewal(holder, self._duration_s, datetime.now(UTC))
        assert self._seen is not None, "read before it is written"
        spec["leaseTransitions"] = next_term(self._seen, self.me, self._floor) if holder else lease.transitions
        version = {"resourceVersion": lease.resource_version} if lease.resource_version else {}
        return leases.lease_body(self._name, version, spec)

    def _report(self) -> None:
        """Report a change, once."""
        if self.is_leading() != self._was_leading:
            self._was_leading = not self._was_leading
            log.info("leading" if self._was_leading else "standing by", extra={"replica": self.me})
            self._changed()


def _parse(answer: Answer) -> Lease:
    """Read the Lease of a success; raises what `Answer.content` raises."""
    answer.content()
    return leases.parse_lease(answer.raw)
